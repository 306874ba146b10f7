"""Descriptors by which it is seen which pages processes write, while these run
(native/pages/tracked.h).

Each process makes one itself, as nobody else can, and keeps none. For that the tree stops for some
milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path

from flowgpu.host.standstill import Standstill

NO_USERFAULTFD = {
    errno.ENOSYS: "this kernel has no userfaultfd(2)",
    errno.EPERM: "userfaultfd(2) is forbidden",
}


TRIES = 3
"""How often all processes are stopped, where one of them has not come to a stop in time: a machine
that is busy now may not be in a moment."""


class Untrackable(Exception):
    """Why the memory of a process cannot be followed, in words."""


def descriptors(root: int, seconds: float, notes: Path) -> dict[int, int]:
    """A userfaultfd of each process of the tree, by its process id; the caller closes them.

    None takes longer than `seconds` to stop, at each try. `notes` is Standstill's. Raises
    Untrackable.
    """
    try:
        still = _stop(root, seconds, notes)
    except OSError as error:
        raise Untrackable(str(error)) from error
    try:
        found = still.userfaultfds()
    except OSError as error:
        for failed in still.put_back():
            raise Untrackable(str(failed)) from error
        raise Untrackable(NO_USERFAULTFD.get(error.errno or 0, str(error))) from error
    finally:
        still.finish()
        still.end()
    return found


def _stop(root: int, seconds: float, notes: Path) -> Standstill:
    for _ in range(TRIES - 1):
        with contextlib.suppress(TimeoutError):
            return Standstill(root, seconds, notes, all_threads=False)
    return Standstill(root, seconds, notes, all_threads=False)


def refuse(pids: list[int]) -> None:
    """Raise Untrackable where CRIU knows a process by another number than we do."""
    for pid in pids:
        status = b""
        try:
            status = Path(f"/proc/{pid}/status").read_bytes()
        except OSError:
            continue
        if re.search(rb"^NSpid:\t\d+\t", status, re.MULTILINE):
            raise Untrackable(f"process {pid} is in a PID namespace of its own")
