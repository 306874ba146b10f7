"""NCCL by ctypes on the driver API, for the programs of the tests: one object a rank.

Signatures as in NCCL's documentation. The library is the first libnccl.so.2 that the loader finds;
the tests put the emulated GPU's first.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from tests.patience import SECONDS

SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, IN_PROGRESS = 0, 4, 5, 7
SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE = range(5)
TYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
Array = NDArray[Any]


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    """The beginning of ncclConfig_t; `size` says how much of it there is."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        *((f"default{number}", ctypes.c_int) for number in range(3)),
        ("net_name", ctypes.c_void_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
    )

    @classmethod
    def made(cls, blocking: int) -> Config:
        undefined = -(2**31)
        values = [ctypes.sizeof(cls), 0xCAFEBEEF, 22809, blocking, *[undefined] * 3]
        return cls(*values, None, undefined, undefined)


class NcclError(Exception):
    pass


def ok(result: tuple[Any, ...]) -> Any:
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(result[0].name)
    return result[1] if len(result) == 2 else result[1:]


class Nccl:
    """The library's functions; a result that is not success raises NcclError."""

    def __init__(self, name: str = "libnccl.so.2") -> None:
        self.library = ctypes.CDLL(name)
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclGetLastError.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, f"nccl{name}")

        def call(*arguments: Any) -> None:
            result = function(*map(_passed, arguments))
            if result != SUCCESS:
                text = self.library.ncclGetErrorString(result).decode()
                more = self.library.ncclGetLastError(None).decode()
                raise NcclError(f"nccl{name}: {text} ({result}): {more}")

        return call


def _passed(value: Any) -> Any:
    if isinstance(value, (cu.CUstream, cu.CUdeviceptr)):
        return ctypes.c_void_p(int(value))
    return value


class Device:
    """A GPU's primary context, made current."""

    def __init__(self, number: int = 0) -> None:
        ok(cu.cuInit(0))
        self.number = number
        self.context = ok(cu.cuDevicePrimaryCtxRetain(ok(cu.cuDeviceGet(number))))
        self.use()

    def use(self) -> None:
        ok(cu.cuCtxSetCurrent(self.context))

    def stream(self) -> Any:
        return ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def put(self, array: Array) -> Any:
        address = ok(cu.cuMemAlloc(max(array.nbytes, 1)))
        ok(cu.cuMemcpyHtoD(address, np.ascontiguousarray(array), array.nbytes))
        return address

    def get(self, address: Any, count: int, type_name: str) -> Array:
        array = np.empty(count, type_name)
        ok(cu.cuMemcpyDtoH(array, address, array.nbytes))
        return array


def wait_for(path: Path, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(str(path))
        time.sleep(0.002)


def share_id(nccl: Nccl, folder: Path, rank: int, name: str = "id") -> UniqueId:
    """The unique id that rank 0 makes, by a file."""
    ident, path = UniqueId(), folder / name
    if rank == 0:
        nccl.GetUniqueId(ctypes.byref(ident))
        part = path.with_suffix(".part")
        part.write_bytes(bytes(ident))
        os.rename(part, path)
    wait_for(path)
    return UniqueId.from_buffer_copy(path.read_bytes())


def communicator(nccl: Nccl, ident: UniqueId, ranks: int, rank: int) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    nccl.CommInitRank(ctypes.byref(made), ranks, ident, rank)
    return made
