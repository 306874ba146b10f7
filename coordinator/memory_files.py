"""Files that are the memory of a job: named semaphores, shared memory, what it maps for writing.

    files = Saving(job)
    files.look(pids)                 # while the job runs; refuses what cannot be kept
    files.save(folder, pids, until)  # while its processes are stopped; CRIU may work beside it
    files.name_links()               # when CRIU has ended; its names for files are gone then
    ...manifest.memory_files, manifest.links = files.files, files.links

    files = Putting(image, job)
    files.put()                      # before CRIU: names and sizes
    files.fill()                     # beside CRIU: what is in them
    files.keep()                     # or put_back(), after a failure

CRIU leaves every named file where it is, and opens it again by its name. A file that processes of
the job alone hold is memory of the job if one maps it shared and for writing. It has to lie on a
tmpfs, or the job has made it and it is not large. Such a file is part of the image. Another file on
a tmpfs that the job writes to or has made is in the image too, for where it is missing: the machine
may have started anew, or be another one. Files without any name are CRIU's own concern.

A file's opened name may be gone while the file has another name. CRIU makes a link to such a file
beside the old name, `link_remap.N`, and wants it again at each restore. These links are taken away
after a dump, and made again for each restore. Where the other name is not found, the image has the
bytes as well.

Shared memory may be between two processes, held by none: one has left it, and the other has only
its name so far. Such files are told by their names, and are made again where they are missing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from coordinator.job_files import named
from flowgpu import jobs
from flowgpu.errors import FileNotMade, FilesChanged, Unsupported
from flowgpu.host import probes
from flowgpu.host.proctree import (
    PROC,
    fd_access,
    fd_targets,
    file_users,
    ids,
    mapped_for_writing,
)
from flowgpu.image import layout
from flowgpu.image.manifest import Link, MemoryFile
from flowgpu.image.space import MEMORY_FILE_SYSTEMS, is_memory

if TYPE_CHECKING:
    from coordinator.session import RunningJob
    from flowgpu.image.reader import Image

log = logging.getLogger(__name__)

MOST_ON_DISK = 256 << 20
"""Bytes of a mapped file that is not in memory, for it to be part of the image."""

MOST_SEARCHED = 20_000
"""Names that are looked at for another link of a file."""

SMALLEST_HOLE, MOST_RUNS = 64 << 10, 4096
"""Smaller holes are written out, and larger ones too where a file has too many."""

PIECE_BYTES = 32 << 20
WORKERS = 4
DELETED = " (deleted)"
SHARED_MEMORY = Path("/dev/shm")
ON_THE_WAY = re.compile(r"(torch_|psm_).*")
"""Names that PyTorch and Python give to shared memory."""

MADE_BY = re.compile(r"torch_(\d+)_")
"""Whose process id PyTorch puts into the name."""

LINK_REMAP = re.compile(r"link_remap\.\d+")
STATX_BTIME = 0x800  # linux/stat.h, with the places of stx_mask and stx_btime in struct statx
STATX_MASK_AT, STATX_BTIME_AT = 0, 80

File = tuple[int, int]
"""Device and inode."""

Piece = tuple[str | Path, int, str | Path, int, int]
"""What is copied: file and place, to file and place, and how many bytes."""


@dataclass
class Held:
    """A regular file with a name that processes of the job hold.

    `door` opens it, whatever has become of its names. `opened` are the names it was opened by.
    """

    door: str
    status: os.stat_result
    opened: set[str] = field(default_factory=set)
    mapped: bool = False  # shared, and for writing
    written: bool = False  # open for writing
    waits: bool = False  # no process of the job has it: it may be another program's

    def has_name(self, path: str) -> bool:
        """True if the path leads to this file."""
        with suppress(OSError):
            return _file(os.lstat(path)) == _file(self.status)
        return False

    def gone(self) -> list[str]:
        """Names by which it was opened and which it does not have any more."""
        return [path for path in sorted(self.opened) if not self.has_name(path)]


def held_files(pids: Iterable[int]) -> dict[File, Held]:
    """What these processes hold that has a name."""
    found: dict[File, Held] = {}
    devices = _memory_devices()
    for pid in pids:
        for fd, target in fd_targets(pid):
            if target.startswith("/") and not target.startswith(("/proc/", "/sys/", "/dev/nvidia")):
                with suppress(OSError):  # closed by now: CRIU opens some in a stopped process
                    access = fd_access(pid, fd)
                    _add(found, f"/proc/{pid}/fd/{fd}", target, written=access != os.O_RDONLY)
        for span, mapped, target in _mapped(pid, devices):
            _add(found, f"/proc/{pid}/map_files/{span}", target, mapped=mapped)
    return found


def _add(
    found: dict[File, Held],
    door: str,
    target: str,
    *,
    mapped: bool = False,
    written: bool = False,
    waits: bool = False,
) -> None:
    with suppress(OSError):  # closed by now
        status = os.stat(door)
        if not stat.S_ISREG(status.st_mode) or not status.st_nlink:
            return
        held = found.setdefault(_file(status), Held(door, status, waits=waits))
        # A name may end in this word, too.
        gone = target.endswith(DELETED) and not held.has_name(target)
        held.opened.add(target.removesuffix(DELETED) if gone else target)
        held.mapped |= mapped
        held.written |= written


def _memory_devices() -> set[tuple[int, ...]]:
    """Numbers of the devices of file systems in memory."""
    table = (PROC / "self/mountinfo").read_text(errors="surrogateescape")
    mounts = (line.split() for line in table.splitlines())
    return {
        tuple(map(int, words[2].split(":")))
        for words in mounts
        if words[words.index("-") + 1] in MEMORY_FILE_SYSTEMS
    }


def _mapped(pid: int, devices: set[tuple[int, ...]]) -> Iterator[tuple[str, bool, str]]:
    """Mappings of files that may matter: where, whether shared and for writing, and the name.

    `devices` are those of file systems in memory.
    """
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text(errors="surrogateescape").splitlines():
            span, access, _, device, inode, *rest = line.split(maxsplit=5)
            if inode == "0" or not rest or not rest[0].startswith("/"):
                continue
            mapped = access[1] == "w" and access[3] == "s"
            in_memory = tuple(int(part, 16) for part in device.split(":")) in devices
            if mapped or in_memory or rest[0].endswith(DELETED):
                start, end = (int(word, 16) for word in span.split("-"))
                # The kernel writes these names without leading zeros, and newlines as octal.
                yield f"{start:x}-{end:x}", mapped, rest[0].replace("\\012", "\n")


def _on_the_way(pids: Sequence[int], since: float) -> Iterator[str]:
    """Paths of files that one of these processes has probably left for another one to open."""
    users = {user for pid in pids if (found := ids(pid)) for user in found.users}
    for name in os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        known = ON_THE_WAY.fullmatch(name) or not set(map(str, pids)).isdisjoint(
            re.findall(r"\d+", name)
        )
        maker = MADE_BY.match(name)
        if maker and int(maker[1]) not in pids and jobs.start_time(int(maker[1])):
            continue  # another job's, which is restored by itself
        path = str(SHARED_MEMORY / name)
        with suppress(OSError):  # gone
            if known and os.lstat(path).st_uid in users and (_birth(path) or 0.0) >= since:
                yield path


class Saving:
    """The files of one checkpoint."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._names: dict[File, list[str]] = {}
        self._shared: set[File] = set()  # with processes outside the job
        self._held: dict[File, Held] = {}  # at the last look
        self._gone: list[tuple[Held, str]] = []  # of these
        self._saved: list[tuple[Held, MemoryFile]] = []
        self.files: tuple[MemoryFile, ...] = ()
        self.links: tuple[Link, ...] = ()

    def look(self, pids: Sequence[int]) -> int:
        """Bytes that the files take. Raises Unsupported for one that is too large to be kept.

        Who else holds the files is found out here and not in the pause: it takes a look at every
        process of the machine.
        """
        self._find(pids)
        wanted = [file for file, held in self._held.items() if self._kept(held)]
        self._shared = set(file_users(wanted, besides=pids))
        return sum(held.status.st_blocks * 512 for held in self._held.values() if self._kept(held))

    def save(self, folder: Path, pids: Sequence[int], until: float) -> None:
        """Copy them to the image's `folder`, while nothing of the job runs.

        Raises TimeoutError at the time `until`, OSError, and Unsupported as `look`.
        """
        self._find(pids)
        # The stopped processes hold CRIU's log while its code is in them.
        image = os.path.realpath(folder) + os.sep
        for file, held in list(self._held.items()):
            if any(path.startswith(image) for path in held.opened):
                del self._held[file]
        self._gone = _gone(self._held)
        kept = list(filter(self._kept, self._held.values()))
        own = [held for held in kept if not held.waits]
        _copy_all([piece for held in own for piece in self._take(folder, held)], until)
        for held in kept:
            if not held.waits:
                continue
            count = len(self._saved)
            try:
                _copy_all(self._take(folder, held), until)
            except FileNotFoundError:  # taken away: nothing of the job runs, so it was not its own
                del self._saved[count:]
                (folder / layout.memory_data(count)).unlink(missing_ok=True)

    def _take(self, folder: Path, held: Held) -> list[Piece]:
        """Make the file of the image that is to have the bytes of another one."""
        name = layout.memory_data(len(self._saved))
        pieces: list[Piece] = []
        runs, at = _runs(held.door), 0
        with open(folder / name, "xb", opener=layout.private) as file:
            file.truncate(sum(size for _, size in runs))
        for start, size in runs:
            pieces += _pieces(held.door, start, folder / name, at, size)
            at += size
        self._saved.append((held, _entry(held, self._names_of(held), name, runs)))
        return pieces

    def written(self, pids: Iterable[int]) -> dict[str, int]:
        """Bytes of the files, by path, to which these processes, which are stopped, can write: but
        for those that the image has."""
        written = [held for held in self._held.values() if held.written and not held.waits]
        paths = {path for held in written for path in held.opened if held.has_name(path)}
        paths |= set().union(*map(mapped_for_writing, pids))
        paths -= {path for _, entry in self._saved if entry.mapped for path in entry.paths}
        # Sizes in the kernel's file systems mean nothing.
        files = (path for path in sorted(paths) if not path.startswith(("/proc/", "/sys/")))
        return {path: os.stat(path).st_size for path in files if os.path.isfile(path)}

    def name_links(self) -> None:
        """Note which link CRIU has made of which file, and take the links away."""
        links: list[Link] = []
        nameless: dict[File, list[str]] = {}
        for held, gone in self._gone:
            file = _file(held.status)
            for path in map(str, _criu_links(gone, held)):
                names = self._names[file] or nameless.setdefault(file, [path])
                links.append(Link(path=path, of=names[0], opened=gone))
        self.links = tuple(links)
        self.files = tuple(
            replace(entry, paths=entry.paths or tuple(nameless.get(_file(held.status), ())))
            for held, entry in self._saved
        )
        self.clear()

    def clear(self) -> None:
        """Take CRIU's links away, which it leaves behind unless the job is to run on."""
        _clear(self._gone)

    def _find(self, pids: Sequence[int]) -> None:
        self._held = held_files(pids)
        for path in _on_the_way(pids, _began(self._job)):
            _add(self._held, path, path, written=True, waits=True)
        for held in self._held.values():
            if not held.waits and not self._names_of(held) and held.status.st_size > MOST_ON_DISK:
                (path, *_) = sorted(held.opened)
                what = f"the file {path}, which was opened by this name and has only another one"
                raise Unsupported(name=f"{what} that was not found")

    def _kept(self, held: Held) -> bool:
        """True if the image has the bytes of a file."""
        names = self._names_of(held)
        if not names:
            return not held.waits
        if _file(held.status) in self._shared:
            return False
        if is_memory(Path(names[0]).parent):
            return held.mapped or held.written or self._has_made(held)
        return held.mapped and held.status.st_size <= MOST_ON_DISK and self._has_made(held)

    def _has_made(self, held: Held) -> bool:
        return (_birth(held.door) or 0.0) >= _began(self._job)

    def _names_of(self, held: Held) -> list[str]:
        """Names that the file has; what is known is not looked for again."""
        file = _file(held.status)
        known = self._names.get(file)
        if known is None or not all(map(held.has_name, known)):
            known = self._names[file] = _names(held)
        return known


