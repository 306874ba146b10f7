"""Chunks of a GPU's memory: which hold active bytes, how they travel, how a restore puts them back.

A chunk is 32 KiB of the GPU's blocks, taken one behind another (docs/image-format.md). Here a GPU
is an array of the addresses of its chunks. What looks at the memory itself is behind `Kernels`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, Kind

CHUNK = layout.CHUNK_BYTES

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
    length = int(counts.sum()) + 1
    first = start + (offset // CHUNK).astype(np.int64)
    behind = start + ((end + np.uint64(CHUNK - 1)) // CHUNK).astype(np.int64)
    steps = np.bincount(first, minlength=length) - np.bincount(behind, minlength=length)
    return np.cumsum(steps[:-1]) > 0


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
        slots = table.slot[places]
        # Backwards, so that of several chunks of a slot the first stays. Sorting takes far longer.
        first = np.full(int(slots.max()) + 1, -1, np.int64)
        first[slots[::-1]] = places[::-1]
        used = np.flatnonzero(first >= 0)
        reads[int(extent)] = segments(where[first[used]], used.astype(np.uint64))
        copied = first[slots] != places
        sources.append(where[first[slots[copied]]])
        destinations.append(where[places[copied]])
    none = [np.empty(0, np.uint64)]
    return FillPlan(
        reads,
        (np.concatenate(sources or none), np.concatenate(destinations or none)),
        where[table.kind == Kind.ZERO],
        where[table.kind == Kind.INACTIVE],
    )
