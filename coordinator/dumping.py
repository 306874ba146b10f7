"""Which chunks of a job's memory a dump stores, and where the others are found instead.

Equal chunks are found by digest, in a catalogue that numbers each distinct one: first those that
linked extents have, then those of the GPUs, in order. Where a chunk may share the place of another
is stated in docs/reference/image-format.md (Sharing).

A chunk that several GPUs have, such as a parameter of ranks that train one model together, is
stored by one of them. They share that work evenly (coordinator/spreading.py), so that the bytes
leave over the links of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coordinator import spreading
from coordinator.chunks import (
    CHUNK,
    U8,
    U64,
    Bools,
    Catalogue,
    Kernels,
    Numbers,
    Segments,
    at_once,
    segments,
)
from flowgpu.image.chunks import Kind
from flowgpu.image.linked import NOT_TAKEN, Linked


@dataclass(frozen=True)
class Sizes:
    """Bytes of one GPU, each but the last a part of the one before.

    What an earlier GPU has is not distinct, but replicated.
    """

    active: int
    nonzero: int
    distinct: int
    replicated: int


@dataclass(frozen=True)
class Scan:
    """The memory of one GPU as the kernels saw it; without kernels there are no digests."""

    where: U64  # of all chunks
    active: Bools  # of all chunks
    found: Numbers  # chunks that may be stored: active ones, without zeros where those are left out
    digests: U8 | None  # of these
    zeros: Bools  # of these
    nonzero: int
    kernels: Kernels | None


@dataclass(frozen=True)
class DumpPlan:
    """The copy that stores what is to be stored of one GPU, and what becomes of each chunk.

    The copy needs the segments alone, and a pause waits for it: the rows of all chunks are made
    when they are asked for.
    """

    segments: Segments
    digests: U8 | None  # one a slot; None: the copy makes them
    sizes: Sizes
    _memory: Scan
    _stored: Bools  # of the chunks found, as the next two
    _extent: Numbers
    _slot: U64

    @cached_property
    def kind(self) -> U8:
        kind = np.where(self._memory.active, Kind.ZERO, Kind.INACTIVE).astype(np.uint8)
        kind[self._memory.found] = np.where(self._stored, Kind.STORED, Kind.SHARED)
        return kind

    @cached_property
    def extent(self) -> Numbers:
        return self._of_all(self._extent)

    @cached_property
    def slot(self) -> U64:
        return self._of_all(self._slot)

    def _of_all(self, values: Numbers) -> Numbers:
        result = np.zeros(len(self._memory.where), values.dtype)
        result[self._memory.found] = values
        return result


class Known:
    """The catalogue of one dump. `linked` is settled by the plan."""

    def __init__(self, catalogue: Catalogue, linked: Linked | None = None) -> None:
        self.catalogue, self.linked = catalogue, linked
        self.links = 0 if linked is None else len(linked.digests)
        self.ambiguous = np.empty(0, np.int64)
        if linked is not None:
            numbers = catalogue.match(linked.digests, 0).astype(np.int64)
            self.ambiguous = numbers[numbers != np.arange(self.links)]
        self.count = self.links

    def match(self, digests: U8) -> Numbers:
        """The number of each; new ones are counted on from those that are known."""
        numbers = self.catalogue.match(digests, self.count).astype(np.int64)
        self.count += len(numbers)
        return numbers

    def fresh(self, digests: U8) -> Bools:
        """True for each digest that is new; the catalogue knows it from then on."""
        first = self.count
        found: Bools = self.match(digests) == first + np.arange(len(digests))
        return found


def scan(where: U64, active: Bools, kernels: Kernels | None, *, zero: bool) -> Scan:
    """Look at the chunks at `where`; `zero`: leave those of zeros out."""
    found = np.flatnonzero(active)
    if kernels is None:
        return Scan(where, active, found, None, np.zeros(len(found), np.bool_), len(found), None)
    digests, zeros = kernels.scan(where[found])
    nonzero = len(found) - int(np.count_nonzero(zeros))
    if zero and nonzero < len(found):
        found, digests, zeros = found[~zeros], digests[~zeros], zeros[~zeros]
    return Scan(where, active, found, digests, zeros, nonzero, kernels)


def new_bytes(memories: Sequence[Scan], known: Known) -> list[int]:
    """About what a dump would store of each GPU; nothing is compared or settled."""
    groups = _group_all(memories, known, compare=False)
    homes = _Homes(known, groups)
    # What a link has stays there, as far as is known here.
    homes.take(np.zeros(known.links, np.uint16), np.zeros(known.links, np.uint64))
    shares = homes.spread(range(len(memories)))
    return [
        (len(memory.found) if group is None else share) * CHUNK
        for memory, group, share in zip(memories, groups, shares, strict=True)
    ]


@dataclass(frozen=True)
class _Groups:
    """The chunks of one GPU's scan, in groups of one digest."""

    gpu: int  # its place among the scans
    numbers: Numbers
    leader: Numbers  # the first of its group, of each
    alone: Numbers  # those that differ from their leader: digests that collide
    first: int  # number of the first chunk, were it new

    @cached_property
    def leads(self) -> Bools:
        found: Bools = self.leader == np.arange(len(self.leader))
        return found


