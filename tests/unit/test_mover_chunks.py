"""Segments with offsets, kernels on lists of chunks, and gathering on the GPU.

The fake driver runs the kernels as loops over host memory; the real ones are in tests/emu.
"""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import xxhash
from mover_lib import CONTEXT, PIECE, expected_digests, segments_of

from coordinator.move_plan import Plan, plan_for, restore_plan_for
from coordinator.mover import NativeMover
from flowgpu.host.native import (
    CHUNK_BYTES,
    Arena,
    Kernels,
    Kind,
    Mode,
    Mover,
    MoverError,
    Status,
    Transfer,
    segment_rows,
)
from flowgpu.image import layout
from tests.patience import SECONDS

Array = numpy.ndarray
PER_PIECE = PIECE // CHUNK_BYTES
RESTORES: dict[str, dict[str, object]] = {
    "ring": {},
    "direct": {"direct_io": True},
    "one thread": {"threads": 1},
    "more threads than slots": {"threads": 7},
}


def aligned(chunks: int, seed: int | None = None) -> Array:
    """Memory of whole chunks at a multiple of a chunk: zeros, or random bytes."""
    room = numpy.zeros((chunks + 1) * CHUNK_BYTES, numpy.uint8)
    start = -room.ctypes.data % CHUNK_BYTES
    memory = room[start : start + chunks * CHUNK_BYTES]
    if seed is not None:
        memory[:] = numpy.random.default_rng(seed).integers(0, 256, memory.size, numpy.uint8)
    return memory


