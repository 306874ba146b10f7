"""A restore's copy into one GPU: reads from extents, then what is made of them on the device.

What several GPUs want is read by one of them. The others copy it from there once it is whole:
over NVLink where there is one (coordinator/chunks.py says between which GPUs). What they have got
is checked by its digests: some machines say that GPUs reach each other, and lose bytes on the way.
It is read from the image there, and so is all of it where they turn out not to reach each other.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from coordinator.chunks import CHUNK, U8, FillPlan, Kernels, Numbers, Passed, Segments, segments
from coordinator.mover import CopyJob
from flowgpu.host.native import MoverError, Status

POISON = 0xF1F1F1F1F1F1F1F1
"""Fills inactive chunks on demand: a program that reads one shows it (it is no number)."""

AT_ONCE = 4
"""Extents that are read at a time: each job has threads and streams of its own, and an image of a
series can have many extents of which it needs little."""

READ_SECONDS = 24 * 3600.0
"""Whoever waits for all of it has a time of their own, and cancels."""


class Meeting:
    """Where the fills of several GPUs wait until each has read what is its part, and it is known
    whether they reach each other's memory."""

    def __init__(self, fills: int) -> None:
        self._left = fills
        self._can_reach: bool | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def arrive(self) -> None:
        """One has read its part."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def tell(self, can_reach: bool) -> None:
        """Say whether the GPUs reach each other's memory."""
        with self._changed:
            self._can_reach = can_reach
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """One never will. The first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def can_take(self) -> bool:
        """Wait until what others have read can be taken from them. False: it never can.

        Raises the error of the one that failed.
        """
        with self._changed:
            self._changed.wait_for(self._is_decided)
            if self._error is not None:
                raise self._error
            return bool(self._can_reach)

    def _is_decided(self) -> bool:
        there = self._can_reach is not None and self._left == 0
        return there or self._can_reach is False or self._error is not None


class FillJob:
    """A CopyJob of several: reads one extent after another, and is done when equal and zero chunks
    are made.
    """

    def __init__(
        self,
        plan: FillPlan,
        read: Callable[[int], CopyJob],
        kernels: Kernels | None,
        poison: bool,
        meeting: Meeting,
        digests: Callable[[int], U8],
    ) -> None:
        """`read` makes the job that reads an extent, of which `digests` gives those of all slots
        (n x 16); `meeting` is that of all GPUs."""
        self._meeting, self._digests = meeting, digests
        self.passed_bytes, self.passed_seconds = 0, 0.0  # from other GPUs
        self._plan, self._read, self._kernels, self._poison = plan, read, kernels, poison
        self._left: list[tuple[int, Segments]] = []  # extents, and what of them
        self._under_way: dict[int, CopyJob] = {}
        self._ended: list[CopyJob] = []
        self._moved = self._total = 0
        self._cancelled = False
        self._lock = threading.Lock()  # of the six above
        self._error: Exception | None = None
        self._done = threading.Event()
        self._begin(plan.reads)
        self._thread = threading.Thread(target=self._run, daemon=True, name="fill")
        self._thread.start()

    def start(self, segments: object, digests: object) -> None:
        """Nothing: the plan is known from the start."""

    def _run(self) -> None:
        try:
            self._read_all()
            self._meeting.arrive()
            self._expand()
        except Exception as error:  # whoever waits is told
            self._error = error
            self._meeting.fail(error)
        finally:
            self._done.set()

    def _begin(self, reads: Mapping[int, Segments]) -> None:
        """Begin to read these; `_read_all` goes on."""
        sizes = {extent: int(rows[:, 1].sum()) for extent, rows in reads.items()}
        with self._lock:
            self._total += sum(sizes.values())
            # The largest first, and the newest waited for first, so that others are read beside it.
            self._left = sorted(reads.items(), key=lambda read: sizes[read[0]])
        self._go_on()

    def _go_on(self) -> None:
        """Keep as many reads under way as may be."""
        with self._lock:
            while self._left and len(self._under_way) < AT_ONCE:
                if self._cancelled:
                    raise MoverError(Status.CANCELLED, "the restore was cancelled")
                extent, rows = self._left.pop()
                job = self._under_way[extent] = self._read(extent)
                job.start(rows, None)

    def _read_all(self) -> None:
        while self._under_way:
            extent, job = list(self._under_way.items())[-1]
            moved = job.wait("done", READ_SECONDS)
            with self._lock:
                self._moved += moved
                self._ended.append(self._under_way.pop(extent))
                if self._left:
                    # It has memory of the GPU. Otherwise there is time for that later.
                    self._ended.pop().close()
            self._go_on()

    def _expand(self) -> None:
        passed, kernels = self._plan.passed, self._kernels
        if len(passed.sources):
            if kernels is not None and self._meeting.can_take():
                self._take(passed, kernels)
            else:
                self._read_passed(passed, np.arange(len(passed.sources)))
        if kernels is None:
            return
        kernels.copy(*self._plan.copies)
        kernels.fill(self._plan.zeros, 0)
        if self._poison:
            kernels.fill(self._plan.inactive, POISON)

    def _take(self, passed: Passed, kernels: Kernels) -> None:
        """Copy from other GPUs, and read what has not come as it was stored."""
        began = time.monotonic()
        kernels.copy(passed.sources, passed.addresses)
        self.passed_bytes = len(passed.sources) * CHUNK
        self.passed_seconds = time.monotonic() - began
        found, _ = kernels.scan(passed.addresses)
        checked = time.monotonic() - began
        print(
            f"{self.passed_bytes >> 20} MiB from other GPUs in {self.passed_seconds:.3f} s, "
            f"checked after {checked:.3f} s",
            file=sys.stderr,
        )
        wrong = np.zeros(len(found), np.bool_)
        for extent in np.unique(passed.extents):
            here = np.flatnonzero(passed.extents == extent)
            wanted = self._digests(int(extent))[passed.slots[here]]
            wrong[here] = np.any(found[here] != wanted, axis=1)
        if wrong.any():
            print(f"{wrong.sum()} chunks did not come whole from another GPU", file=sys.stderr)
            self._read_passed(passed, np.flatnonzero(wrong))

    def _read_passed(self, passed: Passed, which: Numbers) -> None:
        """Read those from the image."""
        reads = {}
        for extent in np.unique(passed.extents[which]).tolist():
            here = which[passed.extents[which] == extent]
            reads[extent] = segments(passed.addresses[here], passed.slots[here])
        self._begin(reads)
        self._read_all()

    def progress(self) -> tuple[int, int]:
        """See CopyJob.progress."""
        with self._lock:
            done = sum(job.progress()[0] for job in self._under_way.values())
            return self._moved + done, self._total

    def wait(self, stage: str, seconds: float) -> int:
        """See CopyJob.wait. Every stage is reached with `done`."""
        if not self._done.wait(seconds):
            raise TimeoutError(f"the copy was not {stage} after {seconds:.1f} s")
        if self._error is not None:
            raise self._error
        return self._moved

    def cancel(self) -> None:
        """Ask the reads to end, and whoever waits for them."""
        self._meeting.fail(MoverError(Status.CANCELLED, "the restore was cancelled"))
        with self._lock:
            self._cancelled = True
            for job in self._under_way.values():
                job.cancel()

    def close(self) -> None:
        """Wait until nothing is in flight, and free all."""
        self.cancel()
        self._thread.join()
        for job in (*self._ended, *self._under_way.values()):
            job.close()
        self._ended.clear()
        self._under_way.clear()
