"""Programs whose processes begin and end: `workers_task.py KIND ...`.

`sweep`: a process that uses the GPU runs trials on it, three at a time, all the time: each is a
short process of its own. It ends when WORKLOAD_HURRY is there and each kind of trial has run since.
`keeper`: it does not use the GPU, but has two workers that do. It says how one ends, and lets them
end when WORKLOAD_HURRY is there. With the file SPAWN it starts one more.
`watched`: a process that uses the GPU, until a thread of it ends it when WORKLOAD_HURRY is there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

BYTES = 4096
HURRY = Path(os.environ["WORKLOAD_HURRY"])
SPAWN = HURRY.with_suffix(".spawn")


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) > 1 else None


class Gpu:
    """Memory that grows by a fixed rule."""

    def __init__(self) -> None:
        ok(cu.cuInit(0))
        ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(0))))))
        self.memory = int(ok(cu.cuMemAlloc(BYTES)))
        ok(cu.cuMemsetD8(self.memory, 1, BYTES))

    def step(self) -> int:
        """Gives a sum of all of it."""
        data = (ctypes.c_uint8 * BYTES)()
        ok(cu.cuMemcpyDtoH(data, self.memory, BYTES))
        changed = bytes((5 * byte + at) % 251 for at, byte in enumerate(data))
        ok(cu.cuMemcpyHtoD(self.memory, changed, BYTES))
        return sum(changed)


def say(*words: object) -> None:
    print(*words, flush=True)


def start(kind: str, *words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, kind, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trial(steps: int) -> None:
    gpu = Gpu()
    for _ in range(steps):
        last = gpu.step()
    say(last)


def worker() -> None:
    gpu = Gpu()
    say(gpu.step())
    sys.stdin.readline()
    say(gpu.step())


def sweep() -> None:
    gpu = Gpu()
    found: list[set[str]] = [set(), set(), set()]
    ended = [0, 0, 0]
    over = threading.Event()

    def run(kind: int) -> None:
        while not over.is_set():
            with start("trial", kind + 1) as one:
                said = one.communicate()[0].strip()
            found[kind].add(f"{one.returncode}: {said}")
            ended[kind] += 1

    def wait_for_all() -> None:
        before = list(ended)
        while any(now < then + 2 for now, then in zip(ended, before, strict=True)):
            time.sleep(0.01)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in range(3)]
    for thread in threads:
        thread.start()
    wait_for_all()
    say("step", gpu.step())
    say("ready")
    while not HURRY.exists():
        time.sleep(0.01)
    wait_for_all()
    over.set()
    for thread in threads:
        thread.join()
    say("trials", *map(sorted, found))
    say("step", gpu.step())


def keeper() -> None:
    workers = [start("worker") for _ in range(2)]
    for one in workers:
        assert one.stdout is not None
        one.stdout.readline()
    say("ready", *(one.pid for one in workers))
    ended: set[int] = set()
    while not HURRY.exists():
        for number, one in enumerate(workers):
            if number not in ended and one.poll() is not None:
                ended.add(number)
                say(f"worker {number} ended {one.returncode}")
        if SPAWN.exists() and len(workers) < 3:
            workers.append(start("worker"))
        time.sleep(0.005)
    for number, one in enumerate(workers):
        if number not in ended:
            said = one.communicate("end\n")[0].split()
            say(f"worker {number} ended {one.returncode}", *said)


def watched() -> None:
    def watch() -> None:
        say("ready")
        while not HURRY.exists():
            time.sleep(0.0005)
        say("last words")
        os._exit(5)

    gpu = Gpu()
    threading.Thread(target=watch).start()
    while True:
        gpu.step()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if name == "trial":
        trial(int(rest[0]))
    else:
        {"worker": worker, "sweep": sweep, "keeper": keeper, "watched": watched}[name]()
