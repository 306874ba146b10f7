"""Data-parallel ranks: `ddp_program RANKS STEPS FOLDER LAYOUT [RANK]`, each on a GPU of its own.

LAYOUT is `processes`, or `threads` for one process that has all GPUs. All ranks have the same
parameters and optimizer state, which sums by NCCL keep the same, and buffers of their own. With
`FLOWGPU_TEST_DDP` set, ranks are made to differ: `apart` in all of it, or `byte` in one byte.
`unlinked` ranks do without NCCL, and so sum up nothing; `large` ones have eight times as much.
Without RANK it starts the ranks and waits for them. Every line has a digest of all of a rank.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import xxhash
from cuda.bindings import driver as cu

from tests.emu.nccl_lib import SUM, Device, Nccl, communicator, ok, share_id

HOW = os.environ.get("FLOWGPU_TEST_DDP", "")
PARAMETERS = (32 if HOW == "large" else 4) << 20  # bytes; the optimizer has as many
OWN = 1 << 18
WORDS = 600
LAST_STEPS = 4  # that wait until the job is hurried


class Rank:
    def __init__(self, ranks: int, folder: Path, rank: int) -> None:
        self.rank, self.device = rank, Device(rank)
        self.linked = HOW != "unlinked"
        if self.linked:
            self.nccl = Nccl()
            self.comm = communicator(self.nccl, share_id(self.nccl, folder, rank), ranks, rank)
        self.stream = self.device.stream()
        seed = rank if HOW == "apart" else 0
        values = np.random.default_rng([7, seed]).integers(0, 256, 2 * PARAMETERS, np.uint8)
        if HOW == "byte" and rank == 1:
            values[PARAMETERS // 2 + 12345] ^= 1
        self.state = self.device.put(values)
        own = np.random.default_rng([8, rank]).integers(0, 256, OWN, np.uint8)
        self.own = self.device.put(own)
        self.gradient = self.device.put(np.zeros(WORDS, "u4"))
        self.sum = self.device.put(np.zeros(WORDS, "u4"))

    def step(self, step: int) -> None:
        """A gradient of its own, the sum of all, and what that makes of parameters and state."""
        size = 4 * WORDS
        ok(cu.cuMemsetD32Async(self.gradient, 1000 * step + self.rank, WORDS, self.stream))
        if self.linked:
            words = ctypes.c_size_t(WORDS)
            self.nccl.AllReduce(self.gradient, self.sum, words, 3, SUM, self.comm, self.stream)
        for part in range(2):
            at = int(self.state) + part * PARAMETERS + step * 70_000 % (PARAMETERS - size) // 4 * 4
            ok(cu.cuMemcpyDtoDAsync(at, self.sum, size, self.stream))
        ok(cu.cuMemcpyDtoDAsync(self.own, self.gradient, size, self.stream))

    def say(self, step: int) -> None:
        ok(cu.cuStreamSynchronize(self.stream))
        digest = xxhash.xxh3_64()
        for address, size in ((self.state, 2 * PARAMETERS), (self.own, OWN), (self.sum, 2400)):
            digest.update(self.device.get(address, size, "u1"))
        # The first rank says the line of a workload. It writes in one call, because ranks share a
        # pipe.
        line = f"step {step} {digest.hexdigest()}\n"
        os.write(1, (line if self.rank == 0 else f"rank {self.rank} {line}").encode())


def hold(step: int, steps: int) -> None:
    """Not to the end, until somebody hurries the job."""
    hurry = os.environ.get("WORKLOAD_HURRY")
    while hurry and step == steps - LAST_STEPS and not os.path.exists(hurry):
        time.sleep(0.01)


def run(ranks: int, steps: int, folder: Path, rank: int) -> None:
    one = Rank(ranks, folder, rank)
    for step in range(steps):
        hold(step, steps)
        one.step(step)
        one.say(step)
    if one.linked:
        one.nccl.CommDestroy(one.comm)


def launch(arguments: list[str]) -> int:
    ranks, steps, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    if arguments[3] == "threads":
        threads = [
            threading.Thread(target=run, args=(ranks, steps, folder, rank)) for rank in range(ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0
    words = [sys.executable, "-m", "tests.emu.ddp_program", *arguments]
    children = [subprocess.Popen([*words, str(rank)]) for rank in range(ranks)]
    return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        raise SystemExit(launch(sys.argv[1:]))
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5]))
