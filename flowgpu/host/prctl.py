"""Settings of this process that only prctl(2) has. Loads little: a job's keeper uses it."""

from __future__ import annotations

import ctypes
import signal

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make this process the parent of orphans below it, so that it can reap them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(yes: bool) -> None:
    """Let the kernel kill this process, or not, when the thread that has made it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL if yes else 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
