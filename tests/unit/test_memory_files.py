"""Files that are the memory of a job go into the image and come back; CRIU's links do not stay."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from coordinator import memory_files
from coordinator.memory_files import Putting, Saving, clear_links
from flowgpu.errors import FileNotMade, FilesChanged, Unsupported
from flowgpu.image.manifest import MemoryFile

# Holds the file of each word, `how:path`, and says when it does. `mapped` ones are not open.
HOLDER = """
import mmap, os, sys
kept = []
for word in sys.argv[1:]:
    how, path = word.split(":")
    fd = os.open(path, os.O_RDONLY if how.endswith("read") else os.O_RDWR)
    if how.startswith("mapped"):
        access = mmap.ACCESS_READ if how.endswith("read") else mmap.ACCESS_DEFAULT
        kept.append(mmap.mmap(fd, 0, access=access))  # which has a descriptor of its own
        os.close(fd)
    if how.endswith("gone"):
        os.unlink(path)
print("ready", flush=True)
sys.stdin.read()
"""


class Saved(NamedTuple):
    files: tuple[MemoryFile, ...]
    links: tuple[Any, ...]
    image: Path


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    if memory_files.is_memory(folder):
        pytest.skip("temporary files are in memory here")
    return folder


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[..., Saving]]:
    """Starts a process that holds these files; gives what a checkpoint of it does with them."""
    processes: list[subprocess.Popen[str]] = []
    directory = tmp_path / "job"
    directory.mkdir()

    def start(*words: str) -> Saving:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout and process.stdout.readline() == "ready\n"
        job: Any = SimpleNamespace(directory=directory, root_pid=process.pid, name="job")
        saving = Saving(job)
        saving.process = process  # type: ignore[attr-defined]
        return saving

    yield start
    for process in processes:
        if process.poll() is None:
            process.communicate("")


def save(saving: Saving, image: Path) -> Saved:
    """What a checkpoint does that ends the job, with CRIU's part played here."""
    process: subprocess.Popen[str] = saving.process  # type: ignore[attr-defined]
    pids = [process.pid]
    image.mkdir(exist_ok=True)
    saving.look(pids)
    saving.save(image, pids, time.monotonic() + 60)
    for number, held in enumerate(memory_files.held_files(pids).values()):
        for gone in held.gone():
            link_open_file(held.door, Path(gone).parent / f"link_remap.{number}")
    saving.name_links()
    process.communicate("")
    return Saved(saving.files, saving.links, image)


def test_what_the_dump_itself_writes_in_memory_is_not_a_file_of_the_job(
    shm: Path, holder: Callable[..., Saving]
) -> None:
    image, own = shm / "image.partial-01234567", shm / "own"
    log = image / "criu" / "dump.log"
    log.parent.mkdir(parents=True)
    for path in (log, own):
        path.write_bytes(b"text")
    saved = save(holder(f"open:{log}", f"open:{own}"), image)
    assert [file.paths for file in saved.files] == [(str(own),)]


def test_what_the_job_can_write_to_and_the_image_has_not_is_told_with_its_size(
    shm: Path, disk: Path, holder: Callable[..., Saving]
) -> None:
    own = [f"open:{shm}/open", f"mapped:{shm}/mapped", f"open-gone:{disk}/gone"]
    others = [f"open:{disk}/open", f"read:{disk}/read", f"mapped:{disk}/mapped"]
    others += [f"mapped-read:{disk}/mapped-read"]
    for size, word in enumerate([*own, *others], 1):
        Path(word.partition(":")[2]).write_bytes(b"." * size)
    saving = holder(*own, *others)
    pids = [saving.process.pid]  # type: ignore[attr-defined]
    image = disk / "image"
    image.mkdir()
    holder(f"mapped-read:{disk}/mapped")  # so it is not memory of the job alone
    saving.look(pids)
    saving.save(image, pids, time.monotonic() + 60)
    assert saving.written(pids) == {f"{shm}/open": 1, f"{disk}/open": 4, f"{disk}/mapped": 6}


