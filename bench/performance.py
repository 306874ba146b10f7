"""Make docs/performance.md, with its plots, from the files in bench/results.

    python -m bench.performance            write the page and the plots
    python -m bench.performance --check    fail if the page is not what would be written

Only what was measured is shown: a section, job or system without results has no row.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.fit import straight
from bench.machine import ROOT

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "performance.md"
GIB, MIB = 1 << 30, 1 << 20
TITLES = {"gpt2_xl": "GPT-2 XL", "gpt2": "GPT-2 124M"}
UNITS = {"allocations": (1, "allocations"), "bytes": (GIB, "GiB"), "processes": (1, "processes")}
Document = dict[str, Any]

INTRODUCTION = """# Performance

Made by `make performance-doc` from the files in `bench/results`, which `make bench` writes; do not
edit. Rows are medians of the runs that succeeded. What the columns mean:

- *pause*: from the closing of the gate until the job's image is complete; for torch.save from the
  end of the step to the file on the storage. *Restore to next step*: from the start of the command,
  or process, to the end of the job's next step.
- *identical*: all runs of a job, of all systems, printed the same lines, to the bit, before and
  after.
- torch.save keeps parameters, optimizer, step and random states; the others keep the process.
"""


def documents(folder: Path = RESULTS) -> list[Document]:
    """The results taken on real GPUs, newest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if "sections" in document and document.get("kind") == "nvidia":
            found.append(document | {"file": path.name})
    return sorted(found, key=lambda document: (document["date"], document["file"]), reverse=True)


def page(found: Sequence[Document]) -> str:
    """The whole page."""
    return INTRODUCTION + "".join("\n" + _one(document) for document in found)


def _one(document: Document) -> str:
    parts = [
        f"## {document['gpu']['gpu']}, {document['date']}",
        report.hardware(document),
        _commands(document),
    ]
    if report.jobs_of(document):
        parts += [
            "### Checkpoint and restore",
            "\n".join(report.checkpoint_table(document)),
            f"![where the time goes]({plot_name(document, 'phases')})",
        ]
    for title, lines in (
        ("Each reduction on and off", breakdown_table(document)),
        ("Repeated images", periodic_table(document)),
        ("Step time without and with FlowGPU", report.overhead_table(document)),
    ):
        if lines:
            parts += [f"### {title}", "\n".join(lines)]
    parts += _growth(document)
    return "\n\n".join(parts) + "\n"


def _commands(document: Document) -> str:
    """How the results were taken."""
    seen: dict[str, None] = {}
    for section in document["sections"].values():
        for words in section.get("commands", [section["command"]] if "command" in section else []):
            seen[" ".join(words)] = None
    lines = [f"python {command}" for command in seen]
    first = f"Results: `bench/results/{document['file']}`, from"
    return "\n".join([first, "", "```", *lines, "```"])


def _median(runs: Sequence[dict[str, Any]], key: str, unit: float = 1) -> str:
    values = [run[key] / unit for run in runs if run.get(key) is not None]
    return report.number(statistics.median(values)) if values else "-"


def _runs(document: Document, section: str) -> dict[str, list[dict[str, Any]]]:
    """The runs that succeeded, of the jobs that have any."""
    jobs = document["sections"].get(section, {}).get("jobs", {})
    good = {job: [run for run in runs if "failed" not in run] for job, runs in jobs.items()}
    return {job: runs for job, runs in good.items() if runs}


