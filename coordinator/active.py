"""Which bytes of a task's device memory are in use.

Two things are known. The task sends the allocations of the program at its hand-over. The stub in
the task keeps in the live set (native/include/flowgpu/live.h) what the allocators of its frameworks
have given out. Memory of an allocation is inactive only where such an allocator owns all of the
allocation and has given out no block: everything else is active.

Take a look after all gates of the job are closed. Allocators may go on giving out and taking back
blocks, as that needs no driver. A block that comes or goes during the look may be reported or not.
Either way is right: nothing can have been written to the one, and nobody wants the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.live_set import LiveSet
from flowgpu import live

Words = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]
Ranges = Words
"""Shape (n, 2): start and bytes."""
Rows = Words
"""Shape (n, 3), the rows of FLOWGPU_ALLOCATIONS: address, bytes, place (flowgpu_allocation)."""
Parts = Words
"""Shape (n, 3): key of a block, offset in it, bytes (at least one)."""

GRANULE = 1 << live.GRANULE_BITS
ADDRESSES = 1 << live.ADDRESS_BITS
WORD = np.dtype("=u8")
SLOT = np.dtype([("address", WORD), ("size", WORD)])
EVENT = np.dtype([("address", WORD), ("word", WORD)])
Events = npt.NDArray[np.void]
"""Rows of EVENT, the oldest first."""
DEVICE_BITS = np.uint64(live.DEVICE_BITS)
EVENT_BITS = np.uint64(live.EVENT_BITS)
FREED = np.uint64(live.EVENT_FREED)
CAPTURING = np.uint64(live.EVENT_CAPTURING)
# Bits are read in pieces that are whole pages of the file, so holes of it stay holes.
PIECE_BYTES = 4096


@dataclass(frozen=True)
class Look:
    """What the live set said at one time. `known` has an item for each row: its allocator is."""

    blocks: Ranges
    known: Bools


def look_at(live_set: LiveSet, rows: Rows) -> Look:
    """Look at the blocks and at the bits of allocations, in the order that live.h demands."""
    log = _log(live_set)
    given = log[log["word"] & FREED == 0]
    captured = given[given["word"] & CAPTURING != 0]
    seen = _any_bit(live_set, live.SEEN_AT, rows) | _in_granules_of(given, rows)
    whole = _any_bit(live_set, live.WHOLE_AT, rows) | _in_granules_of(captured, rows)
    blocks = _blocks(live_set, log)
    # Last: what did not fit during the look must not be missing without a word.
    if live_set.overflow():
        return Look(blocks, np.zeros(len(rows), np.bool_))
    return Look(blocks, seen & ~whole & _has_own_granules(rows))


def _log(live_set: LiveSet) -> Events:
    """The events that the slots and the bitmaps may not have yet."""
    logged = live_set.header().logged
    log = np.frombuffer(live_set.read(live.LOG_AT, live.SLOTS_AT), EVENT)
    # Last: places of events before it may have been written over while they were read.
    applied = live_set.header().applied
    count = min(max(logged - applied, 0), live.LOG_EVENTS)
    return log[(applied % live.LOG_EVENTS + np.arange(count)) % live.LOG_EVENTS]


def _blocks(live_set: LiveSet, log: Events) -> Ranges:
    slots = np.frombuffer(live_set.read(live.SLOTS_AT, live.SEEN_AT), SLOT)
    used = slots[slots["address"] > live.SLOT_DEAD]
    backwards = log[::-1]
    told, last = np.unique(backwards["address"], return_index=True)
    used = used[~np.isin(used["address"], told)]
    given = backwards[last]
    given = given[given["word"] & FREED == 0]
    address = np.concatenate([used["address"], given["address"]])
    size = np.concatenate([used["size"] >> DEVICE_BITS, given["word"] >> EVENT_BITS])
    return np.stack([address, size], axis=1)[np.argsort(address)]


def _any_bit(live_set: LiveSet, at: int, rows: Rows) -> Bools:
    """For each row, whether the bitmap at `at` has a bit in it."""
    first, count = _granules(rows)
    # Memory that is mapped nowhere has a place for an address; no allocator can know it.
    inside = (rows[:, 0] < ADDRESSES) & (first + count <= ADDRESSES // GRANULE)
    found = np.zeros(len(rows), np.bool_)
    row, granule = _expand(first[inside], count[inside])
    found[np.flatnonzero(inside)[row[_bits(live_set, at, granule)]]] = True
    return found


def _bits(live_set: LiveSet, at: int, granules: Words) -> Bools:
    piece, within = np.divmod(granules, np.uint64(PIECE_BYTES * 8))
    result = np.zeros(len(granules), np.bool_)
    for number in np.unique(piece):
        start = at + int(number) * PIECE_BYTES
        data = np.frombuffer(live_set.read(start, start + PIECE_BYTES), np.uint8)
        here = np.flatnonzero(piece == number)
        result[here] = np.unpackbits(data, bitorder="little")[within[here]] != 0
    return result


def active_ranges(rows: Rows, live_set: LiveSet | None) -> Ranges:
    """The active parts of a task's memory, as places: sorted, apart from each other.

    Without a live set all allocations are active.
    """
    if live_set is None:
        return merge(rows[:, [2, 1]])
    return active_of(rows, look_at(live_set, rows))


def active_of(rows: Rows, look: Look) -> Ranges:
    """The active parts of a task's memory as a look at its live set found them."""
    blocks = merge(look.blocks)
    strangers = rows[~look.known][:, [2, 1]]
    return merge(np.concatenate([strangers, _clip(rows[look.known], blocks)]))


