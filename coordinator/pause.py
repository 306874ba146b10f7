"""The way of a job's GPUs out of its processes, which a checkpoint and a suspension have in common.

The actions of phases, and what undoes them (phases.py says which follows which, plan.py how it is
done). Every attribute that an undo reads is set as soon as its fact is true, so that an action may
fail at any line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from coordinator import control_state, faults, obstacles, phases, plan
from coordinator.control_state import ControlState
from coordinator.copy_out import CopyOut
from coordinator.failures import FailedPhase, explain
from coordinator.ghost_client import GhostError
from coordinator.minimum import NEAR, TOLERANCE
from coordinator.move_plan import ESTIMATE_BYTES
from coordinator.others import ALONE, Barrier, Others
from coordinator.phases import Event, Goal, Outcome, Phase
from coordinator.plan import Plan
from coordinator.process import alive, kill_tree
from coordinator.records import GpuSide, gpu_side
from coordinator.sampler import Sampler
from coordinator.session import GhostLink, Progress, RunningJob, Shared, has_room, wanted_gpus
from coordinator.task_group import TaskGroup
from coordinator.tasks import DYING_SECONDS, TaskError, is_cut
from flowgpu import timeline, wire
from flowgpu.errors import FlowError, JobEnded, JobLost, TaskStopped
from flowgpu.host import memory
from flowgpu.host.proctree import is_stopped
from flowgpu.options import CheckpointOptions
from flowgpu.timeline import COORDINATOR, JOB, PAUSED, Recorder

log = logging.getLogger(__name__)

CLOCK_SECONDS = 0.01
"""How much earlier than its time a step may end that was given it in whole milliseconds."""
WAITED_FOR = {Phase.CAPTURE: "criu", Phase.PARK: "copy"}
"""What the command that asked shows of a phase, where it is not the phase's name in the report."""
TRIED_SECONDS = 0.01
"""From which on what was tried before is shown in the timeline."""
GHOST_BYTES = 32 << 20
"""Memory of the host that a ghost takes at least, before it has an arena or a context. What the
driver takes for a context is not known before."""


