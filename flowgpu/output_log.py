"""The log of a job's output: both streams as they came, and beside it where one turns to the other.

`output.streams` is a list of 64-bit offsets of `output.log`: number i is where the output turned to
stream i % 2. The first is where the job's own output begins: what a restore finds is before it.

The log keeps the newest KEEP_BYTES. What is older is given up: both files have holes there, so that
places in them stay what they are.
"""

from __future__ import annotations

import bisect
import errno
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flowgpu.render import size as readable

READ_BYTES = 1 << 16
KEEP_BYTES = 64 << 20
KEEP_TURNS = 1 << 20
HOLE_BYTES = 1 << 12
"""The size of a hole is a multiple of this, and this is a multiple of two offsets."""
STREAMS = ("stdout", "stderr")
OFFSET_BYTES = 8


class Piece(NamedTuple):
    """Bytes of a stream, and the place in the log after them."""

    stream: str
    data: bytes
    end: int


def kept_from(fd: int, position: int) -> int:
    """The first place from `position` on that is still there; the end of the file if none is."""
    try:
        return os.lseek(fd, position, os.SEEK_DATA)
    except OSError as error:  # another one: a file system without holes
        return max(os.fstat(fd).st_size, position) if error.errno == errno.ENXIO else position


def read_turns(streams: Path) -> tuple[array[int], int]:
    """Offsets that are still there, and how many were before them, which is an even number."""
    with open(streams, "rb") as file:
        begin = kept_from(file.fileno(), 0) // HOLE_BYTES * HOLE_BYTES
        file.seek(begin)
        data = file.read()
    return array("Q", data[: len(data) // OFFSET_BYTES * OFFSET_BYTES]), begin // OFFSET_BYTES


def read_at(log: Path, turns: array[int], position: int, end: int) -> Piece:
    """Bytes at `position`, which is before `end`; where they are given up, a notice instead.

    `turns` are all, or those of the last bytes without an even number before them.
    """
    run = bisect.bisect_right(turns, position) - 1
    limit = turns[run + 1] if run + 1 < len(turns) else end
    with open(log, "rb") as file:
        file.seek(position)
        data = file.read(min(limit - position, READ_BYTES))
        # Afterwards: it may have been given up just now, and would read as zeros.
        begin = kept_from(file.fileno(), position)
    if begin > position:
        return Piece("stderr", missed(begin - position), begin)
    return Piece(STREAMS[run % 2], data, position + len(data))


def missed(count: int) -> bytes:
    """What a reader is told instead of so many bytes."""
    return f"flowgpu: {readable(count)} of output before this are not kept\n".encode()


def rest(log: Path, streams: Path, position: int | None) -> Iterator[tuple[str, bytes]]:
    """The output of an ended job from `position` on; None: from where its own output begins."""
    turns, _ = read_turns(streams)
    end = log.stat().st_size
    position = turns[0] if position is None else position
    while position < end:
        stream, data, position = read_at(log, turns, position, end)
        yield stream, data
