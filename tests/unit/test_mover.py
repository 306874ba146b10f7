"""The mover of native/ghost against a fake driver whose device memory is host memory."""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy
import pytest
import zstandard
from mover_lib import (
    CONTEXT,
    FAKES,
    MIB,
    PIECE,
    device,
    dump,
    expected_digests,
    mounted_tmpfs,
    restore,
    segments_of,
)

from flowgpu.host.native import (
    CHUNK_BYTES,
    Arena,
    Kind,
    Mode,
    Mover,
    MoverError,
    Stage,
    Status,
    Transfer,
    digest_count,
)
from tests.patience import SECONDS

JOBS = [(Kind.DUMP, mode) for mode in Mode] + [(Kind.RESTORE, Mode.RING)]
SIZES = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, PIECE, 3 * PIECE + 12345, 9 * PIECE]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("size", SIZES)
def test_what_was_dumped_is_restored(arena: Arena, folder: Path, mode: Mode, size: int) -> None:
    memory = device(size)
    digests, _ = dump(arena, folder / "data", memory, mode=mode)
    assert (folder / "data").read_bytes() == memory.tobytes()
    assert bytes(digests) == expected_digests(memory.tobytes())
    assert numpy.array_equal(restore(arena, folder / "data", size, digests), memory)


@pytest.mark.parametrize("size", SIZES)
def test_direct_io_writes_the_exact_size(arena: Arena, folder: Path, size: int) -> None:
    memory = device(size)
    digests, _ = dump(arena, folder / "data", memory, direct=True)
    assert (folder / "data").read_bytes() == memory.tobytes()
    back = restore(arena, folder / "data", size, digests, direct=True)
    assert numpy.array_equal(back, memory)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("expected", [0, 1, PIECE, 3 * PIECE + 5, 8 * PIECE, 20 * PIECE])
def test_the_estimate_may_be_short_or_long(
    arena: Arena, folder: Path, mode: Mode, expected: int
) -> None:
    memory = device(8 * PIECE - 777)
    digests, _ = dump(arena, folder / "data", memory, mode=mode, expected=expected)
    assert (folder / "data").read_bytes() == memory.tobytes()
    assert bytes(digests) == expected_digests(memory.tobytes())


@pytest.mark.parametrize("mode", list(Mode))
def test_a_start_does_not_wait_for_the_preparation(arena: Arena, folder: Path, mode: Mode) -> None:
    memory = device(8 * PIECE)
    dump(arena, folder / "data", memory, mode=mode, prepared=False)
    assert (folder / "data").read_bytes() == memory.tobytes()


@pytest.mark.parametrize("mode", list(Mode))
def test_segments_need_no_alignment(arena: Arena, tmp_path: Path, mode: Mode) -> None:
    memory = device(5 * PIECE + 99)
    cuts = sorted(random.Random(7).sample(range(1, memory.size), 40))
    digests, _ = dump(arena, tmp_path / "data", memory, mode=mode, cuts=cuts)
    assert (tmp_path / "data").read_bytes() == memory.tobytes()
    back = numpy.zeros(memory.size, numpy.uint8)
    with Transfer(
        arena, Kind.RESTORE, Mode.RING, tmp_path / "data", context=CONTEXT, threads=2
    ) as job:
        job.start(segments_of(back, cuts), digests)
        assert job.wait(timeout=SECONDS)
    assert numpy.array_equal(back, memory)


def test_registered_mode_goes_past_the_arena(arena: Arena, folder: Path) -> None:
    memory = device(6 * PIECE)
    _, direct = dump(arena, folder / "data", memory, mode=Mode.REGISTERED)
    assert direct == memory.size


def test_refused_registration_falls_back_to_the_arena(
    arena: Arena, folder: Path, fake: ctypes.CDLL
) -> None:
    fake.fake_refuse_register(1)
    memory = device(6 * PIECE)
    _, direct = dump(arena, folder / "data", memory, mode=Mode.REGISTERED)
    assert direct == 0
    assert (folder / "data").read_bytes() == memory.tobytes()


