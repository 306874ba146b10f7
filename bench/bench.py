"""Measure FlowGPU on this machine and write bench/results/<gpu>-<date>.json.

    python bench/bench.py
    python bench/bench.py --only rates,flowgpu --jobs gpt2_xl --repeats 2
    python bench/bench.py --gpu emulated

A results file that exists keeps its other sections, so that the sections can be taken in several
calls; of `flowgpu` and `peer` also its other jobs. All images go to a tmpfs. Then
`python bench/report.py FILE` draws the chart; the tables are printed here too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As a script, Python looks in this folder first, where `bench` would be this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine, report
from bench.machine import ROOT
from bench.sections import SECTIONS, Bench, Measured
from flowgpu.errors import FlowError
from flowgpu.launch import GpuKind
from tests.gpu.site import Site

FORMAT = 1
JOBS: dict[GpuKind, str] = {"nvidia": "gpt2,gpt2_xl", "emulated": "digits_mlp"}
OVERHEAD_JOBS: dict[GpuKind, str] = {"nvidia": "gpt2,launches", "emulated": "launches"}
REPEATS = {"gpt2_xl": 2}
DEFAULT_REPEATS = 3
# Jobs without much to do would be through before they are dumped.
OPTIONS = {"digits_mlp": ("--step-delay", "0.02")}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, joined by commas")
    parser.add_argument("--jobs", help="workloads to checkpoint, joined by commas")
    parser.add_argument("--repeats", type=int, help="runs of each job, of either system")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs in overhead")
    parser.add_argument("--overhead-jobs", help="gpt2, launches")
    parser.add_argument("--overhead-steps", type=int, default=120)
    parser.add_argument("--mover-gib", type=float, help="GiB that the mover moves")
    parser.add_argument("--images", type=Path, help="where images go (default: a tmpfs)")
    parser.add_argument("--output", type=Path, help="results file (default: bench/results/...)")
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return options


def bench_of(site: Site, options: argparse.Namespace) -> Bench:
    kind: GpuKind = options.gpu
    names = (options.jobs or JOBS[kind]).split(",")
    small = kind == "emulated"
    return Bench(
        site=site,
        jobs=[
            Measured(
                name,
                options.repeats or REPEATS.get(name, DEFAULT_REPEATS),
                OPTIONS.get(name, ()),
            )
            for name in names
        ],
        pairs=options.pairs,
        overhead_jobs=(options.overhead_jobs or OVERHEAD_JOBS[kind]).split(","),
        overhead_steps=options.overhead_steps,
        small=small,
        mover_gib=options.mover_gib or (0.125 if small else 16.0),
        say=say,
        keep=lambda name, found: None,
        lines={},
    )


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def load(path: Path) -> dict[str, Any]:
    """The results in `path`, or an empty document."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {"format": FORMAT, "sections": {}}
    if document.get("format") != FORMAT:
        raise SystemExit(f"{path} has another format than {FORMAT}")
    return dict(document)


def add(document: dict[str, Any], name: str, found: dict[str, Any]) -> None:
    """Put a section into the results; jobs that were not measured again are kept."""
    before = document["sections"].get(name, {})
    if "jobs" in found and "jobs" in before:
        found = found | {"jobs": before["jobs"] | found["jobs"]}
    document["sections"][name] = found


def save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def without_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments less those that name folders of this machine."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--output", "--images"):
            next(words, None)
        elif not word.startswith(("--output=", "--images=")):
            kept.append(word)
    return kept


def keeper(
    document: dict[str, Any], path: Path, arguments: Sequence[str]
) -> Callable[[str, dict[str, Any]], None]:
    """What puts a section, finished or not, into the document and the document on the disk."""
    command = ["bench/bench.py", *without_paths(arguments)]

    def keep(name: str, found: dict[str, Any]) -> None:
        add(document, name, found | {"command": command})
        save(document, path)

    return keep


def all_good(found: dict[str, Any]) -> bool:
    """True if every run of the section was carried out and printed the same lines."""
    return all(run.get("identical") for runs in found["jobs"].values() for run in runs)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    today = datetime.date.today().isoformat()
    failed = []
    try:
        with Site(options.gpu, options.images) as site:
            site.end_when_terminated()
            bench = bench_of(site, options)
            rates = SECTIONS["rates"](bench)  # also names the GPU
            path = options.output or (
                ROOT / "bench" / "results" / f"{slug(rates['gpu'])}-{today}.json"
            )
            document = load(path)
            document |= {
                "date": today,
                "gpu": {key: rates[key] for key in ("gpu", "gpu_memory_bytes")},
                "kind": options.gpu,
                "commit": machine.commit(),
                "machine": machine.facts(),
            }
            bench.keep = keeper(document, path, arguments)
            bench.lines = document.setdefault("lines", {})
            if "rates" not in document["sections"]:
                bench.keep("rates", rates)
            for name in options.only.split(","):
                began = time.monotonic()
                try:
                    found = rates if name == "rates" else SECTIONS[name](bench)
                except Exception as error:
                    say(f"{name}: {error}")
                    traceback.print_exc()
                    failed.append(name)
                    continue
                bench.keep(name, found | {"seconds": time.monotonic() - began})
                if name in ("flowgpu", "peer") and not all_good(found):
                    failed.append(name)
    except FlowError as error:
        say(f"Error: {error}")
        return 2
    print(report.tables(document))
    say(f"results: {path}; bench/report.py draws its chart")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
