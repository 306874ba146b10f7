"""Write the pages that a view of CRIU's images left out into the restored, stopped processes."""

from __future__ import annotations

import ctypes as c
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flowgpu.criu_view import Fill, Run, View
from flowgpu.proctree import task_states

PIECE_BYTES = 2 << 20
GAP_BYTES = 64 << 10  # reading on over such a gap is faster than another call
IOV_MAX = 1024  # limits.h
STOP_SECONDS = 2.0
MAX_THREADS = 16


class FillFailed(Exception):
    """A page could not be written; the text names process and address."""


class _Iovec(c.Structure):
    _fields_ = [("base", c.c_void_p), ("size", c.c_size_t)]


_libc = c.CDLL(None, use_errno=True)
_libc.process_vm_writev.restype = c.c_ssize_t
_libc.process_vm_writev.argtypes = [c.c_int, c.POINTER(_Iovec), c.c_ulong]
_libc.process_vm_writev.argtypes += [c.POINTER(_Iovec), c.c_ulong, c.c_ulong]
_thread = threading.local()


@dataclass(frozen=True)
class _Piece:
    """Runs that are near in the file: PIECE_BYTES from first to last, and IOV_MAX at most."""

    pid: int
    path: Path
    file: int
    runs: list[Run]


def fill(view: View, threads: int | None = None) -> None:
    """Write everything. Raises FillFailed.

    The processes must be stopped, and are so again afterwards: one that somebody has let go on in
    between has run without its memory.
    """
    _require_stopped(view, STOP_SECONDS)
    threads = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        pieces: list[_Piece] = []
        for one in view.fills:
            file = os.open(one.pages, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, file)
            pieces += _pieces(one, file)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        futures = [pool.submit(_write, piece) for piece in pieces]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    _require_stopped(view, 0.0)


def _require_stopped(view: View, seconds: float) -> None:
    """Wait for it: CRIU ends with the signal sent, and a thread meets it on its way to the program.

    Raises FillFailed.
    """
    deadline = time.monotonic() + seconds
    for one in view.fills:
        while set(task_states(one.pid).values()) != {"T"}:
            if time.monotonic() >= deadline:
                reason = "did not stay stopped until its memory was there"
                raise FillFailed(f"process {one.pid} {reason}")
            time.sleep(0.0005)


def _pieces(one: Fill, file: int) -> Iterator[_Piece]:
    piece: list[Run] = []
    end = 0
    for run in one.runs:
        at = 0
        while at < run.bytes:
            address, offset = run.address + at, run.offset + at
            # No two threads in one huge page: both would clear one.
            size = min(run.bytes - at, PIECE_BYTES - address % PIECE_BYTES)
            if piece and (
                offset - end > GAP_BYTES
                or offset + size - piece[0].offset > PIECE_BYTES
                or len(piece) == IOV_MAX
            ):
                yield _Piece(one.pid, one.pages, file, piece)
                piece = []
            piece.append(Run(address, size, offset))
            at, end = at + size, offset + size
    if piece:
        yield _Piece(one.pid, one.pages, file, piece)


def _write(piece: _Piece) -> None:
    # Through a buffer that stays in the cache: pages of a mapped file would have to be mapped one
    # by one, and unmapped in the end.
    if not hasattr(_thread, "buffer"):
        _thread.buffer = mmap.mmap(-1, PIECE_BYTES)
        _thread.address = c.addressof(c.c_char.from_buffer(_thread.buffer))
    first, runs = piece.runs[0].offset, piece.runs
    size = runs[-1].offset + runs[-1].bytes - first
    view = memoryview(_thread.buffer)
    done = 0
    while done < size:
        count = os.preadv(piece.file, [view[done:size]], first + done)
        if not count:
            raise FillFailed(f"{piece.path} ends at byte {first + done}")
        done += count
    near = _thread.address - first
    local = (_Iovec * len(runs))(*(_Iovec(near + run.offset, run.bytes) for run in runs))
    remote = (_Iovec * len(runs))(*(_Iovec(run.address, run.bytes) for run in runs))
    count = _libc.process_vm_writev(piece.pid, local, len(runs), remote, len(runs), 0)
    if count != sum(run.bytes for run in runs):
        raise FillFailed(_explain(piece, count, c.get_errno()))


def _explain(piece: _Piece, count: int, error: int) -> str:
    done = max(count, 0)
    for run in piece.runs:
        if done < run.bytes:
            break
        done -= run.bytes
    why = os.strerror(error if count < 0 else errno.EFAULT)
    return f"memory of process {piece.pid} at {run.address + done:#x} cannot be written: {why}"
