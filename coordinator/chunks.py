"""Chunks of a GPU's memory: which hold active bytes, how they travel, how a restore puts them back.

A chunk is 32 KiB of the GPU's blocks, taken one behind another (docs/reference/image-format.md).
Here a GPU is an array of the addresses of its chunks. What looks at the memory itself is behind
`Kernels`.
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
    """The way of each slot to its first chunk, and of that chunk to all that are equal to it.

    Works on rows as far as it can: a GPU has millions of chunks, and a restore waits.
    """
    begin, count, slot = (table.stored_segments // np.uint64(CHUNK)).T
    reads = {table.own: _reads_of_runs(where, begin, count, slot)} if len(begin) else {}
    sources, destinations = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    shared = table.rows[table.rows["kind"] == Kind.SHARED]
    places = table.places(Kind.SHARED)
    # The slot of each chunk in `places`: a row's slots go on as its chunks do.
    ends = np.cumsum(shared["count"], dtype=np.uint64)
    slots = np.repeat(shared["first"] - ends + shared["count"], shared["count"])
    slots += np.arange(len(slots), dtype=np.uint64)
    extents = np.repeat(shared["extent"], shared["count"])
    for extent in np.unique(shared["extent"]):
        wanted, there = slots[extents == extent], places[extents == extent]
        if extent == table.own:
            run = np.searchsorted(slot, wanted, "right") - 1
            sources.append(where[begin[run] + wanted - slot[run]])
            destinations.append(where[there])
            continue
        used, first, same = np.unique(wanted, return_index=True, return_inverse=True)
        reads[int(extent)] = segments(where[there[first]], used)
        copied = first[same] != np.arange(len(wanted))
        sources.append(where[there[first[same[copied]]]])
        destinations.append(where[there[copied]])
    return FillPlan(
        reads,
        (np.concatenate(sources), np.concatenate(destinations)),
        where[table.places(Kind.ZERO)],
        where[table.places(Kind.INACTIVE)],
    )


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