def test_two_jobs_share_one_arena(arena: Arena, tmp_path: Path) -> None:
    memories = [device(12 * PIECE, seed) for seed in (1, 2)]
    digests = [bytearray(digest_count(memory.size) * 16) for memory in memories]
    jobs = []
    for index, memory in enumerate(memories):
        path = tmp_path / f"gpu{index}.data"
        jobs.append(Transfer(arena, Kind.DUMP, Mode.RING, path, context=CONTEXT, threads=2))
        jobs[-1].start(segments_of(memory, []), digests[index])
    for index, job in enumerate(jobs):
        assert job.wait(timeout=SECONDS)
        job.close()
        assert (tmp_path / f"gpu{index}.data").read_bytes() == memories[index].tobytes()


def test_restores_with_more_threads_than_slots_share_one_arena(
    arena: Arena, tmp_path: Path, fake: ctypes.CDLL
) -> None:
    memories = [device(size * PIECE, seed) for seed, size in enumerate((1, 12, 30))]
    fake.fake_delay(500)
    jobs, targets = [], []
    for index, memory in enumerate(memories):
        path = tmp_path / f"gpu{index}.data"
        path.write_bytes(memory.tobytes())
        targets.append(numpy.zeros_like(memory))
        jobs.append(Transfer(arena, Kind.RESTORE, Mode.RING, path, context=CONTEXT, threads=5))
        digests = bytearray(expected_digests(memory.tobytes()))
        jobs[-1].start(segments_of(targets[-1], []), digests)
    for job, memory, target in zip(jobs, memories, targets, strict=True):
        assert job.wait(timeout=SECONDS)
        job.close()
        assert numpy.array_equal(target, memory)


def run_to_failure(
    job: Transfer, memory: numpy.ndarray, digests: bytearray | None = None
) -> MoverError:
    with job, pytest.raises(MoverError) as caught:
        job.start(segments_of(memory, []), digests or bytearray(digest_count(memory.size) * 16))
        job.wait(timeout=SECONDS)
    return caught.value


@pytest.mark.parametrize(("kind", "mode"), JOBS)
@pytest.mark.parametrize("number", [0, 3, 9])
def test_a_driver_error_is_named(
    arena: Arena, folder: Path, fake: ctypes.CDLL, mode: Mode, kind: Kind, number: int
) -> None:
    memory = device(10 * PIECE)
    digests, _ = dump(arena, folder / "data", memory)
    path = folder / ("data" if kind is Kind.RESTORE else "data2")
    fake.fake_fail_copy(number)
    job = Transfer(
        arena, kind, mode, path, context=CONTEXT, threads=2, streams=2, expected_bytes=memory.size
    )
    assert job.wait(Stage.PREPARED)
    error = run_to_failure(job, memory, digests)
    assert error.status is Status.DRIVER
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(error)
    fake.fake_fail_copy(-1)
    # Every slot is back: the arena still carries a whole dump.
    dump(arena, folder / "data3", device(6 * PIECE))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_full_disk_is_found_while_preparing(arena: Arena, tmp_path: Path, mode: Mode) -> None:
    with mounted_tmpfs(tmp_path / "small", "8m") as small:
        job = Transfer(
            arena, Kind.DUMP, mode, small / "data", context=CONTEXT, threads=2,
            expected_bytes=16 * MIB,
        )  # fmt: skip
        with job, pytest.raises(MoverError) as caught:
            job.wait(Stage.PREPARED, timeout=SECONDS)
        assert caught.value.status is Status.NO_SPACE
        assert str(small / "data") in str(caught.value)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("direct", [False, True])
def test_a_full_disk_in_the_middle_is_named(
    arena: Arena, tmp_path: Path, mode: Mode, direct: bool
) -> None:
    with mounted_tmpfs(tmp_path / "small", "8m") as small:
        job = Transfer(
            arena, Kind.DUMP, mode, small / "data", context=CONTEXT, threads=2,
            expected_bytes=4 * MIB, direct_io=direct,
        )  # fmt: skip
        assert job.wait(Stage.PREPARED)
        assert run_to_failure(job, device(16 * MIB)).status is Status.NO_SPACE


