"""What the tests of the mover share: device memory that is host memory, and its dumps."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import numpy
import xxhash

from flowgpu.host.native import CHUNK_BYTES, Arena, Kind, Mode, Stage, Transfer, digest_count
from tests.patience import SECONDS

CONTEXT = 0xC0FFEE
MIB = 1 << 20
PIECE = 2 * MIB
FAKES = Path(__file__).parents[1] / "fakes"


class mounted_tmpfs:
    """A tmpfs of a given size, for as long as the block lasts."""

    def __init__(self, path: Path, size: str) -> None:
        self.path, self.size = path, size

    def __enter__(self) -> Path:
        self.path.mkdir()
        options = ["mount", "-t", "tmpfs", "-o", f"size={self.size}", "none", str(self.path)]
        subprocess.run(options, check=True)
        return self.path

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self.path)], check=True)


def device(size: int, seed: int = 1) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


def segments_of(memory: numpy.ndarray, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *cuts, memory.size]
    base = memory.ctypes.data
    return [(base + a, b - a) for a, b in pairwise(edges) if b > a]


def expected_digests(data: bytes) -> bytes:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks)


def dump(
    arena: Arena,
    path: Path,
    memory: numpy.ndarray,
    *,
    mode: Mode = Mode.RING,
    cuts: list[int] | None = None,
    expected: int | None = None,
    direct: bool = False,
    prepared: bool = True,
) -> tuple[bytearray, int]:
    """Dump memory to path; the digests and the bytes that went straight into the file."""
    digests = bytearray(digest_count(memory.size) * 16)
    size = memory.size if expected is None else expected
    with Transfer(
        arena, Kind.DUMP, mode, path, context=CONTEXT, threads=3, streams=2,
        expected_bytes=size, direct_io=direct,
    ) as job:  # fmt: skip
        if prepared:
            assert job.wait(Stage.PREPARED, timeout=SECONDS)
        job.start(segments_of(memory, cuts or []), digests)
        assert job.wait(Stage.OUT, timeout=SECONDS)
        assert job.wait(Stage.DONE, timeout=SECONDS)
        progress = job.progress()
    assert progress.bytes_total == progress.bytes_copied == progress.bytes_file == memory.size
    return digests, progress.bytes_direct


def restore(
    arena: Arena,
    path: Path,
    size: int,
    digests: bytearray,
    *,
    direct: bool = False,
) -> numpy.ndarray:
    memory = numpy.zeros(size, numpy.uint8)
    options = {"context": CONTEXT, "threads": 3, "streams": 2, "direct_io": direct}
    with Transfer(arena, Kind.RESTORE, Mode.RING, path, **options) as job:
        job.start(segments_of(memory, []), digests)
        assert job.wait(timeout=SECONDS)
    return memory
