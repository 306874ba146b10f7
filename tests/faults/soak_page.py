"""What a soak's samples say: whether anything grows.

python -m tests.faults.soak_page RESULT.json PLOT.svg    draw them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from bench import report
from bench.overhead import mean_interval

Document = dict[str, Any]
MIB = 1 << 20
WARM_UP = 0.25  # of the samples: caches and allocators fill
SURE = 4.0  # standard errors of the slope
TOLERANCE = 0.02  # growth over the samples, as a part of their median
PARTS = 10  # of the samples, of which most must show it
NAMES = {
    "seconds": "seconds of a checkpoint (and restore)",
    "pause_seconds": "seconds of the pause",
    "coordinator_rss": "memory of the coordinator",
    "ghost_rss": "memory of the ghost",
    "task_rss": "memory of the task",
    "command_rss": "memory of `flowgpu checkpoint`",
    "coordinator_fds": "descriptors of the coordinator",
    "ghost_fds": "descriptors of the ghost",
    "task_fds": "descriptors of the task",
    "task_mappings": "mappings of the task",
    "processes": "processes",
    "shared_bytes": "shared memory",
    "device_bytes": "device memory",
    "store_bytes": "files of the store",
    "image_bytes": "files of the image",
}
NAME, NEW = "soak", "soak-new"  # the job, and a new one beside it
RESTORES = "pause-and-dump, restore"
TIMES = ("seconds", "pause_seconds")
COUNTED = ("processes", "_fds", "_mappings")
PANELS = {
    "RSS, MiB": ("coordinator_rss", "ghost_rss", "task_rss", "command_rss"),
    "descriptors": ("coordinator_fds", "ghost_fds", "task_fds"),
    "device memory, MiB": ("device_bytes",),
    "seconds": ("seconds", "pause_seconds"),
}


def growth(values: Sequence[float], counted: bool = False) -> tuple[float, bool]:
    """What the straight line through the values gains over them, and whether that is growth.

    It is where the slope is no accident of the noise and the gain is no rounding of the median; of
    what is not `counted`, only if it goes on: a table that is doubled once, as Python's of interned
    strings is after some hundred new paths, makes one step.
    """
    late = numpy.array(values[int(len(values) * WARM_UP) :], float)
    x = numpy.arange(len(late), dtype=float)
    if len(late) < PARTS or not late.std():
        return 0.0, False
    slope, start = numpy.polyfit(x, late, 1)
    rest = late - (start + slope * x)
    error = numpy.sqrt((rest**2).sum() / (len(late) - 2) / ((x - x.mean()) ** 2).sum())
    gain = float(slope * len(late))
    least = TOLERANCE * abs(numpy.median(late))
    steps = numpy.diff([numpy.median(part) for part in numpy.array_split(late, PARTS)])
    goes_on = counted or numpy.median(steps) * PARTS > least
    return gain, bool(slope > SURE * error and gain > least and goes_on)


def growth_of(samples: Sequence[dict[str, float]], key: str) -> tuple[float, bool]:
    return growth(series(samples, key), counted=key.endswith(COUNTED))


def series(samples: Sequence[dict[str, float]], key: str) -> list[float]:
    return [sample[key] for sample in samples]


def grows(samples: Sequence[dict[str, float]]) -> list[str]:
    """Keys of what grows."""
    return [key for key in NAMES if key in samples[0] and growth_of(samples, key)[1]]


def times_of_new(document: Document, key: str) -> tuple[float, float, float]:
    """How many times what the new job takes the job takes: the mean, and where it is at 95 %."""
    ratios = [turn[NAME][key] / turn[NEW][key] for turn in document["in_turn"]]
    low, high = mean_interval(ratios)
    mean = float(numpy.mean(ratios))
    return mean, mean if low is None else low, mean if high is None else high


def grown(document: Document) -> dict[str, list[str]]:
    """Keys of what grows, by part.

    The machine may become slower while a job is dumped and restored. So how long that takes grows
    where it is more than what a new job takes in the same turns, if there are any.
    """
    found = {name: grows(samples) for name, samples in document["parts"].items()}
    if document.get("in_turn"):
        slower = []
        for key in TIMES:
            mean, low, _ = times_of_new(document, key)
            slower += [key] * (mean > 1 + TOLERANCE and low > 1)
        found[RESTORES] = slower + [key for key in found[RESTORES] if key not in TIMES]
    return found


def beside_new(document: Document) -> str:
    """What the turns with a new job say."""
    turns = document.get("in_turn")
    if not turns:
        return "no new job beside it"
    words = []
    for key in TIMES:
        mean, low, high = times_of_new(document, key)
        words.append(f"{NAMES[key]}: {mean:.3f} times ({low:.3f} to {high:.3f} at 95 %)")
    return f"{len(turns)} turns with a new job, of which the {', '.join(words)}"


def draw(document: Document, file: Path) -> None:
    parts = document["parts"]
    figure, axes = report.pyplot().subplots(
        len(parts),
        len(PANELS),
        figsize=(4 * len(PANELS), 2.6 * len(parts)),
        squeeze=False,
        layout="constrained",
    )
    for row, (name, samples) in zip(axes, parts.items(), strict=True):
        for panel, (title, keys) in zip(row, PANELS.items(), strict=True):
            unit = MIB if "MiB" in title else 1
            for key in keys:
                if key in samples[0]:
                    values = [value / unit for value in series(samples, key)]
                    panel.plot(values, linewidth=0.8, label=key.rpartition("_")[0] or key)
            panel.set_title(title)
            panel.set_xlabel(name)
            panel.set_ylim(bottom=0)
            if len(keys) > 1:
                panel.legend(frameon=False, fontsize="small")
    figure.savefig(file)
    report.pyplot().close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