class Attempts:
    """Says whether one that failed where processes began or ended is taken again: not once the
    pause could have taken all of its time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = 0.0

    def again(self, failed: Pause, error: FlowError) -> bool:
        """After that error."""
        self._began = self._began or failed.pause_began or time.monotonic()
        if not failed.disturbed or time.monotonic() >= self._began + self._seconds:
            return False
        log.info("taken again: %s", error)
        return True


class Pause(ABC):
    """One of them; `run` once."""

    action: ClassVar[str]
    """In words."""

    def __init__(
        self,
        job: RunningJob,
        options: CheckpointOptions,
        progress: Progress,
        goal: Goal,
        began: float,
        others: Others = ALONE,
    ) -> None:
        """`began`: when what it is a part of has begun (time.monotonic). `others`: the job's other
        nodes, which take theirs at the same time."""
        self._job = job
        self._others = others
        self._options = options
        self._report = progress
        self._state = phases.start(goal)

        self.timeline = Recorder(began)
        if (tried := time.monotonic() - began) > TRIED_SECONDS:
            self.timeline.add(COORDINATOR, "tried before", began, began + tried)
        self._link = GhostLink(job.start_ghost, job.keep_ghost, self.timeline)
        self._shared = Shared(
            job, self._link, timeline=self.timeline, plan=Plan(options), others=others
        )
        self._engines = control_state.engines(self._shared)
        self._group = TaskGroup(self._shared, self._unless_full)
        self._copy = CopyOut(self._shared, self._report)
        self._active: str | None = None  # parts of blocks, None: all of them

        self._began = self._phase_began = began
        self._paused: timeline.Open | None = None  # in the timeline
        self._pause_ended = 0.0
        self._seconds: dict[Phase, float] = {}
        self._foreign_bytes = 0
        self._failure: FailedPhase | None = None
        self.disturbed = False
        """It failed where a process has begun or ended: another may succeed."""

    def run(self) -> dict[str, Any]:
        """Do it. Gives the report; raises a FlowError after a failure, with everything undone."""
        actions = self._actions()
        while self._state.phase is not Phase.END:
            phase = self._state.phase
            log.info("checkpoint: %s (%s)", phase.value, self._state.outcome.value)
            with self.timeline.span(COORDINATOR, phase.value) as span:
                self._phase_began = span.began
                event = self._perform(phase, actions[phase])
            self._seconds[phase] = span.seconds
            self._note_pause()
            self._state = phases.next(self._state, event)
        if self._state.outcome is not Outcome.GOOD:
            self.disturbed &= self._state.outcome is Outcome.UNDONE
            raise self._explain()
        return self._result()

    def _note_pause(self) -> None:
        """Tell the timeline when the pause begins and ends, as far as that is known."""
        if self._state.phase is Phase.HANDOVER and self._paused is None:
            self._paused = self.timeline.begin(JOB, PAUSED, self._group.pause_began)
        elif self._paused is not None and self._pause_ended:
            self._paused.end(ended=self._pause_ended)

    def _actions(self) -> dict[Phase, Callable[[], None]]:
        """Those that every goal has; a goal of its own adds to them."""
        return {
            Phase.GATE: self._gate,
            Phase.HANDOVER: self._handover,
            Phase.STRIP: self._strip,
            Phase.KILL: self._kill,
            Phase.WAKE: self._wake,
            Phase.MAPBACK: self._group.map_back,
            Phase.OPEN: self._open,
            Phase.RELEASE: self._release,
        }

    @abstractmethod
    def _result(self) -> dict[str, Any]:
        """The report of one that succeeded."""

    @property
    def pause_began(self) -> float:
        """When its gates began to close (time.monotonic); 0: they have not."""
        return self._group.pause_began

    @property
    def _plan(self) -> Plan:
        return self._shared.plan

    @property
    def _engine(self) -> ControlState:
        return self._engines[self._plan.engine]

    def _perform(self, phase: Phase, action: Callable[[], None]) -> Event:
        seconds = faults.begin(phase.value, self._state.spec.limit(self._options))
        if seconds is not None:
            self._shared.deadline = time.monotonic() + seconds
        if waited_for := WAITED_FOR.get(phase, phases.SPECS[phase].report):
            self._report(waited_for, 0, 0)
        try:
            action()
        except Exception as error:
            log.exception("checkpoint: %s failed", phase.value)
            if self._failure is None:
                self._failure = FailedPhase(
                    self.action, self._named(error), phase, late=self._is_late()
                )
                self.disturbed = self._group.has_changed()
                told = explain(self._failure, self._job.name, self._options)
                self._others.failed(told, self.disturbed)
            if self._job_is_gone(error):
                return Event.GONE
            broken = isinstance(error, TaskError) and error.status is wire.Status.LOST
            return Event.BROKEN if broken else Event.FAILED
        return Event.DONE

    def _named(self, error: Exception) -> Exception:
        """By its cause, where a task does not answer because it is stopped."""
        if isinstance(error, TaskError) and error.status is None and is_stopped(error.pid):
            return TaskStopped(pid=error.pid, job=self._job.name, how="SIGSTOP")
        return error

    def _is_late(self) -> bool:
        """The pause has taken all of its time."""
        paused = self._state.spec.paused
        return paused and time.monotonic() >= self._shared.deadline - CLOCK_SECONDS

    def _job_is_gone(self, error: Exception) -> bool:
        deadline = time.monotonic() + (DYING_SECONDS if is_cut(error) else 0.0)
        while alive(self._job.root_pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    # Forward

    def _choose(self) -> None:
        """Choose how."""
        group = self._group
        obstacles.refuse_other_clients(group.pids())
        self._shared.plan = plan.choose(
            self._options,
            self._job.name,
            {task.pid: task.hello.replay != 0 for task in group.tasks},
            lambda: group.refusals(wire.Engine.REPLAY),
        )
        managed = sum(task.page.managed_bytes for task in group.tasks)
        if managed and self._plan.engine is wire.Engine.REPLAY:
            # It becomes ordinary memory of the processes, whatever of it is the GPU's now.
            memory.need(managed, what=f"for the managed memory of job {self._job.name!r}")

    def _export(self) -> None:
        """Start the ghost, and let the tasks send it their blocks."""
        group, shared = self._group, self._shared
        self._link.start(shared.deadline)
        self._refuse_engine()
        if "active" in self._options.reductions:
            tolerance = NEAR if group.closes_itself() else TOLERANCE
            group.sampler = Sampler(group.tasks, self._options.wait_minimum, tolerance)
        shared.plan = dataclasses.replace(shared.plan, late=not self._ghost_fits())
        group.export_all()
        group.refuse_outside()

    def _refuse_engine(self) -> None:
        """Refuse by name what the engine would fail at, and say why it is not the other one."""
        try:
            self._engine.refuse(self._group)
        except FlowError as error:
            if self._options.engine != "auto" or not self._plan.reason:
                raise
            last = error.field_names()[-1]
            both = f"{error.fields[last]} ({self._plan.reason})"
            raise type(error)(**{**error.fields, last: both}) from error

    def _ghost_fits(self) -> bool:
        """The ghost may have its contexts beside those of the tasks."""
        tasks = self._group.tasks
        if wanted_gpus(tasks) <= self._link.warm:
            return True
        return has_room(tasks, self._link.gpus, self._shared.deadline)

    def _unless_full(self, action: Callable[[], object]) -> None:
        """Do it; a ghost that finds no device memory gives way to one that waits for the strip."""
        try:
            action()
        except GhostError as error:
            if not error.no_room:
                raise
            log.info("the ghost takes the place of the tasks' contexts: %s", error)
            self._shared.plan = dataclasses.replace(self._plan, late=True)
            self._link.drop()
            self._link.start()
            self._copy.forget_files()

    def _prepare_copy(self, gpus: int) -> None:
        """Let the ghost make room for the copy, of so many GPUs, while the job runs."""
        group = self._group

        def prepare() -> None:
            active = None
            if "active" in self._options.reductions and not self._plan.late:
                if self._shared.table.total_bytes() >= ESTIMATE_BYTES:
                    # What is in use then is in use, and as it is, when all stands still.
                    group.sampler.wait()
                active = group.active_about()
            self._copy.prepare(active, group.in_use(), gpus)

        self._unless_full(prepare)

    def _expected(self) -> int | None:
        """Bytes that a copy of all will have, at most; None: that cannot be known in advance.

        What is reserved is more, often by far: JAX takes three quarters of a GPU at its start.
        """
        found: list[int] = []
        if not self._plan.late:
            active = self._group.active_about() if "active" in self._options.reductions else None
            self._unless_full(lambda: found.append(self._copy.expect(active)))
        return found[0] if found else None

    def _gate(self) -> None:
        group = self._group
        try:
            group.close_gates()
        except TaskError as error:
            if error.status is not wire.Status.REFUSED or self._plan.engine is wire.Engine.NATIVE:
                raise
            if not self._others.alone:
                raise  # the others have closed theirs
            # What it refuses has come since it was asked in PREPARE.
            why = f"{error.detail} (process {error.pid})"
            self._shared.plan = self._plan.without_replay(why, self._job.name)
            group.reopen()
            self._refuse_engine()
            self._shared.deadline = time.monotonic() + self._options.pause_seconds
            group.close_gates()

    def _reached(self, barrier: Barrier) -> None:
        self._others.reached(barrier, self._shared.deadline)

    def _handover(self) -> None:
        group = self._group
        self._foreign_bytes = sum(task.page.foreign_bytes for task in group.tasks)
        group.hand_over()
        if self._shared.table.saved() and "active" in self._options.reductions:
            self._active = group.active()
        self._copy.begin(self._active)

    def _strip(self) -> None:
        obstacles.refuse_other_clients(self._group.pids())  # loaded since
        self._engine.strip(self._group)
        if self._plan.late and self._shared.table.saved():
            self._group.device_files.wait_freed()
            self._copy.begin_late(self._active)
            if self._options.leave_running and self._engine.needs_ghost:
                self._link.prepare_next()

    def _gpu_side(self) -> GpuSide:
        kind = self._ghost_kind()
        return gpu_side(self._shared, self._group, self._copy, self._foreign_bytes, kind)

    def _ghost_kind(self) -> str:
        if not self._group.tasks:
            return "none"
        if self._plan.late:
            return "late"
        warm = self._link.warm and set(self._copy.indexes) <= self._link.warm
        return "warm" if warm else "cold"

    # The way back

    def _wake(self) -> None:
        if self._state.outcome is not Outcome.GOOD:
            self._copy.cancel()
        self._job.channel.listen()
        if self._plan.late:
            self._link.drop()
            self._copy.abandon()
        self._group.device_files.wait_freed()
        self._engine.rebuild(self._group)

    def _open(self) -> None:
        self._group.open()
        self._job.channel.entrance.open()
        # Not before: a task that waits for its gate is given all of its memory by a takeover.
        self._job.custody.clear()
        self._group.drain(under_way=self._copy.held)
        self._pause_ended = time.monotonic()

    def _release(self) -> None:
        with contextlib.ExitStack() as stack:  # the last first, each whatever becomes of the others
            stack.callback(self._shared.table.close)
            if not self._is_suspended:
                stack.callback(self._job.custody.clear)
            stack.callback(self._release_target)
            # Before that: it may be writing to it.
            stack.callback(self._end_ghost if self._failure is None else self._link.kill)
            if not self._is_suspended:
                stack.callback(self._job.channel.entrance.open)
            stack.callback(self._group.close)
            stack.callback(lambda: self._group.drain(under_way=False))

    @property
    def _is_suspended(self) -> bool:
        """The job waits for a resume, and so for what custody has, and lets nobody in."""
        return False

    def _end_ghost(self) -> None:
        self._link.quit()

    @abstractmethod
    def _release_target(self) -> None:
        """Let go of where the copy went."""

    def _kill(self) -> None:
        kill_tree(self._job.root_pid)

    # Results

    def _explain(self) -> FlowError:
        failure = self._failure
        if failure is None:
            raise RuntimeError("a checkpoint that failed knows no error")
        if self._state.outcome is Outcome.LOST:
            if Phase.KILL not in self._seconds:
                return JobEnded(job=self._job.name, action=failure.action, phase=failure.phase.name)
            return JobLost(job=self._job.name, reason=failure.reason)
        return explain(failure, self._job.name, self._options)
