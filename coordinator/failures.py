"""Named errors for what can go wrong in a checkpoint."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

from coordinator.ghost_client import GhostError
from coordinator.phases import Phase
from coordinator.task_group import Stranger
from coordinator.tasks import TaskError
from flowgpu import wire
from flowgpu.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    CriuFailed,
    FlowError,
    GpuFull,
    InternalError,
    LimitTooLow,
    NotEnoughDisk,
    Unsupported,
    is_internal,
    words_of,
)
from flowgpu.host.pages import PagesUnavailable
from flowgpu.image.space import is_full
from flowgpu.options import CheckpointOptions
from flowgpu.render import size as readable


@dataclass(frozen=True)
class FailedPhase:
    """The phase that the first error of a checkpoint or a suspension has ended."""

    action: str  # which of the two
    error: Exception
    phase: Phase
    late: bool  # the time was up

    @property
    def reason(self) -> str:
        """The error in words."""
        return words_of(self.error)


def explain(failure: FailedPhase, job: str, options: CheckpointOptions) -> FlowError:
    """The named error."""
    error, phase = failure.error, failure.phase.name
    which = {"action": failure.action, "job": job, "phase": phase}
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if largest != resource.RLIM_INFINITY and os.strerror(errno.EFBIG) in str(error):
        what, allowed = f"The {failure.action} of job {job!r}", readable(largest)
        return LimitTooLow(what=what, flag="-f", allowed=allowed, reason=failure.reason)
    if _is_full(error):
        return NotEnoughDisk(path=options.output, free="too little", job=job, needed="more")
    if isinstance(error, FlowError):
        return error
    if isinstance(error, TaskError) and error.status is wire.Status.REFUSED:
        return Unsupported(name=error.detail)
    if isinstance(error, Stranger):
        return Unsupported(name=error.name)
    if isinstance(error, GhostError) and error.no_room:
        return GpuFull(job=job, reason=failure.reason)
    if failure.late:
        return CheckpointTimeout(seconds=options.pause_seconds, **which)
    if is_internal(error):
        action = f"the {failure.action} of job {job!r}, phase {phase}"
        return InternalError(action=action, error=failure.reason)
    return CheckpointFailed(reason=failure.reason, **which)


def _is_full(error: Exception) -> bool:
    """True if the ghost, CRIU, the page server or this process has found the image's disk full."""
    if isinstance(error, GhostError):
        return error.kind == "NO_SPACE"
    if isinstance(error, CriuFailed | PagesUnavailable):
        return os.strerror(errno.ENOSPC) in str(error)
    return is_full(error)
