"""The kernels on chunks, launched through the driver API; used by their tests and measurements."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import ok
from tools.compile_kernels import constants

SOURCES = Path(__file__).resolve().parents[2] / "native" / "ghost" / "kernels"
CHUNK = constants(SOURCES / "chunks.h")["FGK_CHUNK_BYTES"]
DIGEST = 16
Array = np.ndarray[Any, Any]


def upload(array: Array) -> int:
    """Device memory with the bytes of `array`."""
    address = int(ok(cu.cuMemAlloc(max(array.nbytes, 1))))
    ok(cu.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
    return address


def allocate_chunks(count: int) -> tuple[int, int]:
    """Device memory for `count` chunks: what to free, and the first chunk."""
    memory = int(ok(cu.cuMemAlloc((count + 1) * CHUNK)))
    return memory, (memory + CHUNK - 1) // CHUNK * CHUNK


class Kernels:
    """A module of these kernels; launches return at once."""

    def __init__(self, ptx: str, defines: tuple[str, ...] = ()) -> None:
        self.module = ok(cu.cuModuleLoadData(ptx.encode() + b"\0"))
        self.constants = constants(SOURCES / "chunks.h", defines)
        self.functions = {
            name: ok(cu.cuModuleGetFunction(self.module, f"fgk_{name}".encode()))
            for name in ("digest", "compare", "copy", "fill")
        }

    def _launch(self, name: str, count: int, values: tuple[int, ...], types: str) -> None:
        """Types: p a pointer or 64-bit number, n a count."""
        per_block = self.constants[f"FGK_{name.upper()}_CHUNKS"]
        blocks, threads = -(-count // per_block), self.constants["FGK_THREADS"]
        ctype = {"p": ctypes.c_uint64, "n": ctypes.c_uint32}
        args = (values, tuple(ctype[letter] for letter in types))
        ok(cu.cuLaunchKernel(self.functions[name], blocks, 1, 1, threads, 1, 1, 0, 0, args, 0))

    def digest(self, addresses: int, count: int, digests: int, zero: int) -> None:
        self._launch("digest", count, (addresses, count, digests, zero), "pnpp")

    def compare(self, left: int, right: int, count: int, differ: int) -> None:
        self._launch("compare", count, (left, right, count, differ), "ppnp")

    def copy(self, source: int, destination: int, count: int) -> None:
        self._launch("copy", count, (source, destination, count), "ppn")

    def fill(self, destination: int, count: int, pattern: int) -> None:
        self._launch("fill", count, (destination, count, pattern), "pnp")
