"""Limits of open files (RLIMIT_NOFILE) of tasks, that the way back needs: a driver that comes back
opens its devices, and every block of memory that comes back stays a descriptor.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

CAP_SYS_RESOURCE = 24
DRIVERS_OWN = 64
"""About how many a driver has, and what comes at once besides blocks."""
CRIUS_OWN = 4
"""What CRIU opens in a process, and a task to end its driver, below the limit that is dumped."""


@contextlib.contextmanager
def lifted(pids: Iterable[int]) -> Iterator[None]:
    """Let processes open as many files as they could allow themselves.

    What they set themselves meanwhile stays.
    """
    before = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is not ours to change
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            if soft != hard:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
                before[pid] = soft, hard
    try:
        yield
    finally:
        for pid, (soft, hard) in before.items():
            with contextlib.suppress(OSError):
                if resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def lacking(pid: int, blocks: int) -> str:
    """Why a process could not open as many as its way back needs; empty if it can."""
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        opened = [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return ""  # it has ended
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    may_lift = rights is not None and int(rights[1], 16) >> CAP_SYS_RESOURCE & 1
    limits = [(soft, CRIUS_OWN, "-Sn")]
    if not may_lift:
        limits.append((hard, blocks + DRIVERS_OWN, "-Hn"))
    for limit, needed, option in limits:
        used = sum(number < limit for number in opened)
        if limit != resource.RLIM_INFINITY and limit - used < needed:
            have = f"{used} of {limit} are taken (`ulimit {option}`)"
            return f"it needs {needed} more descriptors, and {have}"
    return ""
