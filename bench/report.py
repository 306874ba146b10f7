"""Draw a results file and print its tables.

    python bench/report.py FILE.json [--no-chart]

The chart, FILE.png beside it, has where the time of a pause and of a restore goes, FlowGPU beside
the peers: NVIDIA's checkpoint API with CRIU, and torch.save with a restart.
Copies run beside other phases: drawn is only what the others do not hide, so that each bar is as
long as the whole.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GIB = 1 << 30
NAMES = {
    "flowgpu": "FlowGPU",
    "flowgpu_replay": "FlowGPU, replay engine",
    "peer": "NVIDIA API + CRIU",
    "peer_torch_save": "torch.save + restart",
}
# What a process of the overhead section runs with.
PARTS = {
    "flowgpu": "flowgpu run",
    "intercept": "intercept library alone",
    "stub": "and memory stub",
    "coordinator": "flowgpu run without the libraries",
    "vmm": "no FlowGPU, PyTorch's memory from cuMemCreate",
    "switched": "flowgpu run, against its own calls past it",
    "switched_stub": "the memory stub alone, likewise",
    "switched_heap": "replay's account of the driver's heap alone, likewise",
}
SLOWEST = 1.01
COLORS = {
    "cut": "#c6dbef",
    "gate": "#9ecae1",
    "handover": "#6baed6",
    "strip": "#74c476",
    "checkpoint": "#31a354",
    "criu": "#fd8d3c",
    "copy": "#3182bd",
    "commit": "#756bb1",
    "save": "#e6550d",
    "sync": "#a63603",
    "start": "#fdae6b",
    "load": "#e6550d",
    "step": "#fdd0a2",
    "verify": "#bcbddc",
    "engine": "#74c476",
    "restore": "#31a354",
    "mapback": "#6baed6",
    "other": "#bdbdbd",
}
LEGEND = {
    "copy": "GPU copy, as far as not hidden",
    "checkpoint": "driver: GPU to host memory",
    "cut": "ranks of NCCL catch up",
    "restore": "driver: host memory to GPU",
    "strip": "strip CUDA off",
    "engine": "bring CUDA back",
    "criu": "CRIU",
    "save": "torch.save",
    "start": "program start",
    "load": "torch.load",
    "other": "all else",
}
SHOWN = {
    "pause": (
        *("cut", "gate", "handover", "strip", "checkpoint", "criu", "copy", "commit"),
        *("save", "sync"),
    ),
    "restore": ("verify", "criu", "copy", "engine", "restore", "mapback", "start", "load", "step"),
}
Run = dict[str, Any]


def runs_of(document: dict[str, Any], system: str, job: str) -> list[Run]:
    """The runs that did not fail."""
    jobs = document["sections"].get(system, {}).get("jobs", {})
    return [run for run in jobs.get(job, ()) if "failed" not in run]


def jobs_of(document: dict[str, Any]) -> list[str]:
    """Every checkpointed job, in the order of the file."""
    found: dict[str, None] = {}
    for system in NAMES:
        for job in document["sections"].get(system, {}).get("jobs", {}):
            if runs_of(document, system, job):
                found[job] = None
    return list(found)


def median(runs: Sequence[Run], key: Callable[[Run], float | None]) -> float | None:
    values = [value for run in runs if (value := key(run)) is not None]
    return statistics.median(values) if values else None


def parts(run: Run, what: str) -> dict[str, float]:
    """Seconds of a pause or a restore by phase; their sum is the whole."""
    if what == "pause":
        whole, phases = run["pause_seconds"], dict(run["phases"])
        phases.pop("prepare", None)  # before the pause
        copy = phases.pop("copy", 0.0)
        # Beside strip, CRIU and commit: what is left of the pause is what was waited for.
        phases["copy"] = min(copy, max(whole - sum(phases.values()), 0.0))
    else:
        whole, phases = run["next_step_seconds"], dict(run["restore_phases"])
        # The GPU's side runs beside these two, and what follows waits for both sides.
        beside = phases.pop("copy", 0.0) + phases.pop("ghost", 0.0)
        phases["copy"] = max(beside - phases.get("verify", 0.0) - phases.get("criu", 0.0), 0.0)
        if "open" in phases:
            phases["mapback"] += phases.pop("open")
    found = {name: phases.get(name, 0.0) for name in SHOWN[what]}
    found["other"] = max(whole - sum(found.values()), 0.0)
    return found


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def share(rate: float | None, limit: float | None) -> str:
    """A rate and what part of the limit it is."""
    if rate is None:
        return "-"
    return f"{rate:.1f} ({rate / limit:.0%})" if limit else f"{rate:.1f}"


def checkpoint_table(document: dict[str, Any]) -> list[str]:
    lines = [
        "| job | system | runs | pause, s | of it CRIU, s | image, GiB | of it CPU side, GiB | "
        "restore to next step, s | copy out, GB/s (of pinned) | copy in, GB/s (of pinned) | "
        "identical |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for job in jobs_of(document):
        for system, title in NAMES.items():
            runs = runs_of(document, system, job)
            if not runs:
                if reason := _failure(document, system, job):
                    lines.append(f"| {job} | {title} | 0 | failed: {reason}{' | -' * 7} |")
                continue
            cells = [
                job,
                title,
                str(len(runs)),
                number(median(runs, lambda run: run["pause_seconds"])),
                number(median(runs, lambda run: run["phases"].get("criu"))),
                number(median(runs, lambda run: run["image_bytes"] / GIB)),
                number(median(runs, _cpu_gib)),
                number(median(runs, lambda run: run["next_step_seconds"])),
                share(median(runs, lambda run: _rate(run, "dump")), _pinned(document, runs, "d2h")),
                share(
                    median(runs, lambda run: _rate(run, "restore")), _pinned(document, runs, "h2d")
                ),
                "yes" if all(run["identical"] for run in runs) else "**no**",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _failure(document: dict[str, Any], system: str, job: str) -> str | None:
    """Why the last run of a job failed, in a line; None if there was none."""
    runs = document["sections"].get(system, {}).get("jobs", {}).get(job, [])
    said = [line for line in runs[-1]["failed"].splitlines() if line] if runs else []
    kept = [line for line in said if not line.startswith("hint:")]
    return re.sub(r"^.*?(?:Error: |errors\.\w+: )", "", kept[-1]) if kept else None


def _cpu_gib(run: Run) -> float | None:
    return run["cpu_bytes"] / GIB if "cpu_bytes" in run else None


def _rate(run: Run, what: str) -> float | None:
    value = run.get(f"{what}_copy_gbs")
    return None if value is None else float(value)


def _pinned(document: dict[str, Any], runs: Sequence[Run], way: str) -> float | None:
    """GB/s of a plain copy of pinned memory, on the machine of that day where the runs tell it."""
    told = runs[-1].get("pinned_gbs")
    if told:
        return told[way == "h2d"]
    rates = document["sections"].get("rates", {})
    return rates.get(f"{way}_gbs_median")


def overhead_table(document: dict[str, Any]) -> list[str]:
    lines = [
        "| job | with | pairs | step, ms | with it, ms | ratio: mean | at 95 % | from | to | "
        "at most 1 % slower | plain ones differ by | measured |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for job, found in document["sections"].get("overhead", {}).get("jobs", {}).items():
        for name, part in {"flowgpu": found, **found.get("parts", {})}.items():
            lines.append(f"| {job} | {PARTS[name]} | {' | '.join(_overhead_cells(part))} |")
    return lines if len(lines) > 2 else []


def summed(found: dict[str, Any]) -> dict[str, Any]:
    """What a table shows of pairs of processes: their number and medians in place of each."""
    pairs = found["pairs"]
    if isinstance(pairs, int):
        return found
    kept = {key: value for key, value in found.items() if key not in ("pairs", "parts")}
    medians = {key: statistics.median(pair[key] for pair in pairs) for key in ("plain", "flowgpu")}
    return kept | {"pairs": len(pairs)} | medians


def _overhead_cells(found: dict[str, Any]) -> list[str]:
    found = summed(found)
    low, high = found.get("ratio_low"), found.get("ratio_high")
    interval = verdict = "-"
    if low is not None and high is not None:
        interval = f"{low:.4f} to {high:.4f}"
        verdict = "yes" if high <= SLOWEST else "**no**" if low > SLOWEST else "open"
    spread = found.get("plain_stdev")
    return [
        str(found["pairs"]),
        number(1000 * found["plain"], 3),
        number(1000 * found["flowgpu"], 3),
        number(found["ratio_mean"], 4),
        interval,
        number(found["ratio_min"], 4),
        number(found["ratio_max"], 4),
        verdict,
        "-" if spread is None else f"{100 * spread:.2f} %",
        found.get("taken", "now"),
    ]


def calls_table(document: dict[str, Any], section: str = "calls") -> list[str]:
    """Nanoseconds that the intercept library adds to a call."""
    found = document["sections"].get(section, {}).get("nanoseconds", {})
    if not found:
        return []
    threads = sorted({count for by_threads in found.values() for count in by_threads}, key=int)
    lines = [
        f"| call | {' | '.join(f'{count} threads' for count in threads)} |".replace(
            "| 1 threads", "| 1 thread"
        ),
        f"|---|{'---:|' * len(threads)}",
    ]
    for name, by_threads in found.items():
        cells = [number(by_threads.get(count), 1) for count in threads]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def hardware(document: dict[str, Any]) -> str:
    """What it was measured on."""
    machine, gpu = document["machine"], document["gpu"]
    rates = document["sections"].get("rates", {})
    words = [
        f"{gpu['gpu']} ({gpu['gpu_memory_bytes'] / GIB:.0f} GiB)",
        f"{machine['cores']} cores of {machine['cpu']}",
        f"{machine['memory_bytes'] / GIB:.0f} GiB of memory",
        f"Linux {machine['kernel']}",
        *([f"driver {machine['driver']}"] if machine.get("driver") else []),
        f"CRIU {machine['criu']}",
    ]
    if "d2h_gbs_median" in rates:
        out, back = rates["d2h_gbs_median"], rates["h2d_gbs_median"]
        words.append(f"pinned copies {out:.1f} GB/s out, {back:.1f} GB/s in")
    return f"{', '.join(words)}. Images on a tmpfs; medians."


def tables(document: dict[str, Any]) -> str:
    """Markdown for the README."""
    blocks = [[hardware(document)]]
    if jobs_of(document):
        blocks.append(checkpoint_table(document))
    blocks += [
        overhead_table(document),
        calls_table(document),
        calls_table(document, "calls_replay"),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def middle(runs: Sequence[Run], key: str) -> Run:
    """The run whose `key` is the median; of an even number, the lower one of the middle."""
    return sorted(runs, key=lambda run: float(run[key]))[(len(runs) - 1) // 2]


def pyplot() -> Any:
    """matplotlib's pyplot, without a display and with the same bytes each time."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "flowgpu"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot as result

    return result


