"""Process ids of a job that is started in a new container.

The same command line in the next container starts the same processes of FlowGPU, under the lowest
ids: there the job could not have its own again. So it begins behind them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from pathlib import Path

from flowgpu.host.probes import libc

log = logging.getLogger(__name__)

FIRST = 300
"""Ids below are given once in a namespace, to what begins first there (RESERVED_PIDS)."""
BEHIND = 1000
LAST_ID = Path("/proc/sys/kernel/ns_last_pid")
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


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
            code = int(not (_mount_proc() and _set()))
        os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        log.warning("the job has low process ids, which may be taken in the next container")


def _set() -> bool:
    with contextlib.suppress(OSError):
        LAST_ID.write_text(str(BEHIND))
        return True
    return False


def _mount_proc() -> bool:
    """In a mount namespace of this process alone."""
    library = libc()
    private, no_flags = ctypes.c_ulong(MS_REC | MS_PRIVATE), ctypes.c_ulong(0)
    done: int = library.unshare(CLONE_NEWNS)
    done = done or library.mount(None, b"/", None, private, None)
    done = done or library.mount(b"proc", b"/proc", b"proc", no_flags, None)
    return done == 0
