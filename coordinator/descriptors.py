"""Limits of the coordinator, its ghost and its helpers, above all of descriptors: each block of
device memory is one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

TABLE = 1 << 14
"""Descriptors that a table is made for: 128 KiB of the kernel's memory."""


MANY_FILES = 1 << 20
"""Descriptors that a process may have by default, if the machine's administrator lets it
(fs.nr_open)."""
LIFTED = (
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_AS,
    resource.RLIMIT_DATA,
    resource.RLIMIT_CPU,
)
"""What the user has limited for the job (`ulimit`), and what an image of it needs more of."""


def lift_limits() -> None:
    """Raise this process's limits, and so those of whom it starts, CRIU too, as far as it may.

    To be called after the root task has started, which must have the limits of its user; one that
    is restored has its own.
    """
    for number in LIFTED:
        _, hard = resource.getrlimit(number)
        most = resource.RLIM_INFINITY
        if number == resource.RLIMIT_NOFILE:
            most = max(hard, MANY_FILES)
        try:
            resource.setrlimit(number, (most, most))
        except (OSError, ValueError):
            resource.setrlimit(number, (hard, hard))


def make_table() -> None:
    """Have the kernel make a large table of descriptors, before this process has a second thread.

    Tables double when they are full, and one that threads share waits each time until every
    processor has passed a quiet point: 10 ms, and a multiple of that when they are busy.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # it only costs time
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, min(TABLE, hard) - 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
