"""A checkpoint of a job: the actions of each phase and what undoes them (phases.py says which
follows which, plan.py how it is done).

Every attribute that an undo reads is set as soon as its fact is true, so that an action may fail at
any line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordinator import control_state, faults, obstacles, phases, plan
from coordinator.communicators import refuse_uncounted
from coordinator.control_state import ControlState
from coordinator.copy_out import POPULATE_SECONDS, CopyOut
from coordinator.cpu_side import CpuSide
from coordinator.failures import Failure, explain
from coordinator.ghost_client import GhostError
from coordinator.minimum import NEAR
from coordinator.mover import plan_for
from coordinator.phases import Event, Outcome, Phase
from coordinator.plan import Plan
from coordinator.process import alive
from coordinator.records import Facts, Times, libraries, write_manifest
from coordinator.sampler import Sampler
from coordinator.session import (
    GhostLink,
    Job,
    Progress,
    Shared,
    has_room,
    wanted_gpus,
)
from coordinator.task_group import TaskGroup
from coordinator.tasks import DYING_SECONDS, TaskError, is_cut
from flowgpu import criu_images, memory, timeline, wire
from flowgpu.errors import (
    CriuUnsupported,
    FlowError,
    JobEnded,
    JobLost,
    ModeUnusable,
    NotEnoughDisk,
    TaskStopped,
)
from flowgpu.image import compression, layout
from flowgpu.image.manifest import LEFT_RUNNING, Manifest, Packed
from flowgpu.image.writer import ImageWriter
from flowgpu.jobs import JobDir
from flowgpu.options import CheckpointOptions
from flowgpu.proctree import is_stopped
from flowgpu.timeline import COORDINATOR, JOB, PAUSED, Recorder
from flowgpu.undumpable import undumpable
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

CLOCK_SECONDS = 0.01
"""How much earlier than its time a step may end that was given it in whole milliseconds."""
WAITED_FOR = {Phase.CAPTURE: "criu"}
"""What the command that asked shows of a phase, where it is not the phase's name in the report."""
TRIED_SECONDS = 0.01
"""From which on what was tried before is shown in the timeline."""
DISK_MARGIN = 64 << 20
GHOST_BYTES, CRIU_BYTES = 32 << 20, 16 << 20
"""Memory of the host that a ghost takes at least, before it has an arena or a context, and CRIU
with the page server. What the driver takes for a context is not known before."""


def take(
    job: Job,
    options: CheckpointOptions,
    progress: Progress,
    on_dumped: Callable[[Path], None],
    on_running: Callable[[float], None],
) -> dict[str, Any]:
    """Take a checkpoint; another one where processes that begin or end have disturbed it.

    None is begun once the pause could have taken all of its time. Otherwise as Checkpoint.
    """
    began, paused = time.monotonic(), 0.0
    notes = JobDir(job.directory).timeline
    while True:
        checkpoint = Checkpoint(job, options, progress, on_dumped, on_running, began)
        try:
            result = checkpoint.run()
            timeline.note(notes, "checkpoint", checkpoint.timeline, result, "")
            return result
        except FlowError as error:
            paused = paused or checkpoint.pause_began or time.monotonic()
            if not checkpoint.disturbed or time.monotonic() >= paused + options.pause_seconds:
                timeline.note(notes, "checkpoint", checkpoint.timeline, {}, str(error))
                raise
            log.info("taken again: %s", error)


