"""A sample of the fault matrix, on the fakes and on the emulated GPU (`make fault-matrix`: all)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from flowgpu.wire import Fault
from tests.faults.matrix import ACTIONS, is_right, run

SAMPLES = {
    "fakes": (Fault.EXPORT, Fault.DETACH, Fault.MAPBACK, Fault.GHOST_CHECKPOINT),
    "emulated": (Fault.STRIP, Fault.COMMIT, Fault.REBUILD),
}


@pytest.mark.parametrize("lane", SAMPLES)
def test_a_fault_leaves_the_job_or_nothing(lane: str) -> None:
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        rows = run(lane, Path(folder), SAMPLES[lane], [2])
    assert [row for row in rows if not is_right(row)] == []
    assert {row.fault for row in rows} == set(SAMPLES[lane])
    assert {row.action for row in rows} == set(ACTIONS)
