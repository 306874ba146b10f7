"""Lead a process of a job past FlowGPU's libraries and back, to time its steps both ways.

Two processes differ by some percent for all their life, by where their memory happens to lie. So
one process is measured, whose calls go to the driver itself in every other step.

A program's libraries fill tables with the addresses of driver functions. A slot of the loader has
the address of the allocator's hook. The driver has those of libc's heap, of which replay keeps
account, in slots too. All words of libraries' data that hold such an address are found once; then
each gets the one address or the other. Words on the heap are left alone, because they may become
something else. Memory functions stay where they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy

from bench import machine
from bench.machine import ROOT
from flowgpu import launch

HOOK = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"
MOST_BYTES = 1 << 30  # of a mapping that is looked through
VERSION = 13000
VERSIONS = (2000, 3020, 4000, 6050, 7000, 10000, 11000, 11040, 12000, 12030, VERSION)
READ_WRITE = 3
CALLS, HOOKS, HEAP_CALLS = "calls", "hooks", "heap calls"
# What leads to FlowGPU in each mode; all else leads past it.
ON, STUB, HEAP, OFF = "on", "stub", "heap", "off"
MODES = {ON: (CALLS, HOOKS, HEAP_CALLS), STUB: (HOOKS,), HEAP: (HEAP_CALLS,), OFF: ()}
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


def _by_query(library: ctypes.CDLL, name: str, flags: int, version: int = VERSION) -> int | None:
    """What cuGetProcAddress answers."""
    found = ctypes.c_void_p()
    answer = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), version, ctypes.c_uint64(flags), None
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
    """Pairs of addresses of driver functions."""
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
    """The pair of addresses of the allocator's hook."""
    stub = ctypes.CDLL(str(launch.memory_stub()))
    return _usable(
        {
            _address(stub, HOOK): _address(ctypes.CDLL(path), HOOK)
            for *_, path in list(_mappings())
            if path.endswith("/libc10.so")
        }
    )


HEAP_FUNCTIONS = ("malloc", "calloc", "realloc", "memalign", "posix_memalign", "free")
# <elf.h>
DYNAMIC, SYMBOLS, STRINGS, RELOCATIONS, RELOCATION_BYTES = 2, 6, 5, 7, 8
SLOT_RELOCATIONS, SLOT_BYTES = 23, 2


def _heap() -> Iterator[tuple[int, int, int]]:
    """Slots by which the driver calls libc's heap: the slot, what it holds, and what it held
    without FlowGPU."""
    real = os.path.realpath(os.environ["FLOWGPU_REAL_LIBCUDA"])
    base = min(at for at, _, _, path in _mappings() if os.path.realpath(path) == real)
    ours = os.path.realpath(launch.intercept_library())
    own = [(start, end) for start, end, _, path in _mappings() if os.path.realpath(path) == ours]
    offset, entry, count = (*_words("<Q", base + 32)[:1], *_words("<HH", base + 54))
    heads = (_words("<IIQQQQQQ", base + offset + i * entry) for i in range(count))
    dynamic = next(base + head[3] for head in heads if head[0] == DYNAMIC)
    about: dict[int, int] = {}
    while (row := _words("<QQ", dynamic)) and row[0]:
        about[row[0]] = row[1]
        dynamic += 16
    symbols, strings = (
        about[key] if about[key] > base else base + about[key] for key in (SYMBOLS, STRINGS)
    )
    libc = ctypes.CDLL(None)
    theirs = {name.encode(): _address(libc, name) for name in HEAP_FUNCTIONS}
    for table, size in ((RELOCATIONS, RELOCATION_BYTES), (SLOT_RELOCATIONS, SLOT_BYTES)):
        start = about.get(table, 0)
        start += base if start < base else 0
        for at in range(start, start + about.get(size, 0), 24):
            where, symbol = _words("<QI", at)[0], _words("<I", at + 12)[0]
            name = ctypes.string_at(strings + _words("<I", symbols + 24 * symbol)[0])
            now = _words("<Q", base + where)[0] if name in theirs else None
            if now and (past := theirs[name]) and any(start <= now < end for start, end in own):
                yield base + where, now, past


def _words(form: str, address: int) -> tuple[int, ...]:
    return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))


def _writable(start: int, end: int) -> None:
    start -= start % mmap.PAGESIZE
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(end - start), READ_WRITE)


def _keeps(name: str) -> bool:
    """Memory must go on coming from FlowGPU, and the ways to functions go on leading there."""
    return bool(re.match(r"cuMem(?!cpy|set)|cuGetProcAddress|cuGetExportTable|cuInit", name))


def _mappings() -> Iterator[tuple[int, int, str, str]]:
    """Start, end, mode and path; zeroed memory behind a file's is counted to the file."""
    end_before, path_before = 0, ""
    for start, end, mode, _, path in machine.mappings():
        if not path and start == end_before:
            path = path_before
        end_before, path_before = end, path
        yield start, end, mode, path


