"""A job that is left running goes on once the GPU has a copy of its memory, before that is out."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.jobs import Registry
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu
from tests.unit.coordinator_job import wait_for

# All but the copy on the GPU fits beside the ghost: 64 MiB of contexts each, 64 of scratch.
MEMORY, BIG, MORE = 704 << 20, 192 << 20, 192 << 20
PIECE, COPY_SECONDS = 32 << 20, 1.5  # of each piece
PROGRAM = """
import os, random, sys, time
from cuda.bindings import driver as cu

def ok(result):
    assert int(result[0]) == 0, result
    return result[-1] if len(result) > 1 else None

size, more, go, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
memory = ok(cu.cuMemAlloc(size))
ok(cu.cuMemcpyHtoD(memory, random.Random(1).randbytes(size), size))
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.01)
data = bytearray(8)
ok(cu.cuMemcpyDtoH(data, memory, 8))
print(bytes(data) == random.Random(1).randbytes(8), flush=True)
ok(cu.cuMemsetD8(memory, 7, size))
began = time.monotonic()
ok(cu.cuMemAlloc(more))
print("waited", time.monotonic() - began, flush=True)
while not os.path.exists(end):
    time.sleep(0.01)
ok(cu.cuMemcpyDtoH(data, memory, 8))
print(bytes(data).hex(), flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    delay = str(int(COPY_SECONDS * 1e6))
    with emulated_machine(FLOWGPU_EMU_MEMORY=str(MEMORY), FLOWGPU_EMU_COPY_DELAY=delay) as base:
        yield base


def waited(lines: list[str]) -> tuple[list[str], bool]:
    """The other lines, and true if it waited for pieces of the copy: at least for a sixth of it."""
    (line,) = (line for line in lines if line.startswith("waited "))
    whole = BIG / PIECE * COPY_SECONDS
    return [other for other in lines if other != line], float(line.split()[1]) > whole / 6


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_memory_that_the_copy_takes_is_waited_for(engine: str, tmp_path: Path) -> None:
    go, end, image = tmp_path / "go", tmp_path / "end", tmp_path / "image"
    words = [sys.executable, "-c", PROGRAM, str(BIG), str(MORE), str(go), str(end)]
    run = Run(f"shadow-{engine}", words, tmp_path, "", "--engine", engine)
    try:
        run.wait_lines(1)
        done: list[Any] = []
        command = ("pause-and-dump", run.name, "--output", image, "--leave-running", "--json")
        thread = threading.Thread(target=lambda: done.append(flowgpu(*command)))
        thread.start()
        log = Registry().dir(Registry().find(run.name).id).coordinator_log
        wait_for(lambda: "checkpoint: commit" in log.read_text(), "open gates")
        assert not done, "the copy is out before the job goes on"
        go.touch()
        run.wait_lines(3)
        thread.join()
        assert done[0].returncode == 0, done[0].stderr
        assert json.loads(done[0].stdout)["hold_seconds"] is not None
        end.touch()
        assert run.end() == 0
        assert waited(run.lines) == (["ready", "True", "07" * 8], True)
    finally:
        run.kill()
    # The image is of the moment before.
    go.unlink()
    end.unlink()
    restored: list[Any] = []
    thread = threading.Thread(target=lambda: restored.append(flowgpu("restore", image)))
    thread.start()
    for path in (go, end):
        path.touch()
    thread.join()
    assert restored[0].returncode == 0, restored[0].stderr
    assert waited(restored[0].stdout.splitlines()) == (["True", "07" * 8], False)
