"""Digests of files, computed on the CPU by threads, a part at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from flowgpu.image import layout

ProgressFunction = Callable[[Mapping[str, Any]], None]
T = TypeVar("T")
REPORT_SECONDS = 0.1
_thread = threading.local()


class Unreadable(Exception):
    """A file that cannot be read, or that ends before its size."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Part:
    """Bytes [offset, offset + bytes) of a file."""

    path: Path
    offset: int
    bytes: int


class Meter:
    """Counts bytes for all threads and reports {phase, done, total, rate} now and then."""

    def __init__(self, phase: str, total: int, report: ProgressFunction | None) -> None:
        self.phase, self.total, self.report = phase, total, report
        self.done = 0
        self._lock = threading.Lock()
        self._start = self._last = time.monotonic()

    def add(self, size: int) -> None:
        """Count `size` bytes more."""
        with self._lock:
            self.done += size
            now = time.monotonic()
            if self.report and (now - self._last >= REPORT_SECONDS or self.done == self.total):
                self._last = now
                rate = self.done / max(now - self._start, 1e-9)
                event = {"phase": self.phase, "done": self.done, "total": self.total, "rate": rate}
                self.report(event)


def workers() -> int:
    """Threads that digest: one a processor this process may use."""
    return len(os.sched_getaffinity(0))


def split(path: Path, size: int) -> list[Part]:
    """The parts of a file of `size` bytes."""
    step = layout.PART_BYTES
    return [Part(path, at, min(step, size - at)) for at in range(0, size, step)]


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, never reached through a link in its place."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_part(part: Part) -> memoryview:
    """The bytes of a part, until this thread reads another. Raises Unreadable."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = bytearray(layout.PART_BYTES)
    data = memoryview(_thread.buffer)[: part.bytes]
    try:
        _fill(data, part)
    except OSError as error:
        raise Unreadable(part.path, str(error.strerror)) from None
    return data


def _fill(data: memoryview, part: Part) -> None:
    fd = open_regular(part.path)
    try:
        at = 0
        while at < part.bytes:
            count = os.preadv(fd, [data[at:]], part.offset + at)
            if not count:
                raise Unreadable(part.path, f"it ends at byte {part.offset + at}")
            at += count
    finally:
        os.close(fd)


def part_digest(part: Part) -> bytes:
    """Digest of one part."""
    return layout.digest(read_part(part))


def chunk_digests(data: memoryview) -> bytes:
    """Digests of the chunks of GPU data that `data` holds, one behind another."""
    step = layout.CHUNK_BYTES
    return b"".join(layout.digest(data[at : at + step]) for at in range(0, len(data), step))


def each(work: Callable[[Part], T], parts: Iterable[Part], meter: Meter) -> list[T]:
    """work(part) for every part, on threads; the first error ends it."""

    def counted(part: Part) -> T:
        result = work(part)
        meter.add(part.bytes)
        return result

    with ThreadPoolExecutor(workers()) as pool:
        futures = [pool.submit(counted, part) for part in parts]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def file_digests(files: Sequence[tuple[Path, int]], meter: Meter) -> list[str]:
    """Digest of each file of a given size. Raises Unreadable."""
    parts = [split(*file) for file in files]
    found = iter(each(part_digest, chain.from_iterable(parts), meter))
    return [layout.file_digest(list(islice(found, len(own)))) for own in parts]
