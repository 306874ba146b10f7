"""How often to checkpoint a job: what its checkpoints cost against what failures would lose.

A failure loses what the job has done since the newest complete image. So many checkpoints an hour
lose the least (Young 1974; PhoenixOS, SOSP'25): sqrt(N F / (2 O)), for N GPUs that fail F times an
hour each, and O hours for which a checkpoint stops the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from flowgpu.jobs import JobDir

KEPT = 10
"""Checkpoints of a job whose cost its record has, the newest."""
HOUR = 3600.0
RETRY_SECONDS = 60.0
"""Seconds until the next try where no checkpoint has succeeded yet."""

Between = Callable[[float], float]
"""Seconds from the begin of a checkpoint to that of the next, by those that the first has taken."""
Period = Callable[[JobDir], Between]
"""Gives `Between` for the job with this folder."""


@dataclass(frozen=True)
class Costs:
    """What checkpoints of a job cost, in seconds, as measured."""

    gpus: int
    """How many GPUs the job runs on; a job without one counts as one."""
    checkpoints: int
    """How many checkpoints were measured; the times are their medians."""
    stall: float
    """The time for which the job stands still."""
    drain: float
    """The time in which the image becomes complete, while the job runs on."""
    total: float
    """The time from the request until the image is complete."""
    restore: float | None
    """The time of the job's last restore; None: the job was started, not restored."""

    @staticmethod
    def row(report: dict[str, Any]) -> dict[str, float]:
        """What a job's record keeps of the report of a checkpoint that left it running: little, as
        a record grows on no full disk."""
        row = {name: round(report[f"{name}_seconds"], 4) for name in ("stall", "drain", "total")}
        return row | {"gpus": report["gpus"]}

    @classmethod
    def of(cls, rows: Sequence[dict[str, float]], restored: dict[str, Any] | None) -> Costs | None:
        """Costs from the record's rows and its report of a restore; None without a row."""
        if not rows:
            return None
        return cls(
            gpus=max(int(rows[-1]["gpus"]), 1),
            checkpoints=len(rows),
            **{name: median(row[name] for row in rows) for name in ("stall", "drain", "total")},
            restore=(restored or {}).get("restore_seconds"),
        )

    def failures(self, of_one: float) -> float:
        """A second, of all GPUs, for so many an hour of each."""
        return self.gpus * of_one / HOUR

    def best(self, failures_per_hour: float) -> float:
        """Seconds between the begins of two checkpoints that lose the least. `failures_per_hour`,
        above 0, is of one GPU. No fewer than one checkpoint takes."""
        return max(math.sqrt(2 * self.stall / self.failures(failures_per_hour)), self.total)

    def lost(self, interval: float, failures_per_hour: float) -> tuple[float, float]:
        """Parts of the GPUs' time, together at most 1, that checkpoints each `interval` seconds
        stop, and that failures lose."""
        stopped = min(self.stall / interval, 1.0)
        redone = interval / 2 + self.drain + (self.restore or 0.0)
        return stopped, min(self.failures(failures_per_hour) * redone, 1.0 - stopped)

    def curve(self, failures_per_hour: float) -> list[float]:
        """Intervals to compare, in seconds: the best one, and others by factors of two."""
        best = self.best(failures_per_hour)
        intervals = [best * 2.0**step for step in range(-4, 5)]
        return [interval for interval in intervals if interval >= self.total]


def fixed(every: float) -> Period:
    """Begins are so many seconds apart, or a multiple of them: periods missed are left out."""
    return lambda _job: lambda taken: every * max(math.ceil(taken / every), 1)


def best(failures_per_hour: float) -> Period:
    """The period that loses the least time, by what checkpoints of the job have cost so far."""

    def of(job: JobDir) -> Between:
        def between(taken: float) -> float:
            record = job.read()
            costs = Costs.of(record.costs, record.restored)
            return max(costs.best(failures_per_hour) if costs else RETRY_SECONDS, taken)

        return between

    return of
