"""The plots of docs/performance.md: each shows sections of a machine's results."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from bench import report
from bench.fit import straight

Document = dict[str, Any]
GIB = 1 << 30
TITLES = {"gpt2_xl": "GPT-2 XL", "gpt2": "GPT-2 124M"}
UNITS = {"allocations": (1, "allocations"), "bytes": (GIB, "GiB"), "processes": (1, "processes")}
DARK, LIGHT = "#3182bd", "#bdbdbd"


def good_runs(document: Document, section: str) -> dict[str, list[dict[str, Any]]]:
    """The runs that succeeded, of the jobs that have any."""
    jobs = document["sections"].get(section, {}).get("jobs", {})
    good = {job: [run for run in runs if "failed" not in run] for job, runs in jobs.items()}
    return {job: runs for job, runs in good.items() if runs}


def growth_points(document: Document) -> dict[str, list[tuple[float, float]]]:
    """Value and median pause of the points of each axis."""
    found: dict[str, list[tuple[float, float]]] = {}
    for runs in good_runs(document, "growth").values():
        pause = statistics.median(run["pause_seconds"] for run in runs)
        found.setdefault(runs[0]["axis"], []).append((runs[0]["value"], pause))
    return {axis: sorted(points) for axis, points in found.items()}


def _axes(count: int, height: float = 3.0) -> tuple[Any, Any]:
    return report.pyplot().subplots(
        1, count, figsize=(max(4 * count, 5), height), squeeze=False, layout="constrained"
    )


def _growth(document: Document) -> Any:
    found = growth_points(document)
    figure, axes = _axes(len(found))
    for panel, (axis, points) in zip(axes[0], found.items(), strict=True):
        unit, name = UNITS[axis]
        panel.plot([x / unit for x, _ in points], [y for _, y in points], "o", color=DARK)
        line = straight(points)
        if line is not None:
            ends = [points[0][0], line.until]
            panel.plot([end / unit for end in ends], [line.at(end) for end in ends], color=LIGHT)
        panel.set_xlabel(name)
        panel.set_ylabel("pause, s")
        panel.set_ylim(bottom=0)
    return figure


def compared(document: Document) -> Document:
    """The document with the jobs alone that the README compares."""
    sections = {
        name: section
        | {"jobs": {job: runs for job, runs in section["jobs"].items() if job in TITLES}}
        for name, section in document["sections"].items()
        if name in report.NAMES
    }
    return document | {"sections": sections}


# What each plot is called, and the sections that it shows.
PLOTS = {"phases": tuple(report.NAMES), "growth": ("growth",)}


def shown(document: Document) -> list[str]:
    """The plots that there is something for: bars where systems are compared."""
    sections = document["sections"]
    there = {"phases": {"flowgpu", "peer"} <= sections.keys(), "growth": growth_points(document)}
    return [name for name in PLOTS if there[name]]


def file_name(document: Document, what: str) -> str:
    return f"{document['name']}-{what}.svg"


def link(document: Document, what: str, text: str) -> list[str]:
    """A line that shows the plot; none if there is nothing to draw."""
    return [f"![{text}]({file_name(document, what)})"] if what in shown(document) else []


def mark(document: Document, what: str) -> str:
    """A digest of what a plot shows; it stands in the plot, so that a stale one is seen."""
    sections = {name: document["sections"].get(name) for name in PLOTS[what]}
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()[:16]


def draw(document: Document, folder: Path) -> dict[Path, str]:
    """Draw what there is to draw; the mark of each file."""
    drawn: dict[Path, str] = {}
    for what in shown(document):
        path = folder / file_name(document, what)
        drawn[path] = mark(document, what)
        about = {"Date": None, "Creator": None, "Description": drawn[path]}
        if what == "phases":
            report.chart(compared(document), path, about)
        else:
            figure = _growth(document)
            figure.savefig(path, metadata=about)
            report.pyplot().close(figure)
    return drawn
