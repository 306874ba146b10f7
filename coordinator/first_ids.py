"""Process ids of a job that is started in a new container.

The same command line in the next container starts the same processes of FlowGPU, under the lowest
ids: there the job could not have its own again. So it begins behind them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from flowgpu.host import mounts

log = logging.getLogger(__name__)

FIRST = 300
"""Ids below are given once in a namespace, to what begins first there (RESERVED_PIDS)."""
BEHIND = 1000
LAST_ID = Path("/proc/sys/kernel/ns_last_pid")


def leave() -> None:
    """Have the next process of a namespace that is new begin behind them, if that may be set.

    To be called while this process has one thread.
    """
    if os.getpid() >= FIRST or _set():
        return
    # Containers have that file for reading alone, and whoever may use CRIU may mount another.
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            mounts.leave()  # of this process alone
            mounts.mount("proc", "/proc", "proc", 0)
            code = int(not _set())
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        log.warning("the job has low process ids, which may be taken in the next container")


def _set() -> bool:
    with contextlib.suppress(OSError):
        LAST_ID.write_text(str(BEHIND))
        return True
    return False
