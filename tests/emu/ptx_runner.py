"""Compile CUDA C with NVRTC and run kernels on numpy arrays, today on the PTX interpreter.

A test body only sees `Kernel.run(grid, block, args, shared)`: arrays are device buffers, changed in
place, numpy scalars and structured values are passed by value. A backend for the CUDA driver API
needs nothing else, so the same bodies can run on a real GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.emu.cuda_source import compile_cuda as compile_cuda

OUTCOMES = (
    "ok",
    "illegal_address",
    "misaligned_address",
    "illegal_instruction",
    "launch_failure",
    "assert_failed",
    "cancelled",
)
_BASE = 0x2000_0000_0000
_GUARD = 1 << 20
_ROOT = Path(__file__).resolve().parents[2]


class LaunchError(Exception):
    """A kernel stopped: `outcome` is the interpreter's code, `address` the offending address."""

    def __init__(self, outcome: str, address: int, detail: str) -> None:
        super().__init__(f"{outcome} at {address:#x}: {detail}")
        self.outcome = outcome
        self.address = address
        self.detail = detail


class PtxError(Exception):
    """The interpreter refused the module; the message names line and opcode."""


def _library() -> ctypes.CDLL:
    build = Path(os.environ.get("FLOWGPU_BUILD_DIR", _ROOT / "build"))
    lib = ctypes.CDLL(str(build / "lib" / "libflowgpu_ptx_test.so"))
    lib.ptx_open.restype = ctypes.c_void_p
    lib.ptx_variable.restype = ctypes.c_uint64
    lib.ptx_writes.restype = ctypes.c_uint64
    lib.ptx_function.restype = ctypes.c_uint64
    return lib


LIB = _library()


@dataclass(frozen=True)
class Pointer:
    """A device address as an argument: `array` plus `offset` bytes."""

    array: np.ndarray[Any, Any]
    offset: int = 0


class Kernel:
    """One loaded module and one of its kernels."""

    def __init__(self, ptx: str, name: str) -> None:
        text = ptx.encode()
        message = ctypes.create_string_buffer(1024)
        handle = LIB.ptx_open(text, ctypes.c_size_t(len(text)), message, ctypes.c_size_t(1024))
        if not handle:
            raise PtxError(message.value.decode())
        self._session = ctypes.c_void_p(handle)
        self.name = name
        self.lane_instructions = 0
        self.written: list[tuple[int, int]] = []
        self.variables: dict[str, np.ndarray[Any, Any]] = {}
        self._next = _BASE
        self._place_variables()

    def __del__(self) -> None:
        if hasattr(self, "_session"):
            LIB.ptx_close(self._session)

    def map(self, array: np.ndarray[Any, Any], writable: bool = True) -> int:
        """Give an array a device address; unmapped space lies on both sides."""
        address = self._next
        self._next += (array.nbytes + 2 * _GUARD - 1) // _GUARD * _GUARD
        LIB.ptx_map(
            self._session,
            ctypes.c_uint64(address),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_uint64(array.nbytes),
            int(writable),
        )
        return address

    def _place_variables(self) -> None:
        for index in range(LIB.ptx_variable_count(self._session)):
            name = ctypes.create_string_buffer(256)
            size = LIB.ptx_variable(self._session, index, name, ctypes.c_size_t(256))
            storage = np.zeros(max(size, 1), np.uint8)
            self.variables[name.value.decode()] = storage
            LIB.ptx_place(self._session, index, ctypes.c_uint64(self.map(storage)))
        assert LIB.ptx_link(self._session) == 0

    def attributes(self) -> dict[str, int]:
        """Static shared bytes, local bytes, registers, most threads, parameter bytes."""
        out = (ctypes.c_uint32 * 5)()
        assert LIB.ptx_attributes(self._session, self.name.encode(), out) == 0
        return dict(zip(("shared", "local", "registers", "threads", "params"), out, strict=True))

    def address(self, function: str) -> int:
        """Where kernels find a function, 0 for one that there is not."""
        return int(LIB.ptx_function(self._session, function.encode()))

    def cancel_after(self, seconds: float) -> threading.Timer:
        """Cancel the launch that runs then."""
        timer = threading.Timer(seconds, LIB.ptx_cancel, (self._session,))
        timer.start()
        return timer

    def pack(self, args: Sequence[Any], addresses: dict[int, int]) -> bytes:
        """The parameter buffer: arrays become addresses, everything else its bytes."""
        offsets, sizes = (ctypes.c_uint32 * 64)(), (ctypes.c_uint32 * 64)()
        count = LIB.ptx_params(self._session, self.name.encode(), offsets, sizes, 64)
        if count != len(args):
            raise ValueError(f"{self.name} takes {count} parameters, got {len(args)}")
        buffer = bytearray(self.attributes()["params"])
        for arg, offset, size in zip(args, offsets, sizes, strict=False):
            if isinstance(arg, Pointer):
                data = np.uint64(addresses[id(arg.array)] + arg.offset).tobytes()
            elif isinstance(arg, np.ndarray) and arg.ndim > 0:
                data = np.uint64(addresses[id(arg)]).tobytes()
            else:
                data = arg.tobytes()
            if len(data) != size:
                raise ValueError(f"{self.name}: argument of {len(data)} bytes for {size}")
            buffer[offset : offset + size] = data
        return bytes(buffer)

    def run(
        self,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any],
        shared: int = 0,
        log_writes: bool = False,
    ) -> None:
        """Launch and wait; arrays among `args` hold the results afterwards."""
        addresses: dict[int, int] = {}
        for arg in args:
            array = arg.array if isinstance(arg, Pointer) else arg
            if isinstance(array, np.ndarray) and array.ndim > 0 and id(array) not in addresses:
                assert array.flags.c_contiguous
                addresses[id(array)] = self.map(array, array.flags.writeable)
        code = LIB.ptx_launch(
            self._session,
            self.name.encode(),
            _triple(grid),
            _triple(block),
            ctypes.c_uint32(shared),
            self.pack(args, addresses),
            int(log_writes),
        )
        address, lanes = ctypes.c_uint64(), ctypes.c_uint64()
        detail = ctypes.create_string_buffer(1024)
        LIB.ptx_result(
            self._session,
            ctypes.byref(address),
            ctypes.byref(lanes),
            detail,
            ctypes.c_size_t(1024),
        )
        self.lane_instructions = lanes.value
        if log_writes:
            self._read_log(addresses)
        if code != 0:
            raise LaunchError(OUTCOMES[code], address.value, detail.value.decode())

    def _read_log(self, addresses: dict[int, int]) -> None:
        count = LIB.ptx_writes(self._session, None, ctypes.c_uint64(0))
        pairs = (ctypes.c_uint64 * (2 * count))()
        LIB.ptx_writes(self._session, pairs, ctypes.c_uint64(count))
        self.addresses = list(addresses.values())
        self.written = list(zip(pairs[::2], pairs[1::2], strict=True))


def _triple(value: Sequence[int] | int) -> Any:
    parts = (value,) if isinstance(value, int) else tuple(value)
    return (ctypes.c_uint32 * 3)(*(*parts, 1, 1)[:3])


def run(
    source: str,
    name: str,
    grid: Sequence[int] | int,
    block: Sequence[int] | int,
    args: Sequence[Any],
    shared: int = 0,
    options: tuple[str, ...] = (),
) -> Sequence[Any]:
    """Compile `source`, run kernel `name`, return `args` with the arrays updated."""
    Kernel(compile_cuda(source, options), name).run(grid, block, args, shared)
    return args
