"""How the ghost moves bytes: jobs of the native mover."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from coordinator import faults
from coordinator.chunks import U8, Catalogue, Kernels, Segments
from coordinator.move_plan import MIB, Plan
from flowgpu import launch
from flowgpu.host import native

SCRATCH_BYTES = 64 * MIB
"""Device memory for lists of chunks and their digests; less is taken when there is less."""


class CopyJob(Protocol):
    """One GPU's copy, under way."""

    def start(self, segments: Segments, digests: U8 | None) -> None:
        """Start to copy; `digests` are those of a dump whose kernels have made them."""

    def progress(self) -> tuple[int, int]:
        """Bytes that are where they belong, and all bytes."""

    def wait(self, stage: str, seconds: float) -> int:
        """Wait for `prepared`, `out` or `done` and give the bytes moved.

        Raises native.MoverError, TimeoutError.
        """

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Mover(Protocol):
    """Makes copy jobs."""

    def make_arena(self, plan: Plan) -> None:
        """Make host memory for the jobs to come; those of an earlier one are closed."""

    def pin_arena(self, context: int) -> None: ...

    def kernels(self, context: int) -> Kernels:
        """The chunk kernels in a context. Raises native.MoverError."""

    def catalogue(self, expected: int) -> Catalogue:
        """An empty catalogue."""

    def dump_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        expected: int,
        plan: Plan,
        kernels: Kernels | None,
    ) -> CopyJob:
        """A job to the new file `path`, or to that of a descriptor (/proc/PID/fd/N).

        `digests`: where its digests go; with kernels, it is started with them.
        """

    def restore_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        plan: Plan,
        kernels: Kernels | None,
        frames: Sequence[int] | None = None,
    ) -> CopyJob:
        """A job from an extent, or from its packed file with frames of these sizes."""


class NativeJob:
    """A job of the native mover, with its digests."""

    def __init__(self, job: native.Transfer, digests: Path, kind: native.Kind) -> None:
        self._job = job
        self._path = digests
        self._kind = kind
        self._digests = np.empty(0, np.uint8)
        self._ended = False
        self._ending = threading.Lock()

    def start(self, segments: Segments, digests: U8 | None) -> None:
        """See CopyJob.start; a restore reads its digests first."""
        if self._kind is native.Kind.RESTORE:
            self._digests = np.fromfile(self._path, np.uint8)
        elif digests is None:
            size = int(segments[:, 1].sum())
            self._digests = np.zeros(native.digest_count(size) * native.DIGEST_BYTES, np.uint8)
        else:
            self._digests = np.ascontiguousarray(digests)
        self._job.start(segments, self._digests)

    def progress(self) -> tuple[int, int]:
        """See CopyJob.progress."""
        found = self._job.progress()
        if self._kind is native.Kind.RESTORE:
            return found.bytes_copied, found.bytes_total
        return found.bytes_file, found.bytes_total

    def wait(self, stage: str, seconds: float) -> int:
        """See CopyJob.wait; a dump that is done has its digests in their file."""
        if not self._job.wait(native.Stage[stage.upper()], seconds):
            raise TimeoutError(f"the copy was not {stage} after {seconds:.1f} s")
        found = self._job.progress()
        if stage == "done":
            with self._ending:  # several may wait, and each may use the file when it has its answer
                self._end(found)
        return found.bytes_total

    def _end(self, found: native.Progress) -> None:
        if self._ended:
            return
        if self._kind is native.Kind.DUMP:
            faults.check_write(self._path, faults.TABLE_WRITE)
            self._path.write_bytes(self._digests.tobytes())
        print(f"{self._kind.name} with {self._path.name}: {_summary(found)}", file=sys.stderr)
        self._ended = True

    def cancel(self) -> None:
        """Ask the copy to end."""
        self._job.cancel()

    def close(self) -> None:
        """Wait until nothing is in flight and free the job."""
        self._job.close()


def _summary(found: native.Progress) -> str:
    """Where the bytes of a job went and how long its stages took, for the log."""
    sizes = ("total", "ready", "direct", "gathered")
    parts = [f"{name} {getattr(found, 'bytes_' + name) / MIB:.0f} MiB" for name in sizes]
    stages = ("prepare", "out", "done")
    return ", ".join(
        parts + [f"{name} {getattr(found, name + '_ns') / 1e9:.3f} s" for name in stages]
    )


class NativeMover:
    """Jobs of libflowgpu_ghost.so on one driver library."""

    def __init__(self, library: str) -> None:
        self._mover = native.Mover(Path(library))
        self._arena: native.Arena | None = None

    def make_arena(self, plan: Plan) -> None:
        """Map and touch the host memory that the copies share, in place of what there was."""
        if self._arena is not None:
            self._arena.close()
        self._arena = native.Arena(self._mover, plan.arena, plan.piece, plan.threads)

    def pin_arena(self, context: int) -> None:
        """Pin it for all contexts."""
        self._need_arena().register(context)

    def kernels(self, context: int) -> native.Kernels:
        """See Mover.kernels."""
        return native.Kernels(self._mover, context, launch.kernels_ptx(), SCRATCH_BYTES)

    def catalogue(self, expected: int) -> native.Catalogue:
        """See Mover.catalogue."""
        return native.Catalogue(self._mover, expected)

    def dump_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        expected: int,
        plan: Plan,
        kernels: Kernels | None,
    ) -> NativeJob:
        """See Mover.dump_job."""
        job = self._job(native.Kind.DUMP, path, context, expected, plan, kernels)
        return NativeJob(job, digests, native.Kind.DUMP)

    def restore_job(
        self,
        path: Path,
        digests: Path,
        context: int,
        plan: Plan,
        kernels: Kernels | None,
        frames: Sequence[int] | None = None,
    ) -> NativeJob:
        """See Mover.restore_job."""
        packed = None
        if frames is not None:
            slots = digests.stat().st_size // native.DIGEST_BYTES
            packed = (frames, slots * native.CHUNK_BYTES)
        job = self._job(native.Kind.RESTORE, path, context, 0, plan, kernels, packed)
        return NativeJob(job, digests, native.Kind.RESTORE)

    def _need_arena(self) -> native.Arena:
        if self._arena is None:
            raise RuntimeError("the arena was not made before the copy")
        return self._arena

    def _job(
        self,
        kind: native.Kind,
        path: Path,
        context: int,
        expected: int,
        plan: Plan,
        kernels: Kernels | None,
        packed: tuple[Sequence[int], int] | None = None,
    ) -> native.Transfer:
        if kernels is not None and not isinstance(kernels, native.Kernels):
            raise TypeError("the native mover works with its own kernels")
        return native.Transfer(
            self._need_arena(),
            kind,
            native.Mode[plan.mode.upper()],
            path,
            context=context,
            threads=plan.threads,
            streams=plan.streams,
            expected_bytes=expected,
            direct_io=plan.direct,
            kernels=kernels,
            given_digests=kernels is not None and kind is native.Kind.DUMP,
            packed=packed,
        )