class Checkpoint:
    """One checkpoint; `run` once."""

    def __init__(
        self,
        job: Job,
        options: CheckpointOptions,
        progress: Progress,
        on_dumped: Callable[[Path], None],
        on_running: Callable[[float], None],
        began: float,
    ) -> None:
        """`on_dumped` is called when the image is complete, before the job is killed; `on_running`
        when a job that is left running runs again, with the seconds for which it was paused.

        `began`: when what it is a part of has begun (time.monotonic).
        """
        self._job = job
        self._options = options
        self._report = progress
        self._on_dumped = on_dumped
        self._on_running = on_running
        self._state = phases.start(options.leave_running)

        self.timeline = Recorder(began)
        if (tried := time.monotonic() - began) > TRIED_SECONDS:
            self.timeline.add(COORDINATOR, "tried before", began, began + tried)
        self._link = GhostLink(job.start_ghost, job.keep_ghost, self.timeline)
        self._shared = Shared(job, self._link, timeline=self.timeline, plan=Plan(options))
        self._engines = control_state.engines(self._shared)
        self._group = TaskGroup(self._shared, self._unless_full)
        self._copy = CopyOut(self._shared, self._report)
        self._cpu = CpuSide(self._shared, self._group, self._copy)
        self._manifest: Manifest | None = None
        self._active: str | None = None  # parts of blocks, None: all of them

        self._began = self._phase_began = began
        self._paused: timeline.Open | None = None  # in the timeline
        self._pause_ended = 0.0
        self._seconds: dict[Phase, float] = {}
        self._pack_seconds: float | None = None
        self._foreign_bytes = 0
        self._failure: Failure | None = None
        self.disturbed = False
        """Whether it failed where a process has begun or ended: another may succeed."""

    def run(self) -> dict[str, Any]:
        """Do it. Gives the report; raises a FlowError after a failure, with everything undone."""
        actions: dict[Phase, Callable[[], None]] = {
            Phase.PREPARE: self._prepare,
            Phase.GATE: self._gate,
            Phase.HANDOVER: self._handover,
            Phase.STRIP: self._strip,
            Phase.CAPTURE: self._capture,
            Phase.COMMIT: self._commit,
            Phase.KILL: self._kill,
            Phase.WAKE: self._wake,
            Phase.MAPBACK: self._group.map_back,
            Phase.OPEN: self._open,
            Phase.RELEASE: self._release,
        }
        while self._state.phase is not Phase.END:
            phase = self._state.phase
            log.info("checkpoint: %s (%s)", phase.value, self._state.outcome.value)
            began = self._phase_began = time.monotonic()
            with self.timeline.span(COORDINATOR, phase.value):
                event = self._perform(phase, actions[phase])
            self._seconds[phase] = time.monotonic() - began
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
                self._failure = Failure(self._named(error), phase, late=self._is_late())
                self.disturbed = self._group.has_changed()
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
        """Whether the pause has taken all of its time."""
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

    def _prepare(self) -> None:
        faults.check(Fault.PREPARE)
        obstacles.wait_for_strays(self._job)
        group, shared, cpu = self._group, self._shared, self._cpu
        if held := undumpable(cpu.tree()):
            raise CriuUnsupported(action="dump", what=held)
        cpu.search()  # it traces, so who traces the job has been looked for before
        obstacles.refuse_32_bit(self._job, cpu.criu)
        if self._options.compress:
            compression.need_library()
        obstacles.refuse_without_rights()
        writer = shared.writer = ImageWriter(self._options.output)
        file_bytes = cpu.files.look(cpu.tree())
        group.find(self._options.pause_seconds)
        needs = partial(memory.need, what=f"a checkpoint of job {self._job.name!r}")
        if group.tasks and not self._link.alive:
            needs(CRIU_BYTES + GHOST_BYTES)
        obstacles.refuse_other_users(self._job)
        obstacles.refuse_other_clients(group.pids())
        shared.plan = plan.choose(
            self._options,
            self._job.name,
            {task.pid: task.hello.replay != 0 for task in group.tasks},
            self._against_replay,
        )
        self._refuse_connections()
        refuse_uncounted(group.communicators())
        if group.tasks:
            libraries()  # digested now, not in the pause
            self._link.start(shared.deadline)
            self._engine.refuse(group)
            if "active" in self._options.reductions:
                group.sampler = Sampler(group.tasks, self._options.wait_minimum)
            shared.plan = dataclasses.replace(shared.plan, late=not self._ghost_fits())
            group.export_all()
            group.refuse_outside()
        size = shared.table.total_bytes()
        if size:
            self._copy.take_links()
        # How much of the linked bytes is of use is not known yet; a full disk is undone like
        # every failure.
        beside = max(size - self._copy.linked_bytes, 0) + file_bytes + DISK_MARGIN
        beside += obstacles.resident_bytes(cpu.tree())
        if self._plan.recopies:
            beside += size  # what has changed when the job stands still has room as well
        beside -= self._spared(beside, size)
        cpu.start_pages(lambda more: writer.need(beside + more, self._job.name))
        if size:
            gpus = len(wanted_gpus(group.tasks))
            if not self._link.warm:  # which may have one
                needs(CRIU_BYTES + plan_for(writer.path, gpus, size).arena)
            if self._plan.recopies:
                self._copy_before(gpus)
            self._unless_full(lambda: self._copy.prepare(group.most_bytes(), gpus))
            if self._plan.holds:
                fits = self._copy.prepare_to_hold(group.most_bytes())
                group.drain(fits)
                if not fits:
                    self._refuse_cow("the GPU has no room for a copy of what is in use")
        cpu.pages.ready(shared.left(POPULATE_SECONDS))
        cpu.refuse_sandboxes()
        if cpu.pages.why_not_early:
            self._refuse_cow(cpu.pages.why_not_early)
        self._find_low()
        cpu.pages.again(shared.left(POPULATE_SECONDS))
        if size and self._plan.recopies and not self._plan.late:
            self._copy.copy_before(group.active_about, gpus, passes=1)

    def _spared(self, needed: int, size: int) -> int:
        """Bytes of so many that are needed which replicas will not take, if there is too little
        without that. Raises NotEnoughDisk."""
        try:
            self._shared.image.need(needed, self._job.name)
            return 0
        except NotEnoughDisk:
            several = len(wanted_gpus(self._group.tasks)) > 1 and not self._plan.late
            if not several or self._plan.recopies or "dedup" not in self._options.reductions:
                raise
        found: list[int] = []
        self._unless_full(lambda: found.append(self._copy.expect(size)))
        # What is in use changes until all stands still.
        spared = max(size - self._copy.linked_bytes - sum(found) * 5 // 4, 0) if found else 0
        self._shared.image.need(needed - spared, self._job.name)
        return spared

    def _copy_before(self, gpus: int) -> None:
        """Copy what is in use while the job runs."""
        if self._plan.late:
            self._refuse_mode("recopy", "the ghost has no room beside the job")
        if "dedup" not in self._options.reductions:
            self._refuse_mode("recopy", "--without dedup stores every chunk anew")
        if not self._copy.copy_before(self._group.active_about, gpus):
            self._refuse_mode("recopy", "the GPU has no room to copy parts of what is in use")

    def _refuse_cow(self, why: str) -> None:
        if self._options.leave_running:
            self._refuse_mode("cow", why)

    def _refuse_mode(self, mode: str, why: str) -> None:
        if self._options.mode == mode:
            raise ModeUnusable(job=self._job.name, mode=mode, reason=why)

    def _against_replay(self) -> list[str]:
        """What speaks against the engine replay: what it cannot save, and what nobody has seen it
        restore on a GPU where it was not asked for."""
        group = self._group
        found = list(group.refusals(wire.Engine.REPLAY))
        asked_for = "replay" in (self._options.engine, self._job.engine)
        if not found and not asked_for and group.communicators():
            found.append("NCCL's communicators are safer with the driver's own checkpoint")
        return found

    def _refuse_connections(self) -> None:
        """Of a task the driver may have some to its own service (MPS), which says more."""
        try:
            obstacles.refuse_connections(self._job, {task.inode for task in self._group.tasks})
            self._cpu.refuse_tcp()
        except FlowError:
            self._group.refuse(self._plan.engine)
            raise

    def _find_low(self) -> None:
        """Several tasks together are waited for here; a single one knows its low point best."""
        group = self._group
        smallest = group.sampler.smallest()
        # Behind the cut a thread that waits would not come to its low point.
        if len(group.tasks) == 1 and smallest is not None and not group.communicators():
            group.sampler.close()
            group.low, group.low_wait = int(smallest * (1 + NEAR)), self._options.wait_minimum
        else:
            group.sampler.wait()

    def _ghost_fits(self) -> bool:
        """Whether the ghost may have its contexts beside those of the tasks."""
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

    def _gate(self) -> None:
        group = self._group
        try:
            group.close_gates()
        except TaskError as error:
            if error.status is not wire.Status.REFUSED or self._plan.engine is wire.Engine.NATIVE:
                raise
            # What it refuses has come since it was asked in PREPARE.
            why = f"{error.detail} (process {error.pid})"
            self._shared.plan = self._plan.without_replay(why, self._job.name)
            group.reopen()
            self._engine.refuse(group)
            self._shared.deadline = time.monotonic() + self._options.pause_seconds
            group.close_gates()
        # Only now no task can come any more.
        if self._plan.holds and self._plan.engine is wire.Engine.REPLAY:
            can_lend = control_state.can_lend(self._cpu.criu, group)
            self._shared.plan = dataclasses.replace(self._plan, can_lend=can_lend)
            if not can_lend:
                self._refuse_cow("CUDA has to be taken from its processes")

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
            self._copy.begin_late(self._active)
            if self._options.leave_running and self._engine.needs_ghost:
                self._link.prepare_next()

    def _capture(self) -> None:
        self._cpu.pages.compare(self._group.host_memory())
        self._cpu.dump()
        if self._plan.lends:
            # What of the tasks does not use the GPU need not wait for the copy.
            self._cpu.resume()
        faults.check(Fault.COPY_WAIT)
        if self._copy.under_way and not self._copy.wait_held():
            if self._plan.late and self._options.leave_running:
                # This ghost has to go before the tasks' contexts can come back.
                self._copy.end()
            else:
                self._copy.place()
                self._copy.wait("out")

    def _commit(self) -> None:
        faults.check(Fault.COMMIT)
        self._cpu.check()
        if self._copy.under_way:
            self._copy.place()
            if self._state.resumed:
                # The job has its memory back; mapped here as well, what it frees would stay taken.
                self._link.ask("forget", self._shared.deadline)
            self._copy.end()
            self._group.drain(under_way=False)
        self._cpu.pages.finish(self._shared.left(phases.FLUSH_SECONDS))
        criu_images.rearm_timers(self._shared.image.criu_dir)
        packed = self._pack() if self._options.compress else ()
        mode, rung = self._rung()
        facts = Facts(
            self._shared,
            self._group,
            self._copy,
            self._cpu,
            foreign_bytes=self._foreign_bytes,
            ghost=self._ghost_kind(),
            not_kept=tuple(self._not_kept()),
            mode=mode,
            rung=rung,
            times=self._times,
            progress=self._on_sealed,
            packed=packed,
        )
        self._manifest = write_manifest(facts)

    def _on_sealed(self, event: Mapping[str, Any]) -> None:
        if event["done"] < event["total"]:  # what is over at once is not waited for
            self._report("seal", event["done"], event["total"])

    def _times(self) -> Times:
        """Up to now, which is in COMMIT."""
        now = time.monotonic()
        return Times(
            left_running=self._left_running(now),
            phases=self._phase_seconds() | {"commit": now - self._phase_began},
            pause_seconds=(self._pause_ended or now) - self._group.pause_began,
            total_seconds=now - self._began,
        )

    def _not_kept(self) -> Iterator[str]:
        """What a restored job is going to miss, in words: the process and the thing."""
        yield from self._cpu.unknown
        yield from self._cpu.survey.not_kept
        for pid, words in sorted(self._group.not_kept.items()):
            yield f"process {pid}: {words}"

    def _pack(self) -> Sequence[Packed]:
        began = time.monotonic()

        def progress(event: Mapping[str, Any]) -> None:
            if time.monotonic() >= self._shared.deadline:
                raise TimeoutError("packing takes too long")
            self._report("pack", event["done"], event["total"])

        with self.timeline.span(COORDINATOR, "pack"):
            packed = compression.pack_image(self._shared.image.path, self._job.name, progress)
        self._pack_seconds = time.monotonic() - began
        return packed

    def _ghost_kind(self) -> str:
        if not self._group.tasks:
            return "none"
        if self._plan.late:
            return "late"
        warm = self._link.warm and set(self._copy.indexes) <= self._link.warm
        return "warm" if warm else "cold"

    def _kill(self) -> None:
        if self._state.outcome is Outcome.GOOD:
            self._on_dumped(self._options.output)
        self._cpu.end()
        self._pause_ended = time.monotonic()

    # The way back: after a failure, or with leave_running

    def _wake(self) -> None:
        if self._state.outcome is not Outcome.GOOD:
            self._copy.cancel()
        self._cpu.resume()
        self._job.channel.listen()
        if self._plan.late:
            self._link.drop()
            self._copy.abandon()
        self._engine.rebuild(self._group)

    def _open(self) -> None:
        self._group.open()
        self._job.channel.entrance.open()
        # Not before: a task that waits for its gate is given all of its memory by a takeover.
        self._job.custody.clear()
        self._group.drain(under_way=self._copy.held)
        self._pause_ended = time.monotonic()
        if self._state.outcome is Outcome.GOOD:
            self._on_running(self._pause_ended - self._group.pause_began)

    def _release(self) -> None:
        with contextlib.ExitStack() as stack:  # the last first, each whatever becomes of the others
            stack.callback(self._shared.table.close)
            stack.callback(self._job.custody.clear)
            if self._shared.writer is not None:
                stack.callback(self._shared.writer.abort)  # nothing after a commit
            # Before that: it may be writing to the image.
            stack.callback(self._link.quit if self._failure is None else self._link.kill)
            stack.callback(self._job.channel.entrance.open)
            stack.callback(self._group.close)
            stack.callback(lambda: self._group.drain(under_way=False))
            stack.callback(self._cpu.close)
        if self._manifest is not None:
            self._cpu.pages.report(self._options.output / layout.CRIU_DIR)

    # Results

    def _explain(self) -> FlowError:
        failure = self._failure
        if failure is None:
            raise RuntimeError("a checkpoint that failed knows no error")
        if self._state.outcome is Outcome.LOST:
            if Phase.KILL not in self._seconds:
                return JobEnded(job=self._job.name, phase=failure.phase.name)
            return JobLost(job=self._job.name, reason=failure.reason)
        return explain(failure, self._job.name, self._options)

    def _rung(self) -> tuple[str, str]:
        """In which mode the job was left running, or copied before, and how little stood still."""
        if not self._options.leave_running and not self._plan.recopies:
            return "", ""
        copied = self._cpu.early and (self._copy.held or not self._copy.indexes)
        mode = "recopy" if self._plan.recopies else "cow" if copied else "stop"
        return mode, "early-pages" if self._cpu.early else "all-pages"

    def _left_running(self, now: float) -> dict[str, float]:
        """Seconds for which the job stood still: in all, its CPU side, and its GPUs for a copy; and
        those in which it ran on while the image became complete."""
        if not self._options.leave_running:
            return {}
        stalled = self._pause_ended - self._group.pause_began + self._cpu.tracking_seconds
        found = {"freeze": self._cpu.freeze_seconds, "hold": self._copy.hold_seconds}
        taken = {what: took for what, took in found.items() if took is not None}
        return {"stall": stalled, "drain": now - self._pause_ended} | taken

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds under the names of the report, in its order."""
        found = dict.fromkeys(phases.REPORT, 0.0)
        for phase, seconds in self._seconds.items():
            if name := phases.SPECS[phase].report:
                found[name] += seconds
        cut = self._group.cut_seconds
        found["gate"] = max(found["gate"] - self._group.waited - cut, 0.0)
        found |= {"cut": cut, "copy": self._copy.seconds, "criu": self._cpu.seconds}
        if self._group.cut is None:
            del found["cut"]
        if self._pack_seconds is None:
            del found["pack"]
        else:
            found["pack"] = self._pack_seconds
        return found

    def _result(self) -> dict[str, Any]:
        if self._manifest is None:
            raise RuntimeError("a checkpoint that succeeded has no manifest")
        return {
            "job": self._job.name,
            "image": str(self._options.output),
            "engine": self._manifest.engine,
            "engine_reason": self._manifest.engine_reason,
            "live": self._manifest.live,
            "ghost": self._manifest.ghost,
            "gpu": self._job.gpu,
            "pause_seconds": self._pause_ended - self._group.pause_began,
            # None: it was not left running, or its GPUs waited until the copy was out.
            "mode": self._manifest.mode or None,
            "rung": self._manifest.rung or None,
            "rung_reason": self._cpu.pages.why_not_early,
            **{f"{what}_seconds": self._manifest.left_running.get(what) for what in LEFT_RUNNING},
            "gpus": len(self._manifest.gpus),
            "total_seconds": time.monotonic() - self._began,
            "phases": self._phase_seconds(),
            **dataclasses.asdict(self._manifest.counts),
            "gpu_bytes_linked": self._manifest.linked_bytes,
            "gpu_bytes_before": self._copy.before_bytes,
            "gpu_bytes_replicated": sum(one.replicated for one in self._copy.reduced),
            "not_kept": list(self._manifest.not_kept),
        }