def addresses(memory: Array, chunks: Array | list[int] | None = None) -> Array:
    numbers = numpy.arange(memory.size // CHUNK_BYTES) if chunks is None else numpy.array(chunks)
    return (memory.ctypes.data + numbers * CHUNK_BYTES).astype(numpy.uint64)


def rows(memory: Array, places: list[tuple[int, int, int]]) -> Array:
    """Segments from (chunk of the memory, chunks, chunk of the file)."""
    found = numpy.array(places, numpy.uint64).reshape(-1, 3) * numpy.uint64(CHUNK_BYTES)
    found[:, 0] += numpy.uint64(memory.ctypes.data)
    return found[:, [0, 1, 2]]


def run(arena: Arena, kind: Kind, path: Path, segments: Array, digests: bytearray, **options):
    """Run a job to its end and give its progress."""
    options = {"mode": Mode.RING, "threads": 3, "streams": 2, **options}
    mode = options.pop("mode")
    with Transfer(arena, kind, mode, path, context=CONTEXT, **options) as job:
        job.start(segments, digests)
        assert job.wait(timeout=SECONDS)
        return job.progress()


def failure(arena: Arena, kind: Kind, path: Path, segments: Array, digests: bytearray, **options):
    with pytest.raises(MoverError) as caught:
        run(arena, kind, path, segments, digests, **options)
    return caught.value


def write_extent(path: Path, chunks: int, seed: int = 5) -> tuple[Array, bytearray]:
    """A data file of random chunks, and its digests."""
    data = aligned(chunks, seed)
    path.write_bytes(data.tobytes())
    return data, bytearray(expected_digests(data.tobytes()))


def shuffled(chunks: int, seed: int = 3) -> list[tuple[int, int, int]]:
    """Places that put every chunk of a file elsewhere in memory, one segment a chunk."""
    order = random.Random(seed).sample(range(chunks), chunks)
    return [(place, 1, slot) for slot, place in enumerate(order)]


# Kernels on lists


def test_scan_gives_digests_and_finds_zero_chunks(kernels: Kernels) -> None:
    memory = aligned(9, 1)
    memory[3 * CHUNK_BYTES : 5 * CHUNK_BYTES] = 0
    memory[5 * CHUNK_BYTES - 1] = 1
    digests, zero = kernels.scan(addresses(memory))
    assert digests.tobytes() == expected_digests(memory.tobytes())
    assert zero.dtype == numpy.bool_ and zero.tolist() == [i == 3 for i in range(9)]


def test_lists_longer_than_the_scratch_memory_go_in_batches(
    kernels: Kernels, fake: ctypes.CDLL
) -> None:
    # 1 MiB of scratch memory holds less than 2 * 16 Ki rows.
    memory = aligned(7, 1)
    picked = numpy.random.default_rng(1).integers(0, 7, 50_001)
    digests, zero = kernels.scan(addresses(memory, picked))
    expected = numpy.frombuffer(expected_digests(memory.tobytes()), numpy.uint8).reshape(-1, 16)
    assert numpy.array_equal(digests, expected[picked])
    assert not zero.any()
    assert 3 <= fake.fake_launches() <= 5


def test_compare_copy_and_fill(kernels: Kernels) -> None:
    left, right = aligned(40, 1), aligned(40, 1)
    right[17 * CHUNK_BYTES + 5] ^= 1
    differ = kernels.compare(addresses(left), addresses(right))
    assert differ.tolist() == [i == 17 for i in range(40)]
    kernels.copy(addresses(left, [17, 2]), addresses(right, [17, 39]))
    kernels.fill(addresses(left, [1]), 0x0102030405060708)
    pages = [page.reshape(-1, CHUNK_BYTES) for page in (left, right)]
    assert numpy.array_equal(pages[1][17], pages[0][17])
    assert numpy.array_equal(pages[1][39], pages[0][2])
    assert pages[0][1].tobytes() == bytes([8, 7, 6, 5, 4, 3, 2, 1]) * (CHUNK_BYTES // 8)
    assert not numpy.array_equal(pages[0][1], pages[0][0])


def test_empty_lists_do_nothing(kernels: Kernels, fake: ctypes.CDLL) -> None:
    none = numpy.empty(0, numpy.uint64)
    digests, zero = kernels.scan(none)
    assert digests.shape == (0, 16) and zero.shape == (0,)
    assert kernels.compare(none, none).size == 0
    kernels.copy(none, none)
    kernels.fill(none)
    assert fake.fake_launches() == 0


def test_wrong_lists_are_refused(kernels: Kernels) -> None:
    memory = aligned(2, 1)
    with pytest.raises(MoverError) as caught:
        kernels.scan(addresses(memory) + numpy.uint64(8))
    assert caught.value.status is Status.ARGUMENT
    with pytest.raises(ValueError, match="2 addresses on one side and 1"):
        kernels.compare(addresses(memory), addresses(memory)[:1])
    with pytest.raises(ValueError, match="shape"):
        kernels.scan(addresses(memory).reshape(1, 2))


@pytest.mark.parametrize("number", range(4))
def test_a_failed_call_of_the_driver_is_named(
    kernels: Kernels, fake: ctypes.CDLL, number: int
) -> None:
    # Address lists up and results down are copies; two batches have four.
    memory = aligned(3, 1)
    many = addresses(memory, numpy.arange(40_000) % 3)
    fake.fake_fail_copy(number)
    with pytest.raises(MoverError) as caught:
        kernels.scan(many)
    assert caught.value.status is Status.DRIVER
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(caught.value)
    fake.fake_fail_copy(-1)


def test_less_scratch_memory_is_taken_when_there_is_less(
    mover: Mover, arena: Arena, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    ptx = tmp_path / "chunks.ptx"
    ptx.write_text(".version 6.3\n")
    memory = aligned(5, 1)
    try:
        fake.fake_limit_memory(3 << 20)
        kernels = Kernels(mover, CONTEXT, ptx, 64 << 20)
        assert kernels.scan(addresses(memory))[0].tobytes() == expected_digests(memory.tobytes())
        kernels.close()
        fake.fake_limit_memory(1 << 19)
        with pytest.raises(MoverError, match="not even 1 MiB") as caught:
            Kernels(mover, CONTEXT, ptx, 64 << 20)
        assert caught.value.status is Status.DRIVER
    finally:
        fake.fake_limit_memory(2**64 - 1)


def test_kernels_that_cannot_be_loaded_are_named(
    mover: Mover, arena: Arena, tmp_path: Path
) -> None:
    with pytest.raises(MoverError, match=r"no\.ptx"):
        Kernels(mover, CONTEXT, tmp_path / "no.ptx", 1 << 20)
    (tmp_path / "wrong.ptx").write_text("nothing")
    with pytest.raises(MoverError, match="cuModuleLoadData"):
        Kernels(mover, CONTEXT, tmp_path / "wrong.ptx", 1 << 20)


# Segments


def test_rows_without_offsets_lie_one_behind_another() -> None:
    assert segment_rows([(5, 10), (90, 20)]).tolist() == [[5, 10, 0], [90, 20, 10]]
    assert segment_rows([(5, 10, 7)]).tolist() == [[5, 10, 7]]
    assert segment_rows([]).shape == (0, 3)
    with pytest.raises(ValueError, match="shape"):
        segment_rows(numpy.zeros(4, numpy.uint64))


@pytest.mark.parametrize("options", RESTORES.values(), ids=RESTORES)
@pytest.mark.parametrize("with_kernels", [False, True])
def test_gaps_are_not_read(
    arena: Arena,
    kernels: Kernels,
    folder: Path,
    options: dict[str, object],
    with_kernels: bool,
) -> None:
    chunks = 5 * PER_PIECE + 3
    data, digests = write_extent(folder / "data", chunks)
    # Single chunks, a run over a piece's end, whole pieces left out, and gaps at both ends.
    taken = [(1, 1), (3, 2), (PER_PIECE - 2, 5), (3 * PER_PIECE, 1), (4 * PER_PIECE + 7, 20)]
    taken += [(5 * PER_PIECE, 1)]
    places = [(chunks - start - count, count, start) for start, count in taken]
    gaps = numpy.ones(chunks, bool)
    for start, count in taken:
        gaps[start : start + count] = False
    # What is left out may be damaged: nobody looks at it, and its digest is not checked.
    with open(folder / "data", "r+b") as file:
        for chunk in numpy.flatnonzero(gaps):
            os.pwrite(file.fileno(), b"damaged", int(chunk) * CHUNK_BYTES)
    memory = aligned(chunks)
    used = kernels if with_kernels else None
    seen = run(
        arena, Kind.RESTORE, folder / "data", rows(memory, places), digests, kernels=used, **options
    )
    expected = aligned(chunks)
    for to, count, start in places:
        expected[to * CHUNK_BYTES : (to + count) * CHUNK_BYTES] = data[
            start * CHUNK_BYTES : (start + count) * CHUNK_BYTES
        ]
    assert numpy.array_equal(memory, expected)
    moved = sum(count for _, count in taken) * CHUNK_BYTES
    assert seen.bytes_total == seen.bytes_copied == seen.bytes_file == moved


def test_wrong_segments_are_refused(arena: Arena, kernels: Kernels, tmp_path: Path) -> None:
    memory = aligned(8)
    _, digests = write_extent(tmp_path / "data", 8)
    base = memory.ctypes.data
    wrong = {
        "overlap": [(base, 2 * CHUNK_BYTES, 0), (base, CHUNK_BYTES, CHUNK_BYTES)],
        "not sorted": [(base, CHUNK_BYTES, CHUNK_BYTES), (base, CHUNK_BYTES, 0)],
        "without bytes": [(base, 0, 0)],
        "too many bytes": [(base, 1 << 63, 0)],
        "does not have whole chunks": [(base, 5, 0), (base, CHUNK_BYTES, CHUNK_BYTES)],
        "does not start at a whole chunk": [(base, 5, 0)],
    }
    for text, segments in wrong.items():
        error = failure(arena, Kind.RESTORE, tmp_path / "data", segments, digests)
        assert error.status is Status.ARGUMENT and text in str(error)
    hole = [(base, CHUNK_BYTES, 0), (base, CHUNK_BYTES, 2 * CHUNK_BYTES)]
    error = failure(arena, Kind.DUMP, tmp_path / "d", hole, bytearray(48))
    assert error.status is Status.ARGUMENT and "gap" in str(error)
    odd = [(base + 8, CHUNK_BYTES, 0)]
    error = failure(arena, Kind.DUMP, tmp_path / "e", odd, bytearray(16), kernels=kernels)
    assert error.status is Status.ARGUMENT and "whole chunks" in str(error)


@pytest.mark.parametrize("change", [-1, 1, -CHUNK_BYTES, CHUNK_BYTES])
def test_a_file_with_gaps_of_another_size_is_refused(
    arena: Arena, folder: Path, change: int
) -> None:
    _, digests = write_extent(folder / "data", 8)
    os.truncate(folder / "data", 8 * CHUNK_BYTES + change)
    memory = aligned(1)
    error = failure(arena, Kind.RESTORE, folder / "data", rows(memory, [(0, 1, 2)]), digests)
    assert error.status is Status.SHORT


def test_options_that_do_not_fit_are_refused(
    arena: Arena, kernels: Kernels, tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(b"x")
    wrong: list[tuple[Kind, dict[str, object]]] = [
        (Kind.RESTORE, {"given_digests": True}),
        (Kind.RESTORE, {"mode": Mode.MAPPED}),
        (Kind.RESTORE, {"mode": Mode.REGISTERED}),
        (Kind.DUMP, {"packed": ([1], 1)}),
        (Kind.RESTORE, {"kernels": kernels, "context": CONTEXT + 1}),
    ]
    for kind, options in wrong:
        path = tmp_path / ("data" if kind is Kind.RESTORE else "new")
        settings: dict[str, object] = {"mode": Mode.RING, "context": CONTEXT, "threads": 2}
        settings |= options
        with pytest.raises(MoverError) as caught:
            Transfer(arena, kind, path=path, **settings)
        assert caught.value.status is Status.ARGUMENT


# Dumps with given digests


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("direct", [False, True])
def test_a_dump_with_given_digests_computes_none(
    arena: Arena, folder: Path, mode: Mode, direct: bool
) -> None:
    memory = aligned(3 * PER_PIECE + 5, 1)
    given = bytes(range(16)) * (memory.size // CHUNK_BYTES)
    held = numpy.frombuffer(given, numpy.uint8)
    seen = run(
        arena, Kind.DUMP, folder / "data", segments_of(memory, []), held, mode=mode,
        expected_bytes=memory.size, given_digests=True, direct_io=direct,
    )  # fmt: skip
    assert (folder / "data").read_bytes() == memory.tobytes()
    assert held.tobytes() == given
    assert seen.bytes_file == seen.bytes_total == memory.size


def test_a_dump_that_computes_digests_needs_room_for_them(arena: Arena, tmp_path: Path) -> None:
    memory = aligned(1, 1)
    with (
        Transfer(arena, Kind.DUMP, Mode.RING, tmp_path / "data", context=CONTEXT, threads=1) as job,
        pytest.raises(ValueError, match="read-only"),
    ):
        job.start(segments_of(memory, []), numpy.frombuffer(bytes(16), numpy.uint8))


# Gather and scatter


@pytest.mark.parametrize("mode", list(Mode))
def test_a_dump_of_many_segments_is_one_copy_a_piece(
    arena: Arena, kernels: Kernels, fake: ctypes.CDLL, folder: Path, mode: Mode
) -> None:
    chunks = 4 * PER_PIECE + 3
    memory = aligned(chunks, 1)
    segments = rows(memory, shuffled(chunks))
    digests = bytearray(16 * chunks)
    seen = run(
        arena, Kind.DUMP, folder / "data", segments, digests, mode=mode, kernels=kernels,
        expected_bytes=memory.size,
    )  # fmt: skip
    order = [place for place, _, _ in shuffled(chunks)]
    expected = memory.reshape(-1, CHUNK_BYTES)[order].tobytes()
    assert (folder / "data").read_bytes() == expected
    assert bytes(digests) == expected_digests(expected)
    # Three chunks, the last piece, are fewer parts than a gather is worth.
    assert seen.bytes_gathered == 4 * PIECE
    assert fake.fake_launches() == 4
    assert fake.fake_copies() == 4 * 2 + 3


@pytest.mark.parametrize("options", RESTORES.values(), ids=RESTORES)
def test_a_restore_of_many_segments_scatters_each_piece(
    arena: Arena, kernels: Kernels, fake: ctypes.CDLL, folder: Path, options: dict[str, object]
) -> None:
    chunks = 4 * PER_PIECE + 3
    data, digests = write_extent(folder / "data", chunks)
    memory = aligned(chunks)
    segments = rows(memory, shuffled(chunks))
    seen = run(arena, Kind.RESTORE, folder / "data", segments, digests, kernels=kernels, **options)
    order = [place for place, _, _ in shuffled(chunks)]
    expected = numpy.empty((chunks, CHUNK_BYTES), numpy.uint8)
    expected[order] = data.reshape(-1, CHUNK_BYTES)
    assert numpy.array_equal(memory, expected.reshape(-1))
    assert seen.bytes_gathered == 4 * PIECE
    assert fake.fake_copies() == 4 * 2 + 3


@pytest.mark.parametrize("options", RESTORES.values(), ids=RESTORES)
@pytest.mark.parametrize("step", [2, 3])
def test_pieces_with_many_gaps_are_scattered(
    arena: Arena, kernels: Kernels, folder: Path, options: dict[str, object], step: int
) -> None:
    chunks = 4 * PER_PIECE
    data, digests = write_extent(folder / "data", chunks)
    slots = [slot for slot in range(chunks) if slot % step == 1]
    places = random.Random(1).sample(range(len(slots)), len(slots))
    memory = aligned(len(slots))
    segments = rows(memory, [(to, 1, slot) for to, slot in zip(places, slots, strict=True)])
    seen = run(arena, Kind.RESTORE, folder / "data", segments, digests, kernels=kernels, **options)
    expected = numpy.empty((len(slots), CHUNK_BYTES), numpy.uint8)
    expected[places] = data.reshape(-1, CHUNK_BYTES)[slots]
    assert numpy.array_equal(memory, expected.reshape(-1))
    assert seen.bytes_gathered == seen.bytes_copied == memory.size


@pytest.mark.parametrize("limit", [0, PIECE])
def test_without_device_memory_pieces_are_copied_part_by_part(
    arena: Arena, kernels: Kernels, fake: ctypes.CDLL, tmp_path: Path, limit: int
) -> None:
    chunks = 2 * PER_PIECE
    memory = aligned(chunks, 1)
    fake.fake_limit_memory(limit)
    segments, digests = rows(memory, shuffled(chunks)), bytearray(16 * chunks)
    seen = run(arena, Kind.DUMP, tmp_path / "data", segments, digests, kernels=kernels)
    assert seen.bytes_gathered == 0
    back = aligned(chunks)
    run(
        arena, Kind.RESTORE, tmp_path / "data", rows(back, shuffled(chunks)), digests,
        kernels=kernels,
    )  # fmt: skip
    assert numpy.array_equal(back, memory)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("number", range(6))
def test_a_failure_while_gathering_is_named(
    arena: Arena, kernels: Kernels, fake: ctypes.CDLL, tmp_path: Path, kind: Kind, number: int
) -> None:
    chunks = 3 * PER_PIECE
    memory = aligned(chunks, 1)
    segments = rows(memory, shuffled(chunks))
    _, digests = write_extent(tmp_path / "data", chunks)
    path = tmp_path / ("data" if kind is Kind.RESTORE else "new")
    fake.fake_fail_copy(number)
    error = failure(arena, kind, path, segments, digests, kernels=kernels)
    assert error.status is Status.DRIVER
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(error)
    fake.fake_fail_copy(-1)
    run(arena, Kind.DUMP, tmp_path / "again", segments, digests, kernels=kernels)


# Damage


@pytest.mark.parametrize("options", RESTORES.values(), ids=RESTORES)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("where", [0, CHUNK_BYTES - 1, 2 * PIECE + 3, 5 * PIECE - 1])
def test_a_flipped_byte_is_refused_and_names_the_chunk(
    arena: Arena,
    kernels: Kernels,
    folder: Path,
    options: dict[str, object],
    many: bool,
    where: int,
) -> None:
    chunks = 5 * PER_PIECE
    data, digests = write_extent(folder / "data", chunks)
    with open(folder / "data", "r+b") as file:
        os.pwrite(file.fileno(), bytes([data[where] ^ 1]), where)
    memory = aligned(chunks)
    segments = rows(memory, shuffled(chunks) if many else [(0, chunks, 0)])
    error = failure(
        arena, Kind.RESTORE, folder / "data", segments, digests, kernels=kernels, **options
    )
    chunk = where // CHUNK_BYTES
    assert (error.status, error.chunk) == (Status.DAMAGED, chunk)
    assert f"chunk {chunk} of " in str(error)


def test_digests_of_the_fake_are_the_right_ones(kernels: Kernels) -> None:
    memory = aligned(1, 9)
    assert kernels.scan(addresses(memory))[0].tobytes() == xxhash.xxh3_128_digest(memory.tobytes())


def test_the_coordinators_mover_passes_its_plan_on(
    arena: Arena, kernels: Kernels, fake: ctypes.CDLL, tmp_path: Path
) -> None:
    plan = Plan(mode="registered", threads=2, streams=2, piece=PIECE, arena=4 * PIECE, direct=False)
    mover = NativeMover(fake._name)
    mover.make_arena(plan)
    mover.pin_arena(CONTEXT)
    memory = aligned(2 * PER_PIECE, 1)
    before = memory.copy()
    segments = rows(memory, shuffled(2 * PER_PIECE))
    files = tmp_path / "gpu0.data", tmp_path / "gpu0.digests"
    job = mover.dump_job(*files, CONTEXT, memory.size, plan, kernels)
    job.wait("prepared", 20)
    job.start(segments, kernels.scan(segments[:, 0])[0])
    job.wait("done", 20)
    assert job._job.progress().bytes_direct == memory.size
    job.close()
    plan = replace(plan, mode="ring")
    memory[:] = 0
    digests = tmp_path / "gpu0.digests"
    for damaged in (False, True):
        if damaged:
            digests.write_bytes(bytes(16) + digests.read_bytes()[16:])
        fake.fake_launches()
        job = mover.restore_job(tmp_path / "gpu0.data", digests, CONTEXT, plan, kernels)
        job.start(segments, None)
        if damaged:
            with pytest.raises(MoverError, match="chunk 0 of"):
                job.wait("done", 20)
        else:
            job.wait("done", 20)
            assert fake.fake_launches() == 2
        job.close()
    assert numpy.array_equal(memory, before)
    mover._need_arena().close()


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_a_restore_has_a_slot_for_each_thread_and_copy(folder: Path, gpus: int) -> None:
    plan = restore_plan_for(folder, gpus, 1 << 40)
    assert plan.mode == "ring"
    if plan.direct:
        assert plan == plan_for(folder, gpus, 1 << 40)
    else:
        assert plan.arena == plan.piece * max(gpus, 1) * (plan.threads + 3 * plan.streams)
        assert plan.piece % layout.FRAME_BYTES == 0
