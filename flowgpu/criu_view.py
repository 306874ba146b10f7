"""A view of CRIU's images without most of the pages, which threads of ours write after CRIU.

    view = criu_view.make(images, folder)     # None: CRIU reads all pages itself
    pid = criu.restore(images, leave_stopped=True, view=view)

CRIU reads a process's pages with one thread. The view is a folder of links to the image files, in
which `pagemap-PID.img` and `pages-N.img` of large processes are new and have only the other pages.
When CRIU ends, every process stands stopped before its first instruction, and what was left out is
written into it from the files of the image (`criu_fill`). The images are never changed.

A page may come late when CRIU itself says so (PE_LAZY, for its own lazy restore: private,
anonymous, not locked), and when neither CRIU's restorer nor the kernel touches it before
(`_touched`). Two processes that may share pages copy-on-write get them from CRIU, which makes them
share again. Sources: criu/mem.c, criu/pagemap.c and criu/cr-restore.c of CRIU 4.2.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgpu import criu_images

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""Addresses [start, end)."""

PAGE = 4096
RUN_BYTES = 64 << 10  # a shorter run is left to CRIU
WORTH_BYTES = 16 << 20  # so is a process with less

# criu/include/pagemap.h
_LAZY, _PRESENT = 2, 4
# criu/include/image.h
_REGULAR, _HEAP, _ANON_PRIVATE = 1 << 0, 1 << 5, 1 << 9
# MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE: not MAP_GROWSDOWN, MAP_HUGETLB, or what comes later.
_MAP_FLAGS = 0x2 | 0x20 | 0x4000
_PROT_WRITE = 2

_NEAR = 64 << 10
# 64 signals may wait for a stopped thread, with 12 KiB of registers each.
_SIGNAL_FRAMES = 1 << 20


class Unexpected(Exception):
    """The images have something that this module does not know."""


@dataclass(frozen=True)
class Run:
    """Bytes of a file of pages, and the address at which a process has them."""

    address: int
    bytes: int
    offset: int


@dataclass(frozen=True)
class Fill:
    """What is left out of a process: runs of its file of pages, by ascending offset."""

    pid: int
    pages: Path
    runs: list[Run]


@dataclass(frozen=True)
class View:
    """A folder for CRIU, and what to write into the processes that it restores."""

    path: Path
    fills: list[Fill]
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes that CRIU does not read."""
        return sum(run.bytes for fill in self.fills for run in fill.runs)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)


def make(images: Path, folder: Path) -> View | None:
    """Make `folder`, which must not exist; None, and no folder, when there is nothing to gain.

    The images need not have been checked: what is wrong with them is said in the log, and is None.
    """
    began = time.monotonic()
    try:
        if platform.machine() != "x86_64" or mmap.PAGESIZE != PAGE:
            raise Unexpected(f"{platform.machine()} with pages of {mmap.PAGESIZE} bytes")
        if error := _refusal():
            raise Unexpected(f"process_vm_writev: {os.strerror(error)}")
        folder.mkdir(mode=0o700)
        if fills := _fills(images, folder):
            _link_others(images, folder)
            return View(folder, fills, time.monotonic() - began)
    except Exception as error:  # whatever it is, CRIU can do without
        log.warning("CRIU reads all pages itself: %s", str(error) or repr(error))
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _refusal() -> int:
    """Error number when the system call is not to be had here, as under some seccomp filters."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if libc.process_vm_writev(os.getpid(), None, 0, None, 0, 0) else 0


def _link_others(images: Path, folder: Path) -> None:
    made = {file.name for file in folder.iterdir()}
    for file in images.iterdir():
        if file.name == "parent":
            raise Unexpected("an incremental dump")
        if file.name not in made:
            (folder / file.name).symlink_to(file)


