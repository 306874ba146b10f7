"""The border to native code: libflowgpu_ghost.so (native/ghost/fgg.h), nothing else.

Every call gives the interpreter lock free while it waits.
"""

from __future__ import annotations

import ctypes as c
import enum
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowgpu import launch
from flowgpu.errors import NotBuilt

ABI_VERSION = 4
CHUNK_BYTES = 32768
DIGEST_BYTES = 16
REPORT_SECONDS = 0.1

# (address, bytes) one behind another in the file, or (address, bytes, offset in the file), as rows
# or as an array of shape (n, 2) or (n, 3).
Segments = Sequence[tuple[int, int]] | Sequence[tuple[int, int, int]] | npt.NDArray[np.uint64]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]


class Status(enum.IntEnum):
    OK, PENDING, CANCELLED, DRIVER, NO_SPACE, IO, SHORT, DAMAGED, ARGUMENT, SYSTEM = range(10)


class Kind(enum.IntEnum):
    DUMP, RESTORE = range(2)


class Mode(enum.IntEnum):
    """How a dump writes its file; a restore reads in ring mode."""

    RING, MAPPED, REGISTERED = range(3)


class Stage(enum.IntEnum):
    PREPARED, OUT, DONE = range(3)


class MoverError(Exception):
    """A call or job of the mover failed; `status` says how, `chunk` names a damaged chunk."""

    def __init__(self, status: Status, text: str, chunk: int | None = None) -> None:
        super().__init__(text)
        self.status, self.chunk = status, chunk


class _Options(c.Structure):
    _fields_ = [("path", c.c_char_p), ("arena", c.c_void_p), ("kernels", c.c_void_p)]
    _fields_ += [("context", c.c_uint64), ("expected_bytes", c.c_uint64)]
    _fields_ += [("kind", c.c_uint32), ("mode", c.c_uint32), ("threads", c.c_uint32)]
    _fields_ += [("streams", c.c_uint32), ("direct_io", c.c_uint32)]
    _fields_ += [("given_digests", c.c_uint32), ("frames", c.c_void_p)]
    _fields_ += [("frame_count", c.c_uint64), ("plain_bytes", c.c_uint64)]


class Progress(c.Structure):
    """fgg_progress; `stage` is the highest Stage reached plus 1, times are nanoseconds."""

    stage: int
    status: int
    bytes_total: int
    bytes_ready: int
    bytes_copied: int
    bytes_file: int
    bytes_direct: int
    bytes_gathered: int
    prepare_ns: int
    out_ns: int
    done_ns: int
    damaged_chunk: int
    _fields_ = [("stage", c.c_uint32), ("status", c.c_uint32), ("bytes_total", c.c_uint64)]
    _fields_ += [("bytes_ready", c.c_uint64), ("bytes_copied", c.c_uint64)]
    _fields_ += [("bytes_file", c.c_uint64), ("bytes_direct", c.c_uint64)]
    _fields_ += [("bytes_gathered", c.c_uint64)]
    _fields_ += [("prepare_ns", c.c_uint64), ("out_ns", c.c_uint64), ("done_ns", c.c_uint64)]
    _fields_ += [("damaged_chunk", c.c_uint64)]


class _File(c.Structure):
    _fields_ = [("path", c.c_char_p), ("bytes", c.c_uint64)]


class _DigestProgress(c.Structure):
    _fields_ = [("bytes_done", c.c_uint64), ("failed_file", c.c_uint64), ("stop", c.c_uint32)]


