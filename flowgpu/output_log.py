"""The log of a job's output: both streams as they came, and beside it where one turns to the other.

`output.streams` is a list of 64-bit offsets of `output.log`: number i is where the output turned to
stream i % 2. The first is where the job's own output begins: what a restore finds is before it.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from pathlib import Path

READ_BYTES = 1 << 16
STREAMS = ("stdout", "stderr")


def read_at(log: Path, turns: array[int], position: int, end: int) -> tuple[str, bytes]:
    """Bytes at `position`, which is before `end`, and their stream."""
    run = bisect.bisect_right(turns, position) - 1
    limit = turns[run + 1] if run + 1 < len(turns) else end
    with open(log, "rb") as file:
        file.seek(position)
        return STREAMS[run % 2], file.read(min(limit - position, READ_BYTES))


def rest(log: Path, streams: Path, position: int | None) -> Iterator[tuple[str, bytes]]:
    """All from `position` on, None: from where the job's own output begins; of an ended job."""
    turns, end = array("Q", streams.read_bytes()), log.stat().st_size
    position = turns[0] if position is None else position
    while position < end:
        stream, data = read_at(log, turns, position, end)
        position += len(data)
        yield stream, data