def chart(document: dict[str, Any], path: Path, metadata: dict[str, Any] | None = None) -> None:
    """Stacked bars of pause and restore, FlowGPU beside the peers, one panel a job and kind."""
    plot = pyplot()
    jobs = jobs_of(document)
    figure, axes = plot.subplots(
        len(jobs), 2, figsize=(12, 1.2 + 1.5 * len(jobs)), squeeze=False, layout="constrained"
    )
    drawn: dict[str, Any] = {}
    for line, job in enumerate(jobs):
        for column, (what, key) in enumerate(
            (("pause", "pause_seconds"), ("restore", "next_step_seconds"))
        ):
            panel = axes[line][column]
            panel.set_title(f"{job}: {'pause' if what == 'pause' else 'restore to next step'}")
            for system, title in reversed(NAMES.items()):
                runs = runs_of(document, system, job)
                if runs:
                    _bar(panel, title, parts(middle(runs, key), what), drawn)
            panel.margins(x=0.12)
            panel.set_xlabel("seconds")
    order = [name for name in COLORS if name in drawn]
    figure.legend(
        [drawn[name] for name in order],
        [LEGEND.get(name, name) for name in order],
        loc="outside lower center",
        ncols=min(len(order), 6) or 1,
        frameon=False,
    )
    figure.suptitle(document["gpu"]["gpu"])
    figure.savefig(path, dpi=120, metadata=metadata)
    plot.close(figure)


def _bar(panel: Any, title: str, seconds: dict[str, float], drawn: dict[str, Any]) -> None:
    left = 0.0
    for name, value in seconds.items():
        if value > 0:
            bars = panel.barh(title, value, left=left, color=COLORS[name], height=0.6)
            drawn.setdefault(name, bars)
            left += value
    panel.text(left, title, f" {left:.2f} s", va="center")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--no-chart", action="store_true", help="only print the tables")
    options = parser.parse_args()
    for path in options.results:
        document = json.loads(path.read_text())
        print(tables(document))
        if not options.no_chart and jobs_of(document):
            chart(document, path.with_suffix(".png"))
            print(f"chart: {path.with_suffix('.png')}", file=sys.stderr)


if __name__ == "__main__":
    main()
