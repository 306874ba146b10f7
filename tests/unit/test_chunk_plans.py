"""Plans of dumps and restores, carried out on a dictionary of chunks in place of a GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import chunks, dumping, spreading
from coordinator.chunks import CHUNK, U8, U64, Bools
from coordinator.dumping import DumpPlan, Known
from flowgpu.image import layout
from flowgpu.image.chunks import Kind, decode, encode, replicated
from flowgpu.image.linked import Linked

BASE = 0x7F0000000000
ZERO = bytes(CHUNK)
NO_PARTS = np.empty((0, 3), np.uint64)


class Memory:
    """Chunks of a GPU by address, and the kernels on them. `digest_bytes` < 16 makes collisions."""

    def __init__(self, content: list[bytes], digest_bytes: int = 16, *, start: int = BASE) -> None:
        self.chunks = {start + i * CHUNK: data for i, data in enumerate(content)}
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


def letter(i: int) -> bytes:
    return bytes([i]) * CHUNK


class Series:
    """Images one after another, each of which is checked to bring everything back."""

    def __init__(self, gpus: int = 1) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flowgpu-series-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.gpus, self.turn = gpus, 0
        self.read: list[int] = []

    @property
    def image(self) -> Path:
        return self.folder / str(self.turn)

    def extents(self) -> list[Path]:
        own = [self.image / layout.gpu_data(number) for number in range(self.gpus)]
        return own + sorted(self.image.glob("link*.data"), key=lambda path: int(path.stem[4:]))

    def dump(
        self,
        memories: Sequence[Memory],
        active: Sequence[Bools] | None = None,
        *,
        scanned: Sequence[bool] = (True,) * 8,
        zero: bool = True,
        dedup: bool = True,
    ) -> list[DumpPlan]:
        """Take an image on the one before."""
        before = [path for path in self.extents() if path.exists() and path.stat().st_size]
        self.turn += 1
        self.image.mkdir()
        for number, path in enumerate(before if dedup else []):
            os.link(path, self.image / layout.link_data(number))
            os.link(path.with_suffix(".digests"), self.image / layout.link_digests(number))
        masks = active or [np.ones(len(memory.chunks), bool) for memory in memories]
        scans = [
            dumping.scan(memory.where, mask, memory if scan else None, zero=zero)
            for memory, mask, scan in zip(memories, masks, scanned, strict=False)
        ]
        known = Known(Catalogue(), Linked(self.image)) if dedup else None
        plans = dumping.plan_dump(scans, known, self.gpus, range(self.gpus))
        for memory, plan, path in zip(memories, plans, self.extents(), strict=False):
            data = b""
            for address, size, offset in plan.segments.tolist():
                assert offset == len(data)
                data += b"".join(memory.chunks[address + at] for at in range(0, size, CHUNK))
            path.write_bytes(data)
            stored = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
            digests = b"".join(map(memory.digest, stored))
            assert plan.digests is None or plan.digests.tobytes() == digests
            path.with_suffix(".digests").write_bytes(digests)
        everybody = list(range(self.gpus))
        for groups in ([everybody], [[one] for one in everybody], [everybody[:2], everybody[2:]]):
            found = self.bring_back(plans, groups)
            for memory, mask, plan, back in zip(memories, masks, plans, found, strict=True):
                content = list(memory.chunks.values())
                assert [one for one, used in zip(back, mask, strict=True) if used] == [
                    one for one, used in zip(content, mask, strict=True) if used
                ]
                assert plan.sizes.active >= plan.sizes.nonzero >= plan.sizes.distinct
        named = [plan.extent[plan.kind >= Kind.STORED] for plan in plans]
        links = set(range(self.gpus, len(self.extents())))
        assert links <= set(np.concatenate(named).tolist()), "a link that nobody needs"
        return plans

    def bring_back(
        self, plans: Sequence[DumpPlan], groups: Sequence[Sequence[int]]
    ) -> list[list[bytes]]:
        """Encode the plans, decode them, and fill fresh memories from the extents."""
        data = [path.read_bytes() for path in self.extents()]
        garbage = letter(255)
        memories, gpus = [], []
        for own, plan in enumerate(plans):
            rows = encode(plan.kind, plan.extent, plan.slot)
            table = decode(rows, len(plan.kind), [len(one) // CHUNK for one in data], own)
            memories.append(Memory([garbage] * len(plan.kind), start=BASE + (own << 36)))
            gpus.append((memories[-1].where, table))
        once = replicated([table for _, table in gpus]) * CHUNK
        assert once == sum(plan.sizes.replicated for plan in plans)
        fills = chunks.plan_fills(gpus, groups)
        self.read = [sum(int(rows[:, 1].sum()) for rows in fill.reads.values()) for fill in fills]
        for group in groups:
            taken = [
                (extent, at)
                for number in group
                for extent, rows in fills[number].reads.items()
                for _, size, offset in rows.tolist()
                for at in range(offset, offset + size, CHUNK)
            ]
            assert len(taken) == len(set(taken)), "a slot is read twice"
        for memory, fill in zip(memories, fills, strict=True):
            for extent, segments in fill.reads.items():
                for address, size, offset in segments.tolist():
                    for at in range(0, size, CHUNK):
                        memory.chunks[address + at] = data[extent][offset + at :][:CHUNK]
        at_first = {at: one for memory in memories for at, one in memory.chunks.items()}
        for memory, fill in zip(memories, fills, strict=True):
            passed = fill.passed
            places = list(zip(passed.extents.tolist(), passed.slots.tolist(), strict=True))
            assert len(places) == len({*places}), "a slot is passed on twice"
            ways = zip(passed.sources.tolist(), passed.addresses.tolist(), strict=True)
            for (source, to), (extent, slot) in zip(ways, places, strict=True):
                assert at_first[source] == data[extent][slot * CHUNK :][:CHUNK]
                assert to in memory.chunks
                memory.chunks[to] = at_first[source]
            memory.copy(*fill.copies)
            memory.fill(fill.zeros, 0)
            assert all(memory.chunks[int(at)] == garbage for at in fill.inactive)
        return [list(memory.chunks.values()) for memory in memories]


def stored(plans: Sequence[DumpPlan]) -> list[int]:
    """Chunks that each GPU stores."""
    return [int(np.count_nonzero(plan.kind == Kind.STORED)) for plan in plans]


def letters(*numbers: int, digest_bytes: int = 16) -> Memory:
    return Memory([letter(number) for number in numbers], digest_bytes)


contents = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(contents, contents), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([16, 16, 0]),
)
def test_every_active_chunk_comes_back(
    turns: list[Any], scanned: list[bool], zero: bool, dedup: bool, digest_bytes: int
) -> None:
    if not digest_bytes:
        # All collide: only within what was compared can they be told apart.
        turns = [(first, []) for first, _ in turns[:1]]
    series = Series(2)
    for rows in turns:
        memories = [letters(*(i for i, _ in one), digest_bytes=digest_bytes) for one in rows]
        active = [np.array([used for _, used in one], bool) for one in rows]
        plans = series.dump(memories, active, scanned=scanned, zero=zero, dedup=dedup)
        if dedup and zero and digest_bytes and all(scanned):
            kept = {i for one in rows for i, used in one if used and i}
            assert sum(plan.sizes.distinct for plan in plans) == len(kept) * CHUNK


def test_chunks_of_one_digest_that_differ_are_both_stored() -> None:
    (plan,) = Series().dump([letters(1, 2, 1, 2, digest_bytes=0)])
    assert list(plan.kind) == [Kind.STORED, Kind.STORED, Kind.SHARED, Kind.STORED]
    assert list(plan.slot) == [0, 1, 0, 2]


def test_a_digest_of_different_chunks_is_looked_for_nowhere_else() -> None:
    series = Series()
    series.dump([letters(1, digest_bytes=0)])
    # Nobody can say which of the two the base has.
    (plan,) = series.dump([letters(1, 2, digest_bytes=0)])
    assert list(plan.kind) == [Kind.STORED, Kind.STORED]
    # Nor can the base, which by now has both.
    (plan,) = series.dump([letters(2, 2, digest_bytes=0)])
    assert list(plan.kind) == [Kind.STORED, Kind.SHARED]
    plans = Series(2).dump([letters(1, 1, digest_bytes=0), letters(1, 2, 1, digest_bytes=0)])
    assert stored(plans) == [1, 2]


def test_what_a_linked_extent_has_is_not_stored() -> None:
    series = Series()
    first = letters(1, 2, 0, 3, 4, 3)
    series.dump([first])
    (plan,) = series.dump([first])
    assert stored([plan]) == [0]
    assert list(plan.extent) == [1, 1, 0, 1, 1, 1] and list(plan.slot) == [0, 1, 0, 2, 3, 2]
    assert plan.sizes.distinct == 4 * CHUNK
    (plan,) = series.dump([letters(1, 5, 5, 3, 4, 0)])
    assert list(plan.kind) == [Kind.SHARED, Kind.STORED, *[Kind.SHARED] * 3, Kind.ZERO]
    assert list(plan.extent) == [1, 0, 0, 1, 1, 0]
    # What was stored then is linked now, beside what is linked still.
    (plan,) = series.dump([letters(5, 1, 3, 4)])
    assert stored([plan]) == [0] and len(series.extents()) == 3


def test_what_is_left_of_an_extent_that_goes_is_stored_once() -> None:
    series = Series(2)
    series.dump([letters(*range(1, 41)), letters(41)])
    plans = series.dump([letters(*range(101, 150), 1), letters(1, 2, 1, 2, 41)])
    assert stored(plans) == [49, 2] and len(series.extents()) == 3
    assert list(plans[1].extent) == [1, 1, 1, 1, 2]


def test_equal_chunks_of_several_gpus_are_stored_once() -> None:
    series = Series(3)
    plans = series.dump([letters(1, 2, 3), letters(3, 4, 4), letters(4, 0, 1)])
    assert stored(plans) == [1, 2, 1]
    assert [list(plan.extent) for plan in plans] == [[2, 0, 1], [1, 1, 1], [1, 0, 2]]
    assert [plan.sizes.distinct // CHUNK for plan in plans] == [3, 1, 0]
    plans = series.dump([letters(4, 9), letters(9, 1), letters(2, 7)])
    assert stored(plans) == [1, 0, 1]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_replicas_are_stored_once_and_leave_over_the_links_of_all(gpus: int) -> None:
    series = Series(gpus)
    ranks = [letters(*range(1, 81), 100 + rank) for rank in range(gpus)]
    plans = series.dump(ranks)
    assert stored(plans) == [80 // gpus + 1] * gpus
    assert sum(plan.sizes.replicated for plan in plans) == (gpus - 1) * 80 * CHUNK
    # Parts lie together: the chunks that a rank stores are one run, and one row of its table.
    assert all(len(plan.segments) <= 2 for plan in plans)
    assert all(len(encode(plan.kind, plan.extent, plan.slot)) <= 16 * 2 * gpus for plan in plans)
    # A byte that one rank changes costs it that chunk alone.
    changed = list(ranks[1].chunks.values())
    changed[7] = b"x" + changed[7][1:]
    assert stored(series.dump([ranks[0], Memory(changed), *ranks[2:]])) == [
        int(rank == 1) for rank in range(gpus)
    ]


def test_gpus_that_reach_each_other_read_what_they_share_once() -> None:
    series = Series(4)
    ranks = [letters(*range(1, 81), 100 + rank, 100 + rank) for rank in range(4)]
    plans = series.dump(ranks)
    apart = [[0], [1], [2], [3]]
    series.bring_back(plans, [[0, 1, 2, 3]])
    assert series.read == [21 * CHUNK] * 4
    series.bring_back(plans, apart)
    assert series.read == [81 * CHUNK] * 4
    # What an image before has is shared out evenly as well.
    plans = series.dump(ranks)
    assert stored(plans) == [0] * 4
    series.bring_back(plans, [[0, 1, 2, 3]])
    assert series.read == [21 * CHUNK] * 4
    series.bring_back(plans, [[0, 1], [2, 3]])
    assert series.read == [41 * CHUNK] * 4
    series.bring_back(plans, apart)
    assert series.read == [81 * CHUNK] * 4


def test_gpus_are_grouped_by_who_reaches_whom() -> None:
    def reaching(pairs: str) -> list[list[int]]:
        found = [[False] * 4 for _ in range(4)]
        for one, other in pairs.split():
            found[int(one)][int(other)] = True
        return chunks.islands(found)

    assert reaching("") == [[0], [1], [2], [3]]
    assert reaching("01 10 23 32") == [[0, 1], [2, 3]]
    assert reaching("01 10 12 21 20") == [[0, 1], [2], [3]]
    assert reaching(" ".join(f"{a}{b}" for a in range(4) for b in range(4) if a != b)) == [
        [0, 1, 2, 3]
    ]


def test_ranks_without_a_common_chunk_store_what_each_has() -> None:
    plans = Series(2).dump([letters(*range(1, 41)), letters(*range(41, 91))])
    assert stored(plans) == [40, 50]


def test_who_has_less_of_its_own_stores_more_of_what_all_have() -> None:
    common = range(1, 21)
    plans = Series(3).dump(
        [letters(*range(101, 131), *common), letters(*common, 201), letters(*common)]
    )
    assert stored(plans) == [30, 10, 11]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 100))
def test_what_is_shared_out_raises_the_lowest_first(loads: list[int], amount: int) -> None:
    shares = spreading.level(loads, amount)
    assert sum(shares) == amount and min(shares) >= 0
    after = [load + share for load, share in zip(loads, shares, strict=True)]
    raised = [one for one, share in zip(after, shares, strict=True) if share]
    assert not raised or max(raised) - min(after) <= 1


@given(st.lists(st.integers(0, 15), max_size=60), st.lists(st.integers(0, 9), min_size=4))
def test_a_chunk_is_given_to_one_that_has_it(having: list[int], loads: list[int]) -> None:
    loads = loads[:4]
    before = sum(loads)
    masks = np.array(having, spreading.mask_type(4))
    several, chosen = spreading.spread(masks, loads)
    assert [one.bit_count() > 1 for one in having] == [i in several for i in range(len(having))]
    assert all(having[i] >> gpu & 1 for i, gpu in zip(several, chosen, strict=True))
    assert sum(loads) == before + sum(one > 0 for one in having)


def test_a_gpu_without_kernels_shares_nothing() -> None:
    series = Series(2)
    series.dump([letters(1, 2), letters(3)])
    plans = series.dump([letters(1, 1, 0, 3), letters(1, 3)], scanned=[False, True])
    assert stored(plans) == [4, 0] and plans[0].digests is None


def test_new_bytes_are_those_that_no_link_has(tmp_path: Path) -> None:
    digest = Memory([]).digest
    (tmp_path / layout.link_digests(0)).write_bytes(digest(letter(1)) + digest(letter(2)))
    memories = [letters(1, 3, 3, 0), letters(3, 4), letters(1, 1)]
    everything = [np.ones(len(memory.chunks), bool) for memory in memories]
    scans = [
        dumping.scan(memory.where, mask, memory if number < 2 else None, zero=True)
        for number, (memory, mask) in enumerate(zip(memories, everything, strict=True))
    ]
    found = dumping.new_bytes(scans, Known(Catalogue(), Linked(tmp_path)))
    assert found == [CHUNK, CHUNK, 2 * CHUNK]
    memories = [letters(*range(5, 15)), letters(*range(5, 15), 1)]
    scans = [
        dumping.scan(memory.where, np.ones(len(memory.chunks), bool), memory, zero=True)
        for memory in memories
    ]
    found = dumping.new_bytes(scans, Known(Catalogue(), Linked(tmp_path)))
    assert found == [5 * CHUNK, 5 * CHUNK]


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
    # The order of blocks in the image need not be that of their keys.
    keys = [9, 4]
    parts = [[keys[place], *one] for place, few in ranges.items() for one in few]
    rows = np.array([*parts, [5, 0, CHUNK]], np.uint64)  # and one of another GPU
    found = chunks.active_chunks(keys, [4 * CHUNK, 4 * CHUNK], rows)
    assert "".join(str(int(one)) for one in found) == expected


def slow_active_chunks(
    keys: Sequence[int], sizes: Sequence[int], parts: list[tuple[int, int, int]]
) -> list[bool]:
    """One chunk after another: whether a part of its block has a byte in it."""
    return [
        any(
            owner == key and offset < at + CHUNK and at < offset + size and size > 0
            for owner, offset, size in parts
        )
        for key, whole in zip(keys, sizes, strict=True)
        for at in range(0, whole, CHUNK)
    ]


@given(
    st.data(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), unique_by=lambda b: b[0])
)
def test_active_chunks_are_those_of_a_slow_look(
    data: st.DataObject, blocks: list[tuple[int, int]]
) -> None:
    keys, sizes = [key for key, _ in blocks], [count * CHUNK for _, count in blocks]
    sizes_of = dict(zip(keys, sizes, strict=True))

    def part(key: int) -> st.SearchStrategy[tuple[int, int, int]]:
        whole = sizes_of.get(key, 3 * CHUNK)
        offsets = st.one_of(st.integers(0, whole), st.sampled_from(range(0, whole + 1, CHUNK)))
        return offsets.flatmap(
            lambda offset: st.tuples(st.just(key), st.just(offset), st.integers(0, whole - offset))
        )

    parts = data.draw(st.lists(st.integers(0, 32).flatmap(part), max_size=12))
    rows = np.array(parts, np.uint64).reshape(-1, 3)
    found = chunks.active_chunks(keys, sizes, chunks.unpack_parts(chunks.pack_parts(rows)))
    assert found.tolist() == slow_active_chunks(keys, sizes, parts)


def test_a_job_without_memory_has_an_empty_plan() -> None:
    (plan,) = Series().dump([Memory([])], [chunks.active_chunks([], [], NO_PARTS)])
    assert (len(plan.segments), len(plan.kind), plan.sizes.active) == (0, 0, 0)
