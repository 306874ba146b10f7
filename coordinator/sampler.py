"""Watches the memory in use by the tasks of a job for the moments at which it is smallest."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from coordinator import minimum
from coordinator.minimum import MinimumWatch
from coordinator.tasks import Task


class Sampler:
    """Samples in a thread of its own from its start on, until it is closed."""

    def __init__(
        self, tasks: Sequence[Task], wait: float, tolerance: float = minimum.TOLERANCE
    ) -> None:
        """`wait`: seconds that the minimum may be waited for; `tolerance`: see MinimumWatch."""
        self._tasks = [task for task in tasks if task.live_bytes() is not None]
        self._watch = MinimumWatch(wait, tolerance)
        self._lock = threading.Lock()
        self._reached = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampler")
        if self._tasks:
            self._thread.start()

    @property
    def patience(self) -> float:
        """Seconds that the minimum is waited for at most."""
        with self._lock:
            return self._watch.patience

    def at_minimum(self) -> int | None:
        """Live bytes that count as the minimum, at most; None before the first sample."""
        with self._lock:
            smallest = self._watch.smallest
        return None if smallest is None else int(smallest * (1 + self._watch.tolerance))

    def __str__(self) -> str:
        with self._lock:
            return f"{self._watch.live} bytes in use, at least {self._watch.smallest} of late"

    def wait(self) -> float:
        """Wait for the minimum, at most as long as was said; gives the seconds that it took.

        Without a live set, and after `stop`, it does not wait at all.
        """
        began = time.monotonic()
        if self._tasks and not self._ended.is_set():
            with self._lock:
                self._reached.clear()
                self._watch.begin(began)
            self._reached.wait(self.patience)
        return time.monotonic() - began

    def stop(self) -> None:
        """Take no more samples."""
        self._ended.set()

    def close(self) -> None:
        """End the thread. A second call does nothing."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(minimum.SAMPLE_SECONDS):
            live = [found for task in self._tasks if (found := task.live_bytes()) is not None]
            if len(live) < len(self._tasks):
                continue  # nothing is known of all of them together
            with self._lock:
                if self._watch.sample(time.monotonic(), sum(live)):
                    self._reached.set()
