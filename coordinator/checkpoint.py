"""A checkpoint of a job: the actions of each phase and what undoes them (phases.py says which
follows which, plan.py how it is done).

Every attribute that an undo reads is set as soon as its fact is true, so that an action may fail at
any line.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordinator import control_state, faults, obstacles, phases
from coordinator.communicators import refuse_fixed, refuse_uncounted
from coordinator.copy_out import POPULATE_SECONDS
from coordinator.cpu_side import CpuSide
from coordinator.ghost_commands import Forget
from coordinator.move_plan import plan_for
from coordinator.others import ALONE, Barrier, Others
from coordinator.pause import GHOST_BYTES, Attempts, Pause
from coordinator.phases import Goal, Outcome, Phase
from coordinator.records import Facts, GpuSide, Times, libraries, write_manifest
from coordinator.session import (
    Progress,
    RunningJob,
    wanted_gpus,
)
from flowgpu import timeline, wire
from flowgpu.errors import (
    CriuUnsupported,
    FlowError,
    ModeUnusable,
    NotEnoughDisk,
)
from flowgpu.host import criu_images, memory
from flowgpu.host.undumpable import undumpable
from flowgpu.image import compression, layout
from flowgpu.image.manifest import LEFT_RUNNING, Manifest, Packed
from flowgpu.image.writer import ImageWriter
from flowgpu.jobs import JobDir
from flowgpu.options import CheckpointOptions
from flowgpu.timeline import COORDINATOR
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

DISK_MARGIN = 64 << 20
CRIU_BYTES = 16 << 20
"""Memory of the host that CRIU takes at least, with the page server."""


def take(
    job: RunningJob,
    options: CheckpointOptions,
    progress: Progress,
    on_dumped: Callable[[Path], None],
    on_running: Callable[[float], None],
    others: Others = ALONE,
) -> dict[str, Any]:
    """Take a checkpoint; another one where processes that begin or end have disturbed it.

    A job that is suspended is dumped from where its memory is.

    None is begun once the pause could have taken all of its time, nor where there are other nodes:
    their leader begins one on all of them. Otherwise as Checkpoint.
    """
    from coordinator.evict import Eviction  # which is one too

    began, attempts = time.monotonic(), Attempts(options.pause_seconds)
    notes = JobDir(job.directory).timeline
    while True:
        kind = Checkpoint if job.parked is None else Eviction
        checkpoint = kind(job, options, progress, on_dumped, on_running, began, others)
        try:
            result = checkpoint.run()
            timeline.note(notes, "checkpoint", checkpoint.timeline, result, "")
            return result
        except FlowError as error:
            if not others.alone or not attempts.again(checkpoint, error):
                timeline.note(notes, "checkpoint", checkpoint.timeline, {}, str(error))
                raise


class Checkpoint(Pause):
    """One checkpoint; `run` once."""

    action = "checkpoint"

    def __init__(
        self,
        job: RunningJob,
        options: CheckpointOptions,
        progress: Progress,
        on_dumped: Callable[[Path], None],
        on_running: Callable[[float], None],
        began: float,
        others: Others = ALONE,
    ) -> None:
        """`on_dumped` is called when the image is complete, before the job is killed; `on_running`
        when a job that is left running runs again, with the seconds for which it was paused."""
        goal = Goal.RUNNING if options.leave_running else Goal.ENDED
        super().__init__(job, options, progress, goal, began, others)
        self._on_dumped = on_dumped
        self._on_running = on_running
        self._cpu = CpuSide(self._shared, self._group, self._copy)
        self._manifest: Manifest | None = None
        self._pack_seconds: float | None = None
        self._why_taken = self._why_waits = ""
        self._of_service = False

    def _actions(self) -> dict[Phase, Callable[[], None]]:
        return super()._actions() | {
            Phase.PREPARE: self._prepare,
            Phase.CAPTURE: self._capture,
            Phase.COMMIT: self._commit,
        }

    # Forward

    def _prepare(self) -> None:
        group, shared = self._group, self._shared
        file_bytes = self._look()
        group.find(self._options.pause_seconds)
        needs = partial(memory.need, what=f"a checkpoint of job {self._job.name!r}")
        if group.tasks and not self._link.alive:
            needs(CRIU_BYTES + GHOST_BYTES)
        obstacles.refuse_other_users(self._job)
        self._choose()
        self._refuse_connections()
        refuse_uncounted(group.communicators())
        if self._plan.rebuilds:
            refuse_fixed(group.communicators())
        if group.tasks:
            libraries()  # digested now, not in the pause
            self._export()
        size = shared.table.total_bytes()
        gpus = len(wanted_gpus(group.tasks))
        if size and not self._link.warm:  # which may have one
            needs(CRIU_BYTES + plan_for(shared.image.path, gpus, size).arena)
        self._copy.take_links()
        # How much of the linked bytes is of use is not known yet; a full disk is undone like
        # every failure.
        beside = max(size - self._copy.linked_bytes, 0) + file_bytes
        if self._plan.recopies:
            beside += size  # what has changed when the job stands still has room as well
        self._start_pages(beside, size)
        if size:
            if self._plan.recopies:
                self._copy_before(gpus)
            self._prepare_copy(gpus)
            if self._plan.holds:
                fits = self._copy.prepare_to_hold()
                group.drain(fits)
                if not fits:
                    self._why_waits = "the GPU has no room for a copy of what is in use"
                    self._refuse_cow(self._why_waits)
        self._cpu.pages.ready(shared.left(POPULATE_SECONDS))
        self._cpu.refuse_sandboxes()
        if self._cpu.pages.why_not_early:
            self._refuse_cow(self._cpu.pages.why_not_early)
        self._find_why_taken()
        self._reached(Barrier.PREPARE)  # each node waits for its own low point
        self._cpu.pages.again(shared.left(POPULATE_SECONDS))
        if size and self._plan.recopies and not self._plan.late:
            self._copy.copy_before(group.active_about, gpus, passes=1)

    def _look(self) -> int:
        """Refuse by name what CRIU would fail at, and begin an image; gives the bytes of files that
        are the job's memory."""
        faults.check(Fault.PREPARE)
        obstacles.wait_for_strays(self._job)
        cpu = self._cpu
        if held := undumpable(cpu.tree()):
            raise CriuUnsupported(action="dump", what=held)
        cpu.search()  # it traces, so who traces the job has been looked for before
        obstacles.refuse_32_bit(self._job, cpu.criu)
        if self._options.compress:
            compression.need_library()
        obstacles.refuse_without_rights()
        self._shared.writer = ImageWriter(self._options.output)
        return cpu.files.look(cpu.tree())

    def _start_pages(self, beside: int, size: int) -> None:
        """Have those of the processes prepared, with so many bytes to be written beside them, of
        which at most `size` are of GPUs."""
        writer, tree = self._shared.image, self._cpu.tree()
        own = obstacles.most_saved(tree)
        beside += DISK_MARGIN
        try:
            writer.need(beside + 2 * own, self._job.name)
        except NotEnoughDisk:
            own = obstacles.most_saved(tree, look=True)
        beside += own
        beside -= self._spared(beside, size)
        # Pages that are copied early are there twice: as they are copied, and in their order.
        self._cpu.start_pages(lambda: writer.need(beside + own, self._job.name))

    def _spared(self, needed: int, size: int) -> int:
        """Bytes of so many that are needed which the copy will not take, if there is too little
        without that: zeros, and what is there twice. Raises NotEnoughDisk."""
        try:
            self._shared.image.need(needed, self._job.name)
            return 0
        except NotEnoughDisk:
            expected = self._expected() if size else None
            if expected is None:
                raise
        copies = 2 if self._plan.recopies else 1
        spared = max(copies * (size - expected) - self._copy.linked_bytes, 0)
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
        # A job that does not use a GPU yet, or not any more, has nothing to copy there.
        if self._options.leave_running and self._group.tasks:
            self._refuse_mode("cow", why)

    def _refuse_mode(self, mode: str, why: str) -> None:
        if self._options.mode == mode:
            raise ModeUnusable(job=self._job.name, mode=mode, reason=why)

    def _refuse_connections(self) -> None:
        """Refuse connections to processes outside the job.

        The driver may have connected a task to its own service (MPS). What the engine refuses for
        it says more, so that comes first.
        """
        try:
            connections = {task.inode for task in self._group.tasks}
            self._of_service = obstacles.refuse_connections(self._job, connections)
            self._cpu.refuse_tcp()
        except FlowError:
            self._group.refuse(self._plan.engine)
            raise

    def _gate(self) -> None:
        super()._gate()
        # Only now no task can come any more.
        self._find_why_taken()
        self._reached(Barrier.GATE)

    def _find_why_taken(self) -> None:
        """Raises ModeUnusable where mode cow needs what cannot be."""
        if self._plan.holds and self._plan.engine is wire.Engine.REPLAY:
            why = self._why_taken = control_state.why_taken(
                self._cpu.criu, self._group, self._of_service
            )
            can_keep = not why and bool(self._group.tasks)
            self._shared.plan = dataclasses.replace(self._plan, can_keep=can_keep)
            if why:
                self._refuse_cow(why)

    def _capture(self) -> None:
        self._cpu.pages.compare(self._group.host_memory())
        self._cpu.dump()
        if self._plan.keeps_cuda:
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
                self._link.ask(Forget(), self._shared.deadline)
            self._copy.end()
            self._group.drain(under_way=False)
        self._cpu.pages.finish(self._shared.left(phases.FLUSH_SECONDS))
        criu_images.rearm_timers(self._shared.image.criu_dir)
        packed = self._pack() if self._options.compress else ()
        mode, rung = self._rung()
        gpu = self._gpu_side()
        facts = Facts(
            self._shared,
            gpu,
            self._cpu,
            not_kept=tuple(self._not_kept(gpu)),
            mode=mode,
            rung=rung,
            times=self._times,
            progress=self._on_sealed,
            packed=packed,
        )
        self._manifest = write_manifest(facts)
        self._others.vote(self._options.output, len(self._cpu.connections))

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

    def _not_kept(self, gpu: GpuSide) -> Iterator[str]:
        """What a restored job is going to miss, in words: the process and the thing."""
        yield from self._cpu.unknown
        yield from self._cpu.survey.not_kept
        for pid in criu_images.with_protection_keys(self._shared.image.criu_dir):
            yield f"process {pid}: its memory protection keys (pkey_alloc)"
        yield from gpu.not_kept

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
        super()._wake()

    def _open(self) -> None:
        super()._open()
        if self._state.outcome is Outcome.GOOD:
            self._on_running(self._pause_ended - self._group.pause_began)

    def _release_target(self) -> None:
        if self._shared.writer is not None:
            self._shared.writer.abort()  # nothing after a commit

    def _release(self) -> None:
        try:
            self._cpu.close()
        finally:
            super()._release()
        if self._manifest is not None:
            self._cpu.pages.report(self._options.output / layout.CRIU_DIR)

    # Results

    def _rung(self) -> tuple[str, str]:
        """The mode and the rung of a job that was left running or copied before; else empty."""
        if not self._options.leave_running and not self._plan.recopies:
            return "", ""
        copied = self._cpu.early and (self._copy.held or not self._copy.indexes)
        copied = copied and not self._why_taken
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
            "rung_reason": self._cpu.pages.why_not_early or self._why_taken or self._why_waits,
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
