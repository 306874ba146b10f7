"""A restore's copy into one GPU: reads from extents, then what is made of them on the device."""

from __future__ import annotations

import threading
import time

from coordinator.chunks import FillPlan, Kernels, Segments
from coordinator.mover import CopyJob

POISON = 0xF1F1F1F1F1F1F1F1
"""Fills inactive chunks on demand: a program that reads one shows it (it is no number)."""


class FillJob:
    """A CopyJob of several: starts them at once, and is done when equal and zero chunks are made.

    Kernels are used by the first thread that waits for `done`, others wait for it.
    """

    def __init__(
        self,
        plan: FillPlan,
        reads: list[tuple[CopyJob, Segments]],
        kernels: Kernels | None,
        poison: bool,
    ) -> None:
        self._plan, self._reads, self._kernels, self._poison = plan, reads, kernels, poison
        self._lock = threading.Lock()
        self._expanded = kernels is None
        for job, segments in reads:
            job.start(segments, None)

    def start(self, segments: Segments, digests: object) -> None:
        """Nothing: the plan is known from the start."""

    def progress(self) -> tuple[int, int]:
        """See CopyJob.progress."""
        found = [job.progress() for job, _ in self._reads]
        return sum(done for done, _ in found), sum(total for _, total in found)

    def wait(self, stage: str, seconds: float) -> int:
        """See CopyJob.wait."""
        deadline = time.monotonic() + seconds
        moved = sum(
            job.wait(stage, max(deadline - time.monotonic(), 0.0)) for job, _ in self._reads
        )
        if stage == "done":
            with self._lock:
                self._expand()
        return moved

    def _expand(self) -> None:
        if self._expanded or self._kernels is None:
            return
        self._kernels.copy(*self._plan.copies)
        self._kernels.fill(self._plan.zeros, 0)
        if self._poison:
            self._kernels.fill(self._plan.inactive, POISON)
        self._expanded = True

    def cancel(self) -> None:
        """Ask the reads to end."""
        for job, _ in self._reads:
            job.cancel()

    def close(self) -> None:
        """Free them."""
        for job, _ in self._reads:
            job.close()
