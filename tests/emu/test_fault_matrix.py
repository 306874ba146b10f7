"""A sample of the fault matrix, on the fakes and on the emulated GPU (`make fault-matrix`: all)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from coordinator.phases import SPECS
from flowgpu.wire import Fault
from tests.faults.matrix import ACTIONS, SUSPEND, is_right, run

SAMPLES = {
    "fakes": (Fault.EXPORT, Fault.DETACH, Fault.MAPBACK, Fault.GHOST_CHECKPOINT),
    "emulated": (Fault.STRIP, Fault.COMMIT, Fault.REBUILD, Fault.PAGES_READ),
}


@pytest.mark.parametrize("lane", SAMPLES)
def test_a_fault_leaves_the_job_or_nothing(lane: str) -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, _ = run(lane, Path(folder), SAMPLES[lane], [2])
    assert [row for row in rows if not is_right(row)] == []
    assert {row.fault for row in rows} == set(SAMPLES[lane])
    assert {row.action for row in rows} == set(ACTIONS)


@pytest.mark.parametrize(
    ("action", "engine"), [("leave-running", "replay"), ("pause-and-dump", "native")]
)
def test_an_image_is_made_where_nothing_is_told_of_memory_that_stands_still(
    action: str, engine: str
) -> None:
    faults = {Fault.LOOK_DIES: True, Fault.LOOK_UNTOLD: False}
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, _ = run("emulated", Path(folder), [*faults], [2], engine, actions=(action,))
    assert [row for row in rows if not is_right(row)] == []
    assert {row.fault: bool(row.error) for row in rows} == faults


@pytest.mark.parametrize(
    ("lane", "killed"), [("fakes", Fault.PHASE_GHOST), ("emulated", Fault.PHASE_COORDINATOR)]
)
def test_whoever_is_killed_at_the_beginning_of_a_phase(lane: str, killed: Fault) -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, _ = run(lane, Path(folder), [killed], [2], actions=("leave-running", "restore"))
    assert [row for row in rows if not is_right(row)] == []
    wanted = {phase.value for phase in SPECS} - {"kill", "park"}
    assert {row.phase for row in rows if row.action == "leave-running"} == wanted
    steps = {row.phase for row in rows if row.action == "restore"}
    assert steps == {"fill", "criu", "engine", "mapback"}


@pytest.mark.parametrize("fault", [Fault.PHASE_GHOST, Fault.PHASE_COORDINATOR, Fault.PHASE_TASK])
def test_whoever_is_killed_in_a_suspension_or_a_resume(fault: Fault) -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, _ = run("fakes", Path(folder), [fault], [2], actions=(SUSPEND,))
    assert [row for row in rows if not is_right(row)] == []
    wanted = {"gate", "handover", "strip", "park", "release", "fill", "mapback"}
    assert {row.phase for row in rows} >= wanted


def test_what_no_time_is_left_for_is_left_out() -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, work = run("fakes", Path(folder), [Fault.FILL, Fault.STRIP], [1], seconds=0)
    assert rows == []
    assert {fault for some in work for fault in some.left_out} == {Fault.FILL, Fault.STRIP}
