"""Lead a process of a job past FlowGPU's libraries and back, to time its steps both ways.

Two processes differ by some percent for all their life, by where their memory happens to lie. Of
one process whose calls go to the driver itself in every other step, that is the same both times.

A program holds the addresses of driver functions in tables that its libraries have filled, and that
of the allocator's hook in a slot of the loader's. All words of its libraries' data that hold such
an address are found once; then they are given the one or the other. Not those on the heap, which
may become something else. Memory functions stay where they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy

from bench.machine import ROOT
from flowgpu import launch

HOOK = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
MOST_BYTES = 1 << 30  # of a mapping that is looked through
VERSION = 13000
READ_WRITE = 3
# What calls lead to in each mode: FlowGPU, or the driver with the allocator's hook left to FlowGPU
# or led past it as well.
ON, STUB, OFF = MODES = ("on", "stub", "off")
WITHOUT_HANDLES = (
    *("cuCtxGetDevice", "cuDevicePrimaryCtxGetState", "cuDeviceGet", "cuDeviceGetAttribute"),
    *("cuDriverGetVersion", "cuGetErrorString", "cuStreamIsCapturing", "cuStreamSynchronize"),
    *("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2"),
    *("cuMemsetD8Async", "cuMemsetD32Async"),
)
# The register of the kernel's handle: move it to rax, load it from where it points.
RDI, RSI = (b"\x48\x89\xf8", b"\x48\x8b\x3f"), (b"\x48\x89\xf0", b"\x48\x8b\x36")
LAUNCHES = {"cuLaunchKernel": RDI, "cuLaunchKernelEx": RSI}
_code: list[mmap.mmap] = []  # lasts as long as the process
HANDLE_BITS, HANDLES = 26, 0x1F0000000000  # native/intercept/replay/handles.h


def _address(library: ctypes.CDLL, name: str) -> int | None:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError:
        return None


def _by_query(library: ctypes.CDLL, name: str, flags: int) -> int | None:
    """What cuGetProcAddress answers."""
    found = ctypes.c_void_p()
    answer = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), VERSION, ctypes.c_uint64(flags), None
    )
    return found.value if answer == 0 else None


Pairs = dict[int, int]
"""What is called instead of what, by FlowGPU's address."""


def _plain(name: str) -> str:
    """The name without version and stream suffix, by which cuGetProcAddress is asked."""
    return re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)


def _usable(pairs: dict[int | None, int | None]) -> Pairs:
    return {a: b for a, b in pairs.items() if a and b and a != b and min(a, b) > 1 << 16}


def _calls() -> Pairs:
    """Of driver functions."""
    ours = ctypes.CDLL(str(launch.intercept_library()))
    real = ctypes.CDLL(os.environ["FLOWGPU_REAL_LIBCUDA"])
    if "FLOWGPU_REPLAY" in os.environ:
        past = {name: _address(real, name) for name in WITHOUT_HANDLES}
        past |= {name: _launch(_address(real, name), *how) for name, how in LAUNCHES.items()}
        linked = {_address(ours, name): address for name, address in past.items()}
        asked_for = {_by_query(ours, _plain(name), 0): past[name] for name in past}
        return _usable(linked | asked_for)
    exports = (ROOT / "native/intercept/generated/exports.map").read_text()
    names = {name for name in re.findall(r"\bcu\w+", exports) if not _keeps(name)}
    found: dict[int | None, int | None] = {}
    for name in names:
        found[_address(ours, name)] = _address(real, name)
        for flags in (0, 1, 2):
            found[_by_query(ours, _plain(name), flags)] = _by_query(real, _plain(name), flags)
    return _usable(found)


def _launch(function: int | None, move: bytes, load: bytes) -> int | None:
    """The address of instructions that call a driver's function with the driver's handle."""
    if function is None:
        return None
    in_range = b"\x48\xc1\xe8" + struct.pack("<B", HANDLE_BITS)  # shr rax, HANDLE_BITS
    in_range += b"\x3d" + struct.pack("<I", HANDLES >> HANDLE_BITS)  # cmp eax, ...
    over = b"\x75" + struct.pack("<B", len(load))  # jne over the load
    jump = b"\x49\xbb" + struct.pack("<Q", function) + b"\x41\xff\xe3"  # mov r11; jmp r11
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(move + in_range + over + load + jump)
    _code.append(page)
    return ctypes.addressof(ctypes.c_char.from_buffer(page))


def _hooks() -> Pairs:
    """Of the allocator's hook."""
    stub = ctypes.CDLL(str(launch.memory_stub()))
    return _usable(
        {
            _address(stub, HOOK): _address(ctypes.CDLL(path), HOOK)
            for *_, path in list(_mappings())
            if path.endswith("/libc10.so")
        }
    )


def _keeps(name: str) -> bool:
    """Memory must go on coming from FlowGPU, and the ways to functions go on leading there."""
    return bool(re.match(r"cuMem(?!cpy|set)|cuGetProcAddress|cuGetExportTable|cuInit", name))


def _mappings() -> Iterator[tuple[int, int, str, str]]:
    """Start, end, mode and path; zeroed memory behind a file's is counted to the file."""
    end_before, path_before = 0, ""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode, *rest = line.split(None, 5)
        start, end = (int(word, 16) for word in where.split("-"))
        path = rest[3] if len(rest) > 3 else ""
        if not path and start == end_before:
            path = path_before
        end_before, path_before = end, path
        yield start, end, mode, path


class Switch:
    """All places of this process that lead to FlowGPU."""

    def __init__(self) -> None:
        """Raises LookupError when there is none: this is no process of a job."""
        calls, hooks = _calls(), _hooks()
        pairs = calls | hooks
        wanted = numpy.array(sorted(pairs), dtype=numpy.uint64)
        real = os.path.realpath(os.environ["FLOWGPU_REAL_LIBCUDA"])
        own = {str(launch.intercept_library()), str(launch.memory_stub()), real}
        self._places: dict[bool, list[tuple[Any, int, int]]] = {True: [], False: []}  # hook?
        for start, end, mode, path in list(_mappings()):
            hook_slot = path.endswith("/libc10_cuda.so") and mode.startswith("r--p")
            if not (mode.startswith("rw-p") or hook_slot) or end - start > MOST_BYTES:
                continue
            if ".so" not in path or path in own or os.path.realpath(path) in own:
                continue
            words = numpy.frombuffer(
                (ctypes.c_char * (end - start)).from_address(start), dtype=numpy.uint64
            )
            near = numpy.nonzero((words >= wanted[0]) & (words <= wanted[-1]))[0]
            # Other threads may be writing what is no such address.
            for index, address in zip(near.tolist(), words[near].tolist(), strict=True):
                if address not in pairs:
                    continue
                if hook_slot:
                    ctypes.CDLL(None).mprotect(
                        ctypes.c_void_p(start), ctypes.c_size_t(end - start), READ_WRITE
                    )
                place = ctypes.c_uint64.from_address(start + 8 * index)
                self._places[address in hooks].append((place, address, pairs[address]))
        if not any(self._places.values()):
            raise LookupError("nothing in this process leads to FlowGPU")

    def turn(self, mode: str) -> None:
        """To what `mode` of MODES says; ON is as it was."""
        for is_hook, places in self._places.items():
            past = mode == OFF or (mode == STUB and not is_hook)
            for place, ours, theirs in places:
                place.value = theirs if past else ours
