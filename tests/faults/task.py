"""A program that counts on a GPU: by a kernel, in every piece of its memory there at once.

It prints `step N` for each count, or `torn` when the pieces do not agree or its own memory has
changed, as tests/fakes/task.py does. Usage: python -m tests.faults.task
"""

from __future__ import annotations

import os
import time

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import MIB, download, function, launch_inc, ok, start

COUNT = 100  # numbers in use at the head of each piece
HELD = 24 * MIB // 8  # numbers in its own memory: so much that a restore writes it after CRIU
A_PAGE = 4096 // 8


def main() -> None:
    name = os.environ.get("FAKE_TASK_NAME", "")
    start()
    inc = function(b"inc")
    pieces = [int(ok(cu.cuMemAlloc(size))) for size in (4 * COUNT, 3 * MIB, 5 * MIB)]
    for piece in pieces:
        ok(cu.cuMemsetD32(piece, 0, COUNT))
    held = np.arange(HELD)
    step = 0
    while True:
        step += 1
        for piece in pieces:
            ok(launch_inc(inc, piece, COUNT))
        ok(cu.cuCtxSynchronize())
        first = step % A_PAGE
        kept = np.array_equal(held[first::A_PAGE], np.arange(first, HELD, A_PAGE))
        agree = kept and all((download(piece, COUNT) == step).all() for piece in pieces)
        # In one piece, whatever PYTHONUNBUFFERED says: two tasks write to one pipe.
        os.write(1, f"{name}{f'step {step}' if agree else 'torn'}\n".encode())
        time.sleep(0.01)


if __name__ == "__main__":
    main()
