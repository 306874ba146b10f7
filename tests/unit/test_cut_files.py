"""The job's own files at a restore: what is found changed, the cut, and the way back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import criu_entries
import pytest

from coordinator import cut_files, job_files
from coordinator.cut_files import CutFiles
from coordinator.job_files import (
    MOST_NAMED,
    Grown,
    find_grown,
    is_open_for_writing,
    named,
    written_files,
)
from flowgpu.errors import CutFailed, FilesChanged
from flowgpu.host import criu_images
from flowgpu.host.proctree import file_users
from flowgpu.image import space
from flowgpu.image.digests import Unreadable
from flowgpu.image.manifest import OpenFile
from tests.patience import SECONDS

LOG = os.O_WRONLY | os.O_APPEND
MAPPED = 0


def write(images: Path, files: Sequence[tuple[Path, int, int | None]], **fields: int) -> Path:
    """CRIU's images of files: path, flags, size; `fields` are more of each."""
    images.mkdir(exist_ok=True)
    entries = []
    for number, (path, flags, size) in enumerate(files, 1):
        sizes = {} if size is None else {"size": size}
        more = {"mode": stat.S_IFREG | 0o644, "flags": flags, **sizes, **fields}
        file = criu_entries.make("reg_file_entry", id=number, pos=0, name=str(path), **more)
        entries.append(criu_entries.make("file_entry", type=1, id=number, reg=file))
    criu_entries.rewrite(images / "files.img", entries)
    return images


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """Three files of 10 bytes."""
    paths = [tmp_path / name for name in ("one", "two", "three")]
    for path in paths:
        path.write_bytes(b"0123456789")
        path.chmod(0o640)
    return paths


def grown(paths: Sequence[Path], size: int = 4) -> list[Grown]:
    return [Grown(str(path), size, os.stat(path)) for path in paths]


def changes(images: Path, *known: OpenFile, cut: bool = True) -> str:
    with pytest.raises(FilesChanged) as caught:
        find_grown(images, known, "train", cut=cut)
    return str(caught.value.fields["changes"])


# What is found


def dumped(images: Path) -> tuple[OpenFile, ...]:
    """What a dump would say now of files that are open for writing."""
    sizes = {}
    for file in filter(is_open_for_writing, criu_images.regular_files(images)):
        there = os.path.exists(file.path)
        sizes[file.path] = os.path.getsize(file.path) if file.size is None and there else file.size
    return written_files({path: size or 0 for path, size in sizes.items()})


def test_what_a_job_can_write_to_is_kept_as_it_was(logs: list[Path], tmp_path: Path) -> None:
    one, two, three = logs
    gone = tmp_path / "gone"
    files = [(one, LOG, None), (one, LOG, None), (two, os.O_WRONLY, 7), (three, os.O_PATH, None)]
    images = write(tmp_path / "images", [*files, (gone, LOG, None), (three, os.O_RDONLY, 10)])
    found = dumped(images)
    assert [(file.path, file.bytes) for file in found] == [(str(one), 10), (str(two), 7)]
    for file, path in zip(found, (one, two), strict=True):
        about = path.stat()
        times = (file.mtime_ns, file.ctime_ns)
        assert (file.inode, *times) == (about.st_ino, about.st_mtime_ns, about.st_ctime_ns)
    assert found[0].digest != found[1].digest != ""


