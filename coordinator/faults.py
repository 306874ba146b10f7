"""Faults on purpose: FLOWGPU_FAULT=name:nth makes the nth pass of a point of fault.def fail."""

from __future__ import annotations

import os
import threading
from collections import Counter

from flowgpu.wire import Fault

_passed: Counter[Fault] = Counter()
_lock = threading.Lock()


class FaultInjected(Exception):
    """The fault that FLOWGPU_FAULT asked for."""


def fires(point: Fault) -> bool:
    """Count a pass of `point`; True if this is the one that is to fail."""
    name, _, nth = os.environ.get("FLOWGPU_FAULT", "").partition(":")
    if name != point:
        return False
    with _lock:
        _passed[point] += 1
        return _passed[point] == int(nth or 1)


def check(point: Fault) -> None:
    """Raise FaultInjected if this pass of `point` is the one that is to fail."""
    if fires(point):
        raise FaultInjected(f"fault injected at {point}")


def reset() -> None:
    """Forget all passes, for tests that run several sessions in one process."""
    with _lock:
        _passed.clear()
