"""The job's own regular files: what a restore must find, and which of them have grown.

    manifest.open_files = append_only(criu_dir)             # at the dump, while the job is stopped
    grown = find_grown(criu_dir, manifest.open_files, ...)  # at the restore; CutFiles cuts them

CRIU's images have the size of every file but those that are only appended to, and CRIU refuses
another one. So sizes of those are the manifest's, and the rest is looked at before CRIU is started:
it ends at the first file, names no other, and cuts none.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flowgpu import criu_images
from flowgpu.criu_images import OpenedFile
from flowgpu.errors import FilesChanged
from flowgpu.image.manifest import OpenFile
from flowgpu.proctree import file_users

MOST_NAMED = 20


@dataclass(frozen=True)
class Grown:
    """A file that is to be cut back: its bytes at the dump, and what it is now."""

    path: str
    bytes: int
    found: os.stat_result


@dataclass(frozen=True)
class _Expected:
    """A path, its bytes at the dump, and all that the image has of it."""

    path: str
    bytes: int
    opened: tuple[OpenedFile, ...]


def is_append_only(file: OpenedFile) -> bool:
    """Whether it is open in the way of a log, of which CRIU keeps no size."""
    return bool(file.flags & os.O_APPEND) and file.flags & os.O_ACCMODE == os.O_WRONLY


def append_only(images: Path) -> tuple[OpenFile, ...]:
    """Sizes, in bytes, of the files of CRIU's `images` that have none there.

    Right while the job is as it was dumped: CRIU has seen the file under its path just before.
    """
    found = {}
    for file in criu_images.regular_files(images):
        if file.size is None and is_append_only(file):
            with suppress(OSError):  # gone since, so that a restore will miss it
                found[file.path] = os.stat(file.path).st_size
    return tuple(OpenFile(path, size) for path, size in found.items())


def find_grown(images: Path, known: Sequence[OpenFile], job: str, *, cut: bool) -> list[Grown]:
    """What to cut back before CRIU restores `images`; nothing is changed here.

    `known` are the sizes that the images lack. Raises FilesChanged, which names every file that is
    missing or shorter, or longer and not to be cut: without `cut`, or when the job did not write to
    it, or another process does. Raises ImageDamaged.
    """

    @cache
    def mapped() -> set[int]:
        return criu_images.mapped_for_writing(images)

    changes = [_change(file, mapped, cut) for file in _expected(images, known)]
    wrong = [change for change in changes if isinstance(change, str)]
    grown = {
        (change.found.st_dev, change.found.st_ino): change
        for change in changes
        if isinstance(change, Grown)
    }
    users = file_users(grown)
    for inode, file in list(grown.items()):
        if user := users.get(inode) or _unseen_writer(file.path):
            wrong.append(f"{_sizes(file)}, and {user}")
    if wrong:
        raise FilesChanged(job=job, changes=named(wrong))
    return list(grown.values())


def named(texts: Sequence[str]) -> str:
    """All of them in one text; of very many the first."""
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _expected(images: Path, known: Sequence[OpenFile]) -> list[_Expected]:
    """Files of which the size at the dump is known."""
    sizes = {file.path: file.bytes for file in known}
    by_path: dict[str, list[OpenedFile]] = {}
    for file in criu_images.regular_files(images):
        by_path.setdefault(file.path, []).append(file)
    found = []
    for path, opened in by_path.items():
        size = next((file.size for file in opened if file.size is not None), None)
        if size is None and any(map(is_append_only, opened)):
            size = sizes.get(path)
        if size is not None:
            found.append(_Expected(path, size, tuple(opened)))
    return found


def _change(file: _Expected, mapped: Callable[[], set[int]], cut: bool) -> Grown | str | None:
    """What is to be done about a file: nothing, cut it, or refuse for this reason."""
    try:
        found = os.stat(file.path)
    except (FileNotFoundError, NotADirectoryError):
        return f"{file.path} is missing"
    except OSError:
        return None  # CRIU may have rights that we lack, and says so if not
    if not stat.S_ISREG(found.st_mode):
        return f"{file.path} is no regular file any more"
    if found.st_size == file.bytes:
        return None
    grown = Grown(file.path, file.bytes, found)
    if found.st_size < file.bytes:
        return _sizes(grown)
    if not _is_written(file, mapped):
        return f"{_sizes(grown)}, and the job only read it"
    if os.path.islink(file.path):
        return f"{_sizes(grown)}, and is a link now"
    return grown if cut else _sizes(grown)


def _is_written(file: _Expected, mapped: Callable[[], set[int]]) -> bool:
    """Whether a process of the image could write to the file."""
    if any(opened.flags & os.O_ACCMODE for opened in file.opened):
        return True
    return any(opened.id in mapped() for opened in file.opened)


def _sizes(file: Grown) -> str:
    return f"{file.path} has {file.found.st_size} bytes and had {file.bytes}"


def _unseen_writer(path: str) -> str:
    """The same of a process that /proc does not show; empty where none is, or the file system does
    not say: no lease for reading is to be had beside a writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""  # the cut says why
    try:
        # Who opens it meanwhile makes the kernel tell us, by a signal that would end us.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return "a process that is not seen here writes to it" if error.errno == errno.EAGAIN else ""
    finally:
        os.close(fd)
    return ""
