"""Digests of files: the native way and the one that needs only Python are the same."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from flowgpu.host import native
from flowgpu.image import digests, layout
from flowgpu.image.digests import Meter, Unreadable, file_digests, step_digests

CHUNK, PART = layout.CHUNK_BYTES, layout.PART_BYTES
PIECE = 8 << 20  # what a native thread takes at once of small steps
BUFFER = 256 << 10
SIZES = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, BUFFER - 1, BUFFER + 1, PIECE + 3 * CHUNK + 5, PART + 9)


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which digests are computed: without a native library it is Python's."""
    if request.param == "python":
        monkeypatch.setenv("FLOWGPU_LIB", str(tmp_path / "nothing built"))

        def refused(*_: Any) -> None:
            raise AssertionError("the native library was used")

        monkeypatch.setattr(native.c, "CDLL", refused)
    else:

        def refused(*_: Any) -> None:
            raise AssertionError("the way of Python was used")

        monkeypatch.setattr(digests, "_step_digests", refused)
    return str(request.param)


def made(folder: Path, sizes: tuple[int, ...]) -> tuple[list[tuple[Path, int]], list[bytes]]:
    generator = random.Random(7)
    contents = [generator.randbytes(size) for size in sizes]
    files = [(folder / f"file {number}", size) for number, size in enumerate(sizes)]
    for (path, _), data in zip(files, contents, strict=True):
        path.write_bytes(data)
    return files, contents


def expected(data: bytes, step: int) -> bytes:
    steps = (data[at : at + step] for at in range(0, len(data), step))
    return b"".join(xxhash.xxh3_128_digest(one) for one in steps)


@pytest.mark.parametrize("step", [CHUNK, PART])
def test_every_step_of_every_file_has_its_digest(way: str, tmp_path: Path, step: int) -> None:
    files, contents = made(tmp_path, SIZES)
    reports: list[Any] = []
    meter = Meter("test", sum(SIZES), reports.append)
    assert step_digests(files, step, meter) == [expected(data, step) for data in contents]
    assert reports[-1]["done"] == reports[-1]["total"] == sum(SIZES)


def test_a_files_digest_is_that_of_its_parts_digests(way: str, tmp_path: Path) -> None:
    files, contents = made(tmp_path, SIZES)
    found = file_digests(files, Meter("test", 0, None))
    assert found == [xxhash.xxh3_128_hexdigest(expected(data, PART)) for data in contents]
    assert found[0] == "99aa06d3014798d86001c324468d497f"


def test_no_files_have_no_digests(way: str) -> None:
    assert step_digests([], CHUNK, Meter("test", 0, None)) == []


def test_only_the_bytes_of_the_given_size_count(way: str, tmp_path: Path) -> None:
    ((path, _),) = made(tmp_path, (3 * CHUNK,))[0]
    assert step_digests([(path, CHUNK)], CHUNK, Meter("test", 0, None)) == [
        expected(path.read_bytes()[:CHUNK], CHUNK)
    ]


def end_early(path: Path) -> str:
    os.truncate(path, BUFFER + 7)
    return f"it ends at byte {BUFFER + 7}"


def remove(path: Path) -> str:
    path.unlink()
    return "No such file or directory"


def link(path: Path) -> str:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))
    return "Too many levels of symbolic links"


def replace_by_folder(path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "not a regular file"


@pytest.mark.parametrize("harm", [end_early, remove, link, replace_by_folder])
def test_a_file_that_cannot_be_read_is_named(
    way: str, tmp_path: Path, harm: Callable[[Path], str]
) -> None:
    files, _ = made(tmp_path, (CHUNK, 3 * BUFFER, 5 * BUFFER))
    reason = harm(files[1][0])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unreadable) as caught:
        file_digests(files, Meter("test", 0, None))
    assert (caught.value.path, caught.value.reason) == (files[1][0], reason)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fifo_is_no_file_to_wait_for(way: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Unreadable):
        file_digests([(tmp_path / "fifo", 1)], Meter("test", 0, None))


def test_an_interrupt_ends_it_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole file would take minutes, which the test does not."""
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 42)
    monkeypatch.setattr(native, "REPORT_SECONDS", 0.01)
    seen: list[int] = []

    def report(done: int) -> None:
        seen.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        native.digest_files([(path, 1 << 42)], PART, 2, report)
    assert 0 < seen[-1] < 1 << 42


def test_a_step_of_no_bytes_is_refused() -> None:
    progress = native._DigestProgress()
    status = native.library().fgg_digest_files(None, 0, 0, 1, None, ctypes.byref(progress))
    assert status == native.Status.ARGUMENT
