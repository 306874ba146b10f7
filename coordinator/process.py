"""Processes of a job: starting the root, what belongs to its tree, and ending all of it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from flowgpu.jobs import start_time
from flowgpu.proctree import tree_pids


def allow_many_files() -> None:
    """Every block of device memory is a descriptor here during a checkpoint.

    To be called after the root task has started, which must have the limit of its user.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_root(
    command: list[str], env: dict[str, str], cwd: str, stdin: str | None, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start the root task in a session of its own. Raises OSError."""
    with open(stdin or os.devnull, "rb") as source:
        return subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    return start_time(pid) != 0


def own_children() -> list[int]:
    """Pids of this process's children, of all its threads."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def reap(pids: Iterable[int]) -> None:
    """Collect those of these children that have ended."""
    for pid in pids:
        if not alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_tree(root: int, seconds: float = 10.0) -> None:
    """SIGKILL the tree of `root` and wait until nothing of it runs."""
    deadline = time.monotonic() + seconds
    # A process may fork while the list is made: until nothing is left.
    while pids := [pid for pid in tree_pids(root) if alive(pid)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pids[0]} does not end")
        time.sleep(0.001)
