"""An image of a suspended job: its GPU memory is copied from the host's while the processes run,
and CRIU dumps those. Where that fails, the job stays suspended.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator import obstacles, phases
from coordinator.checkpoint import CRIU_BYTES, Checkpoint
from coordinator.copy_out import POPULATE_SECONDS
from coordinator.host_copy import HostCopy
from coordinator.parked import Parked
from coordinator.phases import Goal, Outcome
from coordinator.records import GpuSide, libraries
from coordinator.task_state import TaskState
from flowgpu.errors import EngineUnusable, Suspended
from flowgpu.host import memory

if TYPE_CHECKING:
    from coordinator.session import RunningJob
    from flowgpu.options import CheckpointOptions


class Eviction(Checkpoint):
    """One of them; `run` once."""

    def __init__(self, job: RunningJob, options: CheckpointOptions, *rest: Any) -> None:
        """See Checkpoint. Raises Suspended, EngineUnusable where no image could be had."""
        if job.parked is None or job.host is None:
            raise RuntimeError("a job that is not suspended cannot be evicted")
        self._parked: Parked = job.parked
        self._host_copy: HostCopy = job.host
        if options.leave_running:
            raise Suspended(job=job.name, action="left running")
        if self._parked.keeps_context:
            raise Suspended(job=job.name, action="dumped, as its processes have kept CUDA")
        if options.communicators == "rebuild":
            raise Suspended(job=job.name, action="dumped without the communicators that it keeps")
        engine = self._parked.gpu.engine
        if options.engine not in ("auto", engine):
            reason = f"it was suspended by {engine}"
            raise EngineUnusable(job=job.name, engine=options.engine, reason=reason)
        super().__init__(job, options, *rest)
        self._state = phases.start(Goal.EVICTED)

    def _prepare(self) -> None:
        job, group, shared, gpu = self._job, self._group, self._shared, self._parked.gpu
        file_bytes = self._look()
        memory.need(CRIU_BYTES, f"a checkpoint of job {job.name!r}")
        obstacles.refuse_other_users(job)
        pids = [task.pid for task in gpu.tasks]
        group.expect(pids, TaskState.STRIPPED)
        group.tasks = job.channel.wait_resumed(pids, shared.deadline)
        if ended := set(pids) - set(group.pids()):
            raise Suspended(job=job.name, action=f"dumped, as process {min(ended)} has ended")
        obstacles.refuse_connections(job, {task.inode for task in group.tasks})
        self._cpu.refuse_tcp()
        libraries()
        self._start_pages(gpu.gpu_bytes_stored + file_bytes, 0)
        report = partial(self._report, "copy")
        total = gpu.gpu_bytes_stored
        self._host_copy.write_to(
            shared.image, pids, len(gpu.gpus), lambda done: report(done, max(total, done))
        )
        self._cpu.pages.ready(shared.left(POPULATE_SECONDS))
        self._cpu.refuse_sandboxes()
        self._cpu.pages.again(shared.left(POPULATE_SECONDS))

    def _spared(self, needed: int, size: int) -> int:
        self._shared.image.need(needed, self._job.name)
        return 0

    def _strip(self) -> None:
        self._group.pause_began = time.monotonic()
        self._shared.deadline = self._group.pause_began + self._options.pause_seconds
        self._group.seclude()
        self._group.detach()

    def _capture(self) -> None:
        self._cpu.dump()

    def _gpu_side(self) -> GpuSide:
        return self._parked.gpu

    def _wake(self) -> None:
        self._cpu.resume()
        self._job.channel.listen()

    @property
    def _is_suspended(self) -> bool:
        return self._state.outcome is Outcome.UNDONE
