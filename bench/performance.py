"""Make docs/performance.md, with its plots, from bench/results/*/bench.json.

    python -m bench.performance            write the page and the plots
    python -m bench.performance --check    fail if the page is not what would be written

Only what was measured is shown: a section, job or system without results has no row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import nodes, plots, preempt, replicas, report, stall, summary, suspend, tables
from bench.fit import straight
from bench.machine import ROOT
from bench.plots import GIB, TITLES, UNITS, good_runs, growth_points

PAGE = ROOT / "docs" / "performance.md"
MIB = 1 << 20
Document = dict[str, Any]

INTRODUCTION = """<!-- Made by `make performance-doc`. Do not edit. -->
# Performance

For readers who want to know what a checkpoint costs, and how it was measured. `make bench` measures
on the GPU of a machine and keeps the newest result of each job in `bench/results`. Each row is the
median of the runs that succeeded.

- *pause*: from the closing of the gate until the job's image is complete. For torch.save: from the
  end of the step to the file on the storage.
- *restore to next step*: from the start of the command, or of the process, to the end of the job's
  next step.
- *identical*: all runs of a job, by all systems, printed the same lines, to the bit.
- *plain ones differ by*: how far step times of processes without FlowGPU lie apart.
- *both engines*: `python -m bench.engine_steps` dumps and restores a job by each engine in turn; a
  restore ends there when the job runs again.
- torch.save keeps parameters, optimizer, step and random states; the others keep the process.
"""


# Summaries of programs that `make bench` does not run.
ALONE = ("engine-steps", "nodes", "preempt", "replicas", "stall", "suspend", "shares")


def documents(folder: Path = summary.RESULTS) -> list[Document]:
    """The summaries taken on real GPUs, newest model first."""
    found = summary.kept("bench", folder)
    alone = {kind: summary.kept(kind, folder) for kind in ALONE}
    return [
        document | {"name": name} | {kind: of.get(name) for kind, of in alone.items()}
        for name, document in found.items()
    ]


def page(found: Sequence[Document]) -> str:
    """The whole page."""
    return INTRODUCTION + "".join("\n" + _one(document) for document in found)


def _one(document: Document) -> str:
    parts = [f"## {document['gpu']['gpu']}", report.hardware(document)]
    if report.jobs_of(document):
        parts += [
            "### Checkpoint and restore",
            _taken(document, report.NAMES),
            "\n".join(report.checkpoint_table(document)),
            *plots.link(document, "phases", "where the time goes"),
        ]
    if steps := document.get("engine-steps"):
        parts += ["### Both engines", "\n".join(engines_table(steps))]
    for title, kind, table in (
        ("What a checkpoint costs a job that goes on", "stall", stall.table),
        ("Suspend, resume and swap", "suspend", suspend.table),
        ("A job that Slurm preempts", "preempt", preempt.table),
        ("Ranks that train one model", "replicas", replicas.table),
        ("Ranks on two nodes", "nodes", nodes.table),
    ):
        if of := document.get(kind):
            parts.append(f"### {title}")
            # One of suspensions has all its jobs itself.
            for one in [of] if kind == "suspend" else of["jobs"].values():
                parts += [*table(one).split("\n", 1), _measured(one)]
    for title, lines, section in (
        ("Each reduction on and off", breakdown_table(document), "breakdown"),
        ("Repeated images", periodic_table(document), "periodic"),
        ("Step time without and with FlowGPU", report.overhead_table(document), ""),
    ):
        if lines:
            parts += [f"### {title}", *([_taken(document, [section])] if section else [])]
            parts += ["\n".join(lines)]
    if shares := document.get("shares"):
        parts += ["### Processor time that FlowGPU takes", _shares(shares)]
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


def engines_table(document: Document) -> list[str]:
    """Each job, dumped and restored by each engine in turn; medians."""
    lines = [
        "| job | engine | rounds | pause, s | end CUDA, s | CRIU, s | restore, s | make CUDA, s | "
        "CPU side, MiB | image, MiB | measured |",
        f"|---|---|{'---:|' * 8}---|",
    ]
    seconds = (
        "pause_seconds",
        "strip_seconds",
        "criu_seconds",
        "restore_seconds",
        "engine_seconds",
    )
    for job, found in document["jobs"].items():
        for engine in ("replay", "native"):
            if of := found.get(engine):
                cells = [
                    job,
                    engine,
                    str(of["rounds"]),
                    *(report.number(of[key]) for key in seconds),
                ]
                cells += [f"{of[key] / MIB:.0f}" for key in ("cpu_bytes", "image_bytes")]
                cells.append(f"{found['date']} at {found['commit'][:12]}")
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _shares(document: Document) -> str:
    low, high = document["share_interval"]
    return (
        f"{document['job']}, prepared for {document['engine']}: FlowGPU's libraries take "
        f"{document['share_mean']:.2%} ({low:.2%} to {high:.2%} at 95 %) of the processor time of "
        f"a step, {document['ours_us_a_step']:.0f} us of {1000 * document['step_seconds']:.2f} ms "
        f"({document['processes']} processes, {document['date']} at {document['commit'][:12]}, "
        "`python -m bench.shares`)."
    )


def _measured(document: Document) -> str:
    return f"`{document['command']}`, {document['date']} at {document['commit'][:12]}."


def _taken(document: Document, names: Sequence[str] | dict[str, str]) -> str:
    """When the sections were measured, at which commits."""
    when = {
        one: None
        for name in names
        for one in document["sections"].get(name, {}).get("taken", {}).values()
    }
    return f"Measured {', '.join(sorted(when)) or document['date']}."


def _code(lines: Sequence[str]) -> list[str]:
    return ["```", *lines, "```"] if lines else []


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
    if parts:
        parts.insert(1, _taken(document, ["growth"]))
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

    A job has rows if FlowGPU's own run is there, which the others are compared with.
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
