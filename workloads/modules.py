"""Keep state in module variables while modules and libraries are loaded and unloaded."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from _common import Report, digest, guarded, parse, verify
from _cuda import (
    MIX_SOURCE,
    CudaError,
    Gpu,
    Kernel,
    Module,
    check,
    compile_ptx,
    mix32,
)
from cuda.bindings import driver
from numpy.typing import NDArray

DEFAULT_STEPS = 40
WORDS = 1024
TABLE = 256
VARIANTS = 4
KEPT = 3
# Above the 48 KiB that a kernel may use without asking.
DYNAMIC_SHARED = 64 << 10

RESIDENT = (
    MIX_SOURCE
    + r"""
__device__ unsigned state[WORDS];
__device__ unsigned* self = state;
__device__ unsigned* outside;
__device__ unsigned long long count = 7;
__constant__ unsigned table[TABLE];

extern "C" __global__ void start()
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    self[i] = mix32(i);
}

extern "C" __global__ void advance()
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    state[i] = mix32(self[i] + table[i % TABLE]) ^ outside[i];
    if (i == 0)
        count += 1;
}

// Sorts nothing: turns the order of the state around in blocks, through dynamic shared memory.
extern "C" __global__ void reverse()
{
    extern __shared__ unsigned room[];
    unsigned last = SHARED_WORDS - 1;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x)
        room[last - i] = state[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x)
        state[i] = room[last - (WORDS - 1 - i)];
}
"""
)

TRANSIENT = r"""
__device__ unsigned seen = VARIANT;

extern "C" __global__ void stir(unsigned* state)
{
    __shared__ unsigned row[VARIANT * 32 + 32];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    row[threadIdx.x % 32] = VARIANT;
    __syncthreads();
    state[i] = state[i] * (2u * VARIANT + 3u) + row[threadIdx.x % 32];
    if (i == 0)
        seen += 100;
}
"""

LIBRARY = r"""
__device__ unsigned total = 11;