_PROTOTYPES: dict[str, tuple[object, list[object]]] = {
    "fgg_abi_version": (c.c_uint32, []),
    "fgg_init": (c.c_int, [c.c_char_p]),
    "fgg_error_text": (c.c_char_p, [c.c_void_p]),
    "fgg_arena_create": (c.c_int, [c.c_uint64, c.c_uint64, c.c_uint32, c.POINTER(c.c_void_p)]),
    "fgg_arena_register": (c.c_int, [c.c_void_p, c.c_uint64]),
    "fgg_arena_destroy": (None, [c.c_void_p]),
    "fgg_job_create": (c.c_int, [c.POINTER(_Options), c.POINTER(c.c_void_p)]),
    "fgg_job_start": (c.c_int, [c.c_void_p, c.c_void_p, c.c_uint64, c.c_void_p, c.c_uint64]),
    "fgg_job_progress": (None, [c.c_void_p, c.POINTER(Progress)]),
    "fgg_job_wait": (c.c_int, [c.c_void_p, c.c_uint32, c.c_int64]),
    "fgg_job_cancel": (None, [c.c_void_p]),
    "fgg_job_destroy": (None, [c.c_void_p]),
    "fgg_kernels_create": (
        c.c_int,
        [c.c_uint64, c.c_char_p, c.c_uint64, c.POINTER(c.c_void_p)],
    ),
    "fgg_kernels_destroy": (None, [c.c_void_p]),
    "fgg_scan": (c.c_int, [c.c_void_p, c.c_void_p, c.c_uint64, c.c_void_p, c.c_void_p]),
    "fgg_compare": (c.c_int, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_uint64, c.c_void_p]),
    "fgg_copy_chunks": (c.c_int, [c.c_void_p, c.c_void_p, c.c_void_p, c.c_uint64]),
    "fgg_fill_chunks": (c.c_int, [c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint64]),
    "fgg_catalogue_create": (c.c_int, [c.c_uint64, c.POINTER(c.c_void_p)]),
    "fgg_catalogue_destroy": (None, [c.c_void_p]),
    "fgg_catalogue_match": (
        c.c_int,
        [c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint64, c.c_void_p],
    ),
    "fgg_digest_files": (
        c.c_int,
        [c.POINTER(_File), c.c_uint64, c.c_uint64, c.c_uint32, c.c_void_p, c.c_void_p],
    ),
}


def library() -> c.CDLL:
    """libflowgpu_ghost.so, without a driver. Raises NotBuilt, MoverError."""
    return _load(launch.library_dir() / "libflowgpu_ghost.so")


@functools.cache
def _load(path: Path) -> c.CDLL:
    if not path.is_file():
        raise NotBuilt(path.name)
    library = c.CDLL(str(path))
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if (found := library.fgg_abi_version()) != ABI_VERSION:
        raise MoverError(Status.ARGUMENT, f"{path} has ABI {found}, not {ABI_VERSION}")
    return library


class FileError(Exception):
    """File number `file` of those to digest cannot be read, or ends before its size."""

    def __init__(self, file: int, reason: str) -> None:
        super().__init__(reason)
        self.file, self.reason = file, reason