def plan_dump(
    memories: Sequence[Scan], known: Known | None, gpus: int, own: Sequence[int]
) -> list[DumpPlan]:
    """Decide for each chunk of GPUs whose extents have the numbers `own`, of an image of `gpus`.

    Without `known` no chunk is shared.
    """
    if known is None:
        return [_store_all(memory, index) for memory, index in zip(memories, own, strict=True)]
    groups = _group_all(memories, known, compare=True)
    homes = _Homes(known, groups)
    homes.settle(gpus)
    homes.spread(own)

    def place(memory: Scan, group: _Groups | None, index: int) -> _Placed | None:
        return None if group is None else homes.place(group, index)

    def plan(memory: Scan, group: _Groups | None, index: int, placed: _Placed | None) -> DumpPlan:
        if group is None or placed is None:
            return _store_all(memory, index)
        return homes.plan(memory, group, index, placed)

    placed = at_once(place, memories, groups, own)
    return at_once(plan, memories, groups, own, placed)


def _group_all(memories: Sequence[Scan], known: Known, *, compare: bool) -> list[_Groups | None]:
    # The memories come in order, because a number says who was first.
    firsts, numbers = [], []
    for memory in memories:
        firsts.append(known.count)
        numbers.append(None if memory.digests is None else known.match(memory.digests))

    def group(gpu: int, memory: Scan, first: int, numbers: Numbers | None) -> _Groups | None:
        return None if numbers is None else _group(gpu, memory, first, numbers, compare)

    return at_once(group, range(len(memories)), memories, firsts, numbers)


def _group(gpu: int, memory: Scan, first: int, numbers: Numbers, compare: bool) -> _Groups:
    leader = numbers - first
    before = np.flatnonzero(leader < 0)
    # The earliest of each number stays: assigned last, as numpy keeps the last of equal indices.
    earliest = np.empty(first if len(before) else 0, np.int64)
    earliest[numbers[before[::-1]]] = before[::-1]
    leader[before] = earliest[numbers[before]]
    followers = np.flatnonzero(leader != np.arange(len(leader)))
    if not compare or memory.kernels is None:
        return _Groups(gpu, numbers, leader, followers[:0], first)
    where = memory.where[memory.found]
    differ = memory.kernels.compare(where[followers], where[leader[followers]])
    return _Groups(gpu, numbers, leader, followers[differ], first)


@dataclass(frozen=True)
class _Placed:
    """What one GPU stores of its chunks found."""

    stored: Bools
    alone: Bools
    slots: U64  # of each that is stored


