"""The border to native code: the mover of libflowgpu_ghost.so (native/ghost/fgg.h), nothing else.

Every call gives the interpreter lock free while it waits.
"""

from __future__ import annotations

import ctypes as c
import enum
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from flowgpu import launch
from flowgpu.errors import NotBuilt

ABI_VERSION = 1
CHUNK_BYTES = 32768
DIGEST_BYTES = 16


class Status(enum.IntEnum):
    OK, PENDING, CANCELLED, DRIVER, NO_SPACE, IO, SHORT, DAMAGED, ARGUMENT, SYSTEM = range(10)


class Kind(enum.IntEnum):
    DUMP, RESTORE = range(2)


class Mode(enum.IntEnum):
    RING, MAPPED, REGISTERED = range(3)


class Stage(enum.IntEnum):
    PREPARED, OUT, DONE = range(3)


class MoverError(Exception):
    """A call or job of the mover failed; `status` says how, `chunk` names a damaged chunk."""

    def __init__(self, status: Status, text: str, chunk: int | None = None) -> None:
        super().__init__(text)
        self.status, self.chunk = status, chunk


class _Options(c.Structure):
    _fields_ = [("path", c.c_char_p), ("arena", c.c_void_p), ("context", c.c_uint64)]
    _fields_ += [("expected_bytes", c.c_uint64), ("kind", c.c_uint32), ("mode", c.c_uint32)]
    _fields_ += [("threads", c.c_uint32), ("streams", c.c_uint32)]
    _fields_ += [("direct_io", c.c_uint32), ("reserved", c.c_uint32)]


class _Segment(c.Structure):
    _fields_ = [("address", c.c_uint64), ("bytes", c.c_uint64)]


class Progress(c.Structure):
    """fgg_progress; `stage` is the highest Stage reached plus 1, times are nanoseconds."""

    stage: int
    status: int
    bytes_total: int
    bytes_ready: int
    bytes_copied: int
    bytes_file: int
    bytes_direct: int
    prepare_ns: int
    out_ns: int
    done_ns: int
    damaged_chunk: int
    _fields_ = [("stage", c.c_uint32), ("status", c.c_uint32), ("bytes_total", c.c_uint64)]
    _fields_ += [("bytes_ready", c.c_uint64), ("bytes_copied", c.c_uint64)]
    _fields_ += [("bytes_file", c.c_uint64), ("bytes_direct", c.c_uint64)]
    _fields_ += [("prepare_ns", c.c_uint64), ("out_ns", c.c_uint64), ("done_ns", c.c_uint64)]
    _fields_ += [("damaged_chunk", c.c_uint64)]


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
}


class Mover:
    """The library, bound to one driver for the life of the process. Raises NotBuilt, MoverError."""

    def __init__(self, driver: Path, library: Path | None = None) -> None:
        path = library or launch.library_dir() / "libflowgpu_ghost.so"
        if not path.is_file():
            raise NotBuilt(path.name)
        self.c = c.CDLL(str(path))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        if (found := self.c.fgg_abi_version()) != ABI_VERSION:
            raise MoverError(Status.ARGUMENT, f"{path} has ABI {found}, not {ABI_VERSION}")
        self.check(self.c.fgg_init(str(driver).encode()))

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


class Job:
    """One file on its way from or to a GPU: created (prepares at once), started, waited for."""

    def __init__(
        self, arena: Arena, kind: Kind, mode: Mode, path: Path, *, context: int, threads: int,
        streams: int = 4, expected_bytes: int = 0, direct_io: bool = False,
    ) -> None:  # fmt: skip
        self.mover, self.arena, self.handle = arena.mover, arena, c.c_void_p()
        self._digests: c.Array[c.c_uint8] | None = None
        options = _Options(bytes(path), arena.handle, context, expected_bytes, kind, mode)
        options.threads, options.streams, options.direct_io = threads, streams, direct_io
        self.mover.check(self.mover.c.fgg_job_create(c.byref(options), c.byref(self.handle)))

    def start(self, segments: Sequence[tuple[int, int]], digests: bytearray) -> None:
        """Copy the (device address, bytes) segments, which make the file one behind another.

        `digests` holds 16 bytes a chunk of 32 KiB and belongs to the job until close().
        """
        rows = (_Segment * len(segments))(*(_Segment(*segment) for segment in segments))
        self._digests = (c.c_uint8 * len(digests)).from_buffer(digests)
        self.mover.check(
            self.mover.c.fgg_job_start(
                self.handle, rows, len(rows), self._digests, len(digests) // DIGEST_BYTES
            )
        )

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

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def digest_count(size: int) -> int:
    """Chunks, and so digests, of a file of `size` bytes."""
    return -(-size // CHUNK_BYTES)
