"""The counts of NCCL's communicators in the tasks of a job, and the cut through them (cut.py).

A page is a memfd of the task, which both sides map (native/include/flowgpu/nccl.h). Closing and
opening, and letting threads on, are stores into it: no task is asked.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.cut import Behind, Channel, Cut, End, State, Thread, View
from coordinator.cut_of_nodes import Late, Part
from coordinator.process import serves
from flowgpu import nccl, wire
from flowgpu.errors import PeerIsIdle, Unsupported

log = logging.getLogger(__name__)

LOOK_SECONDS = 30e-6
ENDED_SECONDS = 0.05
"""How often the coordinator looks for tasks that have ended."""
GATE_AT, WAKE_AT, HELD_AT = 8, 12, 36
"""Places in the page's header; LIMIT_AT is one in a row."""
LIMIT_AT = 16
FUTEX, FUTEX_WAKE, ALL = 202, 1, 2**31 - 1
STATES = {
    nccl.OUTSIDE: State.OUTSIDE,
    nccl.DECIDING: State.DECIDING,
    nccl.INSIDE: State.INSIDE,
    nccl.PARKED: State.PARKED,
}


class Communicators:
    """The page of one task. Owns `fd` from the call on. Raises WireError for another version's."""

    def __init__(self, fd: int) -> None:
        try:
            self._page = mmap.mmap(fd, nccl.BYTES)
        finally:
            os.close(fd)
        header = self.header()
        if (header.magic, header.version) != (nccl.MAGIC, nccl.VERSION):
            self.close()
            raise wire.WireError("the counts of NCCL have another magic or version")

    def close(self) -> None:
        """Let go of the page. A second call does nothing."""
        self._page.close()

    def header(self) -> nccl.Header:
        """What the head of the page says now."""
        return nccl.Header.unpack(self._page[: nccl.Header.SIZE])

    def shut(self) -> None:
        """Close the gate: a thread that is not in NCCL yet waits for a limit."""
        for number in range(self.header().rows):
            struct.pack_into("=Q", self._page, _row_at(number) + LIMIT_AT, 0)
        struct.pack_into("=I", self._page, GATE_AT, nccl.CLOSED)
        self._wake()

    def open(self) -> None:
        """Open the gate, and let all threads on, unless communicators are ended."""
        if self.header().held == nccl.HELD:
            struct.pack_into("=I", self._page, HELD_AT, nccl.FREE)
        struct.pack_into("=I", self._page, GATE_AT, nccl.OPEN)
        self._wake()

    def unique_ids(self) -> dict[int, bytes]:
        """Those that the task has made, of communicators whose first rank it is."""
        return {
            row.communicator: self._page[at : at + nccl.ID_BYTES]
            for at, row in self._ids()
            if row.rank == 0
        }

    def put_unique_ids(self, ids: Mapping[int, bytes]) -> None:
        """Let the task have these, by communicator; none for those that are not to be made."""
        none = bytes(nccl.ID_BYTES)
        for at, row in self._ids():
            self._page[at : at + nccl.ID_BYTES] = ids.get(row.communicator, none)

    def _ids(self) -> list[tuple[int, nccl.Row]]:
        """Where the unique id of each communicator is."""
        return [
            (nccl.IDS_AT + number * nccl.ID_BYTES, row)
            for number, row in self._rows()
            if row.source == nccl.NO_RANK
        ]

    def allow(self, targets: Mapping[Channel, int]) -> None:
        """Let threads on up to these numbers."""
        changed = False
        for number, row in self._rows():
            at = _row_at(number) + LIMIT_AT
            target = targets.get(_channel(row), 0)
            if target > row.limit:
                struct.pack_into("=Q", self._page, at, target)
                changed = True
        if changed:
            self._wake()

    def view(self) -> View:
        """What cut.py wants to know."""
        rows = dict(self._rows())
        channels = {number: _channel(row) for number, row in rows.items()}
        threads = []
        for number in range(self.header().threads):
            at = nccl.THREADS_AT + number * nccl.Thread.SIZE
            used, state, _, wants = struct.unpack_from("=IIII", self._page, at)
            if not used or state == nccl.OUTSIDE:
                continue
            whole = nccl.Thread.unpack(self._page[at : at + nccl.Thread.SIZE])
            wanted = zip(whole.want_row[:wants], whole.want_number[:wants], strict=True)
            threads.append(
                Thread(
                    STATES[state],
                    whole.since_ns * 1e-9,
                    tuple((channels[row], want) for row, want in wanted if row in channels),
                )
            )
        ends = [
            End(channels[n], row.rank, row.entered, row.ranks, bool(row.made), bool(row.pending))
            for n, row in rows.items()
        ]
        return View(ends, threads)

    def _rows(self) -> list[tuple[int, nccl.Row]]:
        found = []
        for number in range(self.header().rows):
            at = _row_at(number)
            row = nccl.Row.unpack(self._page[at : at + nccl.Row.SIZE])
            if row.communicator:
                found.append((number, row))
        return found

    def _wake(self) -> None:
        """Wake threads by the word that they wait for. The system call is a fence as well."""
        wake = struct.unpack_from("=I", self._page, WAKE_AT)[0]
        struct.pack_into("=I", self._page, WAKE_AT, (wake + 1) & 0xFFFFFFFF)
        word = ctypes.c_uint32.from_buffer(self._page, WAKE_AT)
        _libc.syscall(FUTEX, ctypes.byref(word), FUTEX_WAKE, ALL, None, None, 0)


