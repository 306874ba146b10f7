"""Waiting for descriptors, however many are open."""

from __future__ import annotations

import math
import select
from typing import Protocol


class Descriptor(Protocol):
    """What has a descriptor: a socket, a run of CRIU."""

    def fileno(self) -> int: ...


def readable(*wanted: Descriptor | int, seconds: float | None = None) -> set[int]:
    """Numbers of those that can be read or have ended, once there is one or the time is up.

    select.select takes no number beyond 1,023, and in a session each block of device memory is one.
    """
    poller = select.poll()
    for one in wanted:
        poller.register(one, select.POLLIN)
    return {number for number, _ in poller.poll(None if seconds is None else _whole(seconds))}


def _whole(seconds: float) -> int:
    return math.ceil(1000 * max(seconds, 0.0))