def _places(addresses: Iterable[int]) -> Iterator[tuple[Any, int]]:
    """The words of libraries' data that hold one of these, and which."""
    wanted = set(addresses)
    least, most = min(wanted), max(wanted)
    real = os.path.realpath(os.environ["FLOWGPU_REAL_LIBCUDA"])
    own = {str(launch.intercept_library()), str(launch.memory_stub()), real}
    for start, end, mode, path in list(_mappings()):
        hook_slot = path.endswith("/libc10_cuda.so") and mode.startswith("r--p")
        if not (mode.startswith("rw-p") or hook_slot) or end - start > MOST_BYTES:
            continue
        if ".so" not in path or path in own or os.path.realpath(path) in own:
            continue
        words = numpy.frombuffer(
            (ctypes.c_char * (end - start)).from_address(start), dtype=numpy.uint64
        )
        near = numpy.nonzero((words >= least) & (words <= most))[0]
        # Other threads may be writing what is no such address.
        for index, address in zip(near.tolist(), words[near].tolist(), strict=True):
            if address not in wanted:
                continue
            if hook_slot:
                _writable(start, end)
            yield ctypes.c_uint64.from_address(start + 8 * index), address


class Switch:
    """All places of this process that lead to FlowGPU."""

    def __init__(self) -> None:
        """Raises LookupError when there is none: this is no process of a job."""
        calls, hooks = _calls(), _hooks()
        pairs = calls | hooks
        self._places: dict[str, list[tuple[Any, int, int]]] = {kind: [] for kind in MODES[ON]}
        for place, address in _places(pairs):
            kind = HOOKS if address in hooks else CALLS
            self._places[kind].append((place, address, pairs[address]))
        for slot, address, past in _heap():
            _writable(slot, slot + 8)
            place = ctypes.c_uint64.from_address(slot)
            self._places[HEAP_CALLS].append((place, address, past))
        if not any(self._places.values()):
            raise LookupError("nothing in this process leads to FlowGPU")

    def turn(self, mode: str) -> None:
        """To what `mode` of MODES says; ON is as it was."""
        for kind, places in self._places.items():
            for place, ours, theirs in places:
                place.value = ours if kind in MODES[mode] else theirs


def counts(action: Callable[[], None]) -> dict[str, int]:
    """How often `action` calls each of FlowGPU's functions, and as `libc` the driver each of its
    heap's. Calls by addresses on the heap are not counted."""
    ours = ctypes.CDLL(str(launch.intercept_library()))
    real = ctypes.CDLL(os.environ["FLOWGPU_REAL_LIBCUDA"])
    exports = re.findall(r"\bcu\w+", (ROOT / "native/intercept/generated/exports.map").read_text())
    exact = {_address(real, name): name for name in exports}
    names = {address: name for name in exports if (address := _address(ours, name))}
    for name in {_plain(name) for name in exports}:
        for how in ((flags, version) for flags in (0, 1, 2) for version in VERSIONS):
            address = _by_query(ours, name, *how)
            if address and address > 1 << 16:
                names.setdefault(address, exact.get(_by_query(real, name, *how), name))
    libc = ctypes.CDLL(None)
    of_libc = {_address(libc, name): f"libc {name}" for name in HEAP_FUNCTIONS}
    heap = [(slot, address, of_libc[past]) for slot, address, past in _heap()]
    found = [(place, address, names[address]) for place, address in _places(names)]
    for slot, address, name in heap:
        _writable(slot, slot + 8)
        found.append((ctypes.c_uint64.from_address(slot), address, name))
    wanted = sorted({(address, name) for _, address, name in found})
    code, numbers = _counters([address for address, _ in wanted])
    entry = {address: code + COUNTER_BYTES * row for row, (address, _) in enumerate(wanted)}
    for place, address, _ in found:
        place.value = entry[address]
    try:
        action()
    finally:
        for place, address, _ in found:
            place.value = address
    called: dict[str, int] = {}
    for (_, name), number in zip(wanted, numbers, strict=True):
        if number.value:
            called[name] = called.get(name, 0) + number.value
    return called


COUNTER_BYTES = 32


def _counters(functions: Sequence[int]) -> tuple[int, list[ctypes.c_uint64]]:
    """The address of instructions for each that count and go there, and the counts."""
    size = max(COUNTER_BYTES * len(functions), mmap.PAGESIZE)
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    code = mmap.mmap(-1, size, prot=prot | mmap.PROT_EXEC)
    numbers = mmap.mmap(-1, size, prot=prot)
    _code.extend((code, numbers))
    counts = [ctypes.c_uint64.from_buffer(numbers, 8 * row) for row in range(len(functions))]
    for row, function in enumerate(functions):
        code.seek(COUNTER_BYTES * row)
        count = struct.pack("<Q", ctypes.addressof(counts[row]))
        # mov r11, the count; lock inc [r11]; mov r11, the function; jmp r11
        code.write(b"\x49\xbb" + count + b"\xf0\x49\xff\x03\x49\xbb")
        code.write(struct.pack("<Q", function) + b"\x41\xff\xe3")
    return ctypes.addressof(ctypes.c_char.from_buffer(code)), counts
