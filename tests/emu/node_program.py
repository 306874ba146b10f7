"""A rank that computes each step with what all ranks have said of the step before.

    node_program.py FOLDER RANK COUNT STEPS

Ranks talk through files of FOLDER that only grow. Once `hurry` is there they go on without delay,
and make the last steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
SIZE, BLOCK, PLACE = 1 << 16, 256, 7
FACTOR = 2654435761
DELAY_SECONDS, LOOK_SECONDS = 0.1, 0.002
LAST_STEPS = 5

SOURCE = """
extern "C" __global__ void step(unsigned* x, unsigned add)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = (x[i] ^ add) * 2654435761u + i;
}
"""


def next_state(x: NDArray[np.uint32], add: int) -> NDArray[np.uint32]:
    """What the kernel makes of it."""
    return (x ^ np.uint32(add)) * np.uint32(FACTOR) + np.arange(len(x), dtype=np.uint32)


def first_state(rank: int) -> NDArray[np.uint32]:
    return np.arange(SIZE, dtype=np.uint32) + np.uint32(rank)


def expected(count: int, steps: int) -> list[list[str]]:
    """The lines of each rank."""
    states = [first_state(rank) for rank in range(count)]
    lines: list[list[str]] = [[] for _ in range(count)]
    add = 0
    for step in range(steps):
        states = [next_state(x, add) for x in states]
        said = [int(x[PLACE]) for x in states]
        for rank, value in enumerate(said):
            lines[rank].append(f"{step} {value:08x}")
        add = sum(said) & 0xFFFFFFFF
    return lines


def main() -> None:
    sys.path.insert(0, str(ROOT / "workloads"))
    folder, rank, count, steps = Path(sys.argv[1]), *map(int, sys.argv[2:])
    paths = [folder / f"rank{other}" for other in range(count)]
    for path in paths:
        path.touch()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(open(paths[rank], "a"))
        theirs = [stack.enter_context(open(path)) for path in paths]
        work(folder, rank, steps, ours, theirs)
    print("done", flush=True)


def work(folder: Path, rank: int, steps: int, ours: IO[str], theirs: list[IO[str]]) -> None:
    from _cuda import Gpu

    gpu = Gpu(0)
    kernel = gpu.module(SOURCE).kernel("step", "PI")
    x = gpu.upload(first_state(rank))
    add = 0
    for step in range(steps):
        kernel(SIZE // BLOCK, BLOCK, x, add)
        value = int(gpu.read(x, np.uint32, SIZE)[PLACE])
        ours.write(f"{step} {value:08x}\n")
        ours.flush()
        print(f"{step} {value:08x}", flush=True)
        add = 0
        for file in theirs:
            while not (line := file.readline()).endswith("\n"):
                file.seek(file.tell() - len(line))
                time.sleep(LOOK_SECONDS)
            said, text = line.split()
            if int(said) != step:
                raise SystemExit(f"rank {rank}: {line!r} in step {step}")
            add = (add + int(text, 16)) & 0xFFFFFFFF
        while not os.path.exists(folder / "hurry"):
            time.sleep(DELAY_SECONDS)
            if step < steps - LAST_STEPS:
                break


if __name__ == "__main__":
    main()
