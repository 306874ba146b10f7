"""Active ranges from allocations and a live set, against a model that looks at every granule."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from coordinator.active import GRANULE, Rows, active_ranges, by_block, merge, unknown_bytes
from coordinator.live_set import LiveSet
from flowgpu import live, wire

BASE = 0x2000_0000_0000
UNIT = GRANULE // 4
WORDS = st.integers(0, 2**64 - 1)
LOGGED_AT = 16


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
        values = (magic, live.VERSION, 0, overflow, 0, events, events, 0, 0, 0, 0, *sums)
        os.pwrite(self.fd, live.Header.FORMAT.pack(*values), 0)

    def block(self, address: int, size: int, device: int = 1) -> None:
        slot = np.array([address, size << live.DEVICE_BITS | device], np.uint64)
        # Far from each other, and the last slot among them.
        index = (1 << live.SLOT_BITS) - 1 - 1000 * self.slots
        self.slots += 1
        os.pwrite(self.fd, slot.tobytes(), live.SLOTS_AT + 16 * index)

    def log(self, first: int, *events: tuple[int, int]) -> None:
        """Events (address, word) from number `first` on, of which none is applied."""
        for number, event in enumerate(events, first):
            at = live.LOG_AT + 16 * (number % live.LOG_EVENTS)
            os.pwrite(self.fd, np.array(event, np.uint64).tobytes(), at)
        os.pwrite(self.fd, np.array([first + len(events), first], np.uint64).tobytes(), LOGGED_AT)

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


def rows_of(*rows: tuple[int, ...]) -> Rows:
    """Rows of (address, bytes), or with a place."""
    return np.array([(*row, row[0])[:3] for row in rows], np.uint64).reshape(-1, 3)


def ranges_of(stub: Stub, rows: Rows) -> list[tuple[int, int]]:
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


def test_unknown_is_what_no_allocator_tells_of(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, GRANULE)
    rows = rows_of((BASE, 4 * GRANULE), (BASE + 4 * GRANULE, 100), (BASE + 8 * GRANULE, GRANULE))
    assert unknown_bytes(rows, None) == 5 * GRANULE + 100
    found = stub.open()
    assert unknown_bytes(rows, found) == GRANULE + 100
    stub.header(overflow=1)
    assert unknown_bytes(rows, found) == 5 * GRANULE + 100
    found.close()


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


def given(address: int, size: int, what: int = 0) -> tuple[int, int]:
    return address, size << live.EVENT_BITS | what | 1


def freed(address: int, size: int) -> tuple[int, int]:
    return given(address, size, live.EVENT_FREED)


@pytest.mark.parametrize("first", [0, 3, live.LOG_EVENTS - 2, 10**12 * live.LOG_EVENTS - 1])
def test_the_last_event_of_the_log_decides_on_a_block(stub: Stub, first: int) -> None:
    stub.bits(live.SEEN_AT, BASE, 1)
    for address in (BASE, BASE + 4096, BASE + 8192, BASE + 16384):
        stub.block(address, 512)
    stub.log(
        first,
        freed(BASE, 512),
        freed(BASE + 4096, 512),
        given(BASE + 4096, 1024),
        given(BASE + 8192, 100),  # the block that was there has ended without a word
        given(BASE + 12288, 64),
        freed(BASE + 12288, 64),
        given(BASE + 1024, 128),
    )
    rows = rows_of((BASE, 4 * GRANULE))
    assert ranges_of(stub, rows) == [
        (BASE + 1024, 128),
        (BASE + 4096, 1024),
        (BASE + 8192, 100),
        (BASE + 16384, 512),
    ]


def test_a_full_log_counts_and_an_applied_one_does_not(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, 1)
    events = [given(BASE + 1024 * i, 512) for i in range(live.LOG_EVENTS)]
    stub.log(7, *events)
    rows = rows_of((BASE, 1024 * live.LOG_EVENTS))
    assert ranges_of(stub, rows) == [(address, 512) for address, _ in events]
    stub.log(7 + live.LOG_EVENTS)
    assert ranges_of(stub, rows) == []


def test_the_log_tells_of_memory_that_no_bit_tells_of_yet(stub: Stub) -> None:
    """Also by a block that is gone again, and by one that begins in the row before."""
    rows = rows_of(*((BASE + i * 4 * GRANULE, 4 * GRANULE) for i in range(5)))
    stub.log(
        5,
        given(BASE + 4 * GRANULE, 512),
        freed(BASE + 4 * GRANULE, 512),
        given(BASE + 8 * GRANULE - 1, 2),
        freed(BASE + 12 * GRANULE, 512),  # of no block: says nothing
        given(BASE + 12 * GRANULE - 512, 512),  # ends where the next row begins
        given(BASE + 16 * GRANULE, 0),
    )
    assert ranges_of(stub, rows) == [
        (BASE, 4 * GRANULE),
        (BASE + 8 * GRANULE - 1, 2),
        (BASE + 12 * GRANULE - 512, 512 + 8 * GRANULE),
    ]


def test_what_a_capture_was_given_is_active_from_its_event_on(stub: Stub) -> None:
    stub.bits(live.SEEN_AT, BASE, 8 * GRANULE)
    block = given(BASE + GRANULE, 512, live.EVENT_CAPTURING)
    stub.log(0, block, freed(BASE + GRANULE, 512))
    rows = rows_of((BASE, 4 * GRANULE), (BASE + 4 * GRANULE, 4 * GRANULE))
    assert ranges_of(stub, rows) == [(BASE, 4 * GRANULE)]


@pytest.mark.parametrize("moment", range(5))
def test_a_log_that_is_applied_during_a_look_hides_no_block(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before or after whichever read it happens: log, two bitmaps, slots."""
    stub.log(0, given(BASE, 512))
    real, reads = LiveSet.read, 0

    def read(live_set: LiveSet, start: int, end: int) -> bytes:
        nonlocal reads
        if reads == moment:
            stub.block(BASE, 512)
            stub.bits(live.SEEN_AT, BASE, 1)
            # Applied, and its place written over.
            stub.log(live.LOG_EVENTS, freed(BASE + 512, 8))
        reads += 1
        return real(live_set, start, end)

    monkeypatch.setattr(LiveSet, "read", read)
    assert ranges_of(stub, rows_of((BASE, 2 * GRANULE))) == [(BASE, 512)]
    assert reads == 4