def test_files_for_which_there_is_no_time_have_no_digest(
    logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write(tmp_path / "images", [(path, os.O_RDWR, 10) for path in logs])
    logs[1].unlink()
    logs[1].mkdir()  # which is not to be read, and no reason to leave the others out
    assert [bool(file.digest) for file in dumped(images)] == [True, False, True]
    monkeypatch.setattr(job_files, "DIGEST_SECONDS", 0.0)
    assert [bool(file.digest) for file in dumped(images)] == [False] * 3


def test_what_has_grown_is_found_and_what_has_not_is_not(logs: list[Path], tmp_path: Path) -> None:
    one, two, three = logs
    files = [(one, LOG, None), (two, os.O_RDWR, 7), (three, os.O_RDWR, 10)]
    images = write(tmp_path / "images", files)
    known = dumped(images)
    append(one, "more")
    found = find_grown(images, known, "train", cut=True)
    assert [(file.path, file.bytes) for file in found] == [(str(one), 10), (str(two), 7)]
    # Where an image lacks a log's size, the log is left as it is, as CRIU does.
    assert [file.path for file in find_grown(images, known[1:], "train", cut=True)] == [str(two)]


def test_an_image_from_before_has_logs_cut_and_others_refused(
    logs: list[Path], tmp_path: Path
) -> None:
    one, two, three = logs
    images = write(tmp_path / "images", [(one, LOG, None), (three, os.O_RDWR, 10)])
    # A size that an image says of a file of no such kind is no reason to cut it.
    known = [OpenFile(str(one), 3), OpenFile(str(three), 1)]
    assert [file.path for file in find_grown(images, known, "train", cut=True)] == [str(one)]
    write(images, [(one, LOG, None), (two, os.O_RDWR, 9)])
    expected = f"{two} has 10 bytes and had 9, and the image has no digest of it"
    assert changes(images, *known) == expected


def append(path: Path, more: str) -> None:
    with open(path, "a") as file:
        file.write(more)


def rewrite(path: Path) -> None:
    path.write_bytes(b"9876543210")


def rewrite_and_grow(path: Path) -> None:
    path.write_bytes(b"9876543210more")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def copy(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def copy_with_times(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def grow(path: Path) -> None:
    append(path, "more")


def copy_and_grow(path: Path) -> None:
    copy(path)
    append(path, "more")


TOO_LARGE = "{path} was changed, and was too large for a digest that would tell where"


@pytest.mark.parametrize("flags", [LOG, os.O_RDWR], ids=["log", "update"])
@pytest.mark.parametrize(
    ("change", "digested", "refused", "log_refused"),
    [
        (touch, True, "", ""),
        (copy, True, "", ""),
        (copy_with_times, True, "", ""),
        (grow, True, "", ""),
        (copy_and_grow, True, "", ""),
        (rewrite, True, "{path} was changed", "{path} was changed"),
        (rewrite_and_grow, True, *["{path} was changed in its first 10 bytes"] * 2),
        (touch, False, TOO_LARGE, ""),
        (copy, False, TOO_LARGE, ""),
        (copy_with_times, False, "", ""),
        (grow, False, TOO_LARGE, ""),
        (copy_and_grow, False, TOO_LARGE, TOO_LARGE),
        (rewrite, False, TOO_LARGE, ""),  # which no program does by these descriptors
    ],
)
def test_a_file_is_cut_or_left_alone_only_where_its_old_part_is_unchanged(
    logs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: int,
    change: Callable[[Path], None],
    digested: bool,
    refused: str,
    log_refused: str,
) -> None:
    path = logs[0]
    images = write(tmp_path / "images", [(path, flags, None if flags == LOG else 10)])
    if not digested:
        monkeypatch.setattr(job_files, "DIGEST_SECONDS", 0.0)
    known = dumped(images)
    assert find_grown(images, known, "train", cut=True) == []
    change(path)
    if reason := log_refused if flags == LOG else refused:
        assert changes(images, *known) == reason.format(path=path)
        assert changes(images, *known, cut=False)
    else:
        found = find_grown(images, known, "train", cut=True)
        assert [file.path for file in found] == [str(path)] * (path.stat().st_size > 10)


def test_a_mapped_file_is_compared_whatever_its_times_are(logs: list[Path], tmp_path: Path) -> None:
    images = write(tmp_path / "images", [(logs[0], os.O_RDWR, 10)])
    area = criu_entries.make("vma_entry", shmid=1, status=1 << 7, prot=3, fdflags=os.O_RDWR)
    criu_entries.rewrite(images / "mm-7.img", [criu_entries.make("mm_entry", vmas=[area])])
    (known,) = dumped(images)
    assert find_grown(images, [known], "train", cut=True) == []
    # The file is as the kernel leaves it before it notes a write to a page.
    rewrite(logs[0])
    about = logs[0].stat()
    now = dataclasses.replace(known, mtime_ns=about.st_mtime_ns, ctime_ns=about.st_ctime_ns)
    assert changes(images, now) == f"{logs[0]} was changed"


def test_a_file_that_cannot_be_read_and_may_have_changed_is_refused(
    logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(files: Sequence[tuple[Path, int]], *_: object) -> list[str]:
        raise Unreadable(files[0][0], "Permission denied")

    images = write(tmp_path / "images", [(logs[0], os.O_RDWR, 10)])
    known = dumped(images)
    monkeypatch.setattr(job_files, "file_digests", unreadable)
    assert find_grown(images, known, "train", cut=True) == []
    grow(logs[0])
    expected = f"{logs[0]} may have changed and cannot be read (Permission denied)"
    assert changes(images, *known) == expected


def test_every_file_that_changed_is_named_at_once(logs: list[Path], tmp_path: Path) -> None:
    one, two, three = logs
    gone = tmp_path / "gone"
    below = one / "file"
    files = [(path, os.O_RDWR, size) for path, size in ((one, 12), (two, 9), (gone, 0), (below, 0))]
    images = write(tmp_path / "images", [*files, (three, os.O_RDONLY, 9)])
    assert changes(images, *dumped(images)) == (
        f"{one} has 10 bytes and had 12; {gone} is missing; {below} is missing; "
        f"{three} has 10 bytes and had 9, and the job only read it"
    )
    assert f"{two} has 10 bytes and had 9; " in changes(images, *dumped(images), cut=False)
    assert [path.read_bytes() for path in logs] == [b"0123456789"] * 3


def test_of_many_files_the_first_are_named() -> None:
    texts = [f"file {number}" for number in range(MOST_NAMED + 3)]
    assert named(texts).endswith(f"; file {MOST_NAMED - 1}; and 3 more")
    assert named(texts[:MOST_NAMED]).endswith(f"; file {MOST_NAMED - 1}")


def test_a_file_of_two_names_is_cut_once(logs: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.hardlink_to(logs[0])
    images = write(tmp_path / "images", [(logs[0], os.O_RDWR, 4), (other, os.O_RDWR, 4)])
    assert len(find_grown(images, dumped(images), "train", cut=True)) == 1


@pytest.mark.parametrize("fields", [{"mnt_id": 12}, {"ext": 1}, {"mode": stat.S_IFCHR}])
def test_what_criu_does_not_open_by_that_path_is_left_to_it(
    tmp_path: Path, fields: dict[str, int]
) -> None:
    images = write(tmp_path / "images", [(tmp_path / "gone", os.O_RDWR, 1)], **fields)
    assert find_grown(images, (), "train", cut=True) == []
    assert "is missing" in changes(write(images, [(tmp_path / "gone", os.O_RDWR, 1)]))


def test_deleted_files_and_those_of_processes_are_left_to_criu(tmp_path: Path) -> None:
    files = [(tmp_path / "gone", os.O_RDWR, 1), (Path("/proc/999999/stat"), os.O_RDONLY, 0)]
    images = write(tmp_path / "images", files)
    ghost = criu_entries.make("remap_file_path_entry", orig_id=1, remap_id=1, remap_type=1)
    criu_entries.rewrite(images / "remap-fpath.img", [ghost])
    assert criu_images.regular_files(images) == []


@pytest.mark.parametrize(
    ("status", "prot", "flags", "writable"),
    [
        (1 << 7, 3, os.O_RDWR, True),
        (1 << 7, 1, os.O_RDWR, True),  # mprotect(2) may be next
        (1 << 7, 1, os.O_RDONLY, False),
        (1 << 6, 3, os.O_RDWR, False),  # private
    ],
)
def test_a_file_is_written_to_by_a_shared_mapping(
    logs: list[Path], tmp_path: Path, status: int, prot: int, flags: int, writable: bool
) -> None:
    images = write(tmp_path / "images", [(logs[0], MAPPED, 4)])
    areas = [
        criu_entries.make("vma_entry", shmid=shmid, status=state, prot=prot, fdflags=flags)
        for shmid, state in ((2, 1 << 7), (1, status), (3, 1 << 7))
    ]
    criu_entries.rewrite(images / "mm-7.img", [criu_entries.make("mm_entry", vmas=areas)])
    if writable:
        first = write(tmp_path / "first", [(logs[0], os.O_RDWR, 4)])
        assert len(find_grown(images, dumped(first), "train", cut=True)) == 1
    else:
        assert changes(images).endswith(", and the job only read it")


WRITER = "import sys; file = open(sys.argv[1], 'a'); print(flush=True); sys.stdin.read()"


def test_a_writer_that_proc_does_not_show_is_noticed(
    logs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write(tmp_path / "images", [(logs[0], os.O_RDWR, 4)])
    known = dumped(images)
    words = [sys.executable, "-c", WRITER, str(logs[0])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        about = os.stat(logs[0])
        key = (about.st_dev, about.st_ino)
        assert file_users([key]) == {key: f"process {process.pid} has it open for writing"}
        monkeypatch.setattr(job_files, "file_users", lambda files: {})
        assert changes(images, *known).endswith(
            ", and a process that is not seen here writes to it"
        )
        process.communicate(timeout=SECONDS)
    assert len(find_grown(images, known, "train", cut=True)) == 1


# The cut


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Nothing of it is read."""
    image = tmp_path / "images" / "image"
    image.mkdir(parents=True)
    return image


def folders(image: Path) -> list[Path]:
    return sorted(path for path in image.parent.iterdir() if path != image)


def test_what_is_cut_is_kept_beside_the_image(logs: list[Path], image: Path) -> None:
    cut = CutFiles(image, "train")
    cut.cut(grown(logs[:2]))
    (folder,) = folders(image)
    assert folder == cut.folder and folder.name.startswith("image.cut-2")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.read_bytes() for path in logs] == [b"0123", b"0123", b"0123456789"]
    index = json.loads((folder / "index.json").read_text())
    assert (index["image"], index["job"]) == (str(image), "train")
    rows = index["files"]
    assert [row["path"] for row in rows] == [str(path) for path in logs[:2]]
    for row in rows:
        assert (row["bytes_at_dump"], row["bytes_found"], row["mode"]) == (4, 10, "0640")
        part = folder / row["part"]
        assert part.read_bytes() == b"456789"
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
    assert {path.name for path in folder.iterdir()} == {
        "index.json",
        *(row["part"] for row in rows),
    }
    assert cut.report()["cut_folder"] == str(folder)
    assert cut.report()["cut_files"][0] == {"path": str(logs[0]), "bytes": 4, "cut_bytes": 6}


def test_nothing_is_made_when_nothing_has_grown(image: Path) -> None:
    cut = CutFiles(image, "train")
    cut.cut([])
    assert cut.put_back() == []
    assert cut.report() == {"cut_folder": None, "cut_files": []}
    assert folders(image) == []


def test_each_restore_has_a_folder_of_its_own(logs: list[Path], image: Path) -> None:
    for number in range(3):
        logs[0].write_bytes(b"0123" + b"%d" % number)
        CutFiles(image, "train").cut(grown(logs[:1]))
    parts = [next(folder.glob("0000-*")).read_bytes() for folder in folders(image)]
    assert sorted(parts) == [b"0", b"1", b"2"]


def test_parts_have_names_whatever_the_paths_are(tmp_path: Path, image: Path) -> None:
    paths = [tmp_path / "a\nb \udcff", tmp_path / ("x" * 255), tmp_path / "a-b"]
    for path in paths:
        path.write_bytes(b"0123456789")
    cut = CutFiles(image, "train")
    cut.cut(grown(paths))
    assert cut.folder
    index = json.loads((cut.folder / "index.json").read_text())
    assert [row["path"] for row in index["files"]] == [str(path) for path in paths]
    for row in index["files"]:
        assert (cut.folder / row["part"]).read_bytes() == b"456789"
        assert row["part"].isascii() and row["part"].isprintable() and len(row["part"]) <= 105
    assert cut.put_back() == []
    assert all(path.read_bytes() == b"0123456789" for path in paths)


def whole(logs: Sequence[Path], image: Path) -> bool:
    return folders(image) == [] and all(path.read_bytes() == b"0123456789" for path in logs)


def test_putting_back_leaves_everything_as_it_was(logs: list[Path], image: Path) -> None:
    before = [os.stat(path) for path in logs]
    cut = CutFiles(image, "train")
    cut.cut(grown(logs))
    assert cut.put_back() == []
    assert whole(logs, image)
    after = [os.stat(path) for path in logs]
    assert [(s.st_ino, s.st_mtime_ns) for s in after] == [(s.st_ino, s.st_mtime_ns) for s in before]


def test_a_file_of_another_user_is_put_back_without_its_times(
    logs: list[Path], image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utime(fd: int, ns: tuple[int, int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    cut = CutFiles(image, "train")
    cut.cut(grown(logs))
    monkeypatch.setattr(cut_files.os, "utime", utime)
    assert cut.put_back() == []
    assert whole(logs, image)


def written_to(path: Path) -> None:
    path.write_bytes(b"0123, and more")


def exchanged(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(b"0123")
    other.rename(path)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    path.symlink_to(path.with_suffix(".old"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (written_to, "it has 14 bytes now, not 4"),
        (exchanged, "it is another file now"),
        (linked, "Too many levels of symbolic links"),
        (Path.unlink, "No such file or directory"),
    ],
)
def test_a_file_that_changed_since_the_cut_is_named_and_its_part_stays(
    logs: list[Path], image: Path, change: Callable[[Path], object], reason: str
) -> None:
    cut = CutFiles(image, "train")
    cut.cut(grown(logs))
    change(logs[1])
    after = logs[1].read_bytes() if logs[1].exists() else None
    assert cut.put_back() == [f"{logs[1]} ({reason})"]
    assert (logs[1].read_bytes() if logs[1].exists() else None) == after
    assert logs[0].read_bytes() == logs[2].read_bytes() == b"0123456789"
    assert cut.folder and folders(image) == [cut.folder]
    (row,) = json.loads((cut.folder / "index.json").read_text())["files"]
    assert row["path"] == str(logs[1])
    assert {path.name for path in cut.folder.iterdir()} == {"index.json", row["part"]}
    assert (cut.folder / row["part"]).read_bytes() == b"456789"


def test_a_part_that_does_not_go_back_whole_goes_not_at_all(logs: list[Path], image: Path) -> None:
    cut = CutFiles(image, "train")
    cut.cut(grown(logs[:1]))
    assert cut.folder
    os.truncate(next(cut.folder.glob("0000-*")), 3)
    assert cut.put_back() == [f"{logs[0]} (it ends at byte 3)"]
    assert logs[0].read_bytes() == b"0123"


def test_a_cut_that_fails_half_way_is_undone(
    logs: list[Path], image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.ftruncate
    inode = os.stat(logs[1]).st_ino

    def ftruncate(fd: int, size: int) -> None:
        if os.fstat(fd).st_ino == inode:
            raise OSError(1, "Operation not permitted")
        real(fd, size)

    cut = CutFiles(image, "train")
    with monkeypatch.context() as patch:
        patch.setattr(cut_files.os, "ftruncate", ftruncate)
        with pytest.raises(CutFailed, match=rf"{logs[1]}: Operation not permitted"):
            cut.cut(grown(logs))
    assert logs[0].read_bytes() == b"0123"
    assert cut.put_back() == []
    assert whole(logs, image)


@pytest.mark.parametrize("change", [written_to, exchanged, linked, Path.unlink])
def test_a_file_that_changes_before_the_cut_is_not_cut(
    logs: list[Path], image: Path, change: Callable[[Path], object]
) -> None:
    found = grown(logs)
    change(logs[2])
    after = logs[2].read_bytes() if logs[2].exists() else None
    cut = CutFiles(image, "train")
    with pytest.raises((CutFailed, FilesChanged), match=str(logs[2])):
        cut.cut(found)
    assert cut.put_back() == []
    assert whole(logs[:2], image)
    assert (logs[2].read_bytes() if logs[2].exists() else None) == after


def test_a_file_that_grows_while_it_is_set_aside_is_not_cut(
    logs: list[Path], image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = CutFiles(image, "train")
    with monkeypatch.context() as patch:
        patch.setattr(cut_files.layout, "sync", lambda path: written_to(logs[1]))
        with pytest.raises(FilesChanged, match=f"{logs[1]} is being changed"):
            cut.cut(grown(logs))
    assert cut.put_back() == []
    assert whole([logs[0], logs[2]], image)
    assert logs[1].read_bytes() == b"0123, and more"


def test_without_room_for_the_parts_nothing_is_cut(
    logs: list[Path], image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "free", lambda folder: 17)
    cut = CutFiles(image, "train")
    with pytest.raises(CutFailed, match=rf"{image.parent}: it has 17 B free for 18 B"):
        cut.cut(grown(logs))
    assert cut.put_back() == []
    assert whole(logs, image)


def test_without_a_place_for_the_parts_nothing_is_cut(logs: list[Path], tmp_path: Path) -> None:
    cut = CutFiles(tmp_path / "gone" / "image", "train")
    with pytest.raises(CutFailed, match=r"gone: No such file or directory"):
        cut.cut(grown(logs))
    assert cut.put_back() == []
    assert all(path.read_bytes() == b"0123456789" for path in logs)
