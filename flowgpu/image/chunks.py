"""Chunk tables: where each chunk of a GPU's logical data is (docs/reference/image-format.md).

A table says of every chunk that nobody needs it, that it is zero, or in which slot of which extent
it lies. Its file is run-length coded; the arrays per chunk are made only when they are asked for,
because a damaged file of one row can stand for more chunks than fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flowgpu.image import layout

Array = npt.NDArray[Any]
ROW = np.dtype([("kind", "<u2"), ("extent", "<u2"), ("count", "<u4"), ("first", "<u8")])


class Kind(IntEnum):
    """What is known of a chunk."""

    INACTIVE = 0
    ZERO = 1
    STORED = 2
    SHARED = 3


class ChunkTable:
    """The rows of one table, which fit together; made by `decode` and `whole`."""

    def __init__(self, rows: Array, chunk_count: int, own: int) -> None:
        self.rows, self.chunk_count, self.own = rows, chunk_count, own

    @cached_property
    def starts(self) -> Array:
        """First chunk of each row."""
        ends: Array = np.cumsum(self.rows["count"], dtype=np.uint64)
        return ends - self.rows["count"].astype(np.uint64)

    @cached_property
    def kind(self) -> Array:
        """Kind of each chunk, u1."""
        return self._expand(self.rows["kind"].astype(np.uint8))

    @cached_property
    def extent(self) -> Array:
        """Extent of each chunk, u2; 0 where there is none."""
        return self._expand(self.rows["extent"])

    @cached_property
    def slot(self) -> Array:
        """Slot of each chunk in its extent, u8; 0 where there is none."""
        slots = self._expand(self.rows["first"] - self.starts)
        slots += np.arange(self.chunk_count, dtype=np.uint64)
        slots[self.kind < Kind.STORED] = 0
        return slots

    def places(self, kind: Kind) -> Array:
        """Numbers of the chunks of that kind, ascending."""
        rows = self.rows["kind"] == kind
        counts = self.rows["count"][rows]
        before = np.cumsum(counts, dtype=np.uint64) - counts
        found: Array = np.repeat(self.starts[rows] - before, counts)
        found += np.arange(len(found), dtype=np.uint64)
        return found

    def count(self, kind: Kind) -> int:
        """Chunks of that kind."""
        rows = self.rows
        return int(rows["count"][rows["kind"] == kind].sum(dtype=np.uint64))

    @cached_property
    def stored_segments(self) -> Array:
        """Runs of stored chunks in order, u8[n, 3]: logical offset, bytes, offset in the extent.

        The extent is covered without gaps. Bytes are those of whole chunks; only the last chunk of
        an image of version 1 can be shorter.
        """
        stored = self.rows["kind"] == Kind.STORED
        rows = self.rows[stored]
        columns = (self.starts[stored], rows["count"].astype(np.uint64), rows["first"])
        return np.stack(columns, axis=1) * np.uint64(layout.CHUNK_BYTES)

    def _expand(self, values: Array) -> Array:
        if len(self.rows) == self.chunk_count:
            return values.copy()
        return np.repeat(values, self.rows["count"])


def whole(chunk_count: int, own: int) -> ChunkTable:
    """The table of a GPU whose chunks are all stored, in order."""
    rows = np.array([(Kind.STORED, own, chunk_count, 0)][: min(chunk_count, 1)], ROW)
    return ChunkTable(rows, chunk_count, own)


def encode(kind: Array, extent: Array, slot: Array) -> bytes:
    """The file of arrays per chunk (u1, u2, u8); extent and slot count where a chunk has one.

    Raises ValueError for arrays that are not of one length, or are too long.
    """
    if not len(kind) == len(extent) == len(slot) <= layout.MOST_CHUNKS:
        raise ValueError(f"a table of {len(kind)}, {len(extent)} and {len(slot)} chunks")
    if not len(kind):
        return b""
    placed = kind >= Kind.STORED
    # Along a run of placed chunks the slot grows as the chunk's number does.
    shift = slot.astype(np.uint64) - np.arange(len(slot), dtype=np.uint64)
    breaks = (extent[1:] != extent[:-1]) | (shift[1:] != shift[:-1])
    breaks &= placed[1:]
    breaks |= kind[1:] != kind[:-1]
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    rows = np.zeros(len(starts), ROW)
    rows["kind"] = kind[starts]
    rows["count"] = np.diff(starts, append=len(kind))
    rows["extent"] = np.where(placed[starts], extent[starts], 0)
    rows["first"] = np.where(placed[starts], slot[starts], 0)
    return rows.tobytes()


def decode(data: bytes, chunk_count: int, extents: Sequence[int], own: int) -> ChunkTable:
    """The table in `data`, of a GPU with `chunk_count` chunks whose own extent is number `own`.

    `extents` are the slots of each extent of the image. Takes memory for `data` only. Raises
    ValueError, which says what does not fit.
    """
    _require(
        len(data) % layout.ROW_BYTES == 0, f"it has {len(data)} bytes, which are no whole rows"
    )
    _require(chunk_count <= layout.MOST_CHUNKS, f"it stands for {chunk_count} chunks")
    rows = np.frombuffer(data, ROW)
    columns = (np.ascontiguousarray(rows[name]) for name in ROW.names or ())
    kind, extent, count, first = columns
    _no_row(kind > Kind.SHARED, "has an unknown kind")
    _no_row(count == 0, "is empty")
    # At most 2^32 counts below 2^32 each: the sum cannot overflow.
    total = int(count.sum(dtype=np.uint64))
    _require(total == chunk_count, f"its rows are of {total} chunks, not of {chunk_count}")
    stored, shared = kind == Kind.STORED, kind == Kind.SHARED
    _no_row(~(stored | shared) & ((extent != 0) | (first != 0)), "has a place that it cannot have")
    _no_row(stored & (extent != own), "is stored in an extent of another GPU")
    _no_row(shared & (extent >= len(extents)), "names no extent of the image")
    slots = np.array([*extents, 0], np.uint64)[np.where(shared, extent, len(extents))]
    _no_row(shared & ((first > slots) | (count > slots - first)), "ends behind its extent")
    counts = count[stored].astype(np.uint64)
    ends = np.cumsum(counts)
    _require(
        np.array_equal(first[stored], ends - counts), "its stored chunks are not one behind another"
    )
    own_slots = int(ends[-1]) if len(ends) else 0
    _require(own_slots == extents[own], f"it stores {own_slots} chunks, its extent {extents[own]}")
    same = kind[1:] == kind[:-1]
    onward = (extent[1:] == extent[:-1]) & (first[1:] == first[:-1] + count[:-1])
    joined = same & (onward | (kind[1:] < Kind.STORED))
    _no_row(joined, "should be one with the next")
    return ChunkTable(rows, chunk_count, own)


def usage(tables: Iterable[ChunkTable], extents: Sequence[int]) -> list[Array]:
    """For each extent of so many slots: whether a table names the slot, as bool per slot."""
    steps = [np.zeros(slots + 1, np.int64) for slots in extents]
    for table in tables:
        rows = table.rows[table.rows["kind"] >= Kind.STORED]
        for number in np.unique(rows["extent"]):
            own = rows[rows["extent"] == number]
            np.add.at(steps[number], own["first"].astype(np.int64), 1)
            np.add.at(steps[number], (own["first"] + own["count"]).astype(np.int64), -1)
    return [np.cumsum(step[:-1]) > 0 for step in steps]


def covered(rows: Array) -> int:
    """Slots that rows of tables name, each counted once. Takes memory for the rows only."""
    placed = rows[rows["kind"] >= Kind.STORED]
    total = 0
    for extent in np.unique(placed["extent"]):
        own = np.sort(placed[placed["extent"] == extent], order="first")
        ends = own["first"] + own["count"]
        before = np.append(np.zeros(1, np.uint64), np.maximum.accumulate(ends)[:-1])
        total += int((np.maximum(ends, before) - np.maximum(own["first"], before)).sum())
    return total


def replicated(tables: Sequence[ChunkTable]) -> int:
    """Chunks that the image lacks because it has them already, of another of these GPUs.

    A chunk that one GPU has twice counts as one.
    """
    if not tables:
        return 0
    everything = np.concatenate([table.rows for table in tables])
    return sum(covered(table.rows) for table in tables) - covered(everything)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _no_row(wrong: Array, problem: str) -> None:
    if wrong.any():
        raise ValueError(f"row {int(np.argmax(wrong))} {problem}")
