"""A thousand cuts through ranks of NCCL (`make test-cuts`); a few are in test_nccl_cut.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emu.nccl_cuts import campaign, undisturbed

CUTS = 250


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "steps", "seed"), [(2, 4000, 1), (2, 4000, 2), (4, 3000, 3), (4, 3000, 4)]
)
def test_no_cut_of_many_is_wrong(count: int, steps: int, seed: int, tmp_path: Path) -> None:
    first, second = tmp_path / "disturbed", tmp_path / "undisturbed"
    first.mkdir()
    second.mkdir()
    lines, made, _ = campaign(count, steps, first, CUTS, seed)
    assert len(made) == CUTS
    assert lines == undisturbed(count, steps, second)
