"""Plans of dumps and restores, carried out on a dictionary of chunks in place of a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import chunks
from coordinator.chunks import CHUNK, U8, U64, Bools, DumpPlan
from flowgpu.image.chunks import Kind, decode, encode

BASE = 0x7F0000000000
ZERO = bytes(CHUNK)


class Memory:
    """Chunks of a GPU by address, and the kernels on them. `digest_bytes` < 16 makes collisions."""

    def __init__(self, content: list[bytes], digest_bytes: int = 16) -> None:
        self.chunks = {BASE + i * CHUNK: data for i, data in enumerate(content)}
        self.digest_bytes = digest_bytes

    @property
    def where(self) -> U64:
        return np.array(list(self.chunks), np.uint64)

    def digest(self, data: bytes) -> bytes:
        return xxhash.xxh3_128_digest(data)[: self.digest_bytes].ljust(16, b"\0")

    def scan(self, addresses: U64) -> tuple[U8, Bools]:
        found = [self.chunks[int(at)] for at in addresses]
        digests = b"".join(map(self.digest, found))
        zeros = np.array([data == ZERO for data in found], bool)
        return np.frombuffer(digests, np.uint8).reshape(-1, 16), zeros

    def compare(self, left: U64, right: U64) -> Bools:
        pairs = zip(left, right, strict=True)
        return np.array([self.chunks[int(a)] != self.chunks[int(b)] for a, b in pairs], bool)

    def copy(self, sources: U64, destinations: U64) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            self.chunks[int(destination)] = self.chunks[int(source)]

    def fill(self, destinations: U64, pattern: int) -> None:
        for at in destinations:
            self.chunks[int(at)] = pattern.to_bytes(8, "little") * (CHUNK // 8)


class Catalogue:
    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}

    def match(self, digests: U8, first: int) -> U64:
        rows = [row.tobytes() for row in digests]
        found = [self.numbers.setdefault(row, first + i) for i, row in enumerate(rows)]
        return np.array(found, np.uint64)


def store(memory: Memory, plan: DumpPlan) -> bytes:
    """The data file that a copy of the plan's segments makes."""
    data = b""
    for address, size, offset in plan.segments.tolist():
        assert offset == len(data)
        data += b"".join(memory.chunks[address + at] for at in range(0, size, CHUNK))
    return data


def bring_back(data: bytes, plan: DumpPlan, garbage: bytes) -> list[bytes]:
    """Encode the plan, decode it, and fill a fresh memory from the data file."""
    n = len(plan.kind)
    rows = encode(plan.kind, np.zeros(n, np.uint16), plan.slot)
    table = decode(rows, n, [len(data) // CHUNK], 0)
    memory = Memory([garbage] * n)
    fill = chunks.plan_fill(memory.where, table)
    for address, size, offset in itertools.chain(*(r.tolist() for r in fill.reads.values())):
        for at in range(0, size, CHUNK):
            memory.chunks[address + at] = data[offset + at : offset + at + CHUNK]
    memory.copy(*fill.copies)
    memory.fill(fill.zeros, 0)
    assert all(memory.chunks[int(at)] == garbage for at in fill.inactive)
    return list(memory.chunks.values())


def letter(i: int) -> bytes:
    return bytes([i]) * CHUNK


contents = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40)


@settings(deadline=None, max_examples=60)
@given(contents, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([16, 0]))
def test_every_active_chunk_comes_back(
    rows: list[tuple[int, bool]], scan: bool, zero: bool, dedup: bool, digest_bytes: int
) -> None:
    content = [letter(i) for i, _ in rows]
    active = np.array([one for _, one in rows], bool)
    memory = Memory(content, digest_bytes)
    catalogue = Catalogue() if dedup else None
    plan = chunks.plan_dump(memory.where, active, memory if scan else None, catalogue, zero=zero)
    data = store(memory, plan)
    back = bring_back(data, plan, letter(255))
    assert [found for found, one in zip(back, active, strict=True) if one] == [
        data for data, one in zip(content, active, strict=True) if one
    ]
    if scan:
        stored = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        assert plan.digests is not None
        assert plan.digests.tobytes() == b"".join(map(memory.digest, stored))
        kept = {i for i, one in rows if one and i}
        assert plan.sizes.active >= plan.sizes.nonzero >= plan.sizes.distinct
        if dedup and zero and digest_bytes:
            assert sorted(stored) == sorted(map(letter, kept))
            assert plan.sizes.distinct == len(kept) * CHUNK


def test_chunks_of_one_digest_that_differ_are_both_stored() -> None:
    memory = Memory([letter(1), letter(2), letter(1), letter(2)], digest_bytes=0)
    plan = chunks.plan_dump(memory.where, np.ones(4, bool), memory, Catalogue())
    assert list(plan.kind) == [Kind.STORED, Kind.STORED, Kind.SHARED, Kind.STORED]
    assert list(plan.slot) == [0, 1, 0, 2]
    assert bring_back(store(memory, plan), plan, ZERO) == list(memory.chunks.values())


def test_segments_follow_addresses_and_slots() -> None:
    where = chunks.addresses([(BASE, 3 * CHUNK), (BASE + 8 * CHUNK, 2 * CHUNK)])
    slots = np.array([0, 1, 5, 6, 7], np.uint64)
    assert chunks.segments(where, slots).tolist() == [
        [BASE, 2 * CHUNK, 0],
        [BASE + 2 * CHUNK, CHUNK, 5 * CHUNK],
        [BASE + 8 * CHUNK, 2 * CHUNK, 6 * CHUNK],
    ]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ({}, "00000000"),
        ({0: [(0, 1)]}, "10000000"),
        ({0: [(CHUNK - 1, 2)]}, "11000000"),
        ({1: [(0, 4 * CHUNK)]}, "00001111"),
        ({0: [(3 * CHUNK, CHUNK)], 1: [(CHUNK, 1), (CHUNK + 9, 1)]}, "00010100"),
        ({1: [(5, 0)]}, "00000000"),
    ],
)
def test_a_chunk_is_active_when_a_byte_of_it_is(
    ranges: dict[int, list[tuple[int, int]]], expected: str
) -> None:
    found = chunks.active_chunks([4 * CHUNK, 4 * CHUNK], ranges)
    assert "".join(str(int(one)) for one in found) == expected


def test_a_job_without_memory_has_an_empty_plan() -> None:
    memory = Memory([])
    plan = chunks.plan_dump(memory.where, chunks.active_chunks([], {}), memory, Catalogue())
    assert (len(plan.segments), len(plan.kind), plan.sizes.active) == (0, 0, 0)
