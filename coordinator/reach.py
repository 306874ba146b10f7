"""Finds tasks that could not be reached, or use their GPU, once they have let go of both.

A program may have locked itself in (chroot(2), seccomp(2), setrlimit(2)). So this looks while the
job runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.open_files import lacking
from coordinator.process import service_threads
from flowgpu.errors import TaskStopped
from flowgpu.host import seccomp, unix_sockets
from flowgpu.host.proctree import PROC, fd_targets, inner_pid, is_headless, is_stopped, send
from flowgpu.jobs import start_time
from flowgpu.launch import emulator_socket

MOMENT_SECONDS = 1.0
LOOK_SECONDS, SOON_SECONDS = 0.02, 0.002
EMULATED = emulator_socket(Path("/")).name


def refuse_stopped(pids: Iterable[int], job: str, deadline: float) -> None:
    """Raises TaskStopped where a process stays so for a moment, or until the deadline."""
    until = min(time.monotonic() + MOMENT_SECONDS, deadline)
    for pid in pids:
        while is_stopped(pid):
            if time.monotonic() >= until:
                raise TaskStopped(pid=pid, job=job, how="SIGSTOP")
            time.sleep(LOOK_SECONDS)


@contextmanager
def let_run(pids: Iterable[int]) -> Iterator[None]:
    """Let stopped tasks go on meanwhile: what they have let go of, only they can take."""
    stopped = [pid for pid in pids if is_stopped(pid)]
    send(signal.SIGCONT, stopped)
    try:
        yield
    finally:
        send(signal.SIGSTOP, stopped)
        # A stop that is still to come would look to the next caller like a process that runs.
        until = time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < until and any(map(_runs, stopped)):
            time.sleep(SOON_SECONDS)


def _runs(pid: int) -> bool:
    return start_time(pid) != 0 and not is_stopped(pid)


def obstacle(pid: int, blocks: int, *, managed: bool) -> str:
    """What would keep a task from its coordinator, its GPU, so many blocks of memory or managed
    memory; empty if nothing is known to."""
    if is_headless(pid):
        return "its first thread has ended"  # and with that most of its /proc
    if why := lacking(pid, blocks):
        return why
    devices = _devices(pid)
    calls = dict(seccomp.BY_TASK)
    if managed:
        calls |= seccomp.BY_EXCHANGE
    if any(path.endswith(EMULATED) for path in devices):
        calls |= seccomp.BY_EMULATED_DRIVER
    for thread in service_threads(pid):
        if names := seccomp.forbidden(pid, thread, calls):
            return f"a seccomp filter forbids it {', '.join(names)}"
    if not os.path.exists(f"{PROC}/{pid}/root/proc/{inner_pid(pid)}/maps"):
        return "its root folder has no /proc"
    for path, file in devices.items():
        if not _sees(pid, path, file):
            return f"its root folder does not have {path}"
    return ""


def _devices(pid: int) -> dict[str, str]:
    """Paths of the devices that a process has open, and where they can be looked at from here."""
    found = {}
    sockets = {}
    for fd, target in fd_targets(pid):
        if target.startswith("/dev/nvidia"):
            found[target] = f"{PROC}/{pid}/fd/{fd}"
        elif target.startswith("socket:["):
            sockets[int(target[8:-1])] = fd
    with suppress(OSError):  # the kernel does not tell
        for inode, (_, path) in unix_sockets.peers().items() if sockets else ():
            if inode in sockets and (name := os.fsdecode(path)).endswith(EMULATED):
                found[name] = name
    return found


def _sees(pid: int, path: str, file: str) -> bool:
    """True if the process would open this file by this path."""
    try:
        theirs, ours = os.stat(f"{PROC}/{pid}/root{path}"), os.stat(file)
    except OSError:
        return False
    return theirs.st_rdev == ours.st_rdev and (bool(ours.st_rdev) or os.path.samestat(theirs, ours))
