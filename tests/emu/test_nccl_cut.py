"""The counted cut through ranks of NCCL, on a program that is skewed on purpose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from coordinator import communicators
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


def test_a_rank_whose_thread_for_us_has_not_begun_is_in_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[int] = Counter()

    def serves(pid: int) -> bool:
        asked[pid] += 1
        return asked[pid] > 1 or pid != min(asked)

    monkeypatch.setattr(communicators, "serves", serves)
    lines, made, _ = campaign(2, 64, tmp_path, 2)
    assert len(lines) == 2 * (64 // 16 + 1)
    assert made
