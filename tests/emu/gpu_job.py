"""A job that uses the GPU before and after a checkpoint, and what it says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowgpu.errors import DUMPED_EXIT
from flowgpu.image.reader import Image
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, flowgpu
from tests.unit.coordinator_job import wait_for

# Uses the GPU before and after; says "ready" once all is set up and waits until a file is there.
# `went()` stands between the two: what is above it happens before the dump, below after the
# restore.
GPU = """
import ctypes, fcntl, os, select, signal, struct, subprocess, sys, time
from cuda.bindings import driver as cu
def ok(result):
    assert result[0] == 0, result
    return result[-1]
ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
memory = ok(cu.cuMemAlloc(4096))
ok(cu.cuMemsetD8(memory, 5, 4096))
def gpu():
    data = bytearray(4096)
    ok(cu.cuMemcpyDtoH(data, memory, 4096))
    return data == bytes([5]) * 4096
def went():
    print("ready", flush=True)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
def until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())
libc = ctypes.CDLL(None, use_errno=True)
"""


def said_across_a_restore(
    name: str,
    program: str,
    folder: Path,
    *arguments: str,
    before: Sequence[str] = (),
    engine: str = "auto",
    between: Callable[[], object] = lambda: None,
    **options: Any,
) -> list[str]:
    """The lines of a job that is dumped when it says that it is ready, and restored.

    `before` is put in front of the command; `between` is done before the restore.
    """
    go, out = folder / "go", folder / "out"
    job = [sys.executable, "-c", program, str(go), *arguments]
    chosen = ["--gpu", "emulated", "--engine", engine, "--name", name]
    words = [*before, *FLOWGPU, "run", *chosen, "--", *job]
    with (
        open(out, "wb") as output,
        subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=output, **options) as process,
    ):
        try:
            wait_for(
                lambda: "ready" in out.read_text() or process.poll() is not None, "ready", SECONDS
            )
            assert process.poll() is None, out.read_text()
            done = flowgpu("pause-and-dump", name, "--output", folder / "image")
            assert done.returncode == 0, done.stderr
            assert process.wait(SECONDS) == DUMPED_EXIT
            assert engine in ("auto", Image(folder / "image").manifest.engine)
        finally:
            flowgpu("kill", name)
    go.touch()
    between()
    restored = flowgpu("restore", folder / "image")
    assert restored.returncode == 0, restored.stderr
    lines = [*out.read_text().splitlines(), *restored.stdout.splitlines()]
    return [line for line in lines if not line.startswith("flowgpu: ")]


def said_with_a_checkpoint_between(
    name: str,
    engine: str,
    program: str,
    folder: Path,
    argument: object,
    *options: str,
    before: Sequence[str] = (),
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The checkpoint of a job that is ready, and all lines of that job, which goes on and ends."""
    go, out = folder / "go", folder / "out"
    words = ["run", "--gpu", "emulated", "--engine", engine, "--name", name, "--"]
    job = [sys.executable, "-c", program, str(go), str(argument)]
    with (
        open(out, "wb") as output,
        subprocess.Popen([*before, *FLOWGPU, *words, *job], cwd=ROOT, stdout=output) as process,
    ):
        try:
            wait_for(lambda: "ready" in out.read_text(), "ready", SECONDS)
            done = flowgpu("pause-and-dump", name, "--output", folder / "image", *options)
            go.touch()
            assert process.wait(SECONDS) == 0, done.stderr
        finally:
            flowgpu("kill", name)
    return done, out.read_text().splitlines()