def unknown_bytes(rows: Rows, live_set: LiveSet | None) -> int:
    """Bytes of memory whose blocks in use nobody knows, so that all of it is active."""
    if live_set is None:
        return int(rows[:, 1].sum())
    return int(rows[~look_at(live_set, rows).known, 1].sum())


def merge(ranges: Ranges) -> Ranges:
    """The same bytes as sorted ranges that neither overlap nor touch."""
    ranges = ranges[ranges[:, 1] > 0]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if not len(ranges):
        return ranges
    ends = np.maximum.accumulate(ranges[:, 0] + ranges[:, 1])
    opens = np.flatnonzero(np.append(True, ranges[1:, 0] > ends[:-1]))
    starts = ranges[opens, 0]
    closes = np.append(opens[1:], len(ranges)) - 1
    return np.stack([starts, ends[closes] - starts], axis=1)


def by_block(ranges: Ranges, blocks: Words) -> Parts:
    """Split ranges of places by the blocks they lie in, block by block.

    `blocks` are rows (key, address, bytes). `ranges` are sorted and apart, as active_ranges gives
    them.
    """
    rows = np.column_stack([blocks[:, 1:], np.zeros(len(blocks), np.uint64)])
    row, own = _clip_rows(rows, ranges)
    return np.column_stack([blocks[row, 0], own])


def _clip(rows: Rows, ranges: Ranges) -> Ranges:
    """What of `ranges`, which are sorted and apart, lies in each row, moved to the row's place."""
    return _clip_rows(rows, ranges)[1]


def _clip_rows(rows: Rows, ranges: Ranges) -> tuple[npt.NDArray[np.intp], Ranges]:
    """The parts that `_clip` gives, with the row that each lies in."""
    ends = ranges[:, 0] + ranges[:, 1]
    low = np.searchsorted(ends, rows[:, 0], side="right")
    high = np.searchsorted(ranges[:, 0], rows[:, 0] + rows[:, 1], side="left")
    count = np.maximum(high - low, 0).astype(np.uint64)
    row, number = _expand(low.astype(np.uint64), count)
    address, size, place = (rows[row, column] for column in range(3))
    start = np.maximum(ranges[number, 0], address)
    end = np.minimum(ends[number], address + size)
    return row, np.stack([start - address + place, end - start], axis=1)


def _expand(first: Words, count: Words) -> tuple[npt.NDArray[np.intp], Words]:
    """(i, first[i] + k) for each i and each k below count[i]."""
    index = np.repeat(np.arange(len(first)), count.astype(np.intp))
    before = np.repeat(np.cumsum(count) - count, count.astype(np.intp))
    return index, first[index] + (np.arange(len(index), dtype=np.uint64) - before)


def _granules(ranges: Words) -> tuple[Words, Words]:
    """The first granule that each range has a part of, and how many."""
    bits = np.uint64(live.GRANULE_BITS)
    first = ranges[:, 0] >> bits
    last = (ranges[:, 0] + ranges[:, 1] - np.uint64(1)) >> bits
    return first, np.where(ranges[:, 1] > 0, last - first + np.uint64(1), np.uint64(0))


def _in_granules_of(events: Events, rows: Rows) -> Bools:
    """For each row, whether a block of `events` will set a bit in it."""
    blocks = np.stack([events["address"], events["word"] >> EVENT_BITS], axis=1)
    marked = merge(np.stack(_granules(blocks), axis=1))
    first, count = _granules(rows)
    low = np.searchsorted(marked[:, 0] + marked[:, 1], first, side="right")
    return low < np.searchsorted(marked[:, 0], first + count, side="left")


def _has_own_granules(rows: Rows) -> Bools:
    """False where a bit may tell of another allocation: small ones share their granule."""
    aligned: Bools = rows[:, 0] % np.uint64(GRANULE) == 0
    return aligned & (rows[:, 1] >= GRANULE)