def _fills(images: Path, folder: Path) -> list[Fill]:
    tree = criu_images.messages(images / "pstree.img", "pstree_entry")
    memory = {}
    for process in tree:
        path = images / f"mm-{process.pid}.img"
        if path.exists():  # a zombie has none
            memory[process.pid] = criu_images.messages(path, "mm_entry")[0]
    shared: dict[int, set[Range]] = {pid: set() for pid in memory}
    for process in tree:
        if process.pid in memory and process.ppid in memory:
            common = _may_share(memory[process.pid], memory[process.ppid])
            shared[process.pid] |= common
            shared[process.ppid] |= common
    fills = []
    for process in tree:
        if process.pid in memory:
            late = _late(memory[process.pid], shared[process.pid])
            if sum(end - start for start, end in late) < WORTH_BYTES:
                continue
            late = _without(late, _touched(images, process.threads))
            fill = _split(images, folder, process.pid, late)
            if fill is not None:
                fills.append(fill)
    if len({fill.pages for fill in fills}) != len(fills):
        raise Unexpected("two processes with one file of pages")
    return fills


def _may_share(child: Any, parent: Any) -> set[Range]:
    """Mappings whose pages CRIU compares and shares: equal ranges in two copies of a program."""
    if child.exe_file_id != parent.exe_file_id:
        return set()
    ranges = {(vma.start, vma.end) for vma in parent.vmas}
    return ranges.intersection((vma.start, vma.end) for vma in child.vmas)


def _late(memory: Any, shared: set[Range]) -> list[Range]:
    """Ascending ranges of private, anonymous, writable memory, neighbours joined."""
    found: list[Range] = []
    for vma in memory.vmas:
        late = (
            vma.status & ~_HEAP == _REGULAR | _ANON_PRIVATE
            and not vma.flags & ~_MAP_FLAGS
            and vma.prot & _PROT_WRITE
            and (vma.start, vma.end) not in shared
        )
        if not late:
            continue
        if found and vma.start < found[-1][1]:
            raise Unexpected(f"mappings that overlap at {vma.start:#x}")
        if found and vma.start == found[-1][1]:
            found[-1] = (found[-1][0], vma.end)
        else:
            found.append((vma.start, vma.end))
    return found


def _touched(images: Path, threads: Iterable[int]) -> list[Range]:
    """Where something may read or write before the process is filled, in whole pages.

    CRIU registers restartable sequences and writes the pointer to the one that a thread is in, and
    the kernel writes processor numbers there. Signals that wait are delivered before the stop:
    frames on the thread's stack or its signal stack. The rest is small, and known to the kernel.
    """
    found = []
    for thread in threads:
        core = criu_images.messages(images / f"core-{thread}.img", "core_entry")[0]
        cpu, own = core.thread_info, core.thread_core
        if not core.HasField("thread_info") or not core.HasField("thread_core"):
            raise Unexpected(f"thread {thread} without registers")
        stack = cpu.gpregs.sp
        found.append((stack - _SIGNAL_FRAMES, stack + _NEAR))
        found.append((own.sas.ss_sp, own.sas.ss_sp + own.sas.ss_size))
        places = [cpu.gpregs.fs_base, cpu.gpregs.gs_base, cpu.clear_tid_addr, own.futex_rla]
        places += [own.rseq_entry.rseq_abi_pointer, own.rseq_entry.rseq_cs_pointer]
        found += [(place - _NEAR, place + _NEAR) for place in places if place]
    return [(start & -PAGE, -(-end & -PAGE)) for start, end in found]


def _without(ranges: list[Range], holes: Iterable[Range]) -> list[Range]:
    """What of ascending, disjoint ranges lies in no hole."""
    found = []
    ahead = sorted(holes)
    at = 0
    for start, end in ranges:
        while at < len(ahead) and ahead[at][1] <= start:
            at += 1
        for hole_start, hole_end in ahead[at:]:
            if hole_start >= end:
                break
            if start < hole_start:
                found.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            found.append((start, end))
    return found


