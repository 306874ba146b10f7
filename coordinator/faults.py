"""Faults on purpose: FLOWGPU_FAULT=name:nth makes the nth pass of a point of fault.def fail, and
name:0 each.

FLOWGPU_FAULT=@FILE: that is what FILE says, which may change from one checkpoint to the next; each
setting counts its own passes. What fires is told on standard error, which is the coordinator's log.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TypeVar

from flowgpu.wire import Fault

T = TypeVar("T")
HANG_SECONDS = 0.5
"""What CRIU is given when it is to hang."""

IMAGE_WRITE = (Fault.IMAGE_FULL, Fault.IMAGE_ERROR)
TABLE_WRITE = (Fault.TABLE_FULL, Fault.TABLE_ERROR)
"""No space, and an I/O error, of one writer."""

HALTS = (
    *(Fault.PHASE_STOP, Fault.PHASE_SECOND, Fault.PHASE_TASK, Fault.PHASE_DISK),
    *(Fault.PHASE_GHOST, Fault.PHASE_PAGES, Fault.PHASE_COORDINATOR),
)
"""Points at which the coordinator only stops: who has set the fault does the rest."""

_passed: Counter[str] = Counter()  # by setting
_lock = threading.Lock()


class FaultInjected(Exception):
    """The fault that FLOWGPU_FAULT asked for."""


def fires(point: Fault) -> bool:
    """Count a pass of `point`; True if this is the one that is to fail."""
    setting = _setting()
    name, _, nth = setting.partition(":")
    if name != point:
        return False
    with _lock:
        _passed[setting] += 1
        found = int(nth or 1) in (0, _passed[setting])
    if found:
        _tell(point)
    return found


def _setting() -> str:
    text = os.environ.get("FLOWGPU_FAULT", "")
    return Path(text[1:]).read_text() if text.startswith("@") else text


def _tell(text: str) -> None:
    print(f"fault injected at {text}", file=sys.stderr, flush=True)


def check(point: Fault) -> None:
    """Raise FaultInjected if this pass of `point` is the one that is to fail."""
    if fires(point):
        raise FaultInjected(f"fault injected at {point}")


def check_write(path: Path, points: tuple[Fault, Fault]) -> None:
    """Raise what a write to `path` meets where one of the two points of its writer is to fail."""
    for point, code in zip(points, (errno.ENOSPC, errno.EIO), strict=True):
        if fires(point):
            raise OSError(code, os.strerror(code), str(path))


def halt(phase: str) -> None:
    """Where `phase` begins: stop this process, and go on with SIGCONT, if it is to be."""
    if any(fires(point) for point in HALTS):
        _tell(phase)
        # The signal is for this thread. Another thread could take one for the process later.
        signal.raise_signal(signal.SIGSTOP)


def is_late(phase: str) -> bool:
    """True if a fault leaves `phase`, which begins, no time."""
    late = fires(Fault.PHASE_LATE)
    if late:
        _tell(phase)
    return late


def begin(phase: str, seconds: T) -> T | float:
    """Seconds that the phase may take which begins now, of those that it is given."""
    halt(phase)
    return 0.0 if is_late(phase) else seconds


def reset() -> None:
    """Forget all passes, for tests that run several sessions in one process."""
    with _lock:
        _passed.clear()
