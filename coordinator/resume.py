"""A suspended job goes on: device memory is made, and filled from the host's, while the engine puts
CUDA back. Then each task gets its blocks.

Until a task has its memory nothing is lost by a failure: the job stays suspended.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from coordinator import faults
from coordinator.bringup import BringUp
from coordinator.control_state import engines, put_back
from coordinator.host_copy import HostCopy
from coordinator.others import ALONE, Barrier, Others
from coordinator.parked import Parked
from coordinator.phases import UNDO_SECONDS
from coordinator.process import kill_tree, serves
from coordinator.reach import refuse_stopped
from coordinator.refill import Refill, Saved
from coordinator.session import GhostLink, Progress, RunningJob, Session
from coordinator.tasks import NEEDS_OPEN
from flowgpu import timeline, wire
from flowgpu.errors import FlowError, InternalError, JobLost, ResumeFailed, is_internal, words_of
from flowgpu.jobs import JobDir
from flowgpu.timeline import COORDINATOR, JOB, Recorder
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

LIMITS = {"fill": 600.0, "mapback": 120.0}
"""The phases, with the seconds that each may take."""
SPANS = {"engine": (JOB, "CUDA put back")}
"""What the timeline calls parts of the report that others of the coordinator's run beside."""


class Resume:
    """One resume; `run` once."""

    def __init__(
        self,
        job: RunningJob,
        parked: Parked,
        host: HostCopy,
        progress: Progress,
        *,
        drop: bool,
        others: Others = ALONE,
    ) -> None:
        """`drop`: whether the host's memory is freed then, in the place of being kept for the next
        suspension. `others`: the job's other nodes, which come back at the same time."""
        self._others = others
        self._job = job
        self._parked = parked
        self._host = host
        self._report = progress
        self._drop = drop
        self.timeline = Recorder()
        self._link = GhostLink(job.start_ghost, job.keep_ghost, self.timeline)
        self._session = Session(job, self._link, timeline=self.timeline)
        self._tasks = BringUp(self._session, again=UNDO_SECONDS)
        self._seconds: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Do it. Gives the report; raises a FlowError."""
        notes = JobDir(self._job.directory).timeline
        try:
            report = self._run()
        except FlowError as error:
            timeline.note(notes, "resume", self.timeline, {}, str(error))
            raise
        timeline.note(notes, "resume", self.timeline, report, "")
        return report

    def _run(self) -> dict[str, Any]:
        began = time.monotonic()
        try:
            self._fill()
            self._others.reached(Barrier.FILLED, self._session.deadline, True)
        except Exception as error:
            log.exception("resume")
            self._link.kill()
            self._session.table.close()
            raise self._explain(error) from error
        try:
            self._open()
        except Exception as error:
            log.exception("resume")
            # A task that has its memory in part must not run on with wrong data.
            kill_tree(self._job.root_pid)
            self._link.kill()
            raise JobLost(job=self._job.name, reason=words_of(error)) from error
        finally:
            self._session.table.close()
        self._end()
        return {
            "job": self._job.name,
            "resume_seconds": time.monotonic() - began,
            "phases": self._seconds,
            "gpu_bytes_stored": self._parked.gpu.gpu_bytes_stored,
            "host_bytes": self._host.held(),
        }

    def _begin(self, phase: str) -> float:
        """The time at which the phase is over that begins now."""
        log.info("resume: %s", phase)
        return time.monotonic() + faults.begin(phase, LIMITS[phase])

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Note what it takes, under this name of the report."""
        with self.timeline.span(*SPANS.get(name, (COORDINATOR, name))) as span:
            yield
        self._seconds[name] = span.seconds

    def _fill(self) -> None:
        deadline = self._session.deadline = self._begin("fill")
        job, gpu = self._job, self._parked.gpu
        job.channel.listen()
        pids = [task.pid for task in gpu.tasks if serves(task.pid)]
        refuse_stopped(pids, job.name, 0.0)
        self._tasks.tasks = job.channel.wait_resumed(pids, deadline)
        engine = engines(self._session)[wire.Engine[gpu.engine.upper()]]
        refill = Refill(self._session, engine, self._saved(), deadline, self._report)
        with self._timed("ghost"):
            refill.open()
        with ThreadPoolExecutor(max_workers=1) as pool:
            filled = pool.submit(self._make, refill)
            try:
                if not refill.full:
                    self._rebuild()
            except BaseException:
                self._link.kill()  # by which the other side ends
                raise
            filled.result()
        if refill.full:
            # What it has filled is ours by its descriptors; its contexts are in the way.
            self._link.drop()
            self._rebuild()

    def _make(self, refill: Refill) -> None:
        """Make the memory, with what it had."""
        with self._timed("blocks"):
            refill.create()
        with self._timed("copy"):
            refill.fill()

    def _saved(self) -> Saved:
        gpu, host = self._parked.gpu, self._host
        return Saved(
            gpu.gpus,
            gpu.imports,
            gpu.peers,
            [task.pid for task in gpu.tasks],
            gpu.gpu_bytes_reserved,
            host.place,
            host.extents(len(gpu.gpus)),
            {one.index: str(host.gpu_chunks(one.index)) for one in gpu.gpus},
        )

    def _rebuild(self) -> None:
        with self._timed("engine"):
            faults.check(Fault.REBUILD)
            needy = [task for task in self._tasks.tasks if task.hello.resumed != NEEDS_OPEN]
            put_back(self._session, self._tasks, needy)

    def _open(self) -> None:
        self._session.deadline = self._begin("mapback")
        table, custody = self._session.table, self._job.custody
        with self._timed("mapback"):
            # Custody gets all blocks before the first task has any: a coordinator after this one
            # goes on here.
            for task in self._tasks.tasks:
                custody.put(task.pid, table.of(task.pid))
            self._tasks.map_back()
            self._tasks.open()

    def _end(self) -> None:
        """The job runs: nothing of what is left may fail it."""
        job = self._job
        JobDir(job.directory).parked.unlink(missing_ok=True)
        job.parked = None
        job.channel.entrance.open()
        job.custody.clear()
        self._link.quit()
        if self._drop:
            self._host.close()
            job.host = None

    def _explain(self, error: Exception) -> FlowError:
        if is_internal(error):
            action = f"the resume of job {self._job.name!r}"
            return InternalError(action=action, error=words_of(error))
        return ResumeFailed(job=self._job.name, reason=words_of(error))
