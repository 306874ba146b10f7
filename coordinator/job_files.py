"""The job's own regular files: what a restore must find, and which of them it cuts back.

    manifest.open_files = written_files(sizes)              # at the dump, while the job is stopped
    grown = find_grown(criu_dir, manifest.open_files, ...)  # at the restore; CutFiles cuts them

The rule: a restore goes on with a file that the job was writing to only where the part before its
old end is unchanged. It cuts what came after, and refuses everything else by name.

* Unchanged is what has the inode, the times and the size of the dump. What is mapped shared and
  writable has to have the digest too, since the kernel notes a write to a mapped page late.
* Otherwise the digest of the part before the old end decides. The dump takes it of as many files,
  the smallest first, as it can read in DIGEST_SECONDS.
* Without a digest, size and time of the last change stand for it: a copy keeps these. A file that
  all of the job's descriptors only append to may also have grown, or have another time.

CRIU's images have the size of every file but those that are only appended to, and CRIU refuses
another one. It ends at the first file, names no other, and cuts none: so the files are looked at
before CRIU is started.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from flowgpu.errors import FilesChanged
from flowgpu.host import criu_images
from flowgpu.host.criu_images import OpenedFile
from flowgpu.host.proctree import file_users
from flowgpu.image.digests import Meter, Unreadable, file_digests
from flowgpu.image.manifest import OpenFile

MOST_NAMED = 20
DIGEST_SECONDS = 1.0
"""What the pause may take longer for the digests; 1 GiB that is in memory takes some 0.1 s."""
TOGETHER_BYTES = 64 << 20
"""Files up to this size are digested in one go: each go takes a thread."""


@dataclass(frozen=True)
class Grown:
    """A file that is to be cut back: its bytes at the dump, and what it is now."""

    path: str
    bytes: int
    found: os.stat_result


@dataclass(frozen=True)
class _Expected:
    """A path, its bytes at the dump, and all that CRIU's images and the manifest have of it."""

    path: str
    bytes: int
    opened: tuple[OpenedFile, ...]
    known: OpenFile | None


def is_append_only(file: OpenedFile) -> bool:
    """True if the file is open as a log is: CRIU keeps no size of such a file."""
    return bool(file.flags & os.O_APPEND) and is_open_for_writing(file) == os.O_WRONLY


def is_open_for_writing(file: OpenedFile) -> int:
    """O_WRONLY or O_RDWR, which are not 0, where it is."""
    return file.flags & os.O_ACCMODE & (os.O_WRONLY | os.O_RDWR)


def written_files(sizes: Mapping[str, int]) -> tuple[OpenFile, ...]:
    """What the files at these paths, of so many bytes, are now, while the job is stopped."""
    found: dict[str, OpenFile] = {}
    for path, size in sizes.items():
        with suppress(OSError):  # gone since, so that a restore will miss it
            now = os.stat(path)
            found[path] = OpenFile(path, size, now.st_ino, *_times(now))
    digests = _digests(found.values())
    return tuple(replace(file, digest=digests.get(path, "")) for path, file in found.items())


def _times(status: os.stat_result) -> tuple[int, int]:
    """Times of the last change of the data and of anything, in nanoseconds modulo 2^64."""
    return status.st_mtime_ns % (1 << 64), status.st_ctime_ns % (1 << 64)


def _digests(files: Collection[OpenFile]) -> dict[str, str]:
    """Digests by path, as many as there is time for."""
    deadline = time.monotonic() + DIGEST_SECONDS
    by_size = sorted(files, key=lambda file: file.bytes)
    groups: list[list[OpenFile]] = []
    room = -1
    for file in by_size:
        room -= file.bytes
        if room < 0:
            groups.append([])
            room = TOGETHER_BYTES - file.bytes
        groups[-1].append(file)
    found: dict[str, str] = {}
    for group in groups:
        try:
            found |= _digest_group(group, deadline)
        except TimeoutError:
            break
    return found


def _digest_group(group: Sequence[OpenFile], deadline: float) -> dict[str, str]:
    """Digests by path, without those of files that cannot be read. Raises TimeoutError."""

    def report(_: Mapping[str, object]) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError

    left = {file.path: file.bytes for file in group}
    while left:
        report({})
        files = [(Path(path), size) for path, size in left.items()]
        try:
            digests = file_digests(files, Meter("files", sum(left.values()), report))
            return dict(zip(left, digests, strict=True))
        except Unreadable as error:
            del left[str(error.path)]
    return {}


