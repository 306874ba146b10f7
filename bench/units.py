"""What is measured piece by piece: a run of a job is saved when it ends, and not taken twice."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import machine
from bench.deadline import TimeUp
from tests.gpu.site import Trouble

if TYPE_CHECKING:
    from bench.sections import Bench

Run = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """A job of a section, measured `repeats` times by `once(folder, number)`."""

    job: str
    repeats: int
    seconds: float  # about, of one run; what a run of it took before counts more
    once: Callable[[Path, int], Run]
    about: dict[str, Any]  # goes into each run


def good(runs: Sequence[Run]) -> list[Run]:
    """The runs that did not fail."""
    return [run for run in runs if "failed" not in run]


def expected(unit: Unit, runs: Sequence[Run]) -> float:
    """Seconds that the next run will take, about."""
    return max((run["seconds"] for run in good(runs) if "seconds" in run), default=unit.seconds)


def measure(bench: Bench, section: str, units: Sequence[Unit]) -> dict[str, Any]:
    """Take what is missing of the units and give all runs, those of earlier calls included.

    A run that fails is recorded and tried again by the next call, not by this one. What does not
    fit into the time that is left is noted in `bench.missing`.
    """
    before = {} if bench.again else bench.document["sections"].get(section, {}).get("jobs", {})
    found: dict[str, list[Run]] = {job: list(runs) for job, runs in before.items()}
    for unit in units:
        runs = found.setdefault(unit.job, [])
        while len(good(runs)) < unit.repeats:
            if not bench.deadline.fits(expected(unit, runs)):
                bench.missing.append(f"{section} {unit.job}")
                break
            try:
                runs.append(_run(bench, unit, len(runs)))
            except TimeUp:
                bench.missing.append(f"{section} {unit.job}")
                break
            bench.keep(section, {"jobs": {job: runs for job, runs in found.items() if runs}})
            bench.say(f"{section} {unit.job}: {_words(runs[-1])}")
            if "failed" in runs[-1]:
                break
    return {"jobs": {job: runs for job, runs in found.items() if runs}}


def _run(bench: Bench, unit: Unit, number: int) -> Run:
    began = time.monotonic()
    try:
        with bench.folder() as folder:
            run = unit.once(folder, number)
        if "lines" in run:
            run["identical"] = bench.same_lines(unit.about["lines_of"], run.pop("lines"))
    except (Trouble, subprocess.TimeoutExpired) as trouble:
        if bench.deadline.left() <= 0:
            raise TimeUp from trouble
        run = {"failed": str(trouble)}
    about = {key: value for key, value in unit.about.items() if key != "lines_of"}
    return run | about | {"seconds": time.monotonic() - began, "commit": machine.commit()}


def _words(run: Run) -> str:
    if "failed" in run:
        return str(run["failed"])
    words = [
        f"{name} {run[key] / unit:.2f} {sign}"
        for name, key, unit, sign in (
            ("paused", "pause_seconds", 1, "s"),
            ("image", "image_bytes", 1 << 30, "GiB"),
            ("restore to the next step", "next_step_seconds", 1, "s"),
        )
        if run.get(key) is not None
    ]
    if "images" in run:
        written = ", ".join(f"{image['written_bytes'] / 2**20:.1f}" for image in run["images"])
        words.append(f"images of {written} MiB")
    if run.get("identical") is False:
        words.append("LINES DIFFER")
    return ", ".join(words)
