"""Work on the GPU that waits for the program's next call, which a closed gate would hold back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emu.gpu_job import GPU, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import flowgpu, runtime_dir

__all__ = ["runtime_dir"]  # a fixture

# Nearly all the time a stream waits for a value that the program writes later.
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
def test_work_that_waits_for_the_programs_next_call_ends_behind_the_gate(
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
