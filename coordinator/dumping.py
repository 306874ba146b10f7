"""Which chunks of a job's memory a dump stores, and where the others are found instead.

Equal chunks are found by digest, in a catalogue that numbers each distinct one: first those that
linked extents have, then those of the GPUs, in order. Where a chunk may share the place of another
is stated in docs/reference/image-format.md (Sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coordinator.chunks import (
    CHUNK,
    U8,
    U64,
    Bools,
    Catalogue,
    Kernels,
    Numbers,
    Segments,
    segments,
)
from flowgpu.image.chunks import Kind
from flowgpu.image.linked import NOT_TAKEN, Linked


@dataclass(frozen=True)
class Sizes:
    """Bytes of one GPU, each a part of the one before; what an earlier GPU has is not distinct."""

    active: int
    nonzero: int
    distinct: int


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
        """Whether each is new; it is known from then on."""
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
    sizes = []
    for memory in memories:
        count = len(memory.found)
        if memory.digests is not None:
            count = int(np.count_nonzero(known.fresh(memory.digests)))
        sizes.append(count * CHUNK)
    return sizes


@dataclass(frozen=True)
class _Groups:
    """The chunks of one GPU's scan, in groups of one digest."""

    numbers: Numbers
    leader: Numbers  # the first of its group, of each
    alone: Numbers  # those that differ from their leader: digests that collide
    first: int  # number of the first chunk, were it new

    @property
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
    groups = [_group(memory, known) for memory in memories]
    homes = _Homes(known, groups, gpus)
    plans = []
    for memory, group, index in zip(memories, groups, own, strict=True):
        if group is None:
            plans.append(_store_all(memory, index))
        else:
            plans.append(homes.place(memory, group, index))
    return plans


def _group(memory: Scan, known: Known) -> _Groups | None:
    if memory.digests is None or memory.kernels is None:
        return None
    first = known.count
    numbers = known.match(memory.digests)
    leader = numbers - first
    before = np.flatnonzero(leader < 0)
    # The earliest of each number stays: assigned last, as numpy keeps the last of equal indices.
    earliest = np.empty(first if len(before) else 0, np.int64)
    earliest[numbers[before[::-1]]] = before[::-1]
    leader[before] = earliest[numbers[before]]
    followers = np.flatnonzero(leader != np.arange(len(leader)))
    where = memory.where[memory.found]
    differ = memory.kernels.compare(where[followers], where[leader[followers]])
    return _Groups(numbers, leader, followers[differ], first)


class _Homes:
    """Where the chunk of each number is, as far as that is known: in links, then in each GPU."""

    def __init__(self, known: Known, groups: Sequence[_Groups | None], gpus: int) -> None:
        self._extent = np.full(known.count, NOT_TAKEN, np.uint16)
        self._slot = np.zeros(known.count, np.uint64)
        self._seen = np.zeros(known.count, np.bool_)
        # A digest of which different chunks are known says nothing of chunks that are not compared.
        self._shut = np.zeros(known.count, np.bool_)
        self._shut[known.ambiguous] = True
        for group in filter(None, groups):
            self._shut[group.numbers[group.alone]] = True
        if known.linked is None:
            return
        wanted = np.zeros(known.links, np.bool_)
        new = 0
        for group in filter(None, groups):
            leaders = group.numbers[group.leads]
            linked = leaders[leaders < known.links]
            wanted[linked[~self._shut[linked]]] = True
            new += int(np.count_nonzero(leaders >= group.first)) + len(group.alone)
        link, slot = known.linked.place(np.arange(known.links, dtype=np.uint64))
        extents = known.linked.settle([(link[wanted], slot[wanted])], gpus, new)
        self._extent[: known.links] = extents[link]
        self._slot[: known.links] = slot

    def place(self, memory: Scan, group: _Groups, own: int) -> DumpPlan:
        """The plan of one GPU; what it stores is a home for the next ones."""
        numbers, leader, leads = group.numbers, group.leader, group.leads
        alone = np.zeros(len(numbers), np.bool_)
        alone[group.alone] = True
        away = (self._extent[numbers] != NOT_TAKEN) & ~self._shut[numbers]
        stored = (leads & ~away) | alone
        slots = (np.cumsum(stored) - 1).astype(np.uint64)
        places = slots[np.where(alone, np.arange(len(leader)), leader)]
        distinct = stored | (leads & ~self._seen[numbers])
        self._seen[numbers] = True
        plan = _plan(
            memory,
            stored=stored,
            extent=np.where(away, self._extent[numbers], own).astype(np.uint16),
            slot=np.where(away, self._slot[numbers], places),
            distinct=int(np.count_nonzero(distinct & ~memory.zeros)),
        )
        kept = stored & leads
        self._extent[numbers[kept]] = own
        self._slot[numbers[kept]] = slots[kept]
        return plan


def _store_all(memory: Scan, own: int) -> DumpPlan:
    count = len(memory.found)
    return _plan(
        memory,
        stored=np.ones(count, np.bool_),
        extent=np.full(count, own, np.uint16),
        slot=np.arange(count, dtype=np.uint64),
        distinct=memory.nonzero,
    )


def _plan(memory: Scan, *, stored: Bools, extent: Numbers, slot: U64, distinct: int) -> DumpPlan:
    """The plan of all chunks, from what is decided for those found."""
    found, digests = memory.found, memory.digests
    if not stored.all():
        found, digests = found[stored], None if digests is None else digests[stored]
    where = memory.where[found]
    active = int(np.count_nonzero(memory.active))
    return DumpPlan(
        segments(where, np.arange(len(where), dtype=np.uint64)),
        digests,
        Sizes(active * CHUNK, memory.nonzero * CHUNK, distinct * CHUNK),
        memory,
        stored,
        extent,
        slot,
    )
