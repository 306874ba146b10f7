"""Write managed memory with kernels, host code and a thread that counts all the time."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import MIX_SOURCE, Gpu, blocks, check, mix32
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 50
KIB, MIB = 1 << 10, 1 << 20
# From 31 MiB on, the driver reserves the addresses of each by itself.
SIZES = (4 * KIB, 700, 3 * MIB, 20 * MIB, 33 * MIB + 4 * KIB)
UNTOUCHED = 64 * MIB
PLACES = 64  # words of a block that a step writes, spread over it

SOURCE = (
    MIX_SOURCE
    + r"""
extern "C" __global__ void mix(unsigned* words, int count, int stride, unsigned step)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count)
        words[i * stride] = mix32(words[i * stride] + step);
}
"""
)


def managed(size: int, attach: driver.CUmemAttach_flags) -> NDArray[np.uint32]:
    """Return zeroed managed memory of `size` bytes as the host sees it."""
    address = int(check(driver.cuMemAllocManaged(size, attach)))
    words = np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(address))
    words[:] = 0
    return words


def stride_of(words: NDArray[np.uint32]) -> int:
    """Words from one that a step writes to the next."""
    return max(len(words) // PLACES, 1)


class Counter(threading.Thread):
    """Counts in managed memory without a call of CUDA, and beside it in its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._there = managed(4 * MIB, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        self._count = 0
        self._ended = False
        self.wrong = ""

    def run(self) -> None:
        while not self._ended and not self.wrong:
            for place in (0, len(self._there) - 1):
                if int(self._there[place]) != self._count:
                    self.wrong = f"{self._there[place]} in managed memory, not {self._count}"
            self._count = (self._count + 1) % (1 << 31)
            self._there[0] = self._there[-1] = self._count

    def end(self) -> None:
        self._ended = True
        self.join()


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    mix = gpu.module(SOURCE).kernel("mix", "PiiI")
    flags = driver.CUmemAttach_flags
    parts = [
        managed(size, attach)
        for size in SIZES
        for attach in (flags.CU_MEM_ATTACH_GLOBAL, flags.CU_MEM_ATTACH_HOST)
    ]
    advised = parts[-2]
    home = driver.CUmemLocation()
    home.type, home.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, options.device
    advice = driver.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
    check(driver.cuMemAdvise(advised.ctypes.data, advised.nbytes, advice, home))
    untouched = managed(UNTOUCHED, flags.CU_MEM_ATTACH_GLOBAL)
    counter = Counter()
    counter.start()
    for step in range(options.steps):
        before = digest(*(part[:: stride_of(part)].copy() for part in parts))
        if step % 4 == 0:
            check(driver.cuMemPrefetchAsync(advised.ctypes.data, advised.nbytes, home, 0, 0))
        for part in parts:
            stride = stride_of(part)
            count = -(-len(part) // stride)
            mix(blocks(count), 256, part.ctypes.data, count, stride, step)
        gpu.synchronize()
        for part in parts:
            seen = part[:: stride_of(part)]
            seen[:] = mix32(seen + np.uint32(step))
        verify(not counter.wrong, counter.wrong)
        report.step(step, digest(before.encode(), *parts if step % 10 == 0 else parts[:6]))
    counter.end()
    verify(not counter.wrong, counter.wrong)
    verify(not untouched[:: 4 * KIB].any(), "memory that nobody wrote is not zero")
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)
