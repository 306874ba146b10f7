"""Digests of files: at the speed of memory by the native library, which a Python without it need
not have."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flowgpu.errors import NotBuilt
from flowgpu.host import native
from flowgpu.image import layout

ProgressFunction = Callable[[Mapping[str, Any]], None]
REPORT_SECONDS = 0.1
_thread = threading.local()


class Unreadable(Exception):
    """A file that cannot be read, or that ends before its size."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class Meter:
    """Reports {phase, done, total, rate} now and then."""

    def __init__(self, phase: str, total: int, report: ProgressFunction | None) -> None:
        self.phase, self.total, self.report = phase, total, report
        self.done = 0
        self._start = self._last = time.monotonic()

    def reach(self, done: int) -> None:
        """Note that so many bytes are done by now."""
        if done == self.done:
            return
        self.done = done
        now = time.monotonic()
        if self.report and (now - self._last >= REPORT_SECONDS or done == self.total):
            self._last = now
            rate = done / max(now - self._start, 1e-9)
            self.report({"phase": self.phase, "done": done, "total": self.total, "rate": rate})


def workers() -> int:
    """Threads that digest: one a processor this process may use."""
    return len(os.sched_getaffinity(0))


def chunk_digests(data: memoryview) -> bytes:
    """Digests of the chunks of GPU data that `data` holds, one behind another."""
    return _digests(data, layout.CHUNK_BYTES)


def file_digests(files: Sequence[tuple[Path, int]], meter: Meter) -> list[str]:
    """Digest of each file of a given size. Raises Unreadable."""
    return [layout.digest(own).hex() for own in step_digests(files, layout.PART_BYTES, meter)]


def step_digests(files: Sequence[tuple[Path, int]], step: int, meter: Meter) -> list[bytes]:
    """Digests of every `step` bytes of each file of a given size, one behind another.

    `step` divides a part. Raises Unreadable.
    """
    before = meter.done
    try:
        found = native.digest_files(files, step, workers(), lambda done: meter.reach(before + done))
    except native.FileError as error:
        raise Unreadable(files[error.file][0], error.reason) from None
    except NotBuilt:
        return _step_digests(files, step, meter)
    return [digests.tobytes() for digests in found]


def _step_digests(files: Sequence[tuple[Path, int]], step: int, meter: Meter) -> list[bytes]:
    """Do the work of `step_digests` where there is no native library."""
    lock = threading.Lock()

    def work(path: Path, offset: int, size: int) -> bytes:
        found = _digests(_read(path, offset, size), step)
        with lock:
            meter.reach(meter.done + size)
        return found

    part = layout.PART_BYTES
    with ThreadPoolExecutor(workers()) as pool:
        futures = [
            [pool.submit(work, path, at, min(part, size - at)) for at in range(0, size, part)]
            for path, size in files
        ]
        try:
            return [b"".join(future.result() for future in own) for own in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def _digests(data: memoryview, step: int) -> bytes:
    return b"".join(layout.digest(data[at : at + step]) for at in range(0, len(data), step))


def _read(path: Path, offset: int, size: int) -> memoryview:
    """Bytes of a file, until this thread reads others. Raises Unreadable."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = bytearray(layout.PART_BYTES)
    data = memoryview(_thread.buffer)[:size]
    try:
        fd = layout.open_regular(path)
        try:
            at = 0
            while at < size:
                count = os.preadv(fd, [data[at:]], offset + at)
                if not count:
                    raise Unreadable(path, f"it ends at byte {os.fstat(fd).st_size}")
                at += count
        finally:
            os.close(fd)
    except OSError as error:
        raise Unreadable(path, str(error.strerror)) from None
    return data