def digest_files(
    files: Sequence[tuple[Path, int]], step: int, threads: int, report: Callable[[int], None]
) -> list[U8]:
    """Digests, of shape (n, 16), of every `step` bytes of each file of a given size.

    `report` is told now and then how many bytes are done. Needs no driver. Raises NotBuilt,
    FileError, MoverError.
    """
    own = library()
    rows = (_File * len(files))(*(_File(os.fsencode(path), size) for path, size in files))
    counts = [-(-size // step) for _, size in files]
    digests = np.empty((sum(counts), DIGEST_BYTES), np.uint8)
    progress = _DigestProgress()
    outcome: list[tuple[int, str]] = []

    def work() -> None:
        data = (len(files), step, threads, digests.ctypes.data, c.byref(progress))
        status = own.fgg_digest_files(rows, *data)
        # The text belongs to the thread that failed.
        outcome.append((status, own.fgg_error_text(None).decode(errors="replace")))

    worker = threading.Thread(target=work, name="digests")
    worker.start()
    try:
        ended = False
        while not ended:
            worker.join(REPORT_SECONDS)
            ended = not worker.is_alive()
            report(progress.bytes_done)
    finally:
        progress.stop = 1
        worker.join()
    status, text = outcome[0]
    if status in (Status.IO, Status.SHORT):
        raise FileError(progress.failed_file, text)
    if status != Status.OK:
        raise MoverError(Status(status), text)
    return np.split(digests, np.cumsum(counts)[:-1]) if files else []


class Mover:
    """The library, bound to one driver for the life of the process. Raises NotBuilt, MoverError."""

    def __init__(self, driver: Path) -> None:
        self.c = library()
        self.check(self.c.fgg_init(os.fsencode(driver)))

    def check(self, status: int, job: c.c_void_p | None = None) -> None:
        """Raise MoverError, with the text of the job or of this thread's last call."""
        if status == Status.OK:
            return
        chunk = None
        if job is not None and status == Status.DAMAGED:
            self.c.fgg_job_progress(job, c.byref(progress := Progress()))
            chunk = progress.damaged_chunk
        # A refused call leaves its text with the thread, a failed job keeps its own.
        text = (job is not None and self.c.fgg_error_text(job)) or self.c.fgg_error_text(None)
        raise MoverError(Status(status), text.decode(errors="replace"), chunk)


class Arena:
    """Host memory in slots of `piece_bytes` (a multiple of 2 MiB), shared by all jobs."""

    def __init__(self, mover: Mover, size: int, piece_bytes: int, threads: int) -> None:
        self.mover, self.handle = mover, c.c_void_p()
        create = mover.c.fgg_arena_create
        mover.check(create(size, piece_bytes, threads, c.byref(self.handle)))

    def register(self, context: int) -> None:
        """Pin for all contexts of the process; `context` is the value of a CUcontext."""
        self.mover.check(self.mover.c.fgg_arena_register(self.handle, context))

    def close(self) -> None:
        """Unpin and free; every job that used it must be closed."""
        handle, self.handle = self.handle, c.c_void_p()
        if handle:
            self.mover.c.fgg_arena_destroy(handle)


class Kernels:
    """The chunk kernels in one context, with scratch memory; calls come from one thread at a time.

    Addresses are of whole chunks on the GPU, multiples of 32 KiB, in arrays of shape (n,). Every
    call returns when the GPU is done, and raises MoverError.
    """

    def __init__(self, mover: Mover, context: int, ptx: Path, scratch_bytes: int) -> None:
        self.mover, self.handle = mover, c.c_void_p()
        create = mover.c.fgg_kernels_create
        mover.check(create(context, bytes(ptx), scratch_bytes, c.byref(self.handle)))

    def scan(self, addresses: U64) -> tuple[U8, npt.NDArray[np.bool_]]:
        """Digests of shape (n, 16), and whether all bytes of a chunk are zero, of shape (n,)."""
        rows = _addresses(addresses)
        digests = np.empty((rows.size, DIGEST_BYTES), np.uint8)
        zero = np.empty(rows.size, np.bool_)
        scan = self.mover.c.fgg_scan
        data = (rows.ctypes.data, rows.size, digests.ctypes.data, zero.ctypes.data)
        self.mover.check(scan(self.handle, *data))
        return digests, zero

    def compare(self, left: U64, right: U64) -> npt.NDArray[np.bool_]:
        """True for each pair of chunks that differ in any byte."""
        one, other = _pair(left, right)
        differ = np.empty(one.size, np.bool_)
        data = (one.ctypes.data, other.ctypes.data, one.size, differ.ctypes.data)
        self.mover.check(self.mover.c.fgg_compare(self.handle, *data))
        return differ

    def copy(self, sources: U64, destinations: U64) -> None:
        """Copy chunks on the GPU; no destination may be a source or another destination."""
        one, other = _pair(sources, destinations)
        copy = self.mover.c.fgg_copy_chunks
        self.mover.check(copy(self.handle, one.ctypes.data, other.ctypes.data, one.size))

    def fill(self, destinations: U64, pattern: int = 0) -> None:
        """Set every 8 bytes of the chunks to the 64-bit pattern."""
        rows = _addresses(destinations)
        fill = self.mover.c.fgg_fill_chunks
        self.mover.check(fill(self.handle, rows.ctypes.data, rows.size, pattern))

    def close(self) -> None:
        """Unload and free; every job that used it must be closed."""
        handle, self.handle = self.handle, c.c_void_p()
        if handle:
            self.mover.c.fgg_kernels_destroy(handle)

    def __del__(self) -> None:
        self.close()


class Catalogue:
    """A table digest -> number for about `expected` digests; it grows. One thread at a time."""

    def __init__(self, mover: Mover, expected: int) -> None:
        self.mover, self.handle = mover, c.c_void_p()
        mover.check(mover.c.fgg_catalogue_create(expected, c.byref(self.handle)))

    def match(self, digests: U8, first: int) -> U64:
        """Numbers, of shape (n,), of digests of shape (n, 16).

        A known digest has the number it was first added under; a new one at row i is added as
        `first + i`.
        """
        rows = np.ascontiguousarray(digests, np.uint8)
        if rows.ndim != 2 or rows.shape[1] != DIGEST_BYTES:
            raise ValueError(f"digests have shape (n, {DIGEST_BYTES}), not {rows.shape}")
        numbers = np.empty(len(rows), np.uint64)
        data = (rows.ctypes.data, len(rows), first, numbers.ctypes.data)
        self.mover.check(self.mover.c.fgg_catalogue_match(self.handle, *data))
        return numbers

    def close(self) -> None:
        """Free the table."""
        handle, self.handle = self.handle, c.c_void_p()
        if handle:
            self.mover.c.fgg_catalogue_destroy(handle)

    def __del__(self) -> None:
        self.close()


class Transfer:
    """One file on its way from or to a GPU: created (prepares at once), started, waited for.

    With `kernels` (of the same context; must outlive the transfer) segments are whole chunks, and
    pieces of many segments are gathered on the GPU. `given_digests`: a dump computes none.
    `packed`: a restore reads zstd frames of these sizes, which hold so many bytes.
    """

    def __init__(
        self, arena: Arena, kind: Kind, mode: Mode, path: Path, *, context: int, threads: int,
        streams: int = 4, expected_bytes: int = 0, direct_io: bool = False,
        kernels: Kernels | None = None, given_digests: bool = False,
        packed: tuple[Sequence[int], int] | None = None,
    ) -> None:  # fmt: skip
        self.mover, self.arena, self.handle = arena.mover, arena, c.c_void_p()
        self.kernels = kernels
        self._writes = kind is Kind.DUMP and not given_digests
        self._digests: object = None
        options = _Options(bytes(path), arena.handle, kernels.handle if kernels else None, context)
        options.expected_bytes, options.kind, options.mode = expected_bytes, kind, mode
        options.threads, options.streams, options.direct_io = threads, streams, direct_io
        options.given_digests = given_digests
        if packed is not None:
            frames = np.array(packed[0], np.uint32)
            options.frames, options.frame_count = frames.ctypes.data, frames.size
            options.plain_bytes = packed[1]
        self.mover.check(self.mover.c.fgg_job_create(c.byref(options), c.byref(self.handle)))

    def start(self, segments: Segments, digests: bytearray | U8) -> None:
        """Copy the segments, which are sorted by their offset in the file.

        A dump's cover the file without gaps, what a restore leaves out is not read. `digests` holds
        16 bytes a chunk of 32 KiB of the file and belongs to the job until close().
        """
        rows = segment_rows(segments)
        held = np.frombuffer(digests, np.uint8)
        if self._writes and not held.flags.writeable:
            raise ValueError("a dump writes its digests, and these are read-only")
        self._digests = held
        data = (rows.ctypes.data, len(rows), held.ctypes.data, held.size // DIGEST_BYTES)
        self.mover.check(self.mover.c.fgg_job_start(self.handle, *data))

    def progress(self) -> Progress:
        self.mover.c.fgg_job_progress(self.handle, c.byref(progress := Progress()))
        return progress

    def wait(self, stage: Stage = Stage.DONE, timeout: float | None = None) -> bool:
        """True when the stage is reached, False after `timeout` seconds. Raises MoverError."""
        limit = -1 if timeout is None else int(timeout * 1000)
        status = self.mover.c.fgg_job_wait(self.handle, stage, limit)
        if status != Status.PENDING:
            self.mover.check(status, self.handle)
        return bool(status == Status.OK)

    def cancel(self) -> None:
        """Ask it to end; wait() then raises MoverError(CANCELLED) once nothing is in flight."""
        self.mover.c.fgg_job_cancel(self.handle)

    def close(self) -> None:
        """End it if it still runs, and free it. The dumped file stays."""
        handle, self.handle = self.handle, c.c_void_p()
        if handle:
            self.mover.c.fgg_job_destroy(handle)
        self._digests = None

    def __del__(self) -> None:
        # Its threads write to the digests, which must not be freed before.
        self.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def segment_rows(segments: Segments) -> U64:
    """Rows (address, bytes, offset) of shape (n, 3); pairs lie one behind another in the file."""
    rows = np.ascontiguousarray(segments, np.uint64)
    if not rows.size:
        return np.empty((0, 3), np.uint64)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3):
        raise ValueError(f"segments have shape (n, 2) or (n, 3), not {rows.shape}")
    if rows.shape[1] == 2:
        ends = np.cumsum(rows[:, 1], dtype=np.uint64)
        rows = np.column_stack((rows, ends - rows[:, 1]))
    return np.ascontiguousarray(rows)


def _addresses(addresses: U64) -> U64:
    rows = np.ascontiguousarray(addresses, np.uint64)
    if rows.ndim != 1:
        raise ValueError(f"addresses have shape (n,), not {rows.shape}")
    return rows


def _pair(one: U64, other: U64) -> tuple[U64, U64]:
    left, right = _addresses(one), _addresses(other)
    if left.size != right.size:
        raise ValueError(f"{left.size} addresses on one side and {right.size} on the other")
    return left, right


def digest_count(size: int) -> int:
    """Chunks, and so digests, of a file of `size` bytes."""
    return -(-size // CHUNK_BYTES)
