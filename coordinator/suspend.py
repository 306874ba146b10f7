"""A suspension of a job: its GPUs are given back, and its memory of them waits in the host's.

It is a checkpoint without a CPU side, which ends with PARK: the processes go on until they call
CUDA. resume.py is the way back.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from coordinator import faults, obstacles
from coordinator.communicators import refuse_uncounted
from coordinator.host_copy import HostCopy
from coordinator.move_plan import plan_for
from coordinator.others import ALONE, Barrier, Others
from coordinator.parked import Parked
from coordinator.pause import GHOST_BYTES, Attempts, Pause
from coordinator.phases import Goal, Outcome, Phase
from coordinator.process import alive
from coordinator.session import SPARE_BYTES, Progress, RunningJob, wanted_gpus
from coordinator.tasks import DYING_SECONDS
from flowgpu import timeline, wire
from flowgpu.errors import FlowError, GpuFull, NotEnoughMemory, NothingToSuspend
from flowgpu.host import memory
from flowgpu.jobs import JobDir
from flowgpu.options import SuspendOptions
from flowgpu.wire import Fault

log = logging.getLogger(__name__)


def suspend(
    job: RunningJob, options: SuspendOptions, progress: Progress, others: Others = ALONE
) -> dict[str, Any]:
    """Suspend it; once more where processes that begin or end have disturbed that. With `others`,
    who leads all nodes tries again."""
    began, kept = time.monotonic(), JobDir(job.directory)
    attempts = Attempts(options.pause(kept.host_copy).pause_seconds)
    while True:
        suspension = Suspension(job, options, progress, began, others)
        try:
            result = suspension.run()
            timeline.note(kept.timeline, "suspension", suspension.timeline, result, "")
            return result
        except FlowError as error:
            if not others.alone or not attempts.again(suspension, error):
                timeline.note(kept.timeline, "suspension", suspension.timeline, {}, str(error))
                raise


class Suspension(Pause):
    """One suspension; `run` once."""

    action = "suspension"

    def __init__(
        self,
        job: RunningJob,
        options: SuspendOptions,
        progress: Progress,
        began: float,
        others: Others = ALONE,
    ) -> None:
        folder = JobDir(job.directory).host_copy
        goal = Goal.PARKED if options.keep_context else Goal.SUSPENDED
        super().__init__(job, options.pause(folder), progress, goal, began, others)
        self._keeps = options.keep_context
        if job.host is None:
            job.host = HostCopy(folder)
        self._host = self._shared.host = job.host
        self._parked: Parked | None = None

    def _actions(self) -> dict[Phase, Callable[[], None]]:
        return super()._actions() | {Phase.PREPARE: self._prepare, Phase.PARK: self._park}

    def _prepare(self) -> None:
        faults.check(Fault.PREPARE)
        obstacles.wait_for_strays(self._job)
        group, shared = self._group, self._shared
        group.find(self._options.pause_seconds)
        if not group.tasks:
            raise NothingToSuspend(job=self._job.name)
        need = partial(memory.need, what=f"to suspend job {self._job.name!r}")
        if not self._link.alive:
            need(GHOST_BYTES)
        self._choose()
        refuse_uncounted(group.communicators())
        self._host.forget_tables()
        self._export()
        if self._keeps:
            self._refuse_late()
            if managed := sum(task.page.managed_bytes for task in group.tasks):
                need(managed)
        gpus, most = len(wanted_gpus(group.tasks)), group.in_use() + SPARE_BYTES
        if shared.table.total_bytes():
            place = self._host.place

            def needed(size: int) -> int:
                kept = 0 if place else max(size - self._host.held(), 0)
                return kept + plan_for(place, gpus, most).arena

            try:
                need(needed(most))
            except NotEnoughMemory:
                expected = self._expected()
                if expected is None:
                    raise
                need(needed(expected + SPARE_BYTES))
            self._prepare_copy(gpus)
        if self._keeps:
            self._refuse_late()
        self._reached(Barrier.PREPARE)

    def _gate(self) -> None:
        super()._gate()
        self._reached(Barrier.GATE)

    def _choose(self) -> None:
        if self._keeps:
            # Nothing is taken out of the processes, so no engine has to save anything.
            reason = "CUDA stays in the processes"
            self._shared.plan = dataclasses.replace(
                self._plan, engine=wire.Engine.NATIVE, reason=reason, keeps_context=True
            )
        else:
            super()._choose()

    def _refuse_engine(self) -> None:
        if not self._keeps:
            super()._refuse_engine()

    def _refuse_late(self) -> None:
        """A ghost that waits for the tasks' contexts to end would wait for ever."""
        if self._plan.late:
            reason = "the ghost has no room beside the contexts that --keep-context leaves"
            raise GpuFull(job=self._job.name, reason=reason)

    def _park(self) -> None:
        """Once the last byte is in the host's memory, let go of the devices'."""
        group, copy, job = self._group, self._copy, self._job
        faults.check(Fault.COPY_WAIT)
        if not group.tasks:
            self._refuse_ended()
        if self._keeps:
            group.managed_to_host()
            group.seclude()
            group.detach()
        if copy.under_way:
            copy.end()
        self._reached(Barrier.PARK)
        seconds = time.monotonic() - group.pause_began
        parked = Parked(self._gpu_side(), self._keeps, seconds)
        parked.save(JobDir(job.directory).parked)
        # From here on nothing but a resume gives the tasks their memory.
        self._parked = job.parked = parked
        try:
            job.custody.leave_host(self._host.fds, job.channel.entrance.lock)
        except OSError as error:
            log.warning("the host copy is kept by nobody else: %s", error)
            job.custody.clear()
        self._pause_ended = time.monotonic()

    def _refuse_ended(self) -> None:
        """All that used the GPU has ended meanwhile, and maybe the job with it."""
        job, deadline = self._job, time.monotonic() + DYING_SECONDS
        while alive(job.root_pid) and time.monotonic() < deadline:
            time.sleep(0.002)
        raise NothingToSuspend(job=job.name)

    @property
    def _is_suspended(self) -> bool:
        return self._state.outcome is Outcome.GOOD and self._parked is not None

    def _end_ghost(self) -> None:
        if self._is_suspended and self._keeps:
            self._link.quit(stays=True)
        else:
            self._link.end()

    def _release_target(self) -> None:
        if self._is_suspended:
            self._job.channel.listen()  # who has detached knocks until it is let in
        else:
            self._host.close()
            self._job.host = None

    def _phase_seconds(self) -> dict[str, float]:
        group = self._group
        found = {phase.value: seconds for phase, seconds in self._seconds.items()}
        gate = found[Phase.GATE.value] - group.waited - group.cut_seconds
        found[Phase.GATE.value] = max(gate, 0.0)
        return found if group.cut is None else found | {"cut": group.cut_seconds}

    def _result(self) -> dict[str, Any]:
        if self._parked is None:
            raise RuntimeError("a suspension that succeeded has nothing parked")
        gpu = self._parked.gpu
        blocks = sum(one.data_bytes for one in gpu.gpus)
        return {
            "job": self._job.name,
            "engine": "none" if self._keeps else gpu.engine,
            "engine_reason": gpu.engine_reason,
            "keeps_context": self._keeps,
            "ghost": gpu.ghost,
            "gpu": self._job.gpu,
            "suspend_seconds": self._parked.seconds,
            "total_seconds": time.monotonic() - self._began,
            "phases": self._phase_seconds(),
            "copy_seconds": self._copy.seconds,
            "gpu_bytes_reserved": gpu.gpu_bytes_reserved,
            "gpu_bytes_freed": blocks if self._keeps else gpu.gpu_bytes_reserved,
            "gpu_bytes_active": gpu.gpu_bytes_active,
            "gpu_bytes_nonzero": gpu.gpu_bytes_nonzero,
            "gpu_bytes_distinct": gpu.gpu_bytes_distinct,
            "gpu_bytes_stored": gpu.gpu_bytes_stored,
            "host_bytes": self._host.held(),
            "not_kept": list(gpu.not_kept),
        }
