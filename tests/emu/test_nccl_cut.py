"""The counted cut through ranks of NCCL, on a program that is skewed on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emu.nccl_cuts import campaign, undisturbed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "steps", "cuts"), [(2, 384, 60), (4, 192, 30)])
def test_every_cut_lets_the_gpus_become_idle_and_changes_no_line(
    count: int, steps: int, cuts: int, tmp_path: Path
) -> None:
    first, second = tmp_path / "disturbed", tmp_path / "undisturbed"
    first.mkdir()
    second.mkdir()
    lines, made, _ = campaign(count, steps, first, cuts)
    assert lines == undisturbed(count, steps, second)
    assert len(lines) == count * (steps // 16 + 1)
    assert len(made) >= cuts // 2, "the program ended before most cuts were made"
    # Some met ranks that were apart, or the program does not try what it is for.
    assert max(cut.first_behind for cut in made) > 5
    assert any(cut.grown for cut in made)