def link_open_file(door: str, path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    follow, here = 0x400, -100  # AT_SYMLINK_FOLLOW, AT_FDCWD
    assert libc.linkat(here, door.encode(), here, bytes(path), follow) == 0, ctypes.get_errno()


def test_descriptor_that_is_closed_during_the_look_is_passed_over(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, closed = disk / "file", 1 << 20
    with file.open("w"):
        real = memory_files.fd_targets
        monkeypatch.setattr(
            memory_files,
            "fd_targets",
            lambda pid: [(closed, "/memfd:CRIUMFD (deleted)"), *real(pid)],
        )
        held = memory_files.held_files([os.getpid()]).values()
        assert str(file) in {name for one in held for name in one.opened}


def putting(saved: Saved) -> Putting:
    manifest = SimpleNamespace(memory_files=saved.files, links=saved.links)
    image: Any = SimpleNamespace(path=saved.image, manifest=manifest)
    return Putting(image, "job")


def restored(saved: Saved) -> None:
    files = putting(saved)
    files.put()
    files.fill()
    files.keep()


def about(path: Path) -> tuple[int, int, int, int, int]:
    status = path.stat()
    return status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_nlink


def test_a_mapped_file_comes_back_with_bytes_names_mode_and_owner(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path, other = shm / "folder" / "one", shm / "other"
    path.parent.mkdir(mode=0o751)
    path.write_bytes(b"at the dump" + bytes(mmap.PAGESIZE))
    os.link(path, other)
    path.chmod(0o640)
    os.chown(path, 1, 2)
    before = about(path), path.parent.stat().st_mode, path.read_bytes()
    saved = save(holder(f"mapped:{path}"), tmp_path / "image")
    assert [file.paths for file in saved.files] == [(str(path), str(other))]
    shutil.rmtree(path.parent)
    other.unlink()
    for _ in range(2):
        restored(saved)
        assert (about(path), path.parent.stat().st_mode, path.read_bytes()) == before
        assert path.samefile(other)
        other.write_bytes(b"later values")
    assert sorted(shm.iterdir()) == [path.parent, other]


def test_holes_of_a_file_stay_holes(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path = shm / "sparse"
    with open(path, "wb") as file:
        file.truncate(1 << 32)
        os.pwrite(file.fileno(), b"middle", 1 << 31)
    saved = save(holder(f"mapped:{path}"), tmp_path / "image")
    path.unlink()
    restored(saved)
    assert path.stat().st_size == 1 << 32
    assert path.stat().st_blocks * 512 <= 1 << 20
    with open(path, "rb") as file:
        assert os.pread(file.fileno(), 6, 1 << 31) == b"middle"
    assert (saved.image / saved.files[0].data).stat().st_size <= 1 << 20


def test_many_small_holes_are_written_out(monkeypatch: pytest.MonkeyPatch, shm: Path) -> None:
    monkeypatch.setattr(memory_files, "MOST_RUNS", 3)
    path = shm / "holes"
    with open(path, "wb") as file:
        for number in range(8):
            os.pwrite(file.fileno(), b"x", number * (1 << 20))
    runs = memory_files._runs(str(path))
    assert len(runs) <= 3
    assert sum(size for _, size in runs) >= 7 << 20


def test_a_file_that_is_open_but_not_mapped_is_made_only_where_it_is_missing(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path = shm / "log"
    path.write_bytes(b"at the dump")
    saved = save(holder(f"open:{path}"), tmp_path / "image")
    path.write_bytes(b"later")
    restored(saved)
    assert path.read_bytes() == b"later"
    path.unlink()
    restored(saved)
    assert path.read_bytes() == b"at the dump"


@pytest.mark.parametrize("how", ["read", "mapped-read"])
def test_what_the_job_only_reads_is_part_of_the_image_if_the_job_has_made_it(
    how: str,
    shm: Path,
    tmp_path: Path,
    holder: Callable[..., Saving],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = shm / "input"
    path.write_bytes(b"data")
    made = save(holder(f"{how}:{path}"), tmp_path / "made")
    assert [file.paths for file in made.files] == [(str(path),)]
    path.unlink()
    restored(made)
    assert path.read_bytes() == b"data"
    monkeypatch.setattr(memory_files, "_began", lambda job: time.time() + 100)
    assert save(holder(f"{how}:{path}"), tmp_path / "found").files == ()


def test_a_file_on_a_disk_is_memory_if_the_job_has_made_it_and_it_is_not_large(
    disk: Path, tmp_path: Path, holder: Callable[..., Saving], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk / "hsperfdata"
    path.write_bytes(bytes(mmap.PAGESIZE))
    saving = holder(f"mapped:{path}")
    assert [file.paths for file in save(saving, tmp_path / "a").files] == [(str(path),)]
    monkeypatch.setattr(memory_files, "MOST_ON_DISK", 100)
    assert save(holder(f"mapped:{path}"), tmp_path / "b").files == ()
    monkeypatch.undo()
    monkeypatch.setattr(memory_files, "_began", lambda job: time.time() + 100)
    assert save(holder(f"mapped:{path}"), tmp_path / "c").files == ()


def test_a_file_that_others_hold_too_is_not_the_jobs_memory(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path = shm / "shared"
    path.write_bytes(b"of two jobs")
    holder(f"mapped:{path}")
    assert save(holder(f"mapped:{path}"), tmp_path / "image").files == ()


def test_a_file_that_another_process_has_by_now_is_refused_and_nothing_is_changed(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path, other = shm / "one", shm / "two"
    for file in (path, other):
        file.write_bytes(b"at the dump")
    saved = save(holder(f"mapped:{path}", f"mapped:{other}"), tmp_path / "image")
    other.unlink()
    path.write_bytes(b"later value")
    holder(f"mapped:{path}")
    with pytest.raises(FilesChanged, match=rf"{path} is memory of the job, and process \d+ has it"):
        putting(saved).put()
    assert path.read_bytes() == b"later value"
    assert not other.exists()


def test_a_failed_restore_puts_back_what_was_there(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path, missing = shm / "one", shm / "folder" / "two"
    missing.parent.mkdir()
    for file in (path, missing):
        file.write_bytes(b"at the dump")
    saved = save(holder(f"mapped:{path}", f"mapped:{missing}"), tmp_path / "image")
    path.write_bytes(b"later")
    shutil.rmtree(missing.parent)
    inode = path.stat().st_ino
    files = putting(saved)
    files.put()
    files.fill()
    assert missing.read_bytes() == path.read_bytes() == b"at the dump"
    assert files.put_back() == []
    assert (path.read_bytes(), path.stat().st_ino) == (b"later", inode)
    assert list(shm.iterdir()) == [path]


def test_what_a_killed_restore_has_left_is_put_right_by_the_next_one(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path = shm / "one"
    path.write_bytes(b"at the dump")
    saved = save(holder(f"mapped:{path}"), tmp_path / "image")
    path.write_bytes(b"later")
    putting(saved).put()  # and no more
    again = putting(saved)
    again.put()
    assert again.put_back() == []
    assert path.read_bytes() == b"later"
    restored(saved)
    assert list(shm.iterdir()) == [path]


def test_a_file_that_cannot_be_made_is_named(
    shm: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    path = shm / "folder" / "one"
    path.parent.mkdir()
    path.write_bytes(b"at the dump")
    saved = save(holder(f"mapped:{path}"), tmp_path / "image")
    shutil.rmtree(path.parent)
    path.parent.write_text("in the way")
    with pytest.raises(FileNotMade) as caught:
        putting(saved).put()
    assert str(path) in str(caught.value)
    assert path.parent.read_text() == "in the way"


@pytest.mark.parametrize("how", ["open-gone", "mapped-gone"])
def test_a_link_of_criu_goes_after_a_dump_and_is_there_for_each_restore(
    how: str, disk: Path, tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    first, second = disk / "first", disk / "second"
    first.write_bytes(b"hard link")
    os.link(first, second)
    saved = save(holder(f"{how}:{first}"), tmp_path / "image")
    assert os.listdir(disk) == ["second"]
    (link,) = saved.links
    assert (link.of, link.opened) == (str(second), str(first))
    for _ in range(2):
        files = putting(saved)
        files.put()
        assert Path(link.path).samefile(second)
        files.fill()
        files.keep()
        assert os.listdir(disk) == ["second"]


def test_a_file_whose_other_name_is_not_found_is_in_the_image(
    disk: Path, tmp_path: Path, holder: Callable[..., Saving], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_files, "MOST_SEARCHED", 0)
    first, second = disk / "first", disk / "second"
    first.write_bytes(b"hard link")
    os.link(first, second)
    saved = save(holder(f"open-gone:{first}"), tmp_path / "image")
    (link,) = saved.links
    assert [file.paths for file in saved.files] == [(link.path,)]
    second.unlink()
    for _ in range(2):
        files = putting(saved)
        files.put()
        files.fill()
        assert Path(link.path).read_bytes() == b"hard link"
        files.keep()
        assert os.listdir(disk) == []
    monkeypatch.setattr(memory_files, "MOST_ON_DISK", 4)
    first.write_bytes(b"hard link")
    os.link(first, second)
    with pytest.raises(Unsupported, match=f"the file {first}, which was opened by this name"):
        save(holder(f"open-gone:{first}"), tmp_path / "image")


def test_the_next_coordinator_takes_away_what_criu_has_left(
    disk: Path, holder: Callable[..., Saving]
) -> None:
    first, second = disk / "first", disk / "second"
    first.write_bytes(b"hard link")
    os.link(first, second)
    process = holder(f"open-gone:{first}").process  # type: ignore[attr-defined]
    os.link(second, disk / "link_remap.7")
    (disk / "link_remap.8").write_bytes(b"another file")
    clear_links([process.pid])
    assert sorted(os.listdir(disk)) == ["link_remap.8", "second"]


@pytest.mark.parametrize("step", ["_runs", "_copy"])
def test_shared_memory_that_its_owner_takes_away_meanwhile_is_not_in_the_image(
    step: str, tmp_path: Path, holder: Callable[..., Saving], monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = holder()
    name = f"psm_{os.getpid()}_"
    theirs, waiting = Path(f"/dev/shm/{name}0"), Path(f"/dev/shm/{name}1")
    original = getattr(memory_files, step)

    def late(source: str, *rest: Any) -> Any:
        if source == str(theirs):
            theirs.unlink()
        return original(source, *rest)

    monkeypatch.setattr(memory_files, step, late)
    try:
        for path in (theirs, waiting):
            path.write_bytes(b"a batch")
        saved = save(saving, tmp_path / "image")
        paths = [path for file in saved.files for path in file.paths]
        assert str(theirs) not in paths and str(waiting) in paths
        waiting.unlink()
        restored(saved)
        assert waiting.read_bytes() == b"a batch"
    finally:
        for path in (theirs, waiting):
            path.unlink(missing_ok=True)


def ended() -> int:
    """Process id of one that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_shared_memory_that_waits_for_its_next_process_is_in_the_image(
    tmp_path: Path, holder: Callable[..., Saving]
) -> None:
    saving = holder()
    waiting = Path(f"/dev/shm/torch_{ended()}_7_0")
    stranger = Path(f"/dev/shm/of-another-program-{os.getpid()}x")
    theirs = Path(f"/dev/shm/torch_{os.getpid()}_7_0")  # this process is none of the job's
    try:
        for path in (waiting, stranger, theirs):
            path.write_bytes(b"a batch")
        saved = save(saving, tmp_path / "image")
        paths = [path for file in saved.files for path in file.paths]
        assert str(waiting) in paths
        assert str(stranger) not in paths and str(theirs) not in paths
        waiting.unlink()
        restored(saved)
        assert waiting.read_bytes() == b"a batch"
    finally:
        for path in (waiting, stranger, theirs):
            path.unlink(missing_ok=True)
