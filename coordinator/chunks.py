"""Which chunks of a GPU's memory an image stores, and how a restore puts them back.

A chunk is 32 KiB of the GPU's blocks, taken one behind another (docs/image-format.md). Here a GPU
is an array of the addresses of its chunks. What looks at the memory itself is behind `Kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, Kind

CHUNK = layout.CHUNK_BYTES

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]
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


@dataclass(frozen=True)
class Sizes:
    """Bytes of one GPU, each a part of the one before."""

    active: int
    nonzero: int
    distinct: int


@dataclass(frozen=True)
class DumpPlan:
    """What becomes of each chunk, and the copy that stores what is to be stored."""

    kind: U8
    slot: U64
    segments: Segments
    digests: U8 | None  # one a slot; None: the copy makes them
    sizes: Sizes


def addresses(segments: Sequence[tuple[int, int]]) -> U64:
    """Address of each chunk of ranges (address, bytes), which are whole chunks."""
    parts = [np.arange(start, start + size, CHUNK, dtype=np.uint64) for start, size in segments]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def active_chunks(sizes: Sequence[int], ranges: Mapping[int, Sequence[tuple[int, int]]]) -> Bools:
    """Which chunks of blocks of `sizes` bytes hold an active byte.

    `ranges` gives (offset, bytes) of the active parts of blocks by their place in `sizes`.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64) // CHUNK)
    steps = np.zeros(int(ends[-1]) + 1 if len(ends) else 1, np.int64)
    for place, parts in ranges.items():
        start = int(ends[place]) - sizes[place] // CHUNK
        for offset, size in parts:
            if size > 0:
                steps[start + offset // CHUNK] += 1
                steps[start + -(-(offset + size) // CHUNK)] -= 1
    return np.cumsum(steps[:-1]) > 0


def plan_dump(
    where: U64,
    active: Bools,
    kernels: Kernels | None,
    catalogue: Catalogue | None,
    *,
    zero: bool = True,
) -> DumpPlan:
    """Decide for each chunk at `where`.

    Without kernels every active chunk is stored; without a catalogue no chunk is shared. Chunks of
    one digest share only when their bytes are equal.
    """
    kind = np.where(active, Kind.STORED, Kind.INACTIVE).astype(np.uint8)
    slot = np.zeros(len(where), np.uint64)
    found = np.flatnonzero(active)
    digests = None
    nonzero = distinct = len(found)
    if kernels is not None:
        digests, zeros = kernels.scan(where[found])
        nonzero = distinct = int(np.count_nonzero(~zeros))
        if zero:
            kind[found[zeros]] = Kind.ZERO
            found, digests = found[~zeros], digests[~zeros]
        if catalogue is not None:
            first = catalogue.match(digests, 0).astype(np.int64)
            shared = first != np.arange(len(first))
            pairs = np.flatnonzero(shared)
            differ = kernels.compare(where[found[pairs]], where[found[first[pairs]]])
            shared[pairs[differ]] = False
            kind[found[shared]] = Kind.SHARED
            own = np.cumsum(~shared) - 1
            slot[found] = np.where(shared, own[first], own)
            digests = digests[~shared]
            distinct = len(digests)
            if not zero:
                distinct -= int(np.any(zeros))
    stored = np.flatnonzero(kind == Kind.STORED)
    if catalogue is None or kernels is None:
        slot[stored] = np.arange(len(stored))
    sizes = Sizes(int(np.count_nonzero(active)) * CHUNK, nonzero * CHUNK, distinct * CHUNK)
    slots = np.arange(len(stored), dtype=np.uint64)
    return DumpPlan(kind, slot, segments(where[stored], slots), digests, sizes)


def segments(where: U64, slots: U64) -> Segments:
    """Chunks at `where` with their slots, in the order of slots, neighbours in both merged."""
    breaks = (np.diff(where) != CHUNK) | (np.diff(slots) != 1)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))[: len(where)]
    counts = np.diff(np.append(starts, len(where))).astype(np.uint64)
    return np.column_stack((where[starts], counts * CHUNK, slots[starts] * CHUNK))


@dataclass(frozen=True)
class FillPlan:
    """How a restore brings the chunks of one GPU back."""

    reads: dict[int, Segments]  # by extent
    copies: tuple[U64, U64]  # from, to; after the reads
    zeros: U64
    inactive: U64

    def needs_kernels(self, poison: bool) -> bool:
        """Whether there is more to do than to read."""
        return bool(len(self.copies[0]) or len(self.zeros) or (poison and len(self.inactive)))


def plan_fill(where: U64, table: ChunkTable) -> FillPlan:
    """The way of each slot to its first chunk, and of that chunk to all that are equal to it."""
    reads: dict[int, Segments] = {}
    sources, destinations = [], []
    kept = (table.kind == Kind.STORED) | (table.kind == Kind.SHARED)
    for extent in np.unique(table.extent[kept]):
        places = np.flatnonzero(kept & (table.extent == extent))
        slots, first, again = np.unique(table.slot[places], return_index=True, return_inverse=True)
        reads[int(extent)] = segments(where[places[first]], slots)
        copied = first[again] != np.arange(len(places))
        sources.append(where[places[first[again[copied]]]])
        destinations.append(where[places[copied]])
    none = [np.empty(0, np.uint64)]
    return FillPlan(
        reads,
        (np.concatenate(sources or none), np.concatenate(destinations or none)),
        where[table.kind == Kind.ZERO],
        where[table.kind == Kind.INACTIVE],
    )