_libc = ctypes.CDLL(None)


def refuse_uncounted(pages: Mapping[int, Communicators]) -> None:
    """Raise Unsupported for what the counts do not have."""
    for pid, page in pages.items():
        if page.header().overflow:
            what = "NCCL communicators (libnccl) of which not all calls are counted"
            raise Unsupported(name=f"{what} (process {pid})")


def refuse_fixed(pages: Mapping[int, Communicators]) -> None:
    """Raise Unsupported for communicators that cannot be made anew."""
    for pid, page in pages.items():
        header = page.header()
        what = (
            "CUDA graphs with operations of NCCL"
            if header.graphs
            else "windows or device communicators of NCCL"
            if header.windows
            else "NCCL communicators of which not all is noted"
            if header.forgotten
            else ""
        )
        if what:
            name = f"{what}, which cannot be made anew with the communicators (process {pid})"
            raise Unsupported(name=name)


@dataclass(frozen=True)
class Ranks:
    """Those of one communicator that are here, or on other nodes."""

    count: int
    """How many the communicator has."""
    here: frozenset[int]
    process: int
    """One of theirs."""


def refuse_outside(
    pages: Mapping[int, Communicators],
    elsewhere: Mapping[int, Iterable[int]] | None = None,
) -> None:
    """Raise Unsupported for a communicator that has ranks outside of the job; behind the cut.

    `elsewhere`: ranks on other nodes, by communicator.
    """
    for communicator, ranks in ranks_here(pages).items():
        found = len(ranks.here.union((elsewhere or {}).get(communicator, ())))
        if found != ranks.count:
            what = f"an NCCL communicator of {ranks.count} ranks, {found} of which are in the job"
            raise Unsupported(name=f"{what} (process {ranks.process})")


def ranks_here(pages: Mapping[int, Communicators]) -> dict[int, Ranks]:
    """Each communicator's ranks."""
    ranks: dict[int, set[int]] = {}
    counts: dict[int, tuple[int, int]] = {}
    for pid, page in pages.items():
        for end in page.view().ends:
            ranks.setdefault(end.channel[0], set()).add(end.rank)
            counts[end.channel[0]] = (end.ranks, pid)
    return {one: Ranks(count, frozenset(ranks[one]), pid) for one, (count, pid) in counts.items()}


class CutFailed(Exception):
    """The cut was not made in time; `behind` has who is missing, `waiting` a process that waits,
    and its node if there are several."""

    def __init__(self, behind: Sequence[Behind], waiting: tuple[int, int] | None = None) -> None:
        self.behind = behind
        self.waiting = waiting
        super().__init__(f"{len(behind)} ranks are behind")


def make_cut(pages: Mapping[int, Communicators], deadline: float, part: Part | None = None) -> Cut:
    """Make the cut through all tasks; their gates stay closed. Raises CutFailed, with them open.

    A task that ends meanwhile is none any more. `part`: other nodes make theirs as well; then it
    raises FlowError too.
    """
    now = look = time.monotonic()
    cut, living = Cut(now, alone=part is None), dict(pages)
    for page in pages.values():
        page.shut()
    try:
        while True:
            now = time.monotonic()
            if now >= look:
                look = now + ENDED_SECONDS
                # One that has just begun may have no thread yet that answers.
                living = {pid: page for pid, page in pages.items() if serves(pid)}
            views = {pid: page.view() for pid, page in living.items()}
            quiet = cut.look(now, views)
            if quiet if part is None else part.made(cut, quiet, views, now):
                return cut
            if now >= deadline:
                if part is not None:
                    raise part.late(cut, views, now)
                raise CutFailed(cut.behind)
            for page in living.values():
                page.allow(cut.targets)
            time.sleep(LOOK_SECONDS)
    except Late as error:
        open_all(pages)
        raise CutFailed(error.order.behind, error.order.waiting) from error
    except BaseException:
        open_all(pages)
        raise


def open_all(pages: Mapping[int, Communicators]) -> None:
    """Let all threads on."""
    for page in pages.values():
        page.open()


def idle(failed: CutFailed, pages: Mapping[int, Communicators], job: str) -> PeerIsIdle:
    """The name of a cut that was not made in time, by the first rank that did not come."""
    one = next(iter(failed.behind), None)
    task = None if one is None else one.task
    waiting = str(next((pid for pid in pages if pid != task), task or 0))
    if failed.waiting is not None:
        waiting = f"{failed.waiting[1]} (node {failed.waiting[0]})"
    if one is None:
        return PeerIsIdle(
            job=job,
            waiting=waiting,
            peer="a call that does not return",
            number=0,
            communicator="of NCCL",
        )
    process = "" if one.task is None else f"process {one.task}"
    node = "" if one.task is None or one.node is None else f"node {one.node}"
    place = ", ".join(word for word in (process, node) if word)
    peer = f"rank {one.rank}" + (f" ({place})" if place else "")
    name = f"{one.channel[0]:016x}"
    if one.channel[1] >= 0:
        name += f", messages from rank {one.channel[1]} to {one.channel[2]}"
    return PeerIsIdle(job=job, waiting=waiting, peer=peer, number=one.number, communicator=name)


def _row_at(number: int) -> int:
    return nccl.ROWS_AT + number * nccl.Row.SIZE


def _channel(row: nccl.Row) -> Channel:
    if row.source == nccl.NO_RANK:
        return (row.communicator, -1, -1)
    return (row.communicator, row.source, row.target)