class _Homes:
    """Where the chunk of each number is: in a link, or in the extent of one GPU that has it."""

    def __init__(self, known: Known, groups: Sequence[_Groups | None]) -> None:
        self._known, self._gpus = known, len(groups)
        self._groups = [group for group in groups if group is not None]
        self._extent = np.full(known.count, NOT_TAKEN, np.uint16)
        self._slot = np.zeros(known.count, np.uint64)
        # A digest of which different chunks are known says nothing of chunks that are not compared.
        self._shut = np.zeros(known.count, np.bool_)
        self._shut[known.ambiguous] = True
        for group in self._groups:
            self._shut[group.numbers[group.alone]] = True
        self._any_shut = bool(self._shut.any())
        self._finder = np.zeros(known.links, np.uint16)  # first GPU that has it, of what links have

    def settle(self, gpus: int) -> None:
        """Keep those links that are worth it."""
        linked, links = self._known.linked, self._known.links
        if linked is None:
            return
        wanted = np.zeros(links, np.bool_)
        new = 0
        for group in reversed(self._groups):
            leaders = group.numbers[group.leads]
            found = leaders[leaders < links]
            self._finder[found] = group.gpu
            wanted[found[~self._shut[found]]] = True
            new += int(np.count_nonzero(leaders >= group.first)) + len(group.alone)
        link, slot = linked.place(np.arange(links, dtype=np.uint64))
        extents = linked.settle([(link[wanted], slot[wanted])], gpus, new)
        self.take(extents[link], slot)

    def take(self, extent: Numbers, slot: U64) -> None:
        """Where the chunks are that links have."""
        self._extent[: len(extent)], self._slot[: len(slot)] = extent, slot

    def spread(self, own: Sequence[int]) -> list[int]:
        """Choose who stores what several GPUs have. Gives how many chunks each stores."""
        having = np.zeros(len(self._extent), spreading.mask_type(self._gpus))
        loads = [0] * self._gpus

        def mark(group: _Groups) -> Numbers:
            leaders = group.numbers[group.leads]
            if self._any_shut:
                shut = int(np.count_nonzero(self._shut[leaders]))
                loads[group.gpu] = shut + len(group.alone)
            marks = np.zeros_like(having)
            marks[leaders] = 1 << group.gpu
            return marks

        for marks in at_once(mark, self._groups):
            having |= marks
        having[(self._extent != NOT_TAKEN) | self._shut] = 0
        several, chosen = spreading.spread(having, loads)
        self._extent[several] = np.asarray(own, np.uint16)[chosen]
        return loads

    def place(self, group: _Groups, own: int) -> _Placed:
        """Give the chunks that a GPU stores their slots; it is one that has them."""
        numbers = group.numbers
        alone = np.zeros(len(numbers), np.bool_)
        alone[group.alone] = True
        home = self._extent[numbers]
        # Nobody else has what has no home yet, or it says nothing.
        here = group.leads & ((home == own) | (home == NOT_TAKEN) | self._is_shut(numbers))
        stored = here | alone
        slots = (np.cumsum(stored) - 1).astype(np.uint64)
        kept = np.flatnonzero(here & ~self._is_shut(numbers))
        self._extent[numbers[kept]] = own
        self._slot[numbers[kept]] = slots[kept]
        return _Placed(stored, alone, slots)

    def _is_shut(self, numbers: Numbers) -> Bools:
        found: Bools = self._shut[numbers] if self._any_shut else np.zeros(1, np.bool_)
        return found

    def plan(self, memory: Scan, group: _Groups, own: int, placed: _Placed) -> DumpPlan:
        """The plan of one GPU, once all chunks have their places."""
        numbers, shut = group.numbers, self._is_shut(group.numbers)
        extent, slot = self._extent[numbers], self._slot[numbers]
        if self._any_shut:
            first = np.where(placed.alone, np.arange(len(numbers)), group.leader)
            extent, slot = np.where(shut, own, extent), np.where(shut, placed.slots[first], slot)
        new = (numbers >= group.first) | shut
        if self._known.links:
            linked = numbers < self._known.links
            new[linked] |= self._finder[numbers[linked]] == group.gpu
        distinct = (group.leads & new) | placed.alone
        replicated = int(np.count_nonzero(group.leads & ~new))
        return _plan(
            memory,
            stored=placed.stored,
            extent=extent.astype(np.uint16),
            slot=slot,
            distinct=int(np.count_nonzero(distinct & ~memory.zeros)),
            replicated=replicated,
        )


def _store_all(memory: Scan, own: int) -> DumpPlan:
    count = len(memory.found)
    return _plan(
        memory,
        stored=np.ones(count, np.bool_),
        extent=np.full(count, own, np.uint16),
        slot=np.arange(count, dtype=np.uint64),
        distinct=memory.nonzero,
    )


def _plan(
    memory: Scan,
    *,
    stored: Bools,
    extent: Numbers,
    slot: U64,
    distinct: int,
    replicated: int = 0,
) -> DumpPlan:
    """The plan of all chunks, from what is decided for those found."""
    found, digests = memory.found, memory.digests
    if not stored.all():
        found, digests = found[stored], None if digests is None else digests[stored]
    where = memory.where[found]
    active = int(np.count_nonzero(memory.active))
    return DumpPlan(
        segments(where, np.arange(len(where), dtype=np.uint64)),
        digests,
        Sizes(active * CHUNK, memory.nonzero * CHUNK, distinct * CHUNK, replicated * CHUNK),
        memory,
        stored,
        extent,
        slot,
    )
