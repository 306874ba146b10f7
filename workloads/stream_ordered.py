"""Keep allocations from two pools alive, given and freed in the order of two streams."""

from __future__ import annotations

import itertools

from _common import Options, Report, guarded, parse, verify
from _cuda import Gpu, check
from cuda.bindings import driver
from small_allocs import LARGE, Heap

DEFAULT_STEPS = 30
KEPT = 8 << 20  # bytes that the program's own pool keeps when they are free


class Pools(Gpu):
    """A GPU whose memory comes from its own pool and one of the program's, in turns."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.streams = [check(driver.cuStreamCreate(1)) for _ in range(2)]
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        self.pool = check(driver.cuMemPoolCreate(properties))
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        check(driver.cuMemPoolSetAttribute(self.pool, threshold, driver.cuuint64_t(KEPT)))
        self.turns = itertools.count()

    def alloc(self, size: int) -> int:
        turn = next(self.turns)
        stream = self.streams[turn % 2]
        if turn % 3:
            address = check(driver.cuMemAllocAsync(size, stream))
        else:
            address = check(driver.cuMemAllocFromPoolAsync(size, self.pool, stream))
        check(driver.cuMemsetD8Async(address, 0, size, stream))
        check(driver.cuStreamSynchronize(stream))
        self._sizes[int(address)] = size
        return int(address)

    def free(self, address: int) -> None:
        check(driver.cuCtxSynchronize())  # kernels run in another stream
        check(driver.cuMemFreeAsync(address, self.streams[next(self.turns) % 2]))
        del self._sizes[int(address)]


class PoolHeap(Heap):
    """What is asked of a pool's memory."""

    def __init__(self, gpu: Gpu, options: Options) -> None:
        super().__init__(gpu, options)
        self.used = [
            driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
            driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
        ]

    def check_addresses(self) -> None:
        self.apart()
        assert isinstance(self.gpu, Pools)
        default = check(driver.cuDeviceGetDefaultMemPool(self.gpu.device))
        for stream in self.gpu.streams:
            check(driver.cuStreamSynchronize(stream))
        for attribute in self.used:
            counted = sum(
                int(check(driver.cuMemPoolGetAttribute(pool, attribute)))
                for pool in (default, self.gpu.pool)
            )
            live = sum(a.size for a in self.live)
            verify(counted >= live, f"{live} bytes are live, but pools count {counted}")


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Pools(options.device)
    heap = PoolHeap(gpu, options)
    verify(max(a.size for a in heap.live) > LARGE, "the sizes drawn miss the large ones")
    for step in range(options.steps):
        heap.change()
        heap.check_addresses()
        report.step(step, heap.digest(step))
    while heap.live:
        heap.release(len(heap.live) - 1)
    for address in (heap.table, heap.wrong, heap.sums):
        gpu.free(address)
    for stream in gpu.streams:
        check(driver.cuStreamDestroy(stream))
    check(driver.cuMemPoolDestroy(gpu.pool))
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)
