"""When to close the gates: the memory in use by a training job rises and falls with each step, and
an image taken at its lowest point is the smallest.

Pure: the caller brings the clock and the samples, and does the waiting.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flowgpu.options import CheckpointOptions

TOLERANCE = 0.05
SAMPLE_SECONDS = 0.001
"""Short beside the phases of a step, long beside a sample, which asks nobody."""
NEAR = 0.005
"""A single task is quick enough to meet this and waits for it first; the rest of TOLERANCE counts
at the end of the wait (close_at_low in native/intercept/requests_gate.cpp)."""
SETTLED_SECONDS = 0.01
"""Memory comes down before an optimizer's step as well as behind it. Ranks that are stopped between
the two have other parameters than those behind, and replicas of nothing. The first lasts for some
milliseconds, the second until the GPU has done all."""
LOWS = 8
"""How many are known by their length: a much longer one, as in an evaluation, is soon forgotten."""
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
    bytes have come down to within `tolerance` of the smallest seen in the last `recent` seconds,
    and have stayed there for a moment, or when `patience` seconds have passed. They may have come
    down before `begin` and be about to rise, so the next time counts; but bytes that never rise
    are at their smallest. Seconds are of one monotonic clock and do not go back.
    """

    wait: float = CheckpointOptions.wait_minimum
    tolerance: float = TOLERANCE
    recent: float = RECENT_SECONDS
    _first: float | None = None
    _began: float | None = None
    _near: bool = False  # the live bytes of the last sample, to the smallest
    _level: int | None = None  # the smallest of which the steps below are
    _fell: float = 0.0  # when the live bytes last came near it
    _step: float = 0.0  # seconds from one such moment to the next, at most
    # Seconds for which they stayed there.
    _lows_lasted: deque[float] = field(default_factory=lambda: deque(maxlen=LOWS))
    # (time, live) with both rising: the first is the smallest of all that count.
    _lows: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def smallest(self) -> int | None:
        """Smallest live bytes of recent steps, None before the first sample."""
        return self._lows[0][1] if self._lows else None

    @property
    def live(self) -> int | None:
        """Live bytes in the last sample, None before the first."""
        return self._lows[-1][1] if self._lows else None

    @property
    def deadline(self) -> float | None:
        """When the wait is over in any case, None before `begin`."""
        return None if self._began is None else self._began + self.patience

    @property
    def patience(self) -> float:
        """Seconds to wait at most: `wait`, or a step where that is longer. A step is known by how
        long it took until the live bytes came down to the smallest again."""
        step = min(self._step + SETTLED_SECONDS, MOST_SECONDS)
        return max(self.wait, step) if self.wait else 0.0

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
        deadline = self.deadline
        self._note_steps(now, live, self._lows[0][1])
        if deadline is None:
            return False
        if now >= deadline:
            return True
        # A first look at a job says nothing of its steps: any value is then the smallest so far.
        return self._near and self._has_settled(now) and now - self._first >= self.wait

    def _note_steps(self, now: float, live: int, smallest: int) -> None:
        was_near, self._near = self._near, self._is_near(live, smallest)
        if self._level is None or not (
            self._is_near(smallest, self._level) and self._is_near(self._level, smallest)
        ):
            # What was seen so far was of another job, or of its start.
            self._level, self._fell, self._step = smallest, now, 0.0
            self._lows_lasted.clear()
        elif self._near != was_near:
            since = now - self._fell
            if self._near:
                self._step, self._fell = max(self._step, since), now
            else:
                self._lows_lasted.append(since)

    def _is_near(self, live: int, smallest: int) -> bool:
        return live <= smallest * (1 + self.tolerance)

    def _has_settled(self, now: float) -> bool:
        if not self._lows_lasted:
            return True
        # Sampled once a millisecond, short ones are seen once or twice.
        lasts = min(max(self._lows_lasted) / 4 - SAMPLE_SECONDS, SETTLED_SECONDS)
        return self._fell >= (self._began or 0.0) and now - self._fell >= lasts
