"""File descriptors of the coordinator and the ghost: each block of device memory is one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

TABLE = 1 << 14
"""Descriptors that a table is made for: 128 KiB of the kernel's memory."""


def allow_many_files() -> None:
    """Raise this process's limit as far as it goes.

    To be called after the root task has started, which must have the limit of its user; one that is
    restored has its own.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_table() -> None:
    """Have the kernel make a large table of descriptors, before this process has a second thread.

    Tables double when they are full, and one that threads share waits each time until every
    processor has passed a quiet point: 10 ms, and a multiple of that when they are busy.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # it only costs time
        allow_many_files()
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, min(TABLE, hard) - 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