extern "C" __global__ void tally(const unsigned* state, int words)
{
    unsigned sum = 0;
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        sum += state[i];
    atomicAdd(&total, sum);
}
"""


def table_of(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng([seed, 8]).integers(0, 1 << 32, TABLE, np.uint32)


def outside_of(seed: int) -> NDArray[np.uint32]:
    return np.random.default_rng([seed, 9]).integers(0, 1 << 32, WORDS, np.uint32)


class Library:
    """A CUlibrary with one kernel and one variable; a module where libraries are missing."""

    def __init__(self, ptx: bytes) -> None:
        self.handle: Any = None
        try:
            self.handle = check(driver.cuLibraryLoadData(ptx, [], [], 0, [], [], 0))
        except CudaError as error:
            if error.code != driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
                raise
            module = Module(ptx)
            self.tally = module.kernel("tally", "Pi")
            self.total = module.variable("total")[0]
            return
        kernel = check(driver.cuLibraryGetKernel(self.handle, b"tally"))
        self.tally = Kernel(check(driver.cuKernelGetFunction(kernel)), "Pi")
        self.total = int(check(driver.cuLibraryGetGlobal(self.handle, b"total"))[0])

    def unload(self) -> None:
        if self.handle is not None:
            check(driver.cuLibraryUnload(self.handle))


class Resident:
    """The module that holds the state, and the same state in numpy."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu = gpu
        module = gpu.module(RESIDENT, WORDS=WORDS, TABLE=TABLE, SHARED_WORDS=DYNAMIC_SHARED // 4)
        self.module = module
        self.state, size = module.variable("state")
        verify(size == 4 * WORDS, f"variable state has {size} bytes")
        self.table, size = module.variable("table")
        verify(size == 4 * TABLE, f"constant table has {size} bytes")
        self.count = module.variable("count")[0]
        pointer = gpu.read(module.variable("self")[0], np.uint64, 1)[0]
        verify(int(pointer) == self.state, f"variable self holds {pointer:#x}, not its address")
        self.start = module.kernel("start", "")
        self.advance = module.kernel("advance", "")
        self.reverse = module.kernel("reverse", "")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.reverse.function, attribute, DYNAMIC_SHARED))

        gpu.write(self.table, table_of(seed))
        self.outside = gpu.upload(outside_of(seed))
        gpu.write(module.variable("outside")[0], np.array([self.outside], np.uint64))
        self.start(WORDS // 256, 256)
        self.expected = mix32(np.arange(WORDS, dtype=np.uint32))
        self.expected_table = np.tile(table_of(seed), WORDS // TABLE)
        self.expected_outside = outside_of(seed)

    def step(self) -> None:
        self.advance(WORDS // 256, 256)
        self.reverse(1, 256, shared=DYNAMIC_SHARED)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        limit = check(driver.cuFuncGetAttribute(attribute, self.reverse.function))
        verify(limit == DYNAMIC_SHARED, f"the kernel's dynamic shared memory became {limit} bytes")
        mixed = mix32(self.expected + self.expected_table) ^ self.expected_outside
        self.expected = mixed[::-1].copy()

    def stir(self, variant: int) -> None:
        """Do in numpy what the transient module of this variant does."""
        self.expected = self.expected * np.uint32(2 * variant + 3) + np.uint32(variant)


class Transients:
    """Modules that live for a few steps each; several are loaded at any time."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.images = [compile_ptx(TRANSIENT, VARIANT=v + 1) for v in range(VARIANTS)]
        self.live: deque[tuple[int, int, Module, Kernel]] = deque()

    def step(self, step: int, resident: Resident) -> list[NDArray[np.uint32]]:
        """Load one module, run all, unload the oldest; return each module's own variable."""
        variant = step % VARIANTS + 1
        module = Module(self.images[variant - 1])
        kernel = module.kernel("stir", "P")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        shared = check(driver.cuFuncGetAttribute(attribute, kernel.function))
        expected = 4 * (variant * 32 + 32)
        # Devices from compute capability 9.0 may count a reserved KiB here.
        verify(shared in (expected, expected + 1024), f"static shared memory is {shared} bytes")
        self.live.append((step, variant, module, kernel))
        seen = []
        for born, number, loaded, run in self.live:
            run(WORDS // 256, 256, resident.state)
            resident.stir(number)
            value = self.gpu.read(loaded.variable("seen")[0], np.uint32, 1)
            wanted = number + 100 * (step - born + 1)
            verify(int(value[0]) == wanted, f"step {step}: a module's variable is {value[0]}")
            seen.append(value)
        if len(self.live) > KEPT:
            self.live.popleft()[2].unload()
        return seen


def main() -> None:
    options = parse(__doc__ or "", steps=DEFAULT_STEPS)
    report = Report(options)
    gpu = Gpu(options.device)
    resident, transients = Resident(gpu, options.seed), Transients(gpu)
    library = Library(compile_ptx(LIBRARY))
    total = 11
    for step in range(options.steps):
        before = gpu.digest()
        resident.step()
        seen = transients.step(step, resident)
        library.tally(1, 256, resident.state, WORDS)
        state = gpu.read(resident.state, np.uint32, WORDS)
        verify(np.array_equal(state, resident.expected), f"step {step}: the state is wrong")
        total = (total + int(state.sum(dtype=np.uint64))) & 0xFFFFFFFF
        found = gpu.read(library.total, np.uint32, 1)
        verify(int(found[0]) == total, f"step {step}: the library's variable is {found[0]}")
        count = gpu.read(resident.count, np.uint64, 1)
        verify(int(count[0]) == 8 + step, f"step {step}: the step counter is {count[0]}")
        table = gpu.read(resident.table, np.uint32, TABLE)
        report.step(step, digest(before.encode(), state, table, count, found, *seen))
    library.unload()
    resident.module.unload()
    gpu.close()
    report.done()


if __name__ == "__main__":
    guarded(main)