def _split(images: Path, folder: Path, pid: int, late: Sequence[Range]) -> Fill | None:
    """Write the two files of a process without its runs in `late`; None when it has too few."""
    name = f"pagemap-{pid}.img"
    head, *entries = criu_images.messages(images / name, "pagemap_head", "pagemap_entry")
    pages = images / f"pages-{head.pages_id}.img"
    kept: list[Run] = []
    runs: list[Run] = []
    new = [head]
    offset = at = 0
    for start, end, lazy in _present(name, entries):
        while at < len(late) and late[at][1] <= start:
            at += 1
        for run_start, run_end, leave in _pieces(start, end, late if lazy else (), at):
            run = Run(run_start, run_end - run_start, offset)
            # CRIU finds a run's bytes by adding up the runs before it.
            offset += run.bytes
            if leave:
                runs.append(run)
            else:
                kept.append(run)
                new.append(_entry(entries[0], run, lazy))
    if offset > pages.stat().st_size:
        raise Unexpected(f"{pages.name} has fewer bytes than the {offset} of {name}")
    left, copied = (sum(run.bytes for run in some) for some in (runs, kept))
    # The kept pages are written a second time, to the view, which costs memory for a while.
    if left < max(WORTH_BYTES, copied // 2) or not kept:
        return None
    _write_pages(pages, folder / pages.name, kept)
    _write_messages(images / name, folder / name, new)
    return Fill(pid, pages, runs)


def _present(name: str, entries: Iterable[Any]) -> Iterator[tuple[int, int, bool]]:
    """Ranges that have pages, and whether these may come late; neighbours of a kind are joined."""
    joined: tuple[int, int, bool] | None = None
    for entry in entries:
        start, end = entry.vaddr, entry.vaddr + entry.nr_pages * PAGE
        least = joined[1] if joined else 0
        if entry.flags & ~_LAZY != _PRESENT or entry.in_parent or not least <= start < end:
            raise Unexpected(f"{name} has an entry at {start:#x} with flags {entry.flags}")
        lazy = bool(entry.flags & _LAZY)
        if joined and joined[1:] == (start, lazy):
            joined = (joined[0], end, lazy)
            continue
        if joined:
            yield joined
        joined = (start, end, lazy)
    if joined:
        yield joined


def _entry(example: Any, run: Run, lazy: bool) -> Any:
    flags = _PRESENT | _LAZY if lazy else _PRESENT
    count = run.bytes // PAGE
    # The required field is a 32-bit one that CRIU leaves at 0 and no longer reads.
    return type(example)(vaddr=run.address, compat_nr_pages=0, flags=flags, nr_pages=count)


def _pieces(
    start: int, end: int, late: Sequence[Range], at: int
) -> Iterator[tuple[int, int, bool]]:
    """Cut [start, end) into runs, with whether each is left out; late[at] ends behind `start`."""
    while at < len(late) and late[at][0] < end:
        run_start, run_end = max(start, late[at][0]), min(end, late[at][1])
        at += 1
        if run_end - run_start < RUN_BYTES:
            continue
        if start < run_start:
            yield start, run_start, False
        yield run_start, run_end, True
        start = run_end
    if start < end:
        yield start, end, False


def _write_pages(source: Path, target: Path, runs: Sequence[Run]) -> None:
    with source.open("rb") as old, target.open("xb", buffering=0) as new:
        for run in runs:
            offset, end = run.offset, run.offset + run.bytes
            while offset < end:
                count = os.sendfile(new.fileno(), old.fileno(), offset, end - offset)
                if not count:
                    raise Unexpected(f"{source.name} ends at byte {offset}")
                offset += count


def _write_messages(source: Path, target: Path, messages: Iterable[Any]) -> None:
    """Messages behind the magic numbers of another file of the kind."""
    with source.open("rb") as old, target.open("xb") as new:
        new.write(old.read(criu_images.MAGIC_BYTES))
        for message in messages:
            data = message.SerializeToString()
            new.write(struct.pack("<I", len(data)) + data)
