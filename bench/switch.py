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
import os
import re
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


def _pairs() -> dict[int, int]:
    """What is called instead of what, by FlowGPU's address."""
    ours = ctypes.CDLL(str(launch.intercept_library()))
    real = ctypes.CDLL(os.environ["FLOWGPU_REAL_LIBCUDA"])
    exports = (ROOT / "native/intercept/generated/exports.map").read_text()
    names = {name for name in re.findall(r"\bcu\w+", exports) if not _keeps(name)}
    found: dict[int | None, int | None] = {}
    for name in names:
        found[_address(ours, name)] = _address(real, name)
        for flags in (0, 1, 2):
            plain = re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name)
            found[_by_query(ours, plain, flags)] = _by_query(real, plain, flags)
    stub = ctypes.CDLL(str(launch.memory_stub()))
    for *_, path in list(_mappings()):
        if path.endswith("/libc10.so"):
            found[_address(stub, HOOK)] = _address(ctypes.CDLL(path), HOOK)
    return {a: b for a, b in found.items() if a and b and a != b and min(a, b) > 1 << 16}


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
        pairs = _pairs()
        wanted = numpy.array(sorted(pairs), dtype=numpy.uint64)
        real = os.path.realpath(os.environ["FLOWGPU_REAL_LIBCUDA"])
        own = {str(launch.intercept_library()), str(launch.memory_stub()), real}
        self._places: list[tuple[Any, int, int]] = []
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
                self._places.append((place, address, pairs[address]))
        if not self._places:
            raise LookupError("nothing in this process leads to FlowGPU")

    def turn(self, on: bool) -> None:
        """On: to FlowGPU, as it was."""
        for place, ours, theirs in self._places:
            place.value = ours if on else theirs
