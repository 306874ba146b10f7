"""A thin layer over the CUDA driver API for the workloads: context, memory, modules, launches.

Kernels are CUDA C, compiled by NVRTC to PTX (never to machine code), so that the same program
runs on the emulated GPU and on every real one from compute capability 8.0.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

# The driver would keep compiled PTX in files under the home folder: an open file at a checkpoint,
# and a first run unlike the second.
os.environ["CUDA_CACHE_DISABLE"] = "1"

import numpy as np
from _common import digest
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

MAX_BLOCK = 256

# An integer hash used by several programs, in CUDA C and (mix32) in numpy: the same bits.
MIX_SOURCE = r"""
__device__ __forceinline__ unsigned mix32(unsigned x)
{
    x = (x ^ (x >> 15)) * 0x9E3779B1u;
    x = (x ^ (x >> 13)) * 0x85EBCA77u;
    return x ^ (x >> 16);
}
"""

_ARGUMENT_TYPES: dict[str, Any] = {
    "P": ctypes.c_uint64,
    "Q": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


class CudaError(Exception):
    """A driver or NVRTC call returned an error; the message is the error's name."""

    def __init__(self, code: Any, detail: str = "") -> None:
        super().__init__(f"{getattr(code, 'name', code)}{': ' + detail if detail else ''}")
        self.code = code


def mix32(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = values.astype(np.uint32)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x9E3779B1)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0x85EBCA77)
    return x ^ (x >> np.uint32(16))


def pattern_of(identity: int, size: int) -> NDArray[np.uint8]:
    """Bytes that tell memory of one identity from memory of any other."""
    words = np.arange(-(-size // 4), dtype=np.uint32)
    base = np.uint32((identity * 0x01000193) & 0xFFFFFFFF)
    return mix32(words + base).view(np.uint8)[:size]


def check(result: tuple[Any, ...]) -> Any:
    """Return what a cuda.bindings call returned beside its error code; raise on an error."""
    if int(result[0]) != 0:
        raise CudaError(result[0])
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def compile_ptx(source: str, **defines: int) -> bytes:
    """Compile CUDA C to PTX text, ended by a zero byte."""
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"workload.cu", 0, [], []))
    options = [b"--gpu-architecture=compute_80", b"--std=c++17"]
    options += [f"-D{name}={value}".encode() for name, value in defines.items()]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(code) != 0:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(code, log.rstrip(b"\0").decode(errors="replace"))
    ptx = bytearray(check(nvrtc.nvrtcGetPTXSize(program)))
    check(nvrtc.nvrtcGetPTX(program, ptx))
    check(nvrtc.nvrtcDestroyProgram(program))
    return bytes(ptx)


def blocks(count: int, block: int = MAX_BLOCK) -> int:
    """Return how many blocks cover ``count`` threads."""
    return (count + block - 1) // block


class Kernel:
    """A kernel with its argument types, one letter each as in ``struct``: P i I f d Q."""

    def __init__(self, function: Any, signature: str) -> None:
        self.function = function
        self._types = [_ARGUMENT_TYPES[letter] for letter in signature]

    def __call__(
        self,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        *arguments: float,
        shared: int = 0,
        stream: Any = 0,
    ) -> None:
        if len(arguments) != len(self._types):
            raise TypeError(f"kernel takes {len(self._types)} arguments, got {len(arguments)}")
        values = [make(value) for make, value in zip(self._types, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        gx, gy, gz = grid if isinstance(grid, tuple) else (grid, 1, 1)
        bx, by, bz = block if isinstance(block, tuple) else (block, 1, 1)
        # The driver copies the argument values before the call returns.
        check(
            driver.cuLaunchKernel(
                self.function, gx, gy, gz, bx, by, bz, shared, stream, ctypes.addressof(pointers), 0
            )
        )


class Module:
    """A loaded module."""

    def __init__(self, ptx: bytes) -> None:
        self.handle = check(driver.cuModuleLoadData(ptx))

    def kernel(self, name: str, signature: str) -> Kernel:
        return Kernel(check(driver.cuModuleGetFunction(self.handle, name.encode())), signature)

    def variable(self, name: str) -> tuple[int, int]:
        """Return address and size in bytes of a module variable."""
        address, size = check(driver.cuModuleGetGlobal(self.handle, name.encode()))
        return int(address), int(size)

    def unload(self) -> None:
        check(driver.cuModuleUnload(self.handle))


class Gpu:
    """One device with its primary context, current in the thread that made it."""

    def __init__(self, ordinal: int) -> None:
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(ordinal))
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.device))
        self.make_current()
        self._sizes: dict[int, int] = {}

    def make_current(self) -> None:
        check(driver.cuCtxSetCurrent(self.context))

    def close(self) -> None:
        check(driver.cuCtxSynchronize())
        check(driver.cuDevicePrimaryCtxRelease(self.device))

    def module(self, source: str, **defines: int) -> Module:
        return Module(compile_ptx(source, **defines))

    def alloc(self, size: int) -> int:
        """Return zeroed device memory: what is in fresh memory differs from run to run."""
        address = self.allocated(size)
        check(driver.cuMemsetD8(address, 0, size))
        self._sizes[address] = size
        return address

    def allocated(self, size: int) -> int:
        return int(check(driver.cuMemAlloc(size)))

    def free(self, address: int) -> None:
        check(driver.cuMemFree(address))
        del self._sizes[address]

    def digest(self) -> str:
        """Return a digest of all memory allocated here, in the order of allocation.

        Taken before a step as well as after it: a step may overwrite, or lose in rounding, a byte
        that a checkpoint got wrong.
        """
        return digest(*(self.read(at, np.uint8, size) for at, size in self._sizes.items()))

    def contents(self) -> list[NDArray[np.uint8]]:
        """Return a copy of all memory allocated here, in the order of allocation."""
        return [self.read(at, np.uint8, size) for at, size in self._sizes.items()]

    def put_contents(self, contents: list[NDArray[np.uint8]]) -> None:
        """Write what `contents` gave in a process that made the same allocations."""
        for at, data in zip(self._sizes, contents, strict=True):
            self.write(at, data)

    def upload(self, array: NDArray[Any]) -> int:
        """Allocate device memory that holds a copy of the array."""
        address = self.alloc(array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: NDArray[Any]) -> None:
        data = np.ascontiguousarray(array)
        check(driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))

    def read(self, address: int, dtype: Any, shape: int | tuple[int, ...]) -> NDArray[Any]:
        """Return a copy of device memory; synchronous with the legacy default stream."""
        result = np.empty(shape, dtype)
        check(driver.cuMemcpyDtoH(result.ctypes.data, address, result.nbytes))
        return result

    def synchronize(self) -> None:
        check(driver.cuCtxSynchronize())