def clear_links(pids: Iterable[int]) -> None:
    """Take away what a CRIU that was killed has left of its links to the files of these."""
    _clear(_gone(held_files(pids)))


def _gone(files: dict[File, Held]) -> list[tuple[Held, str]]:
    """Each name by which one of the files was opened and which it does not have any more."""
    return [(held, gone) for held in files.values() for gone in held.gone()]


def _clear(gone: Iterable[tuple[Held, str]]) -> None:
    for held, name in gone:
        for path in _criu_links(name, held):
            with suppress(OSError):
                path.unlink()


def _criu_links(gone: str, held: Held) -> list[Path]:
    """Links that CRIU has made of a file beside the name that is gone."""
    folder = Path(gone).parent
    while not folder.is_dir():  # CRIU takes the next one up as well
        folder = folder.parent
    with suppress(OSError):
        paths = [folder / name for name in os.listdir(folder) if LINK_REMAP.fullmatch(name)]
        return [path for path in paths if held.has_name(str(path))]
    return []


def _names(held: Held) -> list[str]:
    """Names of a file: those it was opened by, and if one is missing, others that are found."""
    names = [path for path in sorted(held.opened) if held.has_name(path)]
    if names and len(names) >= held.status.st_nlink:
        return names
    found = set(names)
    for path in sorted(held.opened):
        for other in islice(_nearby(Path(path), held.status.st_dev), MOST_SEARCHED):
            if not LINK_REMAP.fullmatch(os.path.basename(other)) and held.has_name(other):
                found.add(other)
                if len(found) >= held.status.st_nlink:
                    return sorted(found)
    return sorted(found)


