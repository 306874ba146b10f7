"""When to close the gates: the memory in use by a training job rises and falls with each step, and
an image taken at its lowest point is the smallest.

Pure: the caller brings the clock and the samples, and does the waiting.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flowgpu.options import CheckpointOptions

TOLERANCE = 0.05
NEAR = 0.005
"""A single task is quick enough to meet this and waits for it first; the rest of TOLERANCE counts
at the end of the wait (close_at_low in native/intercept/requests_gate.cpp)."""
MOST_SECONDS = 3.0
"""A longer step is not waited for: who wants an image now, before the job is killed, has little
time."""
RECENT_SECONDS = 10.0
"""How long a sample counts: some steps of a usual job, and soon after its start no more the time
before its model was there."""


@dataclass
class MinimumWatch:
    """Says when the live bytes are near the smallest of recent steps.

    Feed it with `sample` from as early as possible: what was seen before `begin` shortens the wait
    or makes it unnecessary. After `begin`, `sample` answers whether the wait is over: when the live
    bytes are within `tolerance` of the smallest seen in the last `recent` seconds, or when
    `patience` seconds have passed since. Seconds are of one monotonic clock and do not go back.
    """

    wait: float = CheckpointOptions.wait_minimum
    tolerance: float = TOLERANCE
    recent: float = RECENT_SECONDS
    _first: float | None = None
    _began: float | None = None
    _near: float | None = None  # when the live bytes were last near the smallest
    _away: float = 0.0  # seconds until they came back, at most
    # (time, live) with both rising: the first is the smallest of all that count.
    _lows: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def smallest(self) -> int | None:
        """Smallest live bytes of recent steps, None before the first sample."""
        return self._lows[0][1] if self._lows else None

    @property
    def deadline(self) -> float | None:
        """When the wait is over in any case, None before `begin`."""
        return None if self._began is None else self._began + self.patience

    @property
    def patience(self) -> float:
        """Seconds to wait at most: `wait`, or a step where that is longer. A step is known by how
        long the live bytes stayed away from the smallest before they came back."""
        return max(self.wait, min(self._away, MOST_SECONDS)) if self.wait else 0.0

    def begin(self, now: float) -> None:
        """Wait from now on."""
        self._began = now

    def sample(self, now: float, live: int) -> bool:
        """Take the live bytes of this moment in; True: wait no longer."""
        if self._first is None:
            self._first = now
        while self._lows and self._lows[-1][1] >= live:
            self._lows.pop()
        self._lows.append((now, live))
        while self._lows[0][0] < now - self.recent:
            self._lows.popleft()
            self._near = now  # another is the smallest from now on
        near = live <= self._lows[0][1] * (1 + self.tolerance)
        if near:
            self._away = max(self._away, 0.0 if self._near is None else now - self._near)
            self._near = now
        deadline = self.deadline
        if deadline is None:
            return False
        if now >= deadline:
            return True
        # A first look at a job says nothing of its steps: any value is then the smallest so far.
        return near and now - self._first >= self.wait