@pytest.mark.parametrize("mode", list(Mode))
def test_a_short_write_at_a_size_limit_is_named(arena: Arena, tmp_path: Path, mode: Mode) -> None:
    # The kernel writes up to the limit, a short write in the middle of a piece, then answers EFBIG.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB + 100, before[1]))
    try:
        job = Transfer(arena, Kind.DUMP, mode, tmp_path / "data", context=CONTEXT, threads=2)
        error = run_to_failure(job, device(8 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.status is Status.NO_SPACE
    assert "File too large" in str(error)


@pytest.mark.parametrize(("kind", "mode"), JOBS)
def test_a_cancelled_job_ends_with_nothing_in_flight(
    arena: Arena, tmp_path: Path, fake: ctypes.CDLL, mode: Mode, kind: Kind
) -> None:
    memory = device(20 * PIECE)
    digests, _ = dump(arena, tmp_path / "data", memory)
    path = tmp_path / ("data" if kind is Kind.RESTORE else "data2")
    fake.fake_delay(200_000)  # on a busy machine this thread goes on late
    with Transfer(arena, kind, mode, path, context=CONTEXT, threads=2, streams=1) as job:
        job.start(segments_of(memory, []), digests)
        assert not job.wait(timeout=0.03)
        job.cancel()
        with pytest.raises(MoverError) as caught:
            job.wait(timeout=SECONDS)
        assert caught.value.status is Status.CANCELLED
        assert 0 <= job.progress().bytes_copied < memory.size
    fake.fake_delay(0)
    dump(arena, tmp_path / "data3", device(6 * PIECE))


@pytest.mark.parametrize("mode", list(Mode))
def test_closing_a_job_under_way_ends_it(
    arena: Arena, tmp_path: Path, fake: ctypes.CDLL, mode: Mode
) -> None:
    fake.fake_delay(5000)
    memory = device(10 * PIECE)
    job = Transfer(
        arena, Kind.DUMP, mode, tmp_path / "data", context=CONTEXT, threads=2,
        expected_bytes=memory.size,
    )  # fmt: skip
    job.start(segments_of(memory, []), bytearray(digest_count(memory.size) * 16))
    job.close()


@pytest.mark.parametrize("change", [-1, 1, -3 * PIECE])
def test_a_file_of_another_size_is_refused(arena: Arena, folder: Path, change: int) -> None:
    memory = device(4 * PIECE)
    digests, _ = dump(arena, folder / "data", memory)
    os.truncate(folder / "data", memory.size + change)
    job = Transfer(arena, Kind.RESTORE, Mode.RING, folder / "data", context=CONTEXT, threads=2)
    assert run_to_failure(job, memory, digests).status is Status.SHORT


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("where", [0, CHUNK_BYTES - 1, 5 * PIECE + 3, 9 * PIECE + 16])
def test_a_flipped_byte_stops_the_restore_and_names_the_chunk(
    arena: Arena, folder: Path, direct: bool, where: int
) -> None:
    memory = device(9 * PIECE + 17)
    digests, _ = dump(arena, folder / "data", memory)
    with open(folder / "data", "r+b") as file:
        os.pwrite(file.fileno(), bytes([memory[where] ^ 1]), where)
    target = numpy.zeros(memory.size, numpy.uint8)
    options = {"context": CONTEXT, "threads": 2, "direct_io": direct}
    job = Transfer(arena, Kind.RESTORE, Mode.RING, folder / "data", **options)
    error = run_to_failure(job, target, digests)
    chunk = where // CHUNK_BYTES
    assert (error.status, error.chunk) == (Status.DAMAGED, chunk)
    assert f"chunk {chunk} of " in str(error)
    # Never restored in part: the piece with the damage has not reached the device.
    piece = where // PIECE * PIECE
    assert not target[piece : piece + PIECE].any()


def test_a_dump_never_writes_over_a_file_or_through_a_link(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"keep")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link", "no/such/folder"):
        with pytest.raises(MoverError) as caught:
            Transfer(arena, Kind.DUMP, Mode.RING, tmp_path / name, context=CONTEXT, threads=1)
        assert caught.value.status is Status.IO
    assert (tmp_path / "there").read_bytes() == b"keep"
    assert not (tmp_path / "elsewhere").exists()


def test_a_restore_follows_no_link_and_reads_no_device(arena: Arena, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(MoverError):
        Transfer(arena, Kind.RESTORE, Mode.RING, tmp_path / "link", context=CONTEXT, threads=1)
    job = Transfer(arena, Kind.RESTORE, Mode.RING, Path("/dev/zero"), context=CONTEXT, threads=1)
    with job, pytest.raises(MoverError) as caught:
        job.wait(Stage.PREPARED)
    assert caught.value.status is Status.IO


def test_wrong_arguments_are_refused(arena: Arena, mover: Mover, tmp_path: Path) -> None:
    def refused(caught: pytest.ExceptionInfo[MoverError]) -> bool:
        return caught.value.status is Status.ARGUMENT

    with pytest.raises(MoverError) as caught:
        Arena(mover, PIECE, PIECE + 4096, threads=1)
    assert refused(caught)
    with pytest.raises(MoverError) as caught:
        Transfer(arena, Kind.DUMP, Mode.RING, tmp_path / "a", context=CONTEXT, threads=0)
    assert refused(caught)
    with pytest.raises(MoverError) as caught:
        Mover(tmp_path / "libcuda.so.1")
    assert refused(caught)
    memory = device(PIECE)
    with Transfer(arena, Kind.DUMP, Mode.RING, tmp_path / "b", context=CONTEXT, threads=1) as job:
        with pytest.raises(MoverError) as caught:
            job.wait(Stage.OUT)
        assert refused(caught)
        with pytest.raises(MoverError) as caught:
            job.start(segments_of(memory, []), bytearray(16))
        assert refused(caught)
        digests = bytearray(digest_count(memory.size) * 16)
        job.start(segments_of(memory, []), digests)
        with pytest.raises(MoverError) as caught:
            job.start(segments_of(memory, []), digests)
        assert refused(caught)
        assert job.wait(timeout=SECONDS)


FRAME = 4 * MIB


def pack(path: Path, data: bytes) -> list[int]:
    """Write data packed; the sizes of its frames."""
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    cut = (data[at : at + FRAME] for at in range(0, len(data), FRAME))
    frames = [compressor.compress(part) for part in cut]
    path.write_bytes(b"".join(frames))
    return [len(frame) for frame in frames]


def packed_job(arena: Arena, path: Path, frames: list[int], size: int, **options: Any) -> Transfer:
    given = {"context": CONTEXT, "threads": 3, "packed": (frames, size), **options}
    return Transfer(arena, Kind.RESTORE, Mode.RING, path, **given)


@pytest.mark.parametrize("size", [1, FRAME - 1, FRAME, FRAME + CHUNK_BYTES, 3 * FRAME - 99])
@pytest.mark.parametrize("direct", [False, True])
def test_a_packed_file_is_restored(arena: Arena, folder: Path, size: int, direct: bool) -> None:
    memory = device(size)
    frames = pack(folder / "data", memory.tobytes())
    back = numpy.zeros(size, numpy.uint8)
    digests = expected_digests(memory.tobytes())
    with packed_job(arena, folder / "data", frames, size, direct_io=direct) as job:
        job.start([(back.ctypes.data, size)], bytearray(digests))
        assert job.wait(Stage.DONE, timeout=SECONDS)
    assert numpy.array_equal(back, memory)


def test_parts_of_a_packed_file_are_restored(arena: Arena, tmp_path: Path) -> None:
    """Gaps within frames and over several, and a part across the edge of two frames."""
    size = 4 * FRAME
    memory = device(size)
    frames = pack(tmp_path / "data", memory.tobytes())
    back = numpy.zeros(size, numpy.uint8)
    chunk = CHUNK_BYTES
    parts = [(chunk, chunk), (3 * chunk, 2 * chunk), (FRAME - chunk, 2 * chunk)]
    parts += [(3 * FRAME + chunk, FRAME - chunk)]
    rows = [(back.ctypes.data + at, length, at) for at, length in parts]
    with packed_job(arena, tmp_path / "data", frames, size) as job:
        job.start(rows, bytearray(expected_digests(memory.tobytes())))
        assert job.wait(Stage.DONE, timeout=SECONDS)
    wanted = numpy.zeros(size, numpy.uint8)
    for at, length in parts:
        wanted[at : at + length] = memory[at : at + length]
    assert numpy.array_equal(back, wanted)


@pytest.mark.parametrize("where", ["magic", "middle", "checksum"])
def test_a_damaged_frame_is_named(arena: Arena, tmp_path: Path, where: str) -> None:
    memory = device(2 * FRAME)
    frames = pack(tmp_path / "data", memory.tobytes())
    data = bytearray((tmp_path / "data").read_bytes())
    data[{"magic": 0, "middle": frames[0] // 2, "checksum": frames[0] - 1}[where]] ^= 1
    (tmp_path / "data").write_bytes(data)
    with packed_job(arena, tmp_path / "data", frames, memory.size) as job:
        job.start(
            [(memory.ctypes.data, memory.size)], bytearray(expected_digests(memory.tobytes()))
        )
        with pytest.raises(MoverError, match="frame 0 of") as caught:
            job.wait(Stage.DONE, timeout=SECONDS)
    assert caught.value.status is Status.DAMAGED


def test_whole_frames_of_other_bytes_are_damage(arena: Arena, tmp_path: Path) -> None:
    memory = device(2 * FRAME)
    other = memory.copy()
    other[FRAME + 5 * CHUNK_BYTES] ^= 1
    frames = pack(tmp_path / "data", other.tobytes())
    with packed_job(arena, tmp_path / "data", frames, memory.size) as job:
        job.start([(other.ctypes.data, memory.size)], bytearray(expected_digests(memory.tobytes())))
        with pytest.raises(MoverError) as caught:
            job.wait(Stage.DONE, timeout=SECONDS)
    assert (caught.value.status, caught.value.chunk) == (Status.DAMAGED, 128 + 5)


def test_frames_that_do_not_fit_their_file_are_refused(arena: Arena, tmp_path: Path) -> None:
    memory = device(FRAME + 1)
    frames = pack(tmp_path / "data", memory.tobytes())
    digests = bytearray(expected_digests(memory.tobytes()))
    with pytest.raises(MoverError) as caught:
        packed_job(arena, tmp_path / "data", frames[:1], memory.size)
    assert caught.value.status is Status.ARGUMENT
    for sizes, size in (([frames[0], frames[1] + 1], memory.size), (frames, memory.size + 1)):
        with packed_job(arena, tmp_path / "data", sizes, size) as job:
            job.start([(memory.ctypes.data, memory.size)], digests)
            with pytest.raises(MoverError) as caught:
                job.wait(Stage.DONE, timeout=SECONDS)
        assert caught.value.status is Status.SHORT


def test_a_wrong_context_is_a_driver_error(arena: Arena, tmp_path: Path) -> None:
    job = Transfer(arena, Kind.DUMP, Mode.RING, tmp_path / "data", context=1, threads=1)
    error = run_to_failure(job, device(PIECE))
    assert error.status is Status.DRIVER
    assert "cuCtxSetCurrent" in str(error)


def test_the_library_exports_its_interface_and_needs_no_driver(mover: Mover) -> None:
    path = mover.c._name
    names = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True)
    header = (FAKES.parents[1] / "native/ghost/fgg.h").read_text()
    exported = {line.split()[-1] for line in names.stdout.splitlines()}
    assert exported == set(re.findall(r"\b(fgg_\w+)\(", header))
    needed = subprocess.run(["objdump", "-p", path], capture_output=True, text=True).stdout
    assert "NEEDED" in needed and "libcuda" not in needed
