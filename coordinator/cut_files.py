"""Cuts the job's files back to their size at the dump, and keeps what they had more.

    cut = CutFiles(image, job)
    cut.cut(find_grown(...))     # before CRIU
    left = cut.put_back()        # the restore has failed

What is cut goes to a folder beside the image, `IMAGE.cut-<UTC time>`, before the first file is
touched: one file for each, and `index.json`, written last, which says where each part belongs. A
folder without it is of a restore that has cut nothing yet.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from coordinator.job_files import Grown
from flowgpu.errors import CutFailed, FilesChanged
from flowgpu.image import layout, space
from flowgpu.render import size as readable

log = logging.getLogger(__name__)

INDEX = "index.json"
COPY_BYTES = 64 << 20
MOST_NAME = 100
"""Letters of a file's path that the name of its part has."""


class CutFiles:
    """What one restore cuts; nothing is done before `cut`."""

    def __init__(self, image: Path, job: str) -> None:
        self._image = image
        self._job = job
        self._grown: list[Grown] = []
        self._cut: list[Grown] = []
        self.folder: Path | None = None
        """Where the parts are; None when there are none."""

    def cut(self, grown: Sequence[Grown]) -> None:
        """Set aside what the files have more than at the dump, then cut them; once.

        Raises CutFailed or FilesChanged. What it has cut by then is for `put_back`.
        """
        if not grown:
            return
        self._grown = list(grown)
        with contextlib.ExitStack() as stack:
            fds = [stack.enter_context(_opened(file, self._job)) for file in grown]
            try:
                self._set_aside(fds)
            except OSError as error:
                place = self.folder or self._image.parent
                raise CutFailed(job=self._job, path=place, reason=error.strerror) from error
            for file, fd in zip(grown, fds, strict=True):
                _require_same(fd, file, self._job)
                try:
                    os.ftruncate(fd, file.bytes)
                except OSError as error:
                    reason = error.strerror
                    raise CutFailed(job=self._job, path=file.path, reason=reason) from error
                self._cut.append(file)
        log.info("cut %d files back, the parts are in %s", len(grown), self.folder)

    def put_back(self) -> list[str]:
        """Undo it. Gives what could not be, with the reason; the parts of these files stay."""
        folder, self.folder = self.folder, None
        if folder is None:
            return []
        left: list[str] = []
        staying: list[Grown] = []
        for file in self._cut:
            try:
                _append(folder / self._part(file), file)
            except OSError as error:
                staying.append(file)
                left.append(f"{file.path} ({error.strerror})")
        log.info("made %d files whole again, not %s", len(self._cut) - len(left), left)
        if not left:
            shutil.rmtree(folder, ignore_errors=True)
            return []
        self.folder = folder
        with contextlib.suppress(OSError):  # what there is too much does no harm
            self._write_index(staying)
            for file in self._grown:
                if file not in staying:
                    (folder / self._part(file)).unlink()
        return left

    def report(self) -> dict[str, Any]:
        """For the report of a restore: each file, its bytes now and those cut, and the folder."""
        return {
            "cut_folder": None if self.folder is None else str(self.folder),
            "cut_files": [
                {
                    "path": file.path,
                    "bytes": file.bytes,
                    "cut_bytes": file.found.st_size - file.bytes,
                }
                for file in self._cut
            ],
        }

    def _set_aside(self, fds: Sequence[int]) -> None:
        total = sum(file.found.st_size - file.bytes for file in self._grown)
        free = space.free(self._image.parent)
        if free < total:
            reason = f"it has {readable(free)} free for {readable(total)}"
            raise CutFailed(job=self._job, path=self._image.parent, reason=reason)
        folder = self.folder = _new_folder(self._image)
        for file, fd in zip(self._grown, fds, strict=True):
            with open(folder / self._part(file), "xb", opener=layout.private) as part:
                _copy(fd, part.fileno(), file.bytes, file.found.st_size)
                os.fsync(part.fileno())
        self._write_index(self._grown)
        layout.sync(folder.parent)

    def _part(self, file: Grown) -> str:
        """Name of the file with what was cut: a number, and for people the path."""
        words = re.sub(r"[^\w.-]+", "-", file.path, flags=re.ASCII).strip("-")
        return f"{self._grown.index(file):04}-{words[-MOST_NAME:]}"

    def _write_index(self, files: Sequence[Grown]) -> None:
        assert self.folder is not None
        index = {
            "image": str(self._image),
            "job": self._job,
            "files": [
                {
                    "path": file.path,
                    "bytes_at_dump": file.bytes,
                    "bytes_found": file.found.st_size,
                    "mode": f"{stat.S_IMODE(file.found.st_mode):04o}",
                    "part": self._part(file),
                }
                for file in files
            ],
        }
        path = self.folder / INDEX
        new = path.with_suffix(".new")
        with open(new, "x", opener=layout.private) as out:
            out.write(json.dumps(index, indent=1) + "\n")
            out.flush()
            os.fsync(out.fileno())
        new.rename(path)
        layout.sync(self.folder)


@contextlib.contextmanager
def _opened(file: Grown, job: str) -> Iterator[int]:
    """Descriptor of a file that is still as it was found. Raises FilesChanged, CutFailed."""
    try:
        fd = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CutFailed(job=job, path=file.path, reason=error.strerror) from error
    try:
        _require_same(fd, file, job)
        yield fd
    finally:
        os.close(fd)


def _require_same(fd: int, file: Grown, job: str) -> None:
    now = os.fstat(fd)
    if not (os.path.samestat(now, file.found) and now.st_size == file.found.st_size):
        raise FilesChanged(job=job, changes=f"{file.path} is being changed")


def _append(part: Path, file: Grown) -> None:
    """Put a part back behind its file, which has its times as before then. Raises OSError."""
    fd = os.open(file.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        now = os.fstat(fd)
        if not os.path.samestat(now, file.found):
            raise OSError(errno.ESTALE, "it is another file now")
        if now.st_size != file.bytes:
            raise OSError(errno.EBUSY, f"it has {now.st_size} bytes now, not {file.bytes}")
        try:
            os.lseek(fd, file.bytes, os.SEEK_SET)
            with open(layout.open_regular(part), "rb") as source:
                _copy(source.fileno(), fd, 0, file.found.st_size - file.bytes)
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, file.bytes)
            raise
        with contextlib.suppress(PermissionError):  # it is another user's, and whole all the same
            os.utime(fd, ns=(file.found.st_atime_ns, file.found.st_mtime_ns))
    finally:
        os.close(fd)


def _copy(source: int, target: int, start: int, end: int) -> None:
    """Copy these bytes of `source` to where `target` is. Raises OSError."""
    while start < end:
        done = os.sendfile(target, source, start, min(end - start, COPY_BYTES))
        if not done:
            raise OSError(errno.EIO, f"it ends at byte {start}")
        start += done


def _new_folder(image: Path) -> Path:
    """A folder of its own for this restore; two in one second differ by a number."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for number in count(1):
        again = f"-{number}" if number > 1 else ""
        path = image.with_name(f"{image.name}.cut-{now}{again}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(layout.DIR_MODE)
            return path
    raise AssertionError("count ends")
