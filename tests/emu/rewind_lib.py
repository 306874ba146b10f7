"""The rewind of a driver library for tests: remember, strip, and what of the driver is left."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cuda.bindings import driver as cu

from flowgpu.launch import program
from tests.emu.driver_lib import (
    GRANULE,
    MIB,
    PTX,
    R,
    allow,
    download,
    launch_inc,
    libcuda,
    ok,
    properties,
    start,
)

WINDOW = 0x6000_0000_0000
MARKS = ("/dev/nvidia", "flowgpu-emu-device")
NAMES = ("cuda-uvmfd-", "flowgpu-emu")


class Range(ctypes.Structure):
    _fields_ = (("start", ctypes.c_size_t), ("bytes", ctypes.c_size_t))


class Refused(Exception):
    """The driver could not be stripped; the message is the library's."""


class Rewinder:
    """Remembers the driver of this process, which must not have been initialised."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(str(program("libflowgpu_rewind_test.so")))
        for name in ("rewind_remember", "rewind_strip"):
            getattr(self._lib, name).restype = ctypes.c_bool
        detail = ctypes.create_string_buffer(256)
        symbol = ctypes.cast(libcuda().cuInit, ctypes.c_void_p)
        assert self._lib.rewind_remember(symbol, detail, 256), detail.value
        self.seconds = 0.0

    def strip(self, keep: Sequence[tuple[int, int]] = ()) -> None:
        """Raises Refused when all is as before."""
        ranges = (Range * max(1, len(keep)))(*keep)
        detail = ctypes.create_string_buffer(256)
        lost = ctypes.c_bool()
        begun = time.perf_counter()
        done = self._lib.rewind_strip(ranges, len(keep), detail, 256, ctypes.byref(lost))
        self.seconds = time.perf_counter() - begun
        assert not lost.value, detail.value
        if not done:
            raise Refused(detail.value.decode())
        if os.environ.get("FLOWGPU_REWIND_TIMES"):
            print(f"strip {self.seconds * 1000:.1f} ms", flush=True)


def threads() -> dict[int, str]:
    """Names of this process's threads."""
    return {
        int(task.name): (task / "comm").read_text().strip()
        for task in Path("/proc/self/task").iterdir()
    }


def device_descriptors() -> list[str]:
    """What CRIU would refuse, and the sockets that the driver binds."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as own:
                    target = str(own.getsockname()) if own.family == socket.AF_UNIX else ""
                    try:
                        target += str(own.getpeername())
                    except OSError:
                        pass
        except OSError:
            continue  # the folder's own
        if any(mark in target for mark in (*MARKS, *NAMES)):
            found.append(target)
    return found


def mappings() -> list[tuple[int, int, str, str]]:
    """Start, end, mode and name of each mapping."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode, *_rest = line.split(None, 5)
        first, last = (int(word, 16) for word in where.split("-"))
        found.append((first, last, mode, _rest[3] if len(_rest) > 3 else ""))
    return found


def inaccessible() -> int:
    """Bytes of private mappings without access, as reservations are."""
    return sum(last - first for first, last, mode, _ in mappings() if mode == "---p")


def mapped(address: int) -> bool:
    return any(first <= address < last for first, last, _, _ in mappings())


def accessible(address: int) -> bool:
    """False also for addresses that are held for the driver's next life."""
    return any(first <= address < last and mode != "---p" for first, last, mode, _ in mappings())


def unmap(address: int, size: int) -> None:
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0


def nothing_is_left() -> None:
    assert not device_descriptors()
    assert not [m for m in mappings() if any(mark in m[3] for mark in MARKS)]
    assert not [name for name in threads().values() if name.startswith("cuda")]


class Life:
    """One of everything on the device, made anew and used."""

    def __init__(self) -> None:
        self.context = start()
        self.second = ok(cu.cuCtxCreate(None, 0, 0))
        ok(cu.cuCtxPopCurrent())
        self.stream = ok(cu.cuStreamCreate(0))
        self.event = ok(cu.cuEventCreate(0))
        self.module = ok(cu.cuModuleLoadData(PTX))
        self.kernel = ok(cu.cuModuleGetFunction(self.module, b"inc"))
        self.address = int(ok(cu.cuMemAlloc(5 * MIB)))
        self.window = int(ok(cu.cuMemAddressReserve(64 * GRANULE, 0, WINDOW, 0)))
        assert self.window == WINDOW
        handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
        ok(cu.cuMemMap(self.window, GRANULE, 0, handle, 0))
        ok(allow(self.window, GRANULE))
        self.called: list[int] = []
        self.check()

    def check(self) -> None:
        """Kernels, copies and a host function give what they should."""
        for address in (self.address, self.window):
            ok(cu.cuMemsetD32(address, 41, 256))
            ok(launch_inc(self.kernel, address, 256, self.stream))
            ok(cu.cuEventRecord(self.event, self.stream))
            ok(cu.cuEventSynchronize(self.event))
            assert np.all(download(address, 256) == 42)
        call_host(self.stream)

    def is_dead(self) -> None:
        """No old handle means anything to a driver that has been initialised again.

        A real driver's handles are addresses, which it does not check.
        """
        for answer in (
            cu.cuCtxSetCurrent(self.second),
            cu.cuStreamSynchronize(self.stream),
            cu.cuEventQuery(self.event),
            cu.cuModuleUnload(self.module),
            cu.cuFuncGetAttribute(cu.CUfunction_attribute(0), self.kernel),
        ):
            assert answer[0] != R.CUDA_SUCCESS, answer


CALLS: list[int] = []
_host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: CALLS.append(1))


def call_host(stream: object) -> None:
    """Lets the stream call a function here, in a thread of the driver's."""
    before = len(CALLS)
    function = ctypes.cast(_host, ctypes.c_void_p).value
    ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(function), 0))
    ok(cu.cuStreamSynchronize(stream))
    assert len(CALLS) == before + 1
