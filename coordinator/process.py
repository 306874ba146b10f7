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
    """SIGKILL the tree of `root`; wait until none of it runs and all ids but the root's are free.

    A restore wants the ids again, and an init that never reaps would keep them taken. The root's
    exit status is left to whoever waits for it.
    """
    deadline = time.monotonic() + seconds
    pids = set(tree_pids(root))
    while left := [p for p in pids if alive(p) or (p != root and Path(f"/proc/{p}").exists())]:
        for pid in left:
            # A process may have forked since the list was made.
            pids.update(tree_pids(pid))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(pid for pid in left if pid != root)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {left[0]} does not end")
        time.sleep(0.001)
