"""How often to checkpoint: figures of the paper, and the minimum of the curve."""

from __future__ import annotations

from typing import Any

import pytest

from flowgpu.frequency import HOUR, Costs


def costs(**changes: Any) -> Costs:
    usual = {"gpus": 1, "checkpoints": 1, "stall": 0.185, "drain": 0.0, "total": 0.0}
    return Costs(**(usual | {"restore": None} | changes))


def test_interval_is_that_of_the_paper() -> None:
    """PhoenixOS, SOSP'25: 185 ms, and eight failures an hour of all GPUs."""
    assert HOUR / costs().best(8.0) == pytest.approx(279, abs=0.5)
    assert costs(gpus=8).best(1.0) == costs().best(8.0)


def test_no_interval_is_shorter_than_a_checkpoint() -> None:
    long = costs(total=20.0)
    assert long.best(8.0) == 20.0
    assert long.curve(8.0) == [20.0 * 2**step for step in range(5)]


@pytest.mark.parametrize(("drain", "restore"), [(0.0, None), (5.0, 40.0)])
def test_best_interval_loses_the_least(drain: float, restore: float | None) -> None:
    found = costs(drain=drain, restore=restore)
    lost = {interval: sum(found.lost(interval, 8.0)) for interval in found.curve(8.0)}
    assert min(lost, key=lost.__getitem__) == found.best(8.0)
    assert len(lost) == 9


def test_no_more_than_all_is_lost() -> None:
    assert sum(costs(restore=1e6).lost(1.0, 100.0)) == 1.0
    assert costs(stall=2.0).lost(1.0, 1.0) == (1.0, 0.0)


def test_costs_are_medians_of_what_the_record_has() -> None:
    reports = [
        {"stall_seconds": stall, "drain_seconds": 1.0, "total_seconds": 2.0, "gpus": 0}
        for stall in (0.2, 9.0, 0.3)
    ]
    rows = [Costs.row(report) for report in reports]
    assert Costs.of(rows, {"restore_seconds": 4.0}) == Costs(1, 3, 0.3, 1.0, 2.0, 4.0)
    assert Costs.of([], {"restore_seconds": 4.0}) is None
