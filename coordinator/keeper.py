"""The keeper of a job: parent of its coordinator, and of another one when that was killed.

It holds the read ends of the job's pipes, so that what the job says waits for the next coordinator.
Memory of the job's waits in a socket pair that it holds too (custody.py). It adopts the job's
processes, so that the root's exit code is not lost. What can fail is left to the coordinator. The
keeper loads nothing that a job's start would have to wait for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowgpu.host.prctl import become_subreaper

MOST_DEATHS, DEATHS_SECONDS = 10, 60.0
END = struct.Struct("=ii")
"""Process id and wait status of a process that the keeper has collected."""


class Kept(NamedTuple):
    """What a coordinator has from its keeper."""

    keeper: int  # process id
    readers: tuple[int, int]  # the job's stdout and stderr
    writers: tuple[int, int] | None  # None: the job runs, and is to be taken over
    ends: int  # a pipe of END
    custody: tuple[int, int]  # see custody.py


def keep(coordinate: Callable[[Kept], int], job_dir: str, given: Sequence[int] = ()) -> int:
    """Do `coordinate` in a child of this process, and again while the job needs it. The first one
    has the descriptors `given`, and gives them to the job.

    Gives what it gave, in the child, and the child's exit code, in the keeper.
    """
    (out, to_out), (err, to_err), (ends, report) = os.pipe(), os.pipe(), os.pipe()
    os.set_blocking(report, False)
    custody = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    into, taken = (end.detach() for end in custody)
    kept = Kept(os.getpid(), (out, err), (to_out, to_err), ends, (into, taken))
    become_subreaper()  # before there is anybody below who could leave an orphan
    deaths: list[float] = []
    while True:
        child = os.fork()
        if child == 0:
            os.close(report)
            _call_me("flowgpu-coord")
            return coordinate(kept)
        if kept.writers is not None:
            _become_keeper([*kept.writers, *given])
            kept = kept._replace(writers=None)
        code = os.waitstatus_to_exitcode(_wait(child, report))
        if code == 0:
            return 0
        if not _goes_on(job_dir):
            _end_rest()
            return abs(code)
        now = time.monotonic()
        deaths = [death for death in deaths if now - death < DEATHS_SECONDS] + [now]
        print(f"keeper: coordinator {child} ended with {code}", file=sys.stderr, flush=True)
        if len(deaths) > MOST_DEATHS:
            return abs(code)


def _become_keeper(others: Sequence[int]) -> None:
    for fd in others:
        os.close(fd)
    _call_me("flowgpu-keeper")
    # Handlers, not SIG_IGN, which a coordinator's children would inherit.
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(signum, lambda *_: None)


def _call_me(name: str) -> None:
    """Name this process for `ps`, and for those that look for it in tests."""
    with open("/proc/self/comm", "w") as comm:
        comm.write(name)


def _wait(child: int, report: int) -> int:
    """The status of `child`; those of others that have come to us are reported."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status
        # Full: there are thousands, and no coordinator that wants to know.
        with contextlib.suppress(BlockingIOError):
            os.write(report, END.pack(pid, status))


def _end_rest() -> None:
    """End what a killed coordinator has left of a start or restore, and collect it: a restore wants
    the ids again, and init may be slow to collect orphans, or never do it."""
    from coordinator.process import children, kill_tree

    while left := children(os.getpid()):
        for pid in left:
            kill_tree(pid)
            os.waitpid(pid, 0)


def _goes_on(job_dir: str) -> bool:
    """True if the job runs and this keeper is its own.

    A restore makes the folder of an ended job anew, with another keeper. A restore that has let
    processes go on leaves them for another coordinator to end.
    """
    from pathlib import Path

    from flowgpu.jobs import CHECKPOINTING, RESTORING, RUNNING, SUSPENDED, JobDir

    with contextlib.suppress(OSError, ValueError):
        record = JobDir(Path(job_dir)).read()
        runs = record.state in (RUNNING, CHECKPOINTING, SUSPENDED)
        runs = runs or (record.state == RESTORING and record.root_pid != 0)
        return runs and record.keeper_pid == os.getpid()
    return False
