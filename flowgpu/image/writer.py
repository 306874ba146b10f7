"""Write an image: grow a partial folder, seal every file with its digest, manifest last, rename.

with ImageWriter(output) as writer:        # OutputNotEmpty; an error inside removes the partial
    ...write to writer.path...
    files = writer.seal()
    writer.commit(Manifest(..., files=files))
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from flowgpu.errors import OutputNotEmpty, OutputUnusable
from flowgpu.image import layout, space
from flowgpu.image.digests import Meter, ProgressFunction, file_digests, workers
from flowgpu.image.linked import choose, take_notes
from flowgpu.image.manifest import Assembled, Extent, FileEntry, Manifest, Packed, check
from flowgpu.image.pages import share


class ImageWriter:
    """A partial image beside `output`, its own until commit() or abort().

    It holds a lock on the folder, by which a store tells it from what a crash has left.

    `sync` tells whether a commit waits until the bytes are on the disk; by default it does unless
    the file system lives in memory.
    """

    def __init__(self, output: Path, sync: bool | None = None) -> None:
        self.output = Path(os.path.abspath(output))
        check_output(self.output)
        name = layout.partial_name(self.output.name, secrets.token_hex(4))
        self.path = self.output.parent / name
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(layout.DIR_MODE)
        except OSError as error:
            raise OutputUnusable(path=self.output, reason=error.strerror) from error
        self._alive = space.lock(self.path)
        self.sync = not space.is_memory(self.path) if sync is None else sync
        self._ended = False
        self.packed_links: tuple[Packed, ...] = ()
        """Packed extents of earlier images, for the manifest; known once the image is sealed."""

    @property
    def place(self) -> Path | None:
        """The folder that the data goes to."""
        return self.path

    @property
    def criu_dir(self) -> Path:
        """Folder for CRIU's images; made when first asked for."""
        folder = self.path / layout.CRIU_DIR
        folder.mkdir(layout.DIR_MODE, exist_ok=True)
        return folder

    @property
    def output_log(self) -> Path:
        """Where the copy of the job's output goes."""
        return self.path / layout.OUTPUT_LOG

    def record(self, pid: int) -> Path:
        """Where the list of the CUDA objects of a process goes."""
        return self.path / layout.record(pid)

    def gpu_data(self, index: int) -> Path:
        """Where the chunks that are stored of a GPU go."""
        return self.path / layout.gpu_data(index)

    def drop_data(self, index: int) -> None:
        """Let that file be made anew."""
        self.gpu_data(index).unlink(missing_ok=True)

    def gpu_digests(self, index: int) -> Path:
        """Where the digests of those chunks go."""
        return self.path / layout.gpu_digests(index)

    def gpu_chunks(self, index: int) -> Path:
        """Where the table of a GPU's chunks goes."""
        return self.path / layout.gpu_chunks(index)

    def link_data(self, number: int) -> Path:
        """Where an extent of an earlier image is linked to; numbers from 0 without a gap."""
        return self.path / layout.link_data(number)

    def link_digests(self, number: int) -> Path:
        """Where its digests are linked to."""
        return self.path / layout.link_digests(number)

    def extents(self) -> tuple[Extent, ...]:
        """The extents so far, as the manifest lists them."""
        found = []
        for name in (layout.gpu_data, layout.link_data):
            for number in count():
                size = self._extent_bytes(name(number))
                if size is None:
                    break
                found.append(Extent(name(number), size))
        return tuple(found)

    def _extent_bytes(self, name: str) -> int | None:
        """Bytes of an extent, also when it is packed by now; None where there is none."""
        if (self.path / name).exists():
            return (self.path / name).stat().st_size
        if (self.path / layout.packed(name)).exists():
            digests = (self.path / layout.digests_of(name)).stat().st_size
            return digests // layout.DIGEST_BYTES * layout.CHUNK_BYTES
        return None

    def need(self, size: int, job: str) -> None:
        """Raise NotEnoughDisk unless `size` bytes more fit."""
        space.need(self.path, size, job)

    def share_pages(self) -> tuple[Assembled, ...]:
        """Leave out the pages that an earlier image has, once CRIU's files are whole."""
        return share(self.path, choose)

    def seal(self, progress: ProgressFunction | None = None) -> tuple[FileEntry, ...]:
        """Digest every file but extents, which have theirs, and sync all. The last to write.

        A packed extent of an earlier image keeps the digest that it has there.
        """
        notes = take_notes(self.path)
        self.packed_links = tuple(packed for packed, _ in notes)
        known = tuple(entry for _, entry in notes)
        found = self._files()
        left_out = {self.path / extent.file for extent in self.extents()}
        left_out |= {self.path / entry.path for entry in known}
        listed = [path for path in found if path not in left_out]
        sizes = [path.stat().st_size for path in listed]
        meter = Meter("seal", sum(sizes), progress)
        with ThreadPoolExecutor(workers()) as pool:
            synced = [pool.submit(layout.sync, path) for path in found] if self.sync else []
            digests = file_digests(list(zip(listed, sizes, strict=True)), meter)
            for future in synced:
                future.result()
        names = [str(path.relative_to(self.path)) for path in listed]
        rows = zip(names, sizes, digests, strict=True)
        return known + tuple(FileEntry(name, size, digest) for name, size, digest in rows)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest and rename the folder to its output: now it is an image."""
        check(manifest)
        if manifest.version < layout.VERSION:
            raise ValueError(f"version {manifest.version} does not fit a new image")
        data = manifest.to_bytes()
        if len(data) > layout.MOST_MANIFEST_BYTES:
            raise ValueError(f"a manifest of {len(data)} bytes does not fit an image")
        with open(self.path / layout.MANIFEST, "xb", opener=layout.private) as file:
            file.write(data)
            if self.sync:
                file.flush()
                os.fsync(file.fileno())
        if self.sync:
            for folder in {path.parent for path in self._files()} | {self.path}:
                layout.sync(folder)
        try:
            os.rename(self.path, self.output)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputNotEmpty(path=self.output) from None
            raise
        self._end()
        if self.sync:
            layout.sync(self.output.parent)

    def abort(self) -> None:
        """Remove the partial image; nothing after a commit."""
        if not self._ended:
            shutil.rmtree(self.path, ignore_errors=True)
            self._end()

    def _end(self) -> None:
        self._ended = True
        if self._alive is not None:
            os.close(self._alive)

    def image_bytes(self) -> int:
        """Bytes of all files so far."""
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> list[Path]:
        return sorted(
            Path(folder) / name for folder, _, names in os.walk(self.path) for name in names
        )

    def __enter__(self) -> ImageWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def check_output(output: Path) -> None:
    """Raise OutputNotEmpty or OutputUnusable unless `output` is absent or an empty folder."""
    try:
        if output.is_symlink() or any(output.iterdir()):
            raise OutputNotEmpty(path=output)
    except FileNotFoundError:
        return
    except OSError as error:
        if os.path.lexists(output) and isinstance(error, NotADirectoryError):
            raise OutputNotEmpty(path=output) from None
        raise OutputUnusable(path=output, reason=error.strerror) from error
