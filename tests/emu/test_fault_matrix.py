"""A sample of the fault matrix, on the fakes and on the emulated GPU (`make fault-matrix`: all)."""

from __future__ import annotations

import math
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.phases import FORWARD, WAY_BACK, Phase
from flowgpu.image.reader import Image
from flowgpu.wire import Fault
from tests.faults import matrix
from tests.faults.case import Case, began_later
from tests.faults.lanes import TASKS
from tests.faults.matrix import ACTIONS, Work, is_right, run
from tests.unit.criu_job import taken

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
    ("lane", "killed"), [("fakes", Fault.PHASE_GHOST), ("emulated", Fault.PHASE_COORDINATOR)]
)
def test_whoever_is_killed_at_the_beginning_of_a_phase(lane: str, killed: Fault) -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows, _ = run(lane, Path(folder), [killed], [2], actions=("leave-running", "restore"))
    assert [row for row in rows if not is_right(row)] == []
    wanted = {phase.value for phase in (*FORWARD, *WAY_BACK, Phase.OPEN)} - {"kill"}
    assert {row.phase for row in rows if row.action == "leave-running"} == wanted
    steps = {row.phase for row in rows if row.action == "restore"}
    assert steps == {"fill", "criu", "engine", "mapback"}


def test_what_a_process_id_given_to_another_spoilt_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dumped = matrix.dumped
    with tempfile.TemporaryDirectory(prefix="fg-") as folder, ExitStack() as stack:
        jobs = stack.enter_context(matrix.lane("fakes", Path(folder)))

        def taken_then(work: Work, image: Path) -> Case:
            case = dumped(work, image)
            assert not began_later(os.getpid(), image)
            stack.enter_context(taken(Image(image).manifest.pids[-1]))
            return case

        monkeypatch.setattr(matrix, "dumped", taken_then)
        work = Work(jobs, TASKS["fakes"], [Fault.FILL], 1, "restore", math.inf)
        assert (work.run(), work.left_out) == ([], [Fault.FILL])
        late = Work(jobs, TASKS["fakes"], [Fault.FILL], 1, "restore", -math.inf)
        assert (late.run(), late.left_out) == ([], [Fault.FILL])
