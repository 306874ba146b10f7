"""Work on the GPU that waits for the program's next call: behind a closed gate it never ends."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from coordinator.task_group import GATE_SECONDS, SHORT_GATE_SECONDS, gate_seconds
from tests.emu.gpu_job import GPU, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import flowgpu, runtime_dir

__all__ = ["runtime_dir"]  # a fixture

# Nine tenths of the time a stream waits for a value that the program writes later.
PROGRAM = (
    GPU
    + """
import threading
waits, writes = (ok(cu.cuStreamCreate(1)) for _ in range(2))
flag = ok(cu.cuMemAlloc(8))
ok(cu.cuMemsetD32(flag, 0, 2))
rounds, faults = 0, []
context = ok(cu.cuCtxGetCurrent())
def work():
    global rounds
    try:
        ok(cu.cuCtxSetCurrent(context))
        while not os.path.exists(sys.argv[1]) or rounds < 20:
            rounds += 1
            ok(cu.cuStreamWaitValue32(waits, flag, rounds, 1))
            time.sleep(0.09)
            ok(cu.cuStreamWriteValue32(writes, flag, rounds, 0))
            ok(cu.cuStreamSynchronize(waits))
            time.sleep(0.01)
    except BaseException as fault:
        faults.append(fault)
thread = threading.Thread(target=work)
thread.start()
until(lambda: rounds > 2)
went()
thread.join()
print(faults, gpu())
"""
)


@pytest.mark.usefixtures("runtime_dir")
@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_moment_without_work_that_waits_for_the_program_is_found(
    engine: str, tmp_path: Path
) -> None:
    done, lines = said_with_a_checkpoint_between(
        f"waits-{engine}", engine, PROGRAM, tmp_path, "", "--leave-running"
    )
    assert done.returncode == 0, done.stderr
    assert lines == ["ready", "[] True"]
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines() == ["[] True"]


def test_long_work_has_twice_the_time_each_time_and_short_tries_between() -> None:
    tries = [*itertools.takewhile(lambda seconds: seconds < 8 * GATE_SECONDS, gate_seconds())]
    assert [seconds for seconds in tries if seconds >= GATE_SECONDS] == [1.0, 2.0, 4.0]
    assert tries.count(SHORT_GATE_SECONDS) > 50
    assert sum(tries) < 2 * (1 + 2 + 4)
