"""Make docs/performance.md, with its plots, from the files in bench/results.

    python -m bench.performance            write the page and the plots
    python -m bench.performance --check    fail if the page is not what would be written

Only what was measured is shown: a section, job or system without results has no row.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plots, report, tables
from bench.fit import straight
from bench.machine import ROOT
from bench.plots import GIB, MIB, UNITS, good_runs, growth_points

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "performance.md"
TITLES = {"gpt2_xl": "GPT-2 XL", "gpt2": "GPT-2 124M"}
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
- *failed*: what the system said when no run of a job succeeded.
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
            *plots.link(document, "phases", "where the time goes"),
        ]
    for title, lines, plot in (
        ("Each reduction on and off", breakdown_table(document), "breakdown"),
        ("Repeated images", periodic_table(document), "periodic"),
        ("Step time without and with FlowGPU", report.overhead_table(document), "overhead"),
    ):
        if lines:
            parts += [f"### {title}", "\n".join(lines), *plots.link(document, plot, title.lower())]
    parts += _growth(document)
    for title, lines in (
        ("Nanoseconds added to a driver call", report.calls_table(document)),
        (
            "Nanoseconds added to a driver call of a job prepared for the replay engine",
            report.calls_table(document, "calls_replay"),
        ),
        ("Nanoseconds of the memory stub", tables.memstub_table(document)),
        ("The mover alone", tables.mover_table(document)),
        ("Variants of the mover", _code(tables.variants_lines(document))),
        ("The kernels on chunks", tables.chunks_table(document)),
    ):
        if lines:
            parts += [f"### {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _code(lines: Sequence[str]) -> list[str]:
    return ["```", *lines, "```"] if lines else []


def _commands(document: Document) -> str:
    """How the results were taken."""
    seen: dict[str, None] = {}
    for section in document["sections"].values():
        for words in section.get("commands", [section["command"]] if "command" in section else []):
            seen[shlex.join(words)] = None
    lines = [f"python {command}" for command in seen]
    first = f"Results: `bench/results/{document['file']}`, from"
    return "\n".join([first, "", "```", *lines, "```"])


def _median(runs: Sequence[dict[str, Any]], key: str, unit: float = 1) -> str:
    values = [run[key] / unit for run in runs if run.get(key) is not None]
    return report.number(statistics.median(values)) if values else "-"


def _mib(size: float | None) -> str:
    return report.number(None if size is None else size / MIB, 1)


def breakdown_table(document: Document) -> list[str]:
    lines = [
        "| job, what is off | runs | pause, s | image, GiB | GPU stored, GiB | restore to next "
        "step, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for job, runs in good_runs(document, "breakdown").items():
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
    """Later images: bytes added to the store beside bytes that changed since the one before."""
    lines = [
        "| job | image | GPU in use, MiB | GPU changed, MiB | CPU changed, MiB | written, MiB | "
        "of it CPU, MiB | written : changed | GPU alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for job, runs in good_runs(document, "periodic").items():
        for number, image in enumerate(runs[-1]["images"][1:], 2):
            changes = ("changed_bytes", "changed_cpu_bytes")
            keys = ("active_bytes", *changes, "written_bytes", "written_cpu_bytes")
            cells = [job, str(number), *(_mib(image.get(key)) for key in keys)]
            gpu, cpu, written, cpu_written = (image.get(key) for key in keys[1:])
            ratios: list[float | None] = [None, None]
            if gpu and None not in (written, cpu, cpu_written):
                ratios = [written / (gpu + cpu), (written - cpu_written) / gpu]
            cells += map(report.number, ratios)
            lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def _growth(document: Document) -> list[str]:
    parts = []
    for axis, points in growth_points(document).items():
        unit, name = UNITS[axis]
        lines = [f"| {name} | pause, s |", "|---:|---:|"]
        lines += [f"| {x / unit:g} | {report.number(y)} |" for x, y in points]
        parts += [f"### Pause against {axis}", "\n".join(lines), _linearity(axis, points)]
    return parts + plots.link(document, "growth", "pause against size")


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


def readme_rows(document: Document) -> list[str]:
    """The rows of the README's table, which its numbers are checked against.

    Of jobs of which FlowGPU's own run is there: the others are compared with it.
    """
    rows = []
    for job, title in TITLES.items():
        held = report.runs_of(document, "flowgpu", job)
        if not held:
            continue
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
        plots.draw(document, PAGE.parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
