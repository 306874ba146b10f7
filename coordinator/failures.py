"""Named errors for what can go wrong in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.ghost_client import GhostError
from coordinator.phases import Phase
from coordinator.tasks import TaskError
from flowgpu import wire
from flowgpu.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    FlowError,
    GpuFull,
    NotEnoughDisk,
    Unsupported,
)


@dataclass(frozen=True)
class Failure:
    """The first error of a checkpoint, the phase that it ended, and whether the time was up."""

    error: Exception
    phase: Phase
    late: bool

    @property
    def reason(self) -> str:
        """The error in words."""
        return str(self.error) or type(self.error).__name__


def explain(failure: Failure, job: str, output: Path, timeout: float) -> FlowError:
    """The named error. `timeout`: the seconds that the pause may take."""
    error = failure.error
    if isinstance(error, FlowError):
        return error
    if isinstance(error, TaskError) and error.status is wire.Status.REFUSED:
        return Unsupported(name=error.detail)
    if isinstance(error, GhostError) and error.no_room:
        return GpuFull(job=job, reason=failure.reason)
    if isinstance(error, GhostError) and error.kind == "NO_SPACE":
        return NotEnoughDisk(path=output, free="too little", job=job, needed="more")
    if failure.late:
        return CheckpointTimeout(job=job, seconds=timeout, phase=failure.phase.name)
    return CheckpointFailed(job=job, phase=failure.phase.name, reason=failure.reason)
