"""When a job printed its lines, seen from outside."""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path

from tests.gpu.job import last_step

LOOK_SECONDS = 0.001
# In the folder of a peer's job while that may run, for whoever has to end its program halfway.
PID_FILE = "peer.pid"


class StepWatch:
    """Looks at a job's output from a thread of its own and notes when each step was there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[int, float] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def __enter__(self) -> StepWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            step = last_step(self._path)
            if step >= 0 and step not in self._seen:
                with self._changed:
                    self._seen[step] = time.monotonic()
                    self._changed.notify_all()

    def first_after(self, step: int, seconds: float) -> float | None:
        """When a step later than `step` was first seen; None if none came within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                later = [at for number, at in self._seen.items() if number > step]
                if later:
                    return min(later)
                if not self._changed.wait(max(deadline - time.monotonic(), 0.001)):
                    return None

    def step_seconds(self) -> float | None:
        """The median time from one step to the next."""
        with self._changed:
            times = [at for _, at in sorted(self._seen.items())]
        gaps = [right - left for left, right in pairwise(times)]
        return statistics.median(gaps) if gaps else None