def test_places_that_were_written_over_during_the_look_are_not_looked_at(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block lives on; that its place says something of another one now is no matter."""
    stub.bits(live.SEEN_AT, BASE, 1)
    stub.log(0, given(BASE, 512))
    real = LiveSet.read

    def read(live_set: LiveSet, start: int, end: int) -> bytes:
        found = real(live_set, start, end)
        if start == live.LOG_AT:
            stub.block(BASE, 512)
            stub.log(1, given(BASE + 1024, 8))
            found = np.array(given(BASE + 2048, 8), np.uint64).tobytes() + found[16:]
        return found

    monkeypatch.setattr(LiveSet, "read", read)
    assert ranges_of(stub, rows_of((BASE, GRANULE))) == [(BASE, 512)]


def test_a_log_of_nonsense_is_not_longer_than_its_places(stub: Stub) -> None:
    os.pwrite(stub.fd, np.array([2**64 - 1, 0], np.uint64).tobytes(), LOGGED_AT)
    rows = rows_of((BASE, GRANULE))
    assert ranges_of(stub, rows) == [(BASE, GRANULE)]
    os.pwrite(stub.fd, np.array([0, 2**64 - 1], np.uint64).tobytes(), LOGGED_AT)
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
    stub.header(total=-512, events=5)  # a block was taken back that was never given out
    assert found.live_bytes() is None
    stub.header(overflow=1, total=512, events=6)
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
    blocks = np.array([(7, 0, 100), (3, 100, 100), (4, 200, 100), (5, 1 << 60, 8)], np.uint64)
    expected = [[3, 0, 50], [3, 80, 20], [4, 0, 20], [5, 0, 8]]
    assert by_block(ranges, blocks).tolist() == expected
    assert by_block(ranges[:0], blocks).shape == by_block(ranges, blocks[:0]).shape == (0, 3)


@hypothesis_given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30)), max_size=15),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), max_size=15),
)
def test_split_ranges_are_those_of_a_slow_look(
    ranges: list[tuple[int, int]], blocks: list[tuple[int, int]]
) -> None:
    """Each block for itself, byte by byte; blocks may be anywhere, also over each other."""
    merged = merge(np.array(ranges, np.uint64).reshape(-1, 2))
    rows = np.array([(100 + i, *block) for i, block in enumerate(blocks)], np.uint64)
    found = by_block(merged, rows.reshape(-1, 3)).tolist()
    assert [key for key, _, _ in found] == sorted(key for key, _, _ in found)
    used = {byte for at, size in ranges for byte in range(at, at + size)}
    for i, (address, size) in enumerate(blocks):
        own = [(start, length) for key, start, length in found if key == 100 + i]
        seen = [byte for start, length in own for byte in range(start, start + length)]
        assert seen == [byte for byte in range(size) if address + byte in used]
        assert all(length > 0 for _, length in own)


@hypothesis_given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=20))
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


@hypothesis_given(worlds(), st.integers(0, 12), st.integers(0, 300))
def test_active_ranges_are_those_of_a_simple_model(
    world: tuple[list[tuple[int, int, int]], list[tuple[int, int]], set[int]],
    applied: int,
    first: int,
) -> None:
    """The table has the first `applied` blocks, the log the others; bits likewise."""
    allocations, blocks, whole = world
    stub = Stub()
    seen: set[int] = set()
    logged = []
    in_log: set[int] = set()
    for number, (start, units) in enumerate(dict(blocks).items()):
        granules = {unit // 4 for unit in range(start, start + units)}
        if number < applied:
            stub.block(BASE + start * UNIT, units * UNIT)
        else:
            logged.append(given(BASE + start * UNIT, units * UNIT))
            in_log |= granules
        seen |= granules
    stub.log(first, *logged)
    live_units = {
        unit for start, units in dict(blocks).items() for unit in range(start, start + units)
    }
    # Freed blocks leave their bits.
    seen |= {start // 4 for start, _, kind in allocations if kind == 1}
    for granule in seen - in_log:
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
