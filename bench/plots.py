"""The plots of docs/performance.md: each shows sections of a results file, and says which."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.fit import straight

Document = dict[str, Any]
GIB, MIB = 1 << 30, 1 << 20
UNITS = {"allocations": (1, "allocations"), "bytes": (GIB, "GiB"), "processes": (1, "processes")}
DARK, LIGHT, WARM = "#3182bd", "#bdbdbd", "#fd8d3c"


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


def _medians(document: Document, keys: Sequence[str]) -> dict[str, list[float]]:
    """Medians of `keys` for each variant of the breakdown whose runs have them."""
    return {
        job: [statistics.median(run[key] for run in runs) for key in keys]
        for job, runs in good_runs(document, "breakdown").items()
        if all(run.get(key) is not None for run in runs for key in keys)
    }


def _breakdown(document: Document) -> Any:
    found = _medians(document, ("pause_seconds", "image_bytes"))
    names = list(found)[::-1]
    figure, axes = _axes(2, 1.0 + 0.28 * len(names))
    for panel, column, unit, label in (
        (axes[0][0], 0, 1, "pause, s"),
        (axes[0][1], 1, GIB, "image, GiB"),
    ):
        values = [found[name][column] / unit for name in names]
        colors = [DARK if name.endswith("all on") else LIGHT for name in names]
        bars = panel.barh(names if column == 0 else range(len(names)), values, color=colors)
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.margins(x=0.18)
        panel.set_xlabel(label)
    axes[0][1].set_yticks([])
    return figure


def _periodic(document: Document) -> Any:
    found = good_runs(document, "periodic")
    figure, axes = _axes(len(found))
    for panel, (job, runs) in zip(axes[0], found.items(), strict=True):
        images = runs[-1]["images"][1:]
        numbers = range(2, len(images) + 2)
        for place, keys, color, label in (
            (-0.2, ("changed_bytes", "changed_cpu_bytes"), LIGHT, "changed"),
            (0.2, ("written_bytes",), DARK, "written"),
        ):
            values = [sum(image.get(key, 0) for key in keys) / MIB for image in images]
            panel.bar([n + place for n in numbers], values, 0.4, color=color, label=label)
        panel.set_title(job)
        panel.set_xticks(list(numbers))
        panel.set_xlabel("image")
        panel.set_ylabel("MiB")
    axes[0][0].legend(frameon=False)
    return figure


def overhead_ratios(document: Document) -> dict[str, list[float]]:
    """Ratios of the pairs of each job, with FlowGPU over without it."""
    jobs = document["sections"].get("overhead", {}).get("jobs", {})
    found = {
        job: [pair["ratio"] for pair in about.get("pairs", ()) if pair.get("ratio") is not None]
        for job, about in jobs.items()
    }
    return {job: ratios for job, ratios in found.items() if ratios}


def _overhead(document: Document) -> Any:
    found = overhead_ratios(document)
    figure, axes = _axes(1, 1.2 + 0.4 * len(found))
    panel = axes[0][0]
    jobs = list(found)[::-1]
    about = document["sections"]["overhead"]["jobs"]
    panel.axvline(1.0, color=LIGHT)
    panel.axvline(report.SLOWEST, color=WARM, linestyle="--")
    for line, job in enumerate(jobs):
        low, high = about[job].get("ratio_low"), about[job].get("ratio_high")
        if low is not None and high is not None:
            panel.plot([low, high], [line, line], color=DARK, linewidth=6, alpha=0.3)
        panel.plot(found[job], [line] * len(found[job]), "o", color=DARK, markersize=4)
    panel.set_yticks(range(len(jobs)), jobs)
    panel.set_ylim(-0.6, len(jobs) - 0.4)
    panel.set_xlabel("step with FlowGPU : without; dashed: 1 % slower")
    return figure


# What each plot is called, the sections that it shows, whether there is anything, and its making.
Plot = tuple[str, tuple[str, ...], Callable[[Document], Any], Callable[[Document], Any]]
PLOTS: tuple[Plot, ...] = (
    (
        "breakdown",
        ("breakdown",),
        lambda d: _medians(d, ("pause_seconds", "image_bytes")),
        _breakdown,
    ),
    ("periodic", ("periodic",), lambda d: good_runs(d, "periodic"), _periodic),
    ("overhead", ("overhead",), overhead_ratios, _overhead),
    ("growth", ("growth",), growth_points, _growth),
)


def file_name(document: Document, what: str) -> str:
    return f"{Path(document['file']).stem}-{what}.svg"


def link(document: Document, what: str, text: str) -> list[str]:
    """A line that shows the plot; none if there is nothing to draw."""
    there = {name: has(document) for name, _, has, _ in PLOTS} | {
        "phases": report.jobs_of(document)
    }
    return [f"![{text}]({file_name(document, what)})"] if there[what] else []


def mark(document: Document, sections: Sequence[str]) -> str:
    """A digest of what a plot shows; it stands in the plot, so that a stale one is seen."""
    shown = {name: document["sections"].get(name) for name in sections}
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def draw(document: Document, folder: Path) -> dict[Path, str]:
    """Draw what there is to draw; the mark of each file."""
    drawn: dict[Path, str] = {}

    def metadata(what: str, sections: Sequence[str]) -> tuple[Path, dict[str, Any]]:
        path = folder / file_name(document, what)
        drawn[path] = mark(document, sections)
        return path, {"Date": None, "Creator": None, "Description": drawn[path]}

    if report.jobs_of(document):
        report.chart(document, *metadata("phases", tuple(report.NAMES)))
    for what, sections, has, make in PLOTS:
        if has(document):
            path, about = metadata(what, sections)
            figure = make(document)
            figure.savefig(path, metadata=about)
            report.pyplot().close(figure)
    return drawn
