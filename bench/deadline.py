"""The time that one call of bench.py may take."""

from __future__ import annotations

import math
import time

# Kept back from every part, so that its jobs can be ended before the time is up.
CLEANUP_SECONDS = 8.0
# How much longer than the last time a part may take and still be begun.
ALLOWANCE = 1.25


class TimeUp(Exception):
    """A part was not begun, or was given up, because the time of this call is over."""


class Deadline:
    """A moment after which nothing may run any more; without seconds there is none."""

    def __init__(self, seconds: float | None = None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that a part which begins now may take."""
        return self._end - CLEANUP_SECONDS - time.monotonic()

    def cap(self, seconds: float) -> float:
        """`seconds`, or less where less is left."""
        return max(min(seconds, self.left()), 0.1)

    def fits(self, seconds: float) -> bool:
        """True if a part of about `seconds` may be begun."""
        return self.left() >= seconds * ALLOWANCE
