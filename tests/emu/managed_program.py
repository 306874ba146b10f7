"""A program with managed memory and variables that kernels and its threads write all the time.

Arguments: a folder in which files tell it to go on. It says a line for each, and ends with what an
undisturbed run would say. What is wrong ends it at once.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_cases_managed import (
    GLOBAL,
    HOST,
    VARIABLE,
    from_pool,
    managed,
    managed_pool,
    words,
)
from tests.emu.driver_lib import MIB, function, launch_inc, ok, start

SIZES = (4096, 700, 3 * MIB, 20 * MIB, 33 * MIB + 4096)


WINDOW = 0x180000000000  # native/intercept/managed.cpp


def mmap_at(address: int, size: int) -> int:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
    private_anonymous_fixed = 0x02 | 0x20 | 0x10
    return int(libc.mmap(address, size, 3, private_anonymous_fixed, -1, 0))


class Counter(threading.Thread):
    """Counts in managed memory without ever calling CUDA, and beside it in its own."""

    def __init__(self, address: int) -> None:
        super().__init__(daemon=True)
        self._there = words(address, 1)
        self.count = 0
        self.wrong = ""
        self.stop = False

    def run(self) -> None:
        while not self.stop and not self.wrong:
            before = int(self._there[0])
            if before != self.count:
                self.wrong = f"{before} in managed memory, {self.count} beside it"
            self.count += 1
            self._there[0] = self.count


def main() -> None:
    folder = Path(sys.argv[1])
    start()
    taken = mmap_at(WINDOW, 4096)  # so that the first place for managed memory is no more
    inc = function(b"inc")
    blocks = [(managed(size, flags), size) for size in SIZES for flags in (GLOBAL, HOST)]
    pool = managed_pool()
    blocks += [(from_pool(pool, size), size) for size in (8192, 20 * MIB)]
    ok(cu.cuStreamSynchronize(0))
    plain = int(ok(cu.cuMemAlloc(4096)))
    ok(cu.cuMemsetD32(plain, 1, 1024))
    untouched = managed(64 * MIB)
    library = ok(cu.cuLibraryLoadData(VARIABLE, [], [], 0, [], [], 0))
    module = ok(cu.cuModuleLoadData(VARIABLE))
    variables = [
        int(ok(cu.cuLibraryGetManaged(library, b"both"))[0]),
        int(ok(cu.cuModuleGetGlobal(module, b"both"))[0]),
    ]
    bumps = [
        cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"bump_both")))),
        ok(cu.cuModuleGetFunction(module, b"bump_both")),
    ]
    for address in variables:
        assert list(words(address, 2)) == [7, 8]
        words(address, 2)[:] = 0
    counted = (blocks[4][0] + 2 * MIB, blocks[-1][0] + 2 * MIB, *(one + 4 for one in variables))
    counters = [Counter(at) for at in counted]
    steps = 0
    for counter in counters:
        counter.start()

    def step() -> None:
        nonlocal steps
        for address, size in blocks:
            for part in (address, address + (size - 64) // 4 * 4):
                ok(launch_inc(inc, part, 4))
        ok(launch_inc(inc, plain, 4))
        for bump in bumps:
            ok(cu.cuLaunchKernel(bump, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        ok(cu.cuCtxSynchronize())
        for address in variables:
            words(address, 1)[:] += 1
        for address, size in blocks:
            for part in (address, address + (size - 64) // 4 * 4):
                words(part, 4)[:] += 1
        steps += 1
        for address, size in blocks:
            for part in (address, address + (size - 64) // 4 * 4):
                assert (words(part, 4) == 2 * steps).all(), (hex(part), words(part, 4), steps)
        for address in variables:
            assert words(address, 1)[0] == 2 * steps, (hex(address), words(address, 1), steps)
        for counter in counters:
            assert not counter.wrong, counter.wrong

    for name in ("begin", "one", "two", "three"):
        print(name, flush=True)
        while not (folder / name).exists():
            step()
            time.sleep(0.005)
        step()
    for counter in counters:
        before = counter.count
        while counter.count == before:
            time.sleep(0.001)
        counter.stop = True
        counter.join()
        assert not counter.wrong, counter.wrong
    assert int(ok(cu.cuLibraryGetManaged(library, b"both"))[0]) == variables[0]
    ok(cu.cuLibraryUnload(library))
    ok(cu.cuModuleUnload(module))
    assert (words(untouched, 1024) == 0).all()
    assert taken == WINDOW
    said = np.zeros(1024, np.uint32)
    ok(cu.cuMemcpyDtoH(said.ctypes.data, plain, 4096))
    assert (said[:4] == 1 + steps).all(), said[:4]
    for address, size in blocks:
        base, known = ok(cu.cuMemGetAddressRange(address + size - 1))
        assert (int(base), known) == (address, size)
        ok(cu.cuMemFree(address))
    fresh = from_pool(pool, 40 * MIB)
    words(fresh, 1)[0] = 6
    ok(launch_inc(inc, fresh, 1))
    ok(cu.cuCtxSynchronize())
    print("after", int(words(fresh, 1)[0]), flush=True)


if __name__ == "__main__":
    main()
