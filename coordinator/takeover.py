"""What a coordinator does first that takes a job over from one that was killed.

A task whose connection ends opens its gate and connects again, unless it has let go of its memory
or of CUDA (service.cpp): then it waits for both, and gets them from here, the memory from where the
dead coordinator has put it (custody.py). What else a checkpoint has left behind is cleared away;
`Job.dump` of the record says that there was one: its output, whether it was to leave the job
running, and who of the job was stopped before it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import signal
import time
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator import renewal
from coordinator.bringup import BringUp
from coordinator.control_state import put_back
from coordinator.epoch import settle as settle_files
from coordinator.host_copy import HostCopy
from coordinator.memory_files import clear_links
from coordinator.parked import Parked
from coordinator.phases import UNDO_SECONDS
from coordinator.process import alive, children, kill_tree, serves
from coordinator.session import GhostLink, RunningJob, Session
from coordinator.task_state import TaskState
from coordinator.tasks import NEEDS_OPEN, Task, TaskError
from flowgpu import jobs, nccl
from flowgpu.errors import FlowError, JobLost, words_of
from flowgpu.host import standstill, tcp
from flowgpu.host.proctree import arguments, resume_tree, stopped_pids, tree_pids
from flowgpu.image import layout, space
from flowgpu.image.manifest import Manifest

if TYPE_CHECKING:
    from coordinator.agent import Agent

log = logging.getLogger(__name__)

HELPERS_SECONDS = 30.0
CRIU_SECONDS = 5.0
HELLO_SECONDS = 60.0
LOOK_SECONDS = 0.05
TOKEN = "[0-9a-f]" * 8  # of ImageWriter


def settle(job: RunningJob, record: jobs.Job, agent: Agent | None = None) -> Path | None:
    """Let the job go on as before the checkpoint that was under way, if one was.

    A job that was suspended stays so: `Job.parked` says it. Gives the image where that was whole
    and the job was to end: then it has. `agent` asks the other nodes, of which an image is a part.
    Raises JobLost, after the job's end as well.
    """
    try:
        return _settle(job, record, agent)
    finally:
        if job.parked is None:
            job.custody.clear()
        jobs.JobDir(job.directory).standstill.unlink(missing_ok=True)


def _settle(job: RunningJob, record: jobs.Job, agent: Agent | None) -> Path | None:
    _end_helpers(job)
    there = jobs.is_process(record.root_pid, record.root_start)
    if record.dump is not None:
        output = Path(record.dump["output"])
        _remove_partial(output)
        if agent is not None:
            _settle_part(output, record, agent)
        if not record.dump["leave_running"] and _is_image(output, job.id):
            if there:
                kill_tree(job.root_pid)
            return output
        if there:
            clear_links(tree_pids(job.root_pid))
            for failed in standstill.take_up(jobs.JobDir(job.directory).standstill, job.root_pid):
                log.warning("what CRIU has left: %s", failed)
            tcp.let_go(jobs.JobDir(job.directory).tcp_notes)
            resume_tree(job.root_pid, keep_stopped=record.dump["stopped"])
    try:
        waiting = _wait_for_tasks(job) if there else []
        if there and not _stays_suspended(job) and waiting:
            _give_back(job, waiting)
        if job.parked is None:
            _forget_host_copy(job)
    except Exception as error:
        log.exception("giving the job back what it had let go of")
        kill_tree(job.root_pid)
        killed = "its coordinator was killed while it had the job's memory, and then"
        raise JobLost(job=job.name, reason=f"{killed}: {words_of(error)}") from error
    return None


def _settle_part(part: Path, record: jobs.Job, agent: Agent) -> None:
    """Remove the image of this node, which may have been voted for, unless it is one of all."""
    image, epoch = part.parent, (record.dump or {}).get("epoch", "")
    if _is_image(part, record.id):
        if agent.decide(image, epoch):
            return
        shutil.rmtree(part, ignore_errors=True)
    elif agent.member.node == 0:
        settle_files(image, epoch)  # nobody leads it any more
    with contextlib.suppress(OSError):  # there are parts of others, or it was removed
        image.rmdir()


def _stays_suspended(job: RunningJob) -> bool:
    """True if tasks wait for a resume and can go on waiting.

    Where custody has the memory of each, the job was only about to be suspended, or all but
    resumed: then it goes on.
    """
    parked = Parked.load(jobs.JobDir(job.directory).parked)
    kept = job.custody.host() if parked else None
    if parked is None or kept is None:
        return False
    fds, lock = kept
    job.host = HostCopy(jobs.JobDir(job.directory).host_copy, fds)
    table, whole = job.custody.copy()
    table.close()
    running = {task.pid for task in job.channel.tasks() if not task.hello.resumed}
    away = {task.pid for task in parked.gpu.tasks if serves(task.pid)} - running
    if away <= whole:
        os.close(lock)
        return False
    job.custody.leave_host(fds, lock)  # of a resume that was under way there may be blocks
    job.parked = parked
    job.channel.entrance.take_up(lock)
    log.info("the job stays suspended")
    return True


def _forget_host_copy(job: RunningJob) -> None:
    """Let go of the host copy of a job that was to be suspended, or has been, and is not."""
    host, job.host = job.host, None
    (host or HostCopy(jobs.JobDir(job.directory).host_copy)).close()
    jobs.JobDir(job.directory).parked.unlink(missing_ok=True)


def _give_back(job: RunningJob, waiting: list[Task]) -> None:
    """Let tasks go on that wait for their memory, and for CUDA if that was taken from them.

    Raises TaskError, GhostError, OSError, RuntimeError.
    """
    table, whole = job.custody.copy()
    session = Session(job, GhostLink(job.start_ghost, job.keep_ghost), table)
    session.deadline = time.monotonic() + UNDO_SECONDS
    tasks = BringUp(session)
    tasks.tasks = job.channel.tasks()
    ready = [task.pid for task in waiting if task.hello.resumed == NEEDS_OPEN]
    needy = [task for task in waiting if task.hello.resumed and task.pid not in ready]
    try:
        if missing := {task.pid for task in needy if serves(task.pid)} - whole:
            raise RuntimeError(f"nobody has the memory of process {min(missing)}")
        if needy:
            put_back(session, tasks, needy)
            tasks.map_back()
        tasks.expect(ready, TaskState.LENT)
        tasks.open()
    finally:
        table.close()
        session.link.quit()
    log.info("processes %s have their memory again", [task.pid for task in waiting])


def _end_helpers(job: RunningJob) -> None:
    """End the dead coordinator's ghost, CRIU and page server, which are of our session.

    CRIU is let fail, as CriuRun.cancel does: killed, it might leave a task with its own code.
    """
    began = time.monotonic()
    while left := _helpers(job):
        waited = time.monotonic() - began
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if "--images-dir" in arguments(pid) and waited < CRIU_SECONDS:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
                else:
                    os.kill(pid, signal.SIGKILL)
        if waited > HELPERS_SECONDS:
            log.warning("processes %s do not end", left)
            return
        time.sleep(0.002)


def _helpers(job: RunningJob) -> list[int]:
    found = []
    for pid in children(job.keeper):
        with contextlib.suppress(ProcessLookupError):
            if pid != job.root_pid and os.getsid(pid) == os.getsid(0) and alive(pid):
                found.append(pid)
    return found


def _remove_partial(output: Path) -> None:
    for path in output.parent.glob(layout.partial_name(escape(output.name), TOKEN)):
        if (fd := space.lock(path)) is not None:  # else somebody writes to it
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _is_image(path: Path, job_id: str) -> bool:
    with contextlib.suppress(FlowError):
        return Manifest.load(path).job.id == job_id
    return False


def _wait_for_tasks(job: RunningJob) -> list[Task]:
    """Wait until each task that runs has connected; gives those that cannot go on by themselves."""
    deadline = time.monotonic() + HELLO_SECONDS
    while True:
        known = job.channel.tasks()
        missing = set(filter(serves, tree_pids(job.root_pid))) - {task.pid for task in known}
        missing -= stopped_pids(job.root_pid)
        missing = {pid for pid in missing if not job.channel.refused([pid])}
        if missing and time.monotonic() >= deadline:
            log.warning("processes %s do not connect", missing)
        elif missing:
            with contextlib.suppress(TaskError):
                job.channel.wait_known(missing, time.monotonic() + LOOK_SECONDS)
            continue
        return [task for task in known if task.hello.resumed or _is_without_nccl(task)]


def _is_without_nccl(task: Task) -> bool:
    """True if its communicators are ended."""
    return bool(renewal.with_communicators([task], nccl.ENDED))
