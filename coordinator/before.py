"""Copies to an image of device memory that its job goes on to use (mode recopy).

What is copied becomes links of the image: extents with the digest of each chunk, of which the copy
that is made when all stands still takes what has not changed, as it does of an image before. Each
part is copied on the GPU first, so that what is digested is what is stored, whatever the job writes
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from coordinator.chunks import CHUNK, U64, Kernels, addresses, segments
from coordinator.dumping import Known
from coordinator.mover import CopyJob
from coordinator.staging import Shadow
from flowgpu.image import layout
from flowgpu.image.linked import Linked

MOST_PARTS = 8
"""A pass copies in at most so many parts; each is a link."""


def part_bytes(size: int, room: int) -> int:
    """Device memory for one part, of `size` bytes to copy and `room` bytes that may be taken; 0:
    that is too little."""
    part = min(size, room // CHUNK * CHUNK)
    return part if part * MOST_PARTS >= size else 0


def store(
    where: U64,
    part: Shadow,
    kernels: Kernels,
    known: Known,
    folder: Path,
    make_job: Callable[[Path], CopyJob],
    seconds: Callable[[], float],
) -> int:
    """Copy the chunks at these addresses to new links in `folder`, part by part. Gives the bytes.

    Chunks of zeros, and those that `known` has, are left out. Raises native.MoverError,
    TimeoutError.
    """
    number, total = len(Linked(folder).slots), 0
    for start in range(0, len(where), part.size // CHUNK):
        sources = where[start : start + part.size // CHUNK]
        copies = addresses([(part.address, len(sources) * CHUNK)])
        kernels.copy(sources, copies)
        digests, zeros = kernels.scan(copies)
        new = known.fresh(digests) & ~zeros
        count = int(np.count_nonzero(new))
        if not count:
            continue
        job = make_job(folder / layout.link_data(number))
        try:
            job.start(segments(copies[new], np.arange(count, dtype=np.uint64)), digests[new])
            job.wait("done", seconds())
        finally:
            job.close()
        number, total = number + 1, total + count * CHUNK
    return total
