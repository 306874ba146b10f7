"""A folder of images, taken one after another, that share what did not change.

Each image is whole by itself: it opens, restores, may be copied away or removed without a thought
to the others (flowgpu/image/linked.py). What is here is their names, and what crashes leave:

`000007-20261121T144500Z`            an image: number in the store, time it was begun
`000008-<time>.partial-<random>`     one that is being written (and locked), or what a crash left
`.removed-<name>-<random>`           one that is being removed, or what a crash left
`000007-20261121T144500Z.damaged`    one that a restore has found damaged; of several nodes, it has
                                    a file `damaged` first, as others may restore from it
`.lock`                              held by who adds images; names its holder
`ended`                              the job of a store of one job has ended well; nothing restores
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flowgpu.errors import FlowError, ImageDamaged, ImageVersion, StoreBusy, StoreUnusable
from flowgpu.image import job_file, layout, space
from flowgpu.image.digests import ProgressFunction
from flowgpu.image.manifest import Manifest
from flowgpu.image.reader import FileIds, Image

LOCK = ".lock"
ENDED = "ended"
DAMAGED, MARK = ".damaged", "damaged"
REMOVED = ".removed-"
_NAME = re.compile(r"(\d{6,})-\d{8}T\d{6}Z")
_DAMAGED = re.compile(rf"{_NAME.pattern}{re.escape(DAMAGED)}")
_PARTIAL = re.compile(rf"({_NAME.pattern})\.partial-[0-9a-f]+")


@dataclass(frozen=True)
class Usage:
    """Bytes of an image: all, and those that its removal would free."""

    total: int
    own: int


class Store:
    """Images in `path`, which is made when the first one is added."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self._lock: int | None = None

    def names(self) -> list[str]:
        """Images, the oldest first; their numbers tell, because a clock can be set back."""
        return [name for name in self._numbered() if _is_whole(self.path / name)]

    def _numbered(self) -> list[str]:
        return sorted(filter(_NAME.fullmatch, self._entries()), key=_number)

    def next_image(self) -> Path:
        """Where the next image goes; no other one, whole or partial, has had its number."""
        last = max(map(_number, filter(_NAME.match, self._entries())), default=0)
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return self.path / f"{last + 1:06}-{now}"

    def of_job(self, job: str) -> list[str]:
        """Names of the readable images of the job with this id, the oldest first."""
        return [name for name in self.names() if self._is_of(name, job)]

    def newest(self, job: str) -> Path | None:
        """The image that the next one of this job shares with; none is one of several nodes."""
        found = (name for name in reversed(self.names()) if self._is_of(name, job))
        newest = next((self.path / name for name in found), None)
        return None if newest is None or job_file.is_nodes_image(newest) else newest

    def parts(self, name: str) -> list[Path]:
        """An image, or the parts that are here of one of several nodes. Raises ImageDamaged,
        ImageVersion."""
        path = self.path / name
        return job_file.parts_here(path) if job_file.is_nodes_image(path) else [path]

    def manifest(self, name: str) -> Manifest:
        """That of an image, or of its first part. Raises ImageDamaged, ImageVersion."""
        return Image(self.parts(name)[0]).manifest

    def remove(self, name: str) -> None:
        """Remove an image: at once out of sight, then from the disk. Raises FileNotFoundError."""
        if not _NAME.fullmatch(name):
            raise FileNotFoundError(name)
        aside = self.path / f"{REMOVED}{name}-{secrets.token_hex(4)}"
        (self.path / name).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def keep(self, job: str, count: int) -> list[str]:
        """Remove all images of a job but the newest `count`, the oldest first; what was removed."""
        surplus = self.of_job(job)[:-count]
        for name in surplus:
            self.remove(name)
        return surplus

    def clean(self) -> list[str]:
        """Remove what crashes have left: images half removed, partial ones that nobody writes."""
        left = []
        for name in self._entries():
            path = self.path / name
            if name.startswith(REMOVED):
                shutil.rmtree(path, ignore_errors=True)
                left.append(name)
            elif _PARTIAL.fullmatch(name) and _is_abandoned(path):
                aside = self.path / f"{REMOVED}{name}"
                path.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                left.append(name)
        for name in self._numbered():
            path = self.path / name
            if (path / MARK).exists():
                path.rename(self.path / f"{name}{DAMAGED}")
            elif not _is_whole(path) and all(map(_is_abandoned, path.glob("*.partial-*/"))):
                self.remove(name)
                left.append(name)
        return left

    def set_aside(self, name: str) -> Path:
        """Keep a damaged image where no command takes it for one. Gives its new path.

        Other nodes may be restoring from one of several: it has its new path from `clean`.
        """
        aside = self.path / f"{name}{DAMAGED}"
        if job_file.is_nodes_image(self.path / name):
            (self.path / name / MARK).touch(layout.FILE_MODE)
        else:
            (self.path / name).rename(aside)
        return aside

    def is_damaged(self, name: str) -> bool:
        """True if another node has set this image aside."""
        return (self.path / name / MARK).exists()

    def damaged(self) -> list[str]:
        """Names of the images that were set aside, the oldest first."""
        marked = [f"{name}{DAMAGED}" for name in self._numbered() if self.is_damaged(name)]
        return sorted([*filter(_DAMAGED.fullmatch, self._entries()), *marked], key=_number)

    def has_ended(self) -> bool:
        """True if the job of this store has ended well."""
        return (self.path / ENDED).exists()

    def end(self) -> None:
        """Note that the job of this store has ended well."""
        with open(self.path / ENDED, "wb", opener=layout.private) as file:
            os.fsync(file.fileno())
        layout.sync(self.path)

    @contextlib.contextmanager
    def adding(self, owner: str) -> Iterator[None]:
        """While entered, no other process adds images. Raises StoreBusy, StoreUnusable."""
        try:
            self.path.mkdir(layout.DIR_MODE, parents=True, exist_ok=True)
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, layout.FILE_MODE)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                other = os.read(fd, 4096).decode(errors="replace").strip() or "another process"
                raise StoreBusy(path=self.path, owner=other) from None
            with contextlib.suppress(OSError):  # a full file system has no room for the name alone
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} for {owner}\n".encode())
            self._lock = fd
            yield
        finally:
            self._lock = None
            os.close(fd)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """While entered, this process may add images beside the one that has entered `adding`, as
        nodes of one job do. Raises StoreUnusable."""
        try:
            self.path.mkdir(layout.DIR_MODE, parents=True, exist_ok=True)
            self._lock = os.open(
                self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, layout.FILE_MODE
            )
        except OSError as error:
            raise self._unusable(error) from error
        try:
            yield
        finally:
            os.close(self._lock)
            self._lock = None

    def check_held(self) -> None:
        """Raise StoreUnusable unless the folder is still that which `adding` has locked.

        Where it was unmounted or removed, the next image would be written to another place.
        """
        assert self._lock is not None
        try:
            there = os.path.samestat(os.stat(self.path / LOCK), os.fstat(self._lock))
        except OSError as error:
            raise self._unusable(error) from error
        if not there:
            raise StoreUnusable(path=self.path, reason="another folder has taken its place")

    def usage(self, name: str) -> Usage:
        """What an image takes."""
        total = own = 0
        for folder, _, files in os.walk(self.path / name):
            for file in files:
                status = os.lstat(os.path.join(folder, file))
                total += status.st_size
                own += status.st_size if status.st_nlink == 1 else 0
        return Usage(total, own)

    def verify(self, progress: ProgressFunction | None = None) -> dict[str, FlowError | None]:
        """Verify every image, reading what they share once; the error of each, None where whole."""
        known: set[FileIds] = set()
        found: dict[str, FlowError | None] = {}
        for name in self.names():
            try:
                for part in self.parts(name):
                    Image(part).verify("all", progress, known)
                found[name] = None
            except (ImageDamaged, ImageVersion) as error:
                found[name] = error
        return found

    def _is_of(self, name: str, job: str) -> bool:
        try:
            return any(Image(part).manifest.job.id == job for part in self.parts(name))
        except (ImageDamaged, ImageVersion):
            return False

    def _entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> StoreUnusable:
        return StoreUnusable(path=self.path, reason=error.strerror or str(error))


def _number(name: str) -> int:
    return int(name.split("-")[0])


def _is_whole(path: Path) -> bool:
    """False for parts of several nodes that are no image: without `job.json`, or damaged."""
    if (path / job_file.JOB_FILE).exists():
        return not (path / MARK).exists()
    nodes = ("node-*", job_file.mark_name("*"))
    return (path / layout.MANIFEST).exists() or not any(any(path.glob(name)) for name in nodes)


def _is_abandoned(partial: Path) -> bool:
    try:
        fd = space.lock(partial)
    except OSError:
        return False  # ended since, or no folder
    if fd is None:
        return False
    os.close(fd)
    return True
