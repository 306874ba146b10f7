"""Read an image: what opens has a whole manifest, what is verified every byte that was written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from flowgpu.errors import ImageDamaged
from flowgpu.image import layout
from flowgpu.image.digests import (
    Meter,
    Part,
    ProgressFunction,
    Unreadable,
    chunk_digests,
    each,
    file_digests,
    open_regular,
    read_part,
    split,
)
from flowgpu.image.manifest import Gpu, Manifest

T = TypeVar("T")
Files = Literal["cpu", "all"]


class Image:
    """An image whose manifest is whole and whose files are there with their sizes."""

    def __init__(self, path: Path) -> None:
        """Open; cheap. Raises ImageDamaged, ImageVersion."""
        self.path = path
        self.manifest = Manifest.from_bytes(self._read_manifest(), path)
        self._sizes = {entry.path: entry.bytes for entry in self.manifest.files}
        for gpu in self.manifest.gpus:
            self._sizes[layout.gpu_data(gpu.index)] = gpu.data_bytes
        self._check_tree()

    @property
    def criu_dir(self) -> Path:
        """Folder of CRIU's images."""
        return self.path / layout.CRIU_DIR

    @property
    def output_log(self) -> Path:
        """The job's output up to the checkpoint."""
        return self.path / layout.OUTPUT_LOG

    def gpu_data(self, index: int) -> Path:
        """Bytes of a GPU's blocks in the order of its block table."""
        return self.path / layout.gpu_data(index)

    def gpu_digests(self, index: int) -> Path:
        """Digests of the chunks of those bytes."""
        return self.path / layout.gpu_digests(index)

    def verify(self, files: Files = "all", progress: ProgressFunction | None = None) -> int:
        """Compare bytes with their digests and give how many; "cpu" leaves gpu*.data out.

        A restore verifies "cpu" and lets the mover check gpu*.data on their way to the GPU.
        Raises ImageDamaged, which names the file and, in GPU data, the chunk.
        """
        entries = self.manifest.files
        total = sum(entry.bytes for entry in entries)
        if files == "all":
            total += sum(gpu.data_bytes for gpu in self.manifest.gpus)
        meter = Meter("verify", total, progress)
        try:
            found = file_digests([(self.path / e.path, e.bytes) for e in entries], meter)
            for entry, digest in zip(entries, found, strict=True):
                if digest != entry.digest:
                    raise self._damaged(f"{entry.path} does not have its digest")
            if files == "all":
                for gpu in self.manifest.gpus:
                    self._verify_gpu(gpu, meter)
        except Unreadable as error:
            name = error.path.relative_to(self.path)
            raise self._damaged(f"{name}: {error.reason}") from None
        return total

    def _verify_gpu(self, gpu: Gpu, meter: Meter) -> None:
        name = layout.gpu_data(gpu.index)
        digests = self._guard(layout.gpu_digests(gpu.index), self.gpu_digests(gpu.index).read_bytes)

        def work(part: Part) -> None:
            found = chunk_digests(read_part(part))
            first = part.offset // layout.CHUNK_BYTES * layout.DIGEST_BYTES
            wanted = digests[first : first + len(found)]
            for at in range(0, len(found), layout.DIGEST_BYTES):
                if found[at : at + layout.DIGEST_BYTES] != wanted[at : at + layout.DIGEST_BYTES]:
                    chunk = (first + at) // layout.DIGEST_BYTES
                    raise self._damaged(f"chunk {chunk} of {name} does not have its digest")

        each(work, split(self.gpu_data(gpu.index), gpu.data_bytes), meter)

    def _read_manifest(self) -> bytes:
        def read() -> bytes:
            with open(open_regular(self.path / layout.MANIFEST), "rb") as file:
                return file.read()

        return self._guard(layout.MANIFEST, read)

    def _check_tree(self) -> None:
        """Every file is regular, listed and of its size: CRIU takes optional files up by name."""
        missing = dict(self._sizes)
        for folder, folders, names in os.walk(self.path):
            for name in folders + names:
                path = Path(folder) / name
                relative = str(path.relative_to(self.path))
                status = self._guard(relative, path.lstat)
                if stat.S_ISDIR(status.st_mode) or relative == layout.MANIFEST:
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
        except OSError as error:
            raise self._damaged(f"{name}: {error.strerror}") from None

    def _damaged(self, reason: str) -> ImageDamaged:
        return ImageDamaged(path=self.path, reason=reason)


def verify(path: Path, files: Files = "all", progress: ProgressFunction | None = None) -> int:
    """Open and verify an image; the bytes verified. Raises ImageDamaged, ImageVersion."""
    return Image(path).verify(files, progress)
