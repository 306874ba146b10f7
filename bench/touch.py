"""Touch the machine's free memory once.

A virtual machine that was just started has its memory from its host only page by page, at the first
touch of each: at a few GB/s, whoever touches it. What is measured first would pay for all others.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time

from bench import machine

MADV_POPULATE_WRITE = 23


def touch(size: int, processes: int) -> None:
    """Make `size` bytes of memory resident at once, then free them."""
    step = size // processes // mmap.PAGESIZE * mmap.PAGESIZE
    memory = mmap.mmap(-1, step * processes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    children = []
    # The call holds the interpreter's lock, so threads would take turns.
    for number in range(processes):
        child = os.fork()
        if not child:
            try:
                memory.madvise(MADV_POPULATE_WRITE, number * step, step)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.6, help="of the memory that is available")
    size = int(machine.memory("MemAvailable") * parser.parse_args().share)
    began = time.monotonic()
    touch(size, len(os.sched_getaffinity(0)))
    print(json.dumps({"bytes": size, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
