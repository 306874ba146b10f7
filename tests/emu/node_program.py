"""A rank that computes each step with what all ranks have said of the step before.

    node_program.py FOLDER RANK COUNT STEPS [HOST PORT]

Ranks talk through files of FOLDER that only grow, or by TCP, where rank 0 listens. By TCP ranks
send it a stream as well, faster than it reads. Once `hurry` is there they go on without delay, and
make the last steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
SIZE, BLOCK, PLACE = 1 << 16, 256, 7
FACTOR = 2654435761
DELAY_SECONDS, LOOK_SECONDS = 0.1, 0.002
LAST_STEPS = 5
PATTERN, READ_SECONDS = 1000, 0.005
PAIR = struct.Struct("=QQ")

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
    folder, rank, count, steps = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    with contextlib.ExitStack() as stack:
        if sys.argv[5:]:
            host, port = sys.argv[5:]
            sockets = Sockets(stack, rank, count, (host, int(port)))
            work(folder, steps, rank, sockets.sum)
            sockets.end()
        else:
            work(folder, steps, rank, Files(stack, folder, rank, count).sum)
    say("done")


class Files:
    """What ranks say in files."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, rank: int, count: int) -> None:
        paths = [folder / f"rank{other}" for other in range(count)]
        for path in paths:
            path.touch()
        self._ours = stack.enter_context(paths[rank].open("a"))
        self._theirs = [stack.enter_context(path.open()) for path in paths]

    def sum(self, step: int, value: int) -> int:
        self._ours.write(f"{step} {value:08x}\n")
        self._ours.flush()
        found = 0
        for file in self._theirs:
            while not (line := file.readline()).endswith("\n"):
                file.seek(file.tell() - len(line))
                time.sleep(LOOK_SECONDS)
            said, text = line.split()
            if int(said) != step:
                raise SystemExit(f"{line!r} in step {step}")
            found += int(text, 16)
        return found & 0xFFFFFFFF


class Sockets:
    """What ranks say to rank 0, and that to them."""

    def __init__(
        self, stack: contextlib.ExitStack, rank: int, count: int, place: tuple[str, int]
    ) -> None:
        self._leads = rank == 0
        if self._leads:
            listener = stack.enter_context(socket.create_server(place))
            ends = [listener.accept()[0] for _ in range(count - 1)]
            for end in ends:
                end.sendall(b"!")
            streams = [listener.accept()[0] for _ in range(count - 1)]
        else:
            ends = [connected(place)]
            ends[0].recv(1)  # else rank 0 would not know which is which
            streams = [connected(place)]
        self._ends = [stack.enter_context(end) for end in ends]
        for stream in streams:
            work = read_pattern if self._leads else send_pattern
            threading.Thread(target=work, args=(stream,), daemon=True).start()

    def sum(self, step: int, value: int) -> int:
        if not self._leads:
            return self._told(step, value)
        found = value
        for end in self._ends:
            said, number = PAIR.unpack(exactly(end, PAIR.size))
            if said != step:
                raise SystemExit(f"{said} in step {step}")
            found += number
        for end in self._ends:
            end.sendall(PAIR.pack(step, found & 0xFFFFFFFF))
        return found & 0xFFFFFFFF

    def end(self) -> None:
        """Rank 0 ends last: a stream that breaks before has been broken by something else."""
        for end in self._ends if self._leads else ():
            end.recv(1)

    def _told(self, step: int, value: int) -> int:
        (end,) = self._ends
        end.sendall(PAIR.pack(step, value))
        said, number = PAIR.unpack(exactly(end, PAIR.size))
        if said != step:
            raise SystemExit(f"{said} in step {step}")
        return int(number)


def say(line: str) -> None:
    """In one piece, since ranks may share their output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def exactly(end: socket.socket, count: int) -> bytes:
    """Not MSG_WAITALL, with which a stop may cut it short."""
    data = b""
    while len(data) < count and (got := end.recv(count - len(data))):
        data += got
    return data


def send_pattern(stream: socket.socket) -> None:
    for number in itertools.count():
        try:
            stream.sendall(PAIR.pack(number, number * FACTOR & 0xFFFFFFFF) * PATTERN)
        except OSError as error:
            say(f"the stream is over: {error}")
            os._exit(1)


def read_pattern(stream: socket.socket) -> None:
    for number in itertools.count():
        wanted = PAIR.pack(number, number * FACTOR & 0xFFFFFFFF) * PATTERN
        if exactly(stream, len(wanted)) != wanted:
            say(f"the stream is wrong at {number}")
            os._exit(1)
        time.sleep(READ_SECONDS)


def connected(place: tuple[str, int]) -> socket.socket:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(place)
        time.sleep(LOOK_SECONDS)


def work(folder: Path, steps: int, rank: int, sum_of: Callable[[int, int], int]) -> None:
    from _cuda import Gpu

    gpu = Gpu(0)
    kernel = gpu.module(SOURCE).kernel("step", "PI")
    x = gpu.upload(first_state(rank))
    add = 0
    for step in range(steps):
        kernel(SIZE // BLOCK, BLOCK, x, add)
        value = int(gpu.read(x, np.uint32, SIZE)[PLACE])
        say(f"{step} {value:08x}")
        add = sum_of(step, value)
        while not os.path.exists(folder / "hurry"):
            time.sleep(DELAY_SECONDS)
            if step < steps - LAST_STEPS:
                break


if __name__ == "__main__":
    main()
