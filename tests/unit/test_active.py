"""Active ranges from allocations and a live set, against a model that looks at every granule."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import active
from coordinator.active import GRANULE, LiveSet, active_ranges, by_block, merge
from flowgpu import live, wire

BASE = 0x2000_0000_0000
UNIT = GRANULE // 4
WORDS = st.integers(0, 2**64 - 1)


@dataclass
class Stub:
    """Writes a live set as the stub does, with blocks in any slot."""

    fd: int = field(default_factory=lambda: os.memfd_create("live"))
    slots: int = 0

    def __post_init__(self) -> None:
        os.ftruncate(self.fd, live.BYTES)
        self.header()

    def header(
        self, magic: int = live.MAGIC, overflow: int = 0, total: int = 0, events: int = 0
    ) -> None:
        sums = [0] * live.DEVICES
        sums[1], sums[live.NO_DEVICE] = total // 2, total - total // 2
        values = (magic, live.VERSION, 0, overflow, 0, events, 0, *sums)
        os.pwrite(self.fd, live.Header.FORMAT.pack(*values), 0)

    def block(self, address: int, size: int, device: int = 1) -> None:
        slot = np.array([address, size << live.DEVICE_BITS | device], np.uint64)
        # Far from each other, and the last slot among them.
        index = (1 << live.SLOT_BITS) - 1 - 1000 * self.slots
        self.slots += 1
        os.pwrite(self.fd, slot.tobytes(), live.SLOTS_AT + 16 * index)

    def bits(self, at: int, address: int, size: int) -> None:
        for granule in range(address // GRANULE, (address + size - 1) // GRANULE + 1):
            byte = os.pread(self.fd, 1, at + granule // 8)[0] | 1 << granule % 8
            os.pwrite(self.fd, bytes([byte]), at + granule // 8)

    def open(self) -> LiveSet:
        return LiveSet(os.dup(self.fd))


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    os.close(made.fd)


def rows_of(*rows: tuple[int, ...]) -> active.Rows:
    """Rows of (address, bytes), or with a place."""
    return np.array([(*row, row[0])[:3] for row in rows], np.uint64).reshape(-1, 3)


def ranges_of(stub: Stub, rows: active.Rows) -> list[tuple[int, int]]:
    found = stub.open()
    try:
        return [(int(a), int(n)) for a, n in active_ranges(rows, found)]
    finally:
        found.close()


def test_without_a_live_set_everything_is_active() -> None:
    rows = rows_of((BASE, 100), (BASE + 512, 5 * GRANULE))
    assert active_ranges(rows, None).tolist() == [[BASE, 100], [BASE + 512, 5 * GRANULE]]
    assert active_ranges(rows_of(), None).shape == (0, 2)


def test_only_live_blocks_of_a_known_allocation_are_active(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, GRANULE)
    stub.block(BASE + 512, 1024)
    stub.block(BASE + 1536, 512)
    stub.block(BASE + 8 * GRANULE - 512, 4096)  # its end is in no allocation
    stub.block(0x7F00_0000_0000, 1 << 20, live.NO_DEVICE)  # host memory
    rows = rows_of((BASE, 8 * GRANULE), (BASE + 8 * GRANULE + 4096, 7))
    assert ranges_of(stub, rows) == [
        (BASE + 512, 1536),
        (BASE + 8 * GRANULE - 512, 512),
        (BASE + 8 * GRANULE + 4096, 7),
    ]


def test_an_allocation_that_no_allocator_has_used_is_active(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE - GRANULE, GRANULE)
    stub.bits(live.SEEN_AT, BASE + 4 * GRANULE, GRANULE)
    assert ranges_of(stub, rows_of((BASE, 4 * GRANULE))) == [(BASE, 4 * GRANULE)]


def test_a_bit_in_the_last_granule_is_enough(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE + 3 * GRANULE, 1)
    assert ranges_of(stub, rows_of((BASE, 3 * GRANULE + 1))) == []


def test_small_allocations_are_active_as_they_share_their_granule(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, GRANULE)
    stub.block(BASE, 512)
    rows = rows_of((BASE, 1024), (BASE + 1024, GRANULE - 1024))
    assert ranges_of(stub, rows) == [(BASE, GRANULE)]


def test_memory_of_graphs_is_active_as_a_whole(stub: Stub) -> None:
    for at in (live.SEEN_AT, live.WHOLE_AT):
        stub.bits(at, BASE + GRANULE, 1)
    stub.bits(live.SEEN_AT, BASE + 4 * GRANULE, 1)
    rows = rows_of((BASE, 2 * GRANULE), (BASE + 4 * GRANULE, GRANULE))
    assert ranges_of(stub, rows) == [(BASE, 2 * GRANULE)]


def test_after_an_overflow_everything_is_active(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, GRANULE)
    rows = rows_of((BASE, GRANULE))
    assert ranges_of(stub, rows) == []
    stub.header(overflow=1)
    assert ranges_of(stub, rows) == [(BASE, GRANULE)]


def test_mappings_of_one_handle_are_active_where_any_of_them_is(stub: Stub) -> None:
    place = 1 << 60
    other = BASE + 64 * GRANULE
    stub.bits(live.SEEN_AT, BASE, GRANULE)
    stub.bits(live.SEEN_AT, other, GRANULE)
    stub.block(BASE + 100, 200)
    stub.block(other + 250, 100)
    rows = rows_of((BASE, GRANULE, place), (other, GRANULE, place))
    assert ranges_of(stub, rows) == [(place + 100, 250)]


def test_what_is_mapped_nowhere_is_active(stub: Stub) -> None:
    place = (1 << 60) + 8 * GRANULE
    assert ranges_of(stub, rows_of((place, GRANULE, place))) == [(place, GRANULE)]


def test_the_live_bytes_are_those_of_all_devices(stub: Stub) -> None:
    found = stub.open()
    assert found.live_bytes() is None  # no framework has asked for memory yet
    stub.header(total=(1 << 40) + 3, events=2)
    assert found.live_bytes() == (1 << 40) + 3
    stub.header(events=4)
    assert found.live_bytes() == 0
    stub.header(overflow=1, total=512, events=5)
    assert found.live_bytes() is None
    found.close()


def test_a_look_makes_no_memory_of_holes(stub: Stub) -> None:
    before = os.fstat(stub.fd).st_blocks
    rows = rows_of(*((BASE + i * (1 << 40), 4 * GRANULE) for i in range(8)))
    assert len(ranges_of(stub, rows)) == 8
    assert os.fstat(stub.fd).st_blocks == before


def test_another_file_is_refused_and_closed(stub: Stub) -> None:
    stub.header(magic=1)
    for size in (live.BYTES, 4096):
        os.ftruncate(stub.fd, size)
        fd = os.dup(stub.fd)
        with pytest.raises(wire.WireError):
            LiveSet(fd)
        with pytest.raises(OSError):
            os.fstat(fd)


def test_a_set_is_closed_once(stub: Stub) -> None:
    found = stub.open()
    found.close()
    found.close()


def test_ranges_are_split_by_blocks() -> None:
    ranges = merge(np.array([[100, 50], [180, 40], [1 << 60, 9]], np.uint64))
    blocks = [(7, 0, 100), (3, 100, 100), (4, 200, 100), (5, 1 << 60, 8)]
    assert by_block(ranges, blocks) == {3: [(0, 50), (80, 20)], 4: [(0, 20)], 5: [(0, 8)]}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20))
def test_merged_ranges_have_the_same_bytes_and_do_not_touch(pairs: list[tuple[int, int]]) -> None:
    merged = merge(np.array(pairs, np.uint64).reshape(-1, 2)).tolist()
    assert {b for a, n in merged for b in range(a, a + n)} == {
        b for a, n in pairs for b in range(a, a + n)
    }
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(merged))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], set[int]]:
    """Allocations (start, units, kind), blocks (start, units), in quarters of a granule."""
    allocations = []
    at = 0
    for _ in range(draw(st.integers(0, 6))):
        at = -(-at // 4) * 4 + 4 * draw(st.integers(0, 2))
        units = draw(st.integers(1, 14))
        allocations.append((at, units, draw(st.integers(0, 2))))
        at += units
    blocks = draw(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=12))
    bits = draw(st.sets(st.integers(0, 24), max_size=3))
    return allocations, blocks, bits


@given(worlds())
def test_active_ranges_are_those_of_a_simple_model(
    world: tuple[list[tuple[int, int, int]], list[tuple[int, int]], set[int]],
) -> None:
    allocations, blocks, whole = world
    stub = Stub()
    seen: set[int] = set()
    for start, units in dict(blocks).items():
        stub.block(BASE + start * UNIT, units * UNIT)
        seen |= {unit // 4 for unit in range(start, start + units)}
    live_units = {
        unit for start, units in dict(blocks).items() for unit in range(start, start + units)
    }
    # Freed blocks leave their bits.
    seen |= {start // 4 for start, _, kind in allocations if kind == 1}
    for granule in seen:
        stub.bits(live.SEEN_AT, BASE + granule * GRANULE, 1)
    for granule in whole:
        stub.bits(live.WHOLE_AT, BASE + granule * GRANULE, 1)
    wanted: set[int] = set()
    for start, units, _ in allocations:
        own = set(range(start, start + units))
        granules = {unit // 4 for unit in own}
        known = units >= 4 and granules & seen and not granules & whole
        wanted |= own & live_units if known else own
    rows = rows_of(*((BASE + s * UNIT, n * UNIT) for s, n, _ in allocations))
    found = ranges_of(stub, rows)
    os.close(stub.fd)
    units_found = {
        (a - BASE) // UNIT + i for a, n in found for i in range(n // UNIT) if not a % UNIT
    }
    assert units_found == wanted
    assert sum(n for _, n in found) == len(wanted) * UNIT