def _nearby(path: Path, device: int) -> Iterator[str]:
    """Paths of the file system of this one: in the folder itself first, then in what is around."""
    for folder in path.parents:
        with suppress(OSError):
            if os.stat(folder).st_dev != device:
                return
            for top, folders, names in os.walk(folder):
                folders[:] = [
                    name for name in folders if _device(os.path.join(top, name)) == device
                ]
                yield from (os.path.join(top, name) for name in names)


def _device(path: str) -> int:
    with suppress(OSError):
        return os.lstat(path).st_dev
    return -1


def _file(status: os.stat_result) -> File:
    return status.st_dev, status.st_ino


def _birth(path: str | Path) -> float | None:
    """When a file was made, in seconds since 1970; None where the file system does not say."""
    found = ctypes.create_string_buffer(256)
    if probes.libc().statx(-100, os.fsencode(path), 0, STATX_BTIME, found) != 0:  # AT_FDCWD
        return None
    (mask,) = struct.unpack_from("I", found, STATX_MASK_AT)
    seconds, nanoseconds = struct.unpack_from("qI", found, STATX_BTIME_AT)
    return seconds + nanoseconds / 1e9 if mask & STATX_BTIME else None


def _began(job: RunningJob) -> float:
    """When the job was started or restored here, at the latest."""
    born = _birth(job.directory)
    if born is not None:
        return born
    ticks = jobs.start_time(job.root_pid)
    return time.time() - jobs.uptime() + ticks / os.sysconf("SC_CLK_TCK")


