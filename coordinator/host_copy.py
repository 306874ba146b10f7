"""Memory of the host for the GPU bytes of a suspended job.

Each GPU's bytes are a file without a name, so that nothing is left of them when nobody has their
descriptors any more. Those are in custody as well (custody.py). The pages are huge where that can
be had: then they are made several times as fast. Tables and digests are small files of the job's
folder, as in an image.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.ghost_commands import Extent
from flowgpu.host import mounts
from flowgpu.image import layout

if TYPE_CHECKING:
    from flowgpu.image.writer import ImageWriter

log = logging.getLogger(__name__)

BLOCK_BYTES = 512
"""Unit of st_blocks (stat(2))."""
PIECE_BYTES = 64 << 20
FILE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class HostCopy:
    """Where a copy goes to, in the place of an ImageWriter. Owns its descriptors until `close`."""

    def __init__(self, folder: Path, fds: Sequence[int] = (), data: Path | None = None) -> None:
        """`fds`: one a GPU, of another coordinator. `data`: a folder for named files, in the place
        of memory."""
        self.path = folder
        self.fds = list(fds)
        self._data = data
        folder.mkdir(layout.DIR_MODE, exist_ok=True)

    @property
    def place(self) -> Path | None:
        """The folder with the bytes; None: they are in memory."""
        return self._data

    def gpu_data(self, index: int) -> Path:
        """The descriptor of a GPU's bytes, which the ghost opens through this process."""
        while len(self.fds) <= index:
            self.fds.append(self._make(len(self.fds)))
        return Path(f"/proc/{os.getpid()}/fd/{self.fds[index]}")

    def _make(self, index: int) -> int:
        if self._data is not None:
            return os.open(self._data / layout.gpu_data(index), FILE_FLAGS, 0o600)
        try:
            return mounts.huge_file()
        except OSError as error:
            log.info("the host copy has small pages: %s", error)
            return os.memfd_create(f"flowgpu-{self.path.parent.name}", os.MFD_CLOEXEC)

    def drop_data(self, index: int) -> None:
        """Nothing: what is there is written over."""

    def gpu_digests(self, index: int) -> Path:
        """See ImageWriter."""
        return self.path / layout.gpu_digests(index)

    def gpu_chunks(self, index: int) -> Path:
        """See ImageWriter."""
        return self.path / layout.gpu_chunks(index)

    def record(self, pid: int) -> Path:
        """See ImageWriter."""
        return self.path / layout.record(pid)

    def forget_tables(self) -> None:
        """Remove what says what the bytes are; the memory stays."""
        for path in self.path.iterdir():
            path.unlink()

    def extents(self, count: int) -> list[Extent]:
        """Data, digests and slots of each of the GPUs of a copy, as a fill wants them."""
        return [
            Extent(
                str(self.gpu_data(index)),
                str(self.gpu_digests(index)),
                os.fstat(self.fds[index]).st_size // layout.CHUNK_BYTES,
                frames=None,
            )
            for index in range(count)
        ]

    def write_to(
        self, target: ImageWriter, pids: Sequence[int], count: int, report: Callable[[int], None]
    ) -> None:
        """Have all of a copy of these tasks and `count` GPUs in an image as well; `report` is told
        the bytes so far."""
        for pid in pids:
            with contextlib.suppress(FileNotFoundError):  # not every engine lists
                shutil.copyfile(self.record(pid), target.record(pid))
        done = 0
        for index in range(count):
            for source, path in (
                (self.gpu_digests(index), target.gpu_digests(index)),
                (self.gpu_chunks(index), target.gpu_chunks(index)),
            ):
                shutil.copyfile(source, path)
            fd, size = self.fds[index], os.fstat(self.fds[index]).st_size
            with open(target.gpu_data(index), "xb", opener=layout.private) as file:
                at = 0
                while at < size:
                    at += os.sendfile(file.fileno(), fd, at, min(size - at, PIECE_BYTES))
                    report(done + at)
            done += size

    def held(self) -> int:
        """Bytes of memory that it takes."""
        return sum(os.fstat(fd).st_blocks for fd in self.fds) * BLOCK_BYTES

    def close(self) -> None:
        """Give the memory back, once nobody else has it, and leave nothing in the folder."""
        while self.fds:
            os.close(self.fds.pop())
        shutil.rmtree(self.path, ignore_errors=True)
