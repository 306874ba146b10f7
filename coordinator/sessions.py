"""What is done to a job, one thing at a time: checkpoints, suspensions, resumes.

Each runs in the thread of the client that asked for it, and the session lock lets in one at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.ghosts import Ghosts
from coordinator.others import ALONE, Barrier, Others
from coordinator.process import alive
from coordinator.server import Client
from coordinator.session import Progress, RunningJob
from coordinator.steps import Steps
from coordinator.tickets import Ticket
from flowgpu.errors import (
    ENDING,
    Busy,
    FlowError,
    InternalError,
    JobEnded,
    NotSuspended,
    Suspended,
    Unsupported,
    words_of,
)
from flowgpu.frequency import KEPT, Costs
from flowgpu.host import memory
from flowgpu.host.proctree import stopped_pids
from flowgpu.jobs import CHECKPOINTING, RUNNING, SUSPENDED, JobDir
from flowgpu.metrics import counting
from flowgpu.options import CheckpointOptions, SuspendOptions

if TYPE_CHECKING:
    from coordinator.agent import Agent, Round

log = logging.getLogger(__name__)

LINGER_SECONDS = 5.0
CLIENT_SECONDS = 30.0
FIRST_BYTES = 24 << 20
"""Memory that a checkpoint takes at least, of the coordinator's and CRIU's."""


class Sessions:
    """Those of one job, with what they leave for its record."""

    def __init__(self, job: RunningJob, directory: JobDir, ghosts: Ghosts) -> None:
        self._job = job
        self._directory = directory
        self._ghosts = ghosts
        self._agent: Agent | None = None  # of a job of several nodes
        self._session = threading.Lock()
        self._doing = "its start"
        self._steps: Steps | None = None  # of what is being done
        self._record_lock = threading.Lock()
        self._ended = threading.Event()
        self._dumped_to: Path | None = None

    def _handlers(self) -> dict[str, Any]:
        return {
            "pause-and-dump": self._on_pause_and_dump,
            "checkpoint": self._on_checkpoint,
            "suspend": self._on_suspend,
            "resume": self._on_resume,
        }

    def _record(self, **changes: Any) -> None:
        with self._record_lock:
            self._directory.update(**changes)

    def _on_pause_and_dump(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        return self._dump(client, CheckpointOptions.from_fields(fields))

    def _dump(
        self,
        client: Client,
        options: CheckpointOptions,
        on_running: Callable[[float], None] = lambda seconds: None,
    ) -> dict[str, Any]:
        """A checkpoint of the job, on all of its nodes."""
        if self._agent is None:
            return self._checkpoint(client.progress, options, on_running)
        if options.base is not None:
            raise Unsupported(name="several nodes, for which no image before can be taken up")
        result = self._agent.ask("checkpoint", options.to_fields(), client.progress)
        if not options.leave_running:
            self._ended.wait(LINGER_SECONDS)
        return result

    def _take_part(self, others: Round) -> None:
        """Take this node's part in what is done on all of them."""
        result: dict[str, Any] | None = None
        try:
            if others.what == "suspension":
                options = SuspendOptions.from_fields(others.fields)
                result = self._suspend_here(others.progress, options, others)
            elif others.what == "resume":
                result = self._resume_here(others.progress, bool(others.fields.get("drop")), others)
            else:
                result = self._checkpoint(others.progress, others.options, others=others)
        except FlowError as error:
            others.failed(error, False)
        except Exception as error:
            action = f"a {others.what} of all nodes"
            log.exception(action)
            others.failed(InternalError(action=action, error=words_of(error)), False)
        finally:
            others.done(result)

    def _on_checkpoint(self, client: Client, fields: dict[str, Any]) -> None:
        """Asked for by a process of the job: no image could have its connection."""
        options = CheckpointOptions.from_fields(fields)
        ticket = Ticket(self._directory.tickets)
        client.send("result", {"ticket": str(ticket.path)})
        deadline = time.monotonic() + CLIENT_SECONDS
        while not client.gone():
            if time.monotonic() >= deadline:
                ticket.failed(FlowError(reason="the program keeps its connection"))
                return
            time.sleep(0.001)
        try:
            ticket.done(self._dump(client, options, ticket.running)["pause_seconds"])
        except FlowError as error:
            ticket.failed(error)
        except Exception as error:
            log.exception("a checkpoint that the job has asked for")
            ticket.failed(InternalError(action="the checkpoint", error=words_of(error)))

    def _checkpoint(
        self,
        progress: Progress,
        options: CheckpointOptions,
        on_running: Callable[[float], None] = lambda seconds: None,
        others: Others = ALONE,
    ) -> dict[str, Any]:
        with self._only_session("a checkpoint"):
            # The kernel would end the largest process, which is the job's.
            memory.need(FIRST_BYTES, f"a checkpoint of job {self._job.name!r}")
            if self._job.parked is not None and not others.alone:
                raise Unsupported(name="several nodes, for a dump of what is suspended")
            from coordinator.checkpoint import take
            from flowgpu.image.writer import check_output

            check_output(options.output)  # what is there after the record is of this checkpoint
            stopped = sorted(stopped_pids(self._job.root_pid))
            dump = {
                "output": str(options.output),
                "leave_running": options.leave_running,
                "stopped": stopped,
                "epoch": others.id,
            }
            self._record(state=CHECKPOINTING, dump=dump)
            costs = self._directory.read().costs
            try:
                with self._ghosts.session():
                    told = self._told(progress)
                    result = take(self._job, options, told, self._on_dumped, on_running, others)
                if options.leave_running:
                    costs = [*costs, Costs.row(result)][-KEPT:]
                with counting(self._directory.counts) as counts:
                    counts.dumped(result)
            except Exception as error:
                if not isinstance(error, JobEnded):
                    with counting(self._directory.counts) as counts:
                        counts.checkpoints["failed"] += 1
                raise
            finally:
                if self._dumped_to is None:
                    spoilt = list(self._job.spoilt.items())
                    self._record_state(dump=None, spoilt=spoilt, costs=costs)
        if self._dumped_to is not None and others.alone:
            # So that a restore right after finds the folder and the process ids free.
            self._ended.wait(LINGER_SECONDS)
        return result

    def _on_suspend(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        options = SuspendOptions.from_fields(fields)
        if self._agent is not None:
            return self._agent.ask("suspension", options.to_fields(), client.progress)
        return self._suspend_here(client.progress, options)

    def _suspend_here(
        self, progress: Progress, options: SuspendOptions, others: Others = ALONE
    ) -> dict[str, Any]:
        with self._only_session("a suspension"):
            if self._job.parked is not None:
                raise Suspended(job=self._job.name, action="suspended again")
            memory.need(FIRST_BYTES, f"to suspend job {self._job.name!r}")
            from coordinator.suspend import suspend

            self._record(state=CHECKPOINTING, dump=None)
            try:
                with self._ghosts.session():
                    told = self._told(progress)
                    result = suspend(self._job, options, told, others)
                self._ghosts.prepare(rests=self._rests())
                return result
            finally:
                self._record_state(spoilt=list(self._job.spoilt.items()))

    def _on_resume(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        drop = bool(fields.get("drop"))
        if self._agent is not None:
            return self._agent.ask("resume", {"drop": drop}, client.progress)
        return self._resume_here(client.progress, drop)

    def _resume_here(
        self, progress: Progress, drop: bool, others: Others = ALONE
    ) -> dict[str, Any]:
        with self._only_session("a resume"):
            parked, host = self._job.parked, self._job.host
            if parked is None or host is None:
                return self._resume_others(others)
            memory.need(FIRST_BYTES, f"to resume job {self._job.name!r}")
            from coordinator.resume import Resume

            self._ghosts.rest(False)  # the ghost of the resume may stay
            try:
                with self._ghosts.session():
                    told = self._told(progress)
                    result = Resume(self._job, parked, host, told, drop=drop, others=others).run()
                self._ghosts.prepare(rests=False)
                return result
            finally:
                self._record_state()

    def _resume_others(self, others: Others) -> dict[str, Any]:
        """The job runs here. Raises NotSuspended where it does on all nodes."""
        from coordinator.resume import LIMITS

        if others.alone:
            raise NotSuspended(job=self._job.name)
        others.reached(Barrier.FILLED, time.monotonic() + LIMITS["fill"], False)
        nothing = {"resume_seconds": 0.0, "phases": {}, "gpu_bytes_stored": 0, "host_bytes": 0}
        return {"job": self._job.name, **nothing}

    def _record_state(self, **changes: Any) -> None:
        """Record the state of a job that has no session under way."""
        parked, host = self._job.parked, self._job.host
        self._ghosts.rest(self._rests())
        held = host.held() if host is not None else 0
        self._record(state=RUNNING if parked is None else SUSPENDED, host_bytes=held, **changes)

    def _rests(self) -> bool:
        """The job has given its GPUs back."""
        return self._job.parked is not None and not self._job.parked.keeps_context

    def _on_dumped(self, image: Path) -> None:
        # The image of several nodes is the folder above each node's part.
        self._dumped_to = image if self._agent is None else image.parent

    def _told(self, progress: Progress) -> Progress:
        """Also for others than the client that is told."""
        steps = self._steps = Steps()

        def told(phase: str, done: int, total: int) -> None:
            steps.note(phase, done, total)
            progress(phase, done, total)

        return told

    @contextlib.contextmanager
    def _only_session(self, action: str) -> Any:
        while not self._session.acquire(blocking=False):
            # Without an action, children are being waited for, which is soon over.
            if self._doing:
                raise Busy(job=self._job.name, action=self._doing)
            time.sleep(0.001)
        try:
            self._doing = action
            if self._ended.is_set() or not alive(self._job.root_pid):
                raise Busy(job=self._job.name, action=ENDING)
            yield
        finally:
            self._doing, self._steps = "", None
            self._session.release()