def find_grown(
    images: Path,
    known: Sequence[OpenFile],
    job: str,
    *,
    cut: bool,
    besides: Container[str] = (),
) -> list[Grown]:
    """What to cut back before CRIU restores `images`; nothing is changed here.

    `known` is the manifest's; files `besides` are the restore's own. Raises FilesChanged, which
    names every file that is missing, shorter or not unchanged, or longer and not to be cut: without
    `cut`, or when the job did not write to it, or another process does. Raises ImageDamaged.
    """
    grown, wrong = look(images, known, cut=cut, besides=besides)
    if wrong:
        raise FilesChanged(job=job, changes=named(wrong))
    return grown


def look(
    images: Path, known: Sequence[OpenFile], *, cut: bool, besides: Container[str] = ()
) -> tuple[list[Grown], list[str]]:
    """The same, and what FilesChanged would name. Raises ImageDamaged."""

    @cache
    def mapped() -> set[int]:
        return criu_images.mapped_for_writing(images)

    expected = (file for file in _expected(images, known) if file.path not in besides)
    changes = [_change(file, mapped, cut) for file in expected]
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
    return list(grown.values()), wrong


def named(texts: Sequence[str]) -> str:
    """One text of them all, or of the first if they are very many."""
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _expected(images: Path, known: Sequence[OpenFile]) -> list[_Expected]:
    """Files of which the size at the dump is known."""
    of_path = {file.path: file for file in known}
    by_path: dict[str, list[OpenedFile]] = {}
    for file in criu_images.regular_files(images):
        by_path.setdefault(file.path, []).append(file)
    found = []
    for path, opened in by_path.items():
        size = next((file.size for file in opened if file.size is not None), None)
        if size is None and path in of_path and any(map(is_append_only, opened)):
            size = of_path[path].bytes
        if size is not None:
            found.append(_Expected(path, size, tuple(opened), of_path.get(path)))
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
    grown = Grown(file.path, file.bytes, found)
    if found.st_size < file.bytes:
        return _sizes(grown)
    is_mapped = any(opened.id in mapped() for opened in file.opened)
    if not is_mapped and not any(map(is_open_for_writing, file.opened)):
        is_same = found.st_size == file.bytes
        return None if is_same else f"{_sizes(grown)}, and the job only read it"
    if reason := _changed_before(file, found, is_mapped):
        return reason
    if found.st_size == file.bytes:
        return None
    if os.path.islink(file.path):
        return f"{_sizes(grown)}, and is a link now"
    return grown if cut else _sizes(grown)


def _changed_before(file: _Expected, found: os.stat_result, is_mapped: bool) -> str:
    """Why the part before the old end does not count as unchanged; empty where it does."""
    known = file.known
    same_size = found.st_size == file.bytes
    only_appended = not is_mapped and all(
        is_append_only(opened) for opened in file.opened if is_open_for_writing(opened)
    )
    if known is None or not known.inode:  # of an image from before it was kept
        if same_size or only_appended:
            return ""
        return f"{_sizes(Grown(file.path, file.bytes, found))}, and the image has no digest of it"
    same_inode = found.st_ino == known.inode
    changed, touched = _times(found)
    same_time = same_size and changed == known.mtime_ns
    if same_time and same_inode and touched == known.ctime_ns and not (is_mapped and known.digest):
        return ""
    if known.digest:
        try:
            part = [(Path(os.path.realpath(file.path)), file.bytes)]  # as CRIU follows links
            (digest,) = file_digests(part, Meter("files", file.bytes, None))
        except Unreadable as error:
            return f"{file.path} may have changed and cannot be read ({error.reason})"
        where = "" if same_size else f" in its first {file.bytes} bytes"
        return "" if digest == known.digest else f"{file.path} was changed{where}"
    if same_time or (only_appended and (same_size or same_inode)):
        return ""
    return f"{file.path} was changed, and was too large for a digest that would tell where"


def _sizes(file: Grown) -> str:
    return f"{file.path} has {file.found.st_size} bytes and had {file.bytes}"


def _unseen_writer(path: str) -> str:
    """Words for a writer that /proc does not show; empty: there is none, or nobody can tell.

    The kernel gives no lease for reading beside a writer. Some file systems give none at all.
    """
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
