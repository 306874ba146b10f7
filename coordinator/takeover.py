"""What a coordinator does first that takes a job over from one that was killed.

A task whose connection ends opens its gate and connects again, unless it has let go of its memory
(service.cpp): that is gone with the dead coordinator and its ghost, and such a job is ended. What
else a checkpoint has left behind is cleared away here; `Job.dump` of the record says that there was
one: its output, whether it was to leave the job running, and who of the job was stopped before it.
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

from coordinator.process import alive, children, kill_tree, serves
from coordinator.session import Job
from flowgpu import jobs
from flowgpu.errors import FlowError, JobLost
from flowgpu.image import layout, space
from flowgpu.image.manifest import Manifest
from flowgpu.proctree import arguments, resume_tree, stopped_pids, tree_pids

log = logging.getLogger(__name__)

HELPERS_SECONDS = 30.0
CRIU_SECONDS = 5.0
HELLO_SECONDS = 60.0
TOKEN = "[0-9a-f]" * 8  # of ImageWriter


def settle(job: Job, record: jobs.Job) -> Path | None:
    """Let the job go on as before the checkpoint that was under way, if one was.

    Gives the image where that was whole and the job was to end: then it has. Raises JobLost, after
    the job's end as well.
    """
    _end_helpers(job)
    there = jobs.is_process(record.root_pid, record.root_start)
    if record.dump is not None:
        output = Path(record.dump["output"])
        _remove_partial(output)
        if not record.dump["leave_running"] and _is_image(output, job.id):
            if there:
                kill_tree(job.root_pid)
            return output
        if there:
            resume_tree(job.root_pid, keep_stopped=record.dump["stopped"])
    if not there or _wait_for_tasks(job):
        return None
    kill_tree(job.root_pid)
    reason = "its coordinator was killed while it had the job's memory"
    raise JobLost(job=job.name, reason=reason)


def _end_helpers(job: Job) -> None:
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


def _helpers(job: Job) -> list[int]:
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


def _wait_for_tasks(job: Job) -> bool:
    """Wait until each task that runs has connected. False: one waits for its memory."""
    deadline = time.monotonic() + HELLO_SECONDS
    while True:
        known = job.channel.tasks()
        if any(task.hello.resumed for task in known):
            return False
        missing = set(filter(serves, tree_pids(job.root_pid))) - {task.pid for task in known}
        missing -= stopped_pids(job.root_pid)
        missing = {pid for pid in missing if not job.channel.refused([pid])}
        if not missing:
            return True
        if time.monotonic() >= deadline:
            log.warning("processes %s do not connect", missing)
            return True
        time.sleep(0.005)