def breakdown_table(document: Document) -> list[str]:
    lines = [
        "| job, what is off | runs | pause, s | image, GiB | GPU stored, GiB | restore to next "
        "step, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for job, runs in _runs(document, "breakdown").items():
        cells = [
            job,
            str(len(runs)),
            _median(runs, "pause_seconds"),
            _median(runs, "image_bytes", GIB),
            _median(runs, "gpu_bytes_stored", GIB),
            _median(runs, "next_step_seconds"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def periodic_table(document: Document) -> list[str]:
    """Later images: bytes added to the store beside GPU bytes that changed since the one before."""
    lines = [
        "| job | image | in use, MiB | changed, MiB | written, MiB | of it CPU, MiB | "
        "written : changed | without CPU |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for job, runs in _runs(document, "periodic").items():
        for number, image in enumerate(runs[-1]["images"][1:], 2):
            written, changed = image["written_bytes"], image["changed_bytes"]
            gpu = written - image["written_cpu_bytes"]
            keys = ("active_bytes", "changed_bytes", "written_bytes", "written_cpu_bytes")
            cells = [job, str(number), *(report.number(image[key] / MIB, 1) for key in keys)]
            cells += [report.number(size / changed if changed else None) for size in (written, gpu)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def growth_points(document: Document) -> dict[str, list[tuple[float, float]]]:
    """Value and median pause of the points of each axis."""
    found: dict[str, list[tuple[float, float]]] = {}
    for runs in _runs(document, "growth").values():
        pause = statistics.median(run["pause_seconds"] for run in runs)
        found.setdefault(runs[0]["axis"], []).append((runs[0]["value"], pause))
    return {axis: sorted(points) for axis, points in found.items()}


def _growth(document: Document) -> list[str]:
    parts = []
    for axis, points in growth_points(document).items():
        unit, name = UNITS[axis]
        lines = [f"| {name} | pause, s |", "|---:|---:|"]
        lines += [f"| {x / unit:g} | {report.number(y)} |" for x, y in points]
        parts += [f"### Pause against {axis}", "\n".join(lines), _linearity(axis, points)]
    if parts:
        parts.append(f"![pause against size]({plot_name(document, 'growth')})")
    return parts


def _linearity(axis: str, points: list[tuple[float, float]]) -> str:
    unit, name = UNITS[axis]
    line = straight(points)
    if line is None:
        return "No three of the first points lie on a line, to 10 %."
    told = (
        f"Linear, to 10 %, up to {line.until / unit:g} {name}: {line.start:.2f} s and "
        f"{1000 * line.slope * unit:.3g} ms for each {'one' if unit == 1 else 'GiB'}."
    )
    if line.beyond is None:
        return told
    x, y = line.beyond
    return f"{told} At {x / unit:g} it is {y / line.at(x):.2f} times that line."


def plot_name(document: Document, what: str) -> str:
    return f"{Path(document['file']).stem}-{what}.svg"


def readme_rows(document: Document) -> list[str]:
    """The rows of the README's table, which its numbers are checked against."""
    rows = []
    for job, title in TITLES.items():
        held = report.runs_of(document, "flowgpu", job)
        first = f" {title} "
        if held:
            first = f" {title} ({held[0]['gpu_bytes_reserved'] / GIB:.1f} GiB on the GPU) "
        for system, name in report.NAMES.items():
            runs = report.runs_of(document, system, job)
            if not runs:
                continue
            bold = "**" if system == "flowgpu" else ""
            count = f"{len(runs)} run{'s' if len(runs) > 1 else ''}"
            pause, back = _median(runs, "pause_seconds"), _median(runs, "next_step_seconds")
            image = statistics.median(run["image_bytes"] for run in runs) / GIB
            cells = [f"{name} ({count})", f"{bold}{pause} s{bold}", f"{image:.1f} GiB"]
            rows.append(f"|{first}| {' | '.join(cells)} | {bold}{back} s{bold} |")
            first = " "
    return rows


def mark(document: Document) -> str:
    """A digest of what the plots show; it stands in them, so that a stale one is seen."""
    shown = {name: document["sections"].get(name) for name in (*report.NAMES, "growth")}
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def plots(document: Document, folder: Path) -> list[Path]:
    """Draw what there is to draw; the files."""
    metadata = {"Date": None, "Creator": None, "Description": mark(document)}
    drawn = []
    if report.jobs_of(document):
        drawn.append(folder / plot_name(document, "phases"))
        report.chart(document, drawn[-1], metadata)
    points = growth_points(document)
    if points:
        drawn.append(folder / plot_name(document, "growth"))
        _growth_plot(points, drawn[-1], metadata)
    return drawn


def _growth_plot(
    found: dict[str, list[tuple[float, float]]], path: Path, metadata: dict[str, Any]
) -> None:
    pyplot = report.pyplot()
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(4 * len(found), 3), squeeze=False, layout="constrained"
    )
    for panel, (axis, points) in zip(axes[0], found.items(), strict=True):
        unit, name = UNITS[axis]
        x, y = [value / unit for value, _ in points], [pause for _, pause in points]
        panel.plot(x, y, "o", color="#3182bd")
        line = straight(points)
        if line is not None:
            ends = [points[0][0], line.until]
            panel.plot(
                [end / unit for end in ends], [line.at(end) for end in ends], color="#bdbdbd"
            )
        panel.set_xlabel(name)
        panel.set_ylabel("pause, s")
        panel.set_ylim(bottom=0)
    figure.savefig(path, metadata=metadata)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.performance")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    found = documents()
    text = page(found)
    if options.check:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print(f"{PAGE.name} is stale: make performance-doc", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    for document in found:
        plots(document, PAGE.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
