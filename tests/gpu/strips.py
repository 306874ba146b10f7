"""End CUDA in running programs and make it anew, again and again, with no dump in between.

    python -m tests.gpu.strips [--gpu emulated] [--seconds 60] [--programs plain,threads,torch,...]

Each program runs in a process of its own, all at once; one may be named several times. It is asked
the same after each round and must answer the same; descriptors must not grow after the first one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

from flowgpu.launch import GpuKind, choose_driver
from tests.emu import intercept_lib as lib
from tests.emu.replay_cases import PRELUDE
from tests.emu.test_replay import Task

# What a program makes, and what it is asked then.
PROGRAMS = {
    "plain": ("kernel = function(b'inc')", "inc_of(kernel)"),
    "streams": (
        "kernel = function(b'inc'); streams = [ok(cu.cuStreamCreate(1)) for _ in range(8)]",
        "[inc_of(kernel, 64, stream) for stream in streams]",
    ),
    "threads": (
        """
import threading
kernel = function(b'inc')
def work():
    square = np.ones((200, 200))
    while True:
        square = square @ square / 200
        bytes(1 << 20)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
""",
        "inc_of(kernel)",
    ),
    "torch": (
        "import torch; x = torch.ones(1000, 1000, device='cuda')",
        "float((x @ x).sum().item() + torch.relu(x).sum().item())",
    ),
}
DESCRIPTORS = "len(__import__('os').listdir('/proc/self/fd'))"
Row = tuple[str, int, float, str, str]


def repeat(name: str, gpu: GpuKind, seconds: float = 0, rounds: int = 1) -> Row:
    """For so long, and so many rounds at least: rounds, the median of their seconds, descriptors
    after the first and the last, the end."""
    spans: list[float] = []
    held: list[int] = []
    end, program = "ok", None
    libcuda = choose_driver(gpu).libcuda
    # An emulated device may write into it until it ends.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with lib.job(Path(folder), replay=True, libcuda=libcuda) as (_, program, peer):
                task = Task(program, peer)
                setup, question = PROGRAMS[name]
                task.do(f"{PRELUDE}\n{setup}\nNone")
                answer = task.do(question)
                until = time.monotonic() + seconds
                while len(spans) < rounds or time.monotonic() < until:
                    began = time.monotonic()
                    task.checkpoint()
                    spans.append(time.monotonic() - began)
                    assert task.do(question) == answer, "another answer"
                    held.append(task.do(DESCRIPTORS))
        except Exception as error:
            code = program.process.poll() if program else None
            end = f"{type(error).__name__}: {error}; exit code {code}"
    if end == "ok" and held[-1] > held[0]:
        end = "descriptors grow"
    counts = f"{held[0]} {held[-1]}" if held else "-"
    return name, len(spans), statistics.median(spans or [0.0]), counts, end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.gpu.strips")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--programs", default="plain,streams,threads")
    options = parser.parse_args()
    names = options.programs.split(",")
    with multiprocessing.Pool(len(names)) as pool:
        rows = pool.starmap(repeat, [(name, options.gpu, options.seconds) for name in names])
    for name, rounds, median, counts, end in rows:
        print(f"{name:8} {rounds:6} rounds  {median:.3f} s  descriptors {counts}  {end}")
    return any(row[-1] != "ok" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
