"""Read an image: what opens has a whole manifest, what is verified every byte that was written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

import numpy as np

from flowgpu.errors import ImageDamaged
from flowgpu.image import chunks, layout, page_tables
from flowgpu.image.digests import (
    Meter,
    ProgressFunction,
    Unreadable,
    file_digests,
    step_digests,
)
from flowgpu.image.manifest import Assembled, Extent, FileEntry, Manifest

T = TypeVar("T")
Files = Literal["cpu", "all"]
FileIds = tuple[tuple[int, int] | str, ...]
"""Device and inode of an extent's files, or of another file with the digest that it must have: they
tell one that several images share."""


class Image:
    """An image whose manifest is whole and whose files are there with their sizes."""

    def __init__(self, path: Path) -> None:
        """Open; cheap. Raises ImageDamaged, ImageVersion."""
        self.path = path
        self.manifest = Manifest.load(path)
        self._sizes = {entry.path: entry.bytes for entry in self.manifest.files}
        self._packed = {entry.plain: entry for entry in self.manifest.packed}
        plain = (extent for extent in self.extents if extent.file not in self._packed)
        self._sizes |= {extent.file: extent.bytes for extent in plain}
        self._check_tree()

    @property
    def criu_dir(self) -> Path:
        """Folder of CRIU's images."""
        return self.path / layout.CRIU_DIR

    @property
    def output_log(self) -> Path:
        """The job's output up to the checkpoint."""
        return self.path / layout.OUTPUT_LOG

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Data files: extent i is that of GPU i, and those behind them are of earlier images."""
        return self.manifest.extents

    def extent_data(self, number: int) -> Path:
        """Chunks, one behind another, or, where there are `frames`, packed."""
        name = self.extents[number].file
        return self.path / (layout.packed(name) if name in self._packed else name)

    def frames(self, number: int) -> tuple[int, ...] | None:
        """Sizes of the frames of an extent that is packed."""
        entry = self._packed.get(self.extents[number].file)
        return None if entry is None else entry.frames

    def extent_digests(self, number: int) -> Path:
        """Digests of those chunks."""
        return self.path / layout.digests_of(self.extents[number].file)

    def gpu_chunks(self, index: int) -> Path | None:
        """The file of the table of GPU `index`; an image of version 1 has none."""
        return None if self.manifest.version == 1 else self.path / layout.gpu_chunks(index)

    def chunk_table(self, index: int) -> chunks.ChunkTable:
        """Where the chunks of GPU `index` are. Raises ImageDamaged."""
        size = layout.chunk_count(self.manifest.gpus[index].data_bytes)
        if self.manifest.version == 1:
            return chunks.whole(size, index)
        name = layout.gpu_chunks(index)
        data = self._read(name)
        try:
            return chunks.decode(data, size, [extent.slots for extent in self.extents], index)
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from None

    def page_table(self, entry: Assembled) -> page_tables.Array:
        """Rows that say where the pages of an assembled file are. Raises ImageDamaged."""
        name, page = layout.page_table(entry.file), layout.PAGE_BYTES
        sources = [self._sizes[source] // page for source in self.manifest.page_sources]
        data = self._read(name)
        try:
            return page_tables.decode(data, entry.bytes // page, sources)
        except ValueError as error:
            raise self._damaged(f"{name}: {error}") from None

    def entry(self, path: str) -> FileEntry:
        """What the manifest lists under `path`, which it does list."""
        return next(entry for entry in self.manifest.files if entry.path == path)

    def read_small(self, path: str) -> bytes | None:
        """A listed file, compared with its digest; None where none is listed under `path`.

        Raises ImageDamaged.
        """
        entry = next((entry for entry in self.manifest.files if entry.path == path), None)
        if entry is None:
            return None
        if entry.bytes > layout.MOST_MANIFEST_BYTES:
            raise self._damaged(f"{path} has more than {layout.MOST_MANIFEST_BYTES} bytes")
        self._check_files([entry], Meter(path, entry.bytes, None))
        return self._read(path)

    def check_digests(self, number: int) -> None:
        """Check the digests file of an extent, not the extent. Raises ImageDamaged."""
        entry = self.entry(layout.digests_of(self.extents[number].file))
        self._check_files([entry], Meter("digests", entry.bytes, None))

    def verify(
        self,
        files: Files = "all",
        progress: ProgressFunction | None = None,
        known: set[FileIds] | None = None,
    ) -> int:
        """Compare bytes with their digests and give how many; "cpu" leaves extents out.

        A packed extent is compared as it is stored, which a restore does not do.

        A restore verifies "cpu" and lets the mover check extents on their way to the GPU. `known`
        has files that need not be read again, and gets those that were.
        Raises ImageDamaged, which names the file and, in GPU data, the chunk.
        """
        known = set() if known is None else known
        ids = [self._ids(number) for number in range(len(self.extents))] if files == "all" else []
        left = [
            number
            for number, files_of in enumerate(ids)
            if files_of not in known and self.frames(number) is None
        ]
        packed = {layout.packed(extent.file) for extent in self.extents}
        entries = [e for e in self.manifest.files if files == "all" or e.path not in packed]
        if files == "all":
            own = [self._entry_ids(entry) for entry in entries]
            entries = [e for e, found in zip(entries, own, strict=True) if found not in known]
            ids += own
        total = sum(entry.bytes for entry in entries)
        total += sum(self.extents[number].bytes for number in left)
        meter = Meter("verify", total, progress)
        self._check_files(entries, meter)
        for gpu in self.manifest.gpus:
            self.chunk_table(gpu.index)
        for entry in self.manifest.assembled:
            self.page_table(entry)
        for number in left:
            self._verify_extent(number, meter)
        known.update(ids)
        return total

    def _ids(self, number: int) -> FileIds:
        def read() -> FileIds:
            pair = (self.extent_data(number).lstat(), self.extent_digests(number).lstat())
            return tuple((status.st_dev, status.st_ino) for status in pair)

        return self._guard(self.extents[number].file, read)

    def _entry_ids(self, entry: FileEntry) -> FileIds:
        status = self._guard(entry.path, (self.path / entry.path).lstat)
        return ((status.st_dev, status.st_ino), entry.digest)

    def _check_files(self, entries: Sequence[FileEntry], meter: Meter) -> None:
        paths = [(self.path / entry.path, entry.bytes) for entry in entries]
        found = self._guard("", lambda: file_digests(paths, meter))
        for entry, digest in zip(entries, found, strict=True):
            if digest != entry.digest:
                raise self._damaged(f"{entry.path} does not have its digest")

    def _verify_extent(self, number: int, meter: Meter) -> None:
        extent = self.extents[number]
        wanted = self._read(layout.digests_of(extent.file))
        file = [(self.extent_data(number), extent.bytes)]
        found = self._guard(extent.file, lambda: step_digests(file, layout.CHUNK_BYTES, meter)[0])
        if found == wanted:
            return
        rows = [np.frombuffer(digests, f"V{layout.DIGEST_BYTES}") for digests in (found, wanted)]
        chunk = int(np.flatnonzero(rows[0] != rows[1])[0])
        raise self._damaged(f"chunk {chunk} of {extent.file} does not have its digest")

    def _read(self, name: str) -> bytes:
        def read() -> bytes:
            with open(layout.open_regular(self.path / name), "rb") as file:
                return file.read()

        return self._guard(name, read)

    def _check_tree(self) -> None:
        """Every file is regular, listed and of its size: CRIU takes optional files up by name."""
        missing = dict(self._sizes)
        known = {str(parent) for path in missing for parent in PurePosixPath(path).parents}
        for folder, folders, names in os.walk(self.path):
            for name in folders + names:
                path = Path(folder) / name
                relative = str(path.relative_to(self.path))
                status = self._guard(relative, path.lstat)
                if relative == layout.MANIFEST:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    # os.walk of Python 3.11 goes down by recursion: never where nothing is listed.
                    if relative not in known and relative != layout.CRIU_DIR:
                        raise self._damaged(f"the folder {relative} is not part of it")
                    continue
                if not stat.S_ISREG(status.st_mode):
                    raise self._damaged(f"{relative} is not a regular file")
                size = missing.pop(relative, None)
                if size is None:
                    raise self._damaged(f"{relative} is not part of it")
                if status.st_size != size:
                    raise self._damaged(f"{relative} has {status.st_size} bytes, not {size}")
        if missing:
            raise self._damaged(f"{min(missing)} is missing")

    def _guard(self, name: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Unreadable as error:
            name = str(error.path.relative_to(self.path))
            raise self._damaged(f"{name}: {error.reason}") from None
        except OSError as error:
            raise self._damaged(f"{name}: {error.strerror}") from None

    def _damaged(self, reason: str) -> ImageDamaged:
        return ImageDamaged(path=self.path, reason=reason)


def verify(path: Path, files: Files = "all", progress: ProgressFunction | None = None) -> int:
    """Open and verify an image; the bytes verified. Raises ImageDamaged, ImageVersion."""
    return Image(path).verify(files, progress)
