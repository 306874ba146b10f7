"""An awkward job of NCCL ranks, for cuts at any moment: `nccl_program RANKS STEPS FOLDER [RANK]`.

Without RANK it starts the ranks and waits for them. Ranks are skewed, and use several communicators
in orders of their own; there are groups, pipelines of messages, waits in different places, and one
rank that dawdles. Every 16 steps each prints a digest of all that it has: the lines are the same in
each run, whatever stops it meanwhile. A line on the standard input of a rank asks its GPU to become
idle, and is answered. With NCCL_PROGRAM=eager there is no graph: the same is issued each time. With
NCCL_PROGRAM_HOSTS=N the ranks are on N hosts, and those of different ones talk by TCP.
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from cuda.bindings import driver as cu

from tests.emu.nccl_lib import SUM, Device, Nccl, communicator, ok, share_id

COMMS = 3
WORDS, SMALL = 60_000, 500
U4 = 3  # ncclUint32
EAGER = os.environ.get("NCCL_PROGRAM") == "eager"
HOSTS = int(os.environ.get("NCCL_PROGRAM_HOSTS", "0"))
LAST_STEPS = 32  # that wait until the job is hurried


class Rank:
    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = Device(0)
        # To wait for all work would break a capture.
        self.capturing = threading.Lock()
        threading.Thread(target=self.answer, daemon=True).start()
        self.nccl = Nccl()
        names = [f"id{number}" for number in range(COMMS)]
        idents = [share_id(self.nccl, folder, rank, name) for name in names]
        self.comms = [communicator(self.nccl, ident, ranks, rank) for ident in idents]
        self.child = ctypes.c_void_p()
        self.nccl.CommSplit(self.comms[0], rank % 2, rank, ctypes.byref(self.child), None)
        self.streams = [self.device.stream() for _ in range(COMMS)]
        values = np.random.default_rng([7, rank]).integers(0, 1 << 32, WORDS, np.uint32)
        self.data = [self.device.put(values + number) for number in range(COMMS)]
        self.other = [self.device.put(np.zeros(WORDS, "u4")) for _ in range(COMMS)]
        for number in range(COMMS):  # the first use connects, and waits for the others
            self.reduce(number, SMALL)
            self.ring(number, SMALL)
        self.child_reduce()
        self.pipeline(0, SMALL)
        self.graph = None if EAGER else self.captured()

    def captured(self) -> Any:
        """A graph of a sum and of messages in a ring, on one communicator."""
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self.capturing:
            ok(cu.cuStreamBeginCapture(self.streams[2], relaxed))
            self.reduce(2, SMALL)
            self.ring(2, SMALL)
            graph = ok(cu.cuStreamEndCapture(self.streams[2]))
        return ok(cu.cuGraphInstantiate(graph, 0))

    def words(self, count: int) -> ctypes.c_size_t:
        return ctypes.c_size_t(count)

    def keep(self, number: int, count: int) -> None:
        """What has come is what is sent next."""
        stream = self.streams[number]
        ok(cu.cuMemcpyDtoDAsync(self.data[number], self.other[number], 4 * count, stream))

    def reduce(self, number: int, count: int) -> None:
        comm, stream = self.comms[number], self.streams[number]
        self.nccl.AllReduce(
            self.data[number], self.other[number], self.words(count), U4, SUM, comm, stream
        )
        self.keep(number, count)

    def ring(self, number: int, count: int) -> None:
        comm, stream, n = self.comms[number], self.streams[number], self.ranks
        after, before = (self.rank + 1) % n, (self.rank - 1) % n
        self.nccl.GroupStart()
        self.nccl.Send(self.data[number], self.words(count), U4, after, comm, stream)
        self.nccl.Recv(self.other[number], self.words(count), U4, before, comm, stream)
        self.nccl.GroupEnd()
        self.keep(number, count)

    def pipeline(self, number: int, count: int) -> None:
        """From the first rank to the last, each after the one before it."""
        comm, stream = self.comms[number], self.streams[number]
        if self.rank > 0:
            self.nccl.Recv(self.data[number], self.words(count), U4, self.rank - 1, comm, stream)
        if self.rank < self.ranks - 1:
            self.nccl.Send(self.data[number], self.words(count), U4, self.rank + 1, comm, stream)

    def child_reduce(self) -> None:
        args = self.data[1], self.other[1], self.words(SMALL), U4, SUM
        self.nccl.AllReduce(*args, self.child, self.streams[1])
        self.keep(1, SMALL)

    def both(self, one: int, two: int) -> None:
        """One group over two communicators."""
        self.nccl.GroupStart()
        for number in (one, two):
            args = self.data[number], self.other[number], self.words(SMALL), U4, SUM
            self.nccl.AllReduce(*args, self.comms[number], self.streams[number])
        self.nccl.GroupEnd()
        for number in (one, two):
            self.keep(number, SMALL)

    def scatter(self, number: int, count: int) -> None:
        comm, stream = self.comms[number], self.streams[number]
        part = self.words(count // self.ranks)
        self.nccl.ReduceScatter(self.data[number], self.other[number], part, U4, SUM, comm, stream)
        self.nccl.AllGather(self.other[number], self.data[number], part, U4, comm, stream)

    def renew(self, number: int, step: int) -> None:
        """Something that is new in each step, and of each rank: else sums soon are all the same."""
        at = int(self.data[number]) + 4 * (step * 67 % (SMALL - 64))
        value = (step * 2654435761 + self.rank * 40503 + number) & 0xFFFFFFFF
        ok(cu.cuMemsetD32Async(at, value, 64, self.streams[number]))

    def step(self, step: int, same: random.Random, own: random.Random) -> None:
        for number in range(COMMS):
            self.renew(number, step)
        kind, order = same.randrange(10), same.sample(range(COMMS), COMMS)
        count = WORDS if same.random() < 0.15 else SMALL
        if kind < 2:
            for number in order:
                self.reduce(number, count)
        elif kind == 2:  # in opposite orders, without a wait in between
            for number in order[:2] if self.rank % 2 else order[1::-1]:
                self.reduce(number, SMALL)
                if own.random() < 0.3:
                    time.sleep(own.random() * 0.01)
        elif kind == 3:
            self.both(*order[:2])
        elif kind == 4:
            self.ring(order[0], count)
        elif kind == 5:
            self.pipeline(order[0], count)
        elif kind == 6:
            self.scatter(order[0], count)
        elif kind == 7:
            self.child_reduce()
        elif kind == 8 and EAGER:
            self.reduce(2, SMALL)
            self.ring(2, SMALL)
        elif kind == 8:
            ok(cu.cuGraphLaunch(self.graph, self.streams[2]))
        else:
            root = same.randrange(self.ranks)
            comm, data = self.comms[order[0]], self.data[order[0]]
            stream = self.streams[order[0]]
            self.nccl.Broadcast(data, data, self.words(SMALL), U4, root, comm, stream)

    def dawdle(self, own: random.Random, number: int) -> None:
        if own.random() < 0.1:
            time.sleep(own.random() * 0.005)
        if own.random() < 0.1:  # in the driver, for ranks that may be far behind
            ok(cu.cuStreamSynchronize(self.streams[own.randrange(COMMS)]))
        if self.rank == self.ranks - 1 and number % 24 == 5:
            time.sleep(0.03)

    def digest(self) -> str:
        state = xxhash.xxh3_64()
        for number in range(COMMS):
            ok(cu.cuStreamSynchronize(self.streams[number]))
            for address in (self.data[number], self.other[number]):
                state.update(self.device.get(address, WORDS, "u4"))
        return state.hexdigest()

    def answer(self) -> None:
        self.device.use()
        for _ in sys.stdin:
            with self.capturing:
                ok(cu.cuCtxSynchronize())
            say("idle")

    def end(self) -> None:
        if self.graph is not None:
            ok(cu.cuGraphExecDestroy(self.graph))
        self.nccl.GroupStart()
        for comm in (*self.comms, self.child):
            self.nccl.CommDestroy(comm)
        self.nccl.GroupEnd()


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # whole, because the ranks may share a pipe


def hold(step: int, steps: int) -> None:
    """Slowly, and not to the end, until somebody hurries the job."""
    hurry = os.environ.get("WORKLOAD_HURRY")
    if hurry and not os.path.exists(hurry):
        time.sleep(0.01)
        while step == steps - LAST_STEPS and not os.path.exists(hurry):
            time.sleep(0.01)


def run_rank(ranks: int, steps: int, folder: Path, rank: int) -> None:
    if HOSTS:
        os.environ["NCCL_HOSTID"] = f"host{rank % HOSTS}"
    one = Rank(folder, rank, ranks)
    same, own = random.Random(7), random.Random(100 + rank)
    for number in range(steps):
        hold(number, steps)
        one.step(number, same, own)
        one.dawdle(own, number)
        if number % 16 == 15:
            say(f"step {number} rank {rank} {one.digest()}")
    one.end()
    say(f"done rank {rank}")


def launch(arguments: list[str]) -> int:
    command: list[Any] = [sys.executable, "-m", "tests.emu.nccl_program", *arguments]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(int(arguments[0]))]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        raise SystemExit(launch(sys.argv[1:]))
    run_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
