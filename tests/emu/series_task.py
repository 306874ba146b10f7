"""A program of which a known part changes: `series_task.py GPUS STEPS DELAY [spread] [packable]`.

On each GPU, CONSTANT chunks never change and are the same on all of them, and CHANGING chunks are
written at each step; with `spread` one is, and one of the others every few steps. With `packable`
half of each chunk is zeros. A line a step has a digest of all that the GPUs hold.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np
import xxhash
from cuda.bindings import driver as cu

CHUNK = 32 << 10
SPREAD_STEPS = 3
SLOWER = 1.03
"""Each wait is longer than the one before: however slow the machine is, an image of a few takes the
time of some steps, and the last one comes before the last step."""
CONSTANT, CHANGING = 100, 28  # both in a block of their own, and none of it left over


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


def content(chunks: int, seed: list[int]) -> np.ndarray:
    data = np.random.default_rng(seed).integers(0, 256, chunks * CHUNK, np.uint8)
    if "packable" in sys.argv:
        data.reshape(-1, 2, 64)[:, 1] = 0
    return data


class Memory:
    """What one GPU holds."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(ordinal))))
        self.use()
        self.constant, self.changing = (
            int(ok(cu.cuMemAlloc(chunks * CHUNK))) for chunks in (CONSTANT, CHANGING)
        )
        self.write(self.constant, content(CONSTANT, [0]))

    def use(self) -> None:
        ok(cu.cuCtxSetCurrent(self.context))

    def write(self, address: int, data: np.ndarray) -> None:
        ok(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def step(self, number: int, spread: bool) -> None:
        self.use()
        chunks = 1 if spread else CHANGING
        self.write(self.changing, content(chunks, [1, self.ordinal, number]))
        if spread and number % SPREAD_STEPS == 0:
            at = number // SPREAD_STEPS % CONSTANT
            self.write(self.constant + at * CHUNK, content(1, [2, self.ordinal, number]))

    def read(self) -> bytes:
        self.use()
        found = []
        for address, chunks in ((self.constant, CONSTANT), (self.changing, CHANGING)):
            data = np.empty(chunks * CHUNK, np.uint8)
            ok(cu.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))
            found.append(data.tobytes())
        return b"".join(found)


def main() -> None:
    gpus, steps, delay = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    ok(cu.cuInit(0))
    memories = [Memory(ordinal) for ordinal in range(gpus)]
    for number in range(steps):
        for memory in memories:
            memory.step(number, "spread" in sys.argv)
        digest = xxhash.xxh3_64_hexdigest(b"".join(memory.read() for memory in memories))
        print(f"step {number} {digest}", flush=True)
        hurry = os.environ.get("WORKLOAD_HURRY", "")
        if not os.path.exists(hurry):
            time.sleep(delay * SLOWER**number)
        while delay and hurry and number == steps - 2 and not os.path.exists(hurry):
            time.sleep(0.01)


if __name__ == "__main__":
    main()
