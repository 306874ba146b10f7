"""Chunks of a GPU's memory: which hold active bytes, how they travel, how a restore puts them back.

A chunk is 32 KiB of the GPU's blocks, taken one behind another (docs/reference/image-format.md).
Here a GPU is an array of the addresses of its chunks. What looks at the memory itself is behind
`Kernels`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator import spreading
from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, Kind

CHUNK = layout.CHUNK_BYTES

T = TypeVar("T")
U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
Numbers = NDArray[Any]
"""Integers that index or count."""
Segments = NDArray[np.uint64]
"""Rows (address, bytes, offset in the file)."""


class Kernels(Protocol):
    """Work on chunks in the memory of one GPU, given by their addresses."""

    def scan(self, addresses: U64) -> tuple[U8, Bools]:
        """Digests (n x 16) of the chunks, and which hold zeros only."""

    def compare(self, left: U64, right: U64) -> Bools:
        """Which pairs of chunks differ."""

    def copy(self, sources: U64, destinations: U64) -> None: ...

    def fill(self, destinations: U64, pattern: int) -> None: ...


class Catalogue(Protocol):
    """Digests and the numbers they were first seen under."""

    def match(self, digests: U8, first: int) -> U64:
        """The number of each digest: that of its first appearance, counted from `first` here."""


def at_once(work: Callable[..., T], *lists: Sequence[Any]) -> list[T]:
    """What `work` makes of each row of the lists, one a GPU, in threads of their own."""
    with ThreadPoolExecutor(max_workers=max(len(lists[0]), 1)) as pool:
        return list(pool.map(work, *lists))


def addresses(segments: Sequence[tuple[int, int]]) -> U64:
    """Address of each chunk of ranges (address, bytes), which are whole chunks."""
    parts = [np.arange(start, start + size, CHUNK, dtype=np.uint64) for start, size in segments]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def pack_parts(parts: U64) -> str:
    """Rows (key of a block, offset, bytes) as they travel to the ghost: thousands at a time."""
    return base64.b64encode(parts.astype(np.uint64).tobytes()).decode()


def unpack_parts(text: str) -> U64:
    """What pack_parts was given."""
    return np.frombuffer(base64.b64decode(text), np.uint64).reshape(-1, 3)


def active_chunks(keys: Sequence[int], sizes: Sequence[int], parts: U64) -> Bools:
    """Which chunks of blocks, by their keys and bytes, hold an active byte.

    `parts` are rows (key, offset, bytes); keys of other blocks may be among them.
    """
    counts = np.asarray(sizes, np.int64) // CHUNK
    starts = np.cumsum(counts) - counts
    order = np.argsort(np.asarray(keys, np.uint64))
    known = np.asarray(keys, np.uint64)[order]
    at = np.searchsorted(known, parts[:, 0])
    here = (at < len(known)) & (parts[:, 2] > 0)
    here[here] = known[at[here]] == parts[here, 0]
    start = starts[order[at[here]]]
    offset, end = parts[here, 1], parts[here, 1] + parts[here, 2]
    first = start + (offset // CHUNK).astype(np.int64)
    behind = start + ((end + np.uint64(CHUNK - 1)) // CHUNK).astype(np.int64)
    # Runs that do not touch, in order: what is between two of them holds none.
    order = np.argsort(first)
    first, behind = first[order], np.maximum.accumulate(behind[order])
    begins = np.flatnonzero(first[1:] > behind[:-1]) + 1
    edges = np.zeros(2 * (len(begins) + min(len(first), 1)) + 2, np.int64)
    edges[1:-1:2] = first[np.append(0, begins)] if len(first) else 0
    edges[2:-1:2] = behind[np.append(begins - 1, len(first) - 1)] if len(first) else 0
    edges[-1] = counts.sum()
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def segments(where: U64, slots: U64) -> Segments:
    """Chunks at `where` with their slots, in the order of slots, neighbours in both merged."""
    breaks = (np.diff(where) != CHUNK) | (np.diff(slots) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))[: len(where)]
    counts = np.diff(np.append(starts, len(where))).astype(np.uint64)
    return np.column_stack((where[starts], counts * CHUNK, slots[starts] * CHUNK))


Copies = tuple[U64, U64]
"""Addresses of chunks: from, to."""


@dataclass(frozen=True)
class Passed:
    """Chunks that come from the memory of other GPUs, once these have read what they are to read,
    and the extent and slot that each has in the image."""

    sources: U64
    addresses: U64
    extents: Numbers
    slots: Numbers


@dataclass(frozen=True)
class FillPlan:
    """How a restore brings the chunks of one GPU back."""

    reads: dict[int, Segments]  # by extent
    passed: Passed
    copies: Copies  # in this GPU; after the two above
    zeros: U64
    inactive: U64

    def needs_kernels(self, poison: bool) -> bool:
        """True if there are chunks that no read brings."""
        return any(map(len, (self.copies[0], self.zeros))) or (poison and len(self.inactive) > 0)


def islands(reaches: Sequence[Sequence[bool]]) -> list[list[int]]:
    """GPUs in groups of which each reaches the memory of all others, from who reaches whom."""
    found: list[list[int]] = []
    for gpu, row in enumerate(reaches):
        for others in found:
            if all(row[other] and reaches[other][gpu] for other in others):
                others.append(gpu)
                break
        else:
            found.append([gpu])
    return found


def plan_fills(
    gpus: Sequence[tuple[U64, ChunkTable]], groups: Sequence[Sequence[int]]
) -> list[FillPlan]:
    """How each GPU's chunks, at these addresses, come back.

    GPUs of one of the `groups` (see islands) read a slot that several of them want once: from a
    GPU's own extent that GPU, from another one any, in even parts. The others copy it there.

    Works on rows as far as it can: a GPU has millions of chunks, and a restore waits.
    """
    fills = at_once(_Fill, *zip(*gpus, strict=True)) if gpus else []
    for group in groups:
        _divide([fills[number] for number in group])
    return at_once(_Fill.plan, fills)


@dataclass(frozen=True)
class _Wanted:
    """Slots of one extent that chunks of a GPU share."""

    slots: Numbers  # each once, ascending
    places: Numbers  # the first chunk of each
    more: Copies  # places, from and to, of the others


class _Fill:
    """One GPU's part of a fill, while its group is being planned."""

    def __init__(self, where: U64, table: ChunkTable) -> None:
        self.where, self.table = where, table
        self._begin, self._count, self._slot = (table.stored_segments // np.uint64(CHUNK)).T
        self.reads: dict[int, Segments] = {}
        if len(self._begin):
            self.reads[table.own] = _reads_of_runs(where, self._begin, self._count, self._slot)
        self.load = int(self._count.sum())
        self._passed: list[Passed] = []
        self._copies: list[Copies] = []
        shared = table.rows[table.rows["kind"] == Kind.SHARED]
        self._places = table.places(Kind.SHARED)
        # The slot of each chunk in `places`: a row's slots go on as its chunks do.
        ends = np.cumsum(shared["count"], dtype=np.uint64)
        self._slots = np.repeat(shared["first"] - ends + shared["count"], shared["count"])
        self._slots += np.arange(len(self._slots), dtype=np.uint64)
        self._extents = np.repeat(shared["extent"], shared["count"])
        self.extents = [int(extent) for extent in np.unique(shared["extent"])]
        self.owners: Mapping[int, _Fill] = {table.own: self}
        """Who reads an extent as a whole: it is theirs."""

    def address(self, slots: Numbers) -> U64:
        """Where slots of the own extent are, once they are read."""
        run = np.searchsorted(self._slot, slots, "right") - 1
        found: U64 = self.where[self._begin[run] + slots - self._slot[run]]
        return found

    def _share(self, extent: int, owner: _Fill) -> None:
        """Take what is wanted of an extent from the GPU that reads it, which may be this one."""
        if owner is self:
            here = self._extents == extent
            self._copies.append((self.address(self._slots[here]), self.where[self._places[here]]))
            return
        wanted = self.wanted(extent)
        sources = owner.address(wanted.slots)
        self._pass(sources, self.where[wanted.places], extent, wanted.slots)
        self._copies.append((self.where[wanted.more[0]], self.where[wanted.more[1]]))

    def _pass(self, sources: U64, addresses: U64, extent: int, slots: Numbers) -> None:
        extents = np.full(len(slots), extent, np.uint16)
        self._passed.append(Passed(sources, addresses, extents, slots))

    def wanted(self, extent: int) -> _Wanted:
        """What is wanted of an extent, each slot once."""
        here = self._extents == extent
        slots, there = self._slots[here], self._places[here]
        if np.all(slots[1:] > slots[:-1]):  # as is usual, which saves a sort
            return _Wanted(slots, there, (slots[:0], slots[:0]))
        used, first, same = np.unique(slots, return_index=True, return_inverse=True)
        more = first[same] != np.arange(len(slots))
        return _Wanted(used, there[first], (there[first[same[more]]], there[more]))

    def read(self, extent: int, wanted: _Wanted, own: Bools, sources: U64) -> None:
        """Read those of the slots that are the own ones, and take the others from `sources`."""
        if own.any():
            self.reads[extent] = segments(self.where[wanted.places[own]], wanted.slots[own])
        self._pass(sources, self.where[wanted.places[~own]], extent, wanted.slots[~own])
        self._copies.append((self.where[wanted.more[0]], self.where[wanted.more[1]]))

    def plan(self) -> FillPlan:
        """What has come together, once the others are divided."""
        for extent in self.extents:
            if extent in self.owners:
                self._share(extent, self.owners[extent])
        return FillPlan(
            self.reads,
            Passed(
                _joined(one.sources for one in self._passed),
                _joined(one.addresses for one in self._passed),
                _joined(one.extents for one in self._passed),
                _joined(one.slots for one in self._passed),
            ),
            (_joined(one for one, _ in self._copies), _joined(to for _, to in self._copies)),
            self.where[self.table.places(Kind.ZERO)],
            self.where[self.table.places(Kind.INACTIVE)],
        )


def _joined(parts: Iterable[Numbers]) -> U64:
    found: U64 = np.concatenate([np.empty(0, np.uint64), *parts])
    return found


def _divide(fills: Sequence[_Fill]) -> None:
    """Say for each extent who reads what of it."""
    owners = {fill.table.own: fill for fill in fills}
    for fill in fills:
        fill.owners = owners
    for extent in sorted({extent for fill in fills for extent in fill.extents} - owners.keys()):
        users = [fill for fill in fills if extent in fill.extents]
        wanted = at_once(_Fill.wanted, users, [extent] * len(users))
        size = 1 + max(int(one.slots[-1]) for one in wanted)
        having = np.zeros(size, spreading.mask_type(len(users)))
        for number, one in enumerate(wanted):
            having[one.slots] |= having.dtype.type(1 << number)
        loads = [fill.load for fill in users]
        several, chosen = spreading.spread(having, loads)
        reader = np.full(size, -1)  # -1: who wants it
        reader[several] = chosen
        own = [
            (reader[one.slots] == number) | (reader[one.slots] < 0)
            for number, one in enumerate(wanted)
        ]
        sources = np.zeros(size, np.uint64)
        for fill, one, mine in zip(users, wanted, own, strict=True):
            sources[one.slots[mine]] = fill.where[one.places[mine]]
        for fill, one, mine, load in zip(users, wanted, own, loads, strict=True):
            fill.read(extent, one, mine, sources[one.slots[~mine]])
            fill.load = load


def _reads_of_runs(where: U64, begin: U64, count: U64, slot: U64) -> Segments:
    """Segments of runs of chunks, cut where the addresses do not go on."""
    jumps = (np.flatnonzero(np.diff(where) != CHUNK) + 1).astype(np.uint64)
    owner = np.searchsorted(begin, jumps, "right") - 1
    inside = (owner >= 0) & (jumps > begin[owner]) & (jumps < begin[owner] + count[owner])
    starts = np.sort(np.concatenate((begin, jumps[inside])))
    owner = np.searchsorted(begin, starts, "right") - 1
    ends = np.minimum(np.append(starts[1:], starts[-1:] + count[-1]), begin[owner] + count[owner])
    return np.column_stack(
        (where[starts], (ends - starts) * CHUNK, (slot[owner] + starts - begin[owner]) * CHUNK)
    )