def _entry(
    held: Held, paths: Sequence[str], name: str, runs: Sequence[Sequence[int]]
) -> MemoryFile:
    status = held.status
    folder = os.stat(os.path.dirname(paths[0]) if paths else "/")
    return MemoryFile(
        paths=tuple(paths),
        data=name,
        bytes=os.stat(held.door).st_size,
        runs=tuple(tuple(run) for run in runs),
        mode=stat.S_IMODE(status.st_mode),
        user=status.st_uid,
        group=status.st_gid,
        modified_ns=status.st_mtime_ns,
        folder_mode=stat.S_IMODE(folder.st_mode),
        folder_user=folder.st_uid,
        folder_group=folder.st_gid,
        mapped=held.mapped or not paths,
    )


def _runs(path: str) -> list[tuple[int, int]]:
    """Where a file has data, and how many bytes: the rest are holes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    found = []
    try:
        size, at = os.fstat(fd).st_size, 0
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole up to the end
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            found.append((start, at - start))
    finally:
        os.close(fd)
    gap = SMALLEST_HOLE
    while len(found := list(_joined(found, gap))) > MOST_RUNS:
        gap *= 4
    return found


def _joined(runs: Iterable[tuple[int, int]], gap: int) -> Iterator[tuple[int, int]]:
    """Join runs, so that no hole of `gap` bytes or less is between them."""
    start = end = -1
    for at, size in runs:
        if end < 0 or at - end > gap:
            if end >= 0:
                yield start, end - start
            start = at
        end = at + size
    if end >= 0:
        yield start, end - start


def _pieces(source: str | Path, start: int, target: str | Path, at: int, size: int) -> list[Piece]:
    return [
        (source, start + done, target, at + done, min(PIECE_BYTES, size - done))
        for done in range(0, size, PIECE_BYTES)
    ]


def _copy_all(pieces: Sequence[Piece], until: float) -> None:
    """Copy them side by side. Raises TimeoutError, OSError."""

    def copy(piece: Piece) -> None:
        if time.monotonic() >= until:
            raise TimeoutError("copying the job's files in memory takes too long")
        _copy(*piece)

    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in pool.map(copy, pieces):
            pass


def _copy(source: str | Path, start: int, target: str | Path, at: int, size: int) -> None:
    with open(source, "rb", 0) as before, open(target, "r+b", 0) as after:
        after.seek(at)
        while size > 0:
            done = os.sendfile(after.fileno(), before.fileno(), start, size)
            if not done:
                raise OSError(0, f"{source} has become shorter")
            start, size = start + done, size - done


class Putting:
    """The files of one restore."""

    def __init__(self, image: Image, job: str) -> None:
        self._image = image.path
        self._entries = image.manifest.memory_files
        self._links = image.manifest.links
        self._job = job
        self._before: list[tuple[str, str]] = []  # a path, and where the file is that was there
        self.made: list[str] = []
        """Paths that were given to files of this restore."""
        self._folders: list[str] = []
        self._filled: list[MemoryFile] = []

    def put(self) -> None:
        """Give each file its names and its size. Raises FilesChanged, FileNotMade.

        A file that lies there under its name is replaced, as the job that it was memory of has
        ended. One that is only open in the image stays, where it is there.
        """
        self._refuse_held()
        for entry in self._entries:
            if not entry.mapped and any(map(os.path.lexists, entry.paths)):
                continue
            try:
                self._make(entry)
            except FileNotMade as error:
                if entry.mapped:
                    raise
                log.warning("it may not be the job's: %s", error)  # else CRIU misses it
            else:
                self._filled.append(entry)
        for link in self._links:
            self._link(link)

    def fill(self) -> None:
        """Write what was in them. Raises FileNotMade."""
        for entry in self._filled:
            at, pieces = 0, []
            for start, size in entry.runs:
                pieces += _pieces(self._image / entry.data, at, entry.paths[0], start, size)
                at += size
            try:
                _copy_all(pieces, float("inf"))
                os.utime(entry.paths[0], ns=(entry.modified_ns, entry.modified_ns))
            except OSError as error:
                raise self._not_made(entry.paths[0], error) from error

    def keep(self) -> None:
        """The restore has succeeded: what was there before goes, and so do CRIU's names."""
        for _, other in self._before:
            with suppress(OSError):
                os.unlink(other)
        # One whose bytes the image has is the last: the others are told by it.
        for link in sorted(self._links, key=lambda link: link.path == link.of):
            _unlink_same(link.path, link.of)

    def put_back(self) -> list[str]:
        """The restore has failed. Gives what could not be made as it was, with the reason."""
        left = []
        for link in self._links:
            _unlink_same(link.opened, link.of)
            _unlink_same(link.path, link.of)
        for path in reversed(self.made):
            with suppress(OSError):
                os.unlink(path)
        for path, other in self._before:
            try:
                os.rename(other, path)
            except OSError as error:
                left.append(f"{path} ({error.strerror})")
        for folder in reversed(self._folders):
            with suppress(OSError):
                os.rmdir(folder)
        return left

    def report(self) -> dict[str, int]:
        """Fields for the restore's report."""
        return {"memory_files": len(self._filled)} if self._filled else {}

    def _refuse_held(self) -> None:
        """A file that another process has is not this job's any more."""
        there: dict[File, str] = {}
        for entry in self._entries:
            for path in entry.paths if entry.mapped else ():
                with suppress(OSError):
                    there[_file(os.lstat(path))] = path
        users = file_users(there)
        if users:
            wrong = [f"{there[file]} is memory of the job, and {users[file]}" for file in users]
            raise FilesChanged(job=self._job, changes=named(sorted(wrong)))

    def _make(self, entry: MemoryFile) -> None:
        first, *others = entry.paths
        try:
            self._make_folders(entry)
            for path in entry.paths:
                self._set_aside(path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(first, flags, layout.FILE_MODE)
            self.made.append(first)
            try:
                os.ftruncate(fd, entry.bytes)
                os.fchown(fd, entry.user, entry.group)
                os.fchmod(fd, entry.mode)
            finally:
                os.close(fd)
            for path in others:
                os.link(first, path)
                self.made.append(path)
        except OSError as error:
            raise self._not_made(first, error) from error

    def _make_folders(self, entry: MemoryFile) -> None:
        for path in entry.paths:
            missing = []
            for folder in Path(path).parents:
                if folder.is_dir():
                    break
                missing.append(str(folder))
            for name in reversed(missing):
                os.mkdir(name, layout.DIR_MODE)
                self._folders.append(name)
                os.chown(name, entry.folder_user, entry.folder_group)
                os.chmod(name, entry.folder_mode)

    def _set_aside(self, path: str) -> None:
        """Rename what is there, to a name that says whose it is: a restore that was killed leaves
        it, and the next one must not take what that one has made for what was there."""
        other = os.path.join(
            os.path.dirname(path), f".flowgpu-{xxhash.xxh3_64_hexdigest(os.fsencode(path))}"
        )
        if os.path.lexists(other):
            with suppress(FileNotFoundError):
                os.unlink(path)
        elif os.path.lexists(path):
            os.rename(path, other)
        else:
            return
        self._before.append((path, other))

    def _link(self, link: Link) -> None:
        if link.path == link.of:  # the image has its bytes
            return
        try:
            with suppress(FileNotFoundError):
                if LINK_REMAP.fullmatch(os.path.basename(link.path)):
                    os.unlink(link.path)
            os.link(link.of, link.path, follow_symlinks=False)
        except FileNotFoundError:
            raise FilesChanged(job=self._job, changes=f"{link.of} is missing") from None
        except OSError as error:
            raise self._not_made(link.path, error) from error
        self.made.append(link.path)

    def _not_made(self, path: str, error: OSError) -> FileNotMade:
        return FileNotMade(job=self._job, path=path, reason=error.strerror)


def _unlink_same(path: str, of: str) -> None:
    with suppress(OSError):
        if os.path.samestat(os.lstat(path), os.lstat(of)):
            os.unlink(path)
