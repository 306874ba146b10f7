"""What the engines' ending of CUDA and making it anew take, step by step, and how they compare.

    python -m bench.engine_steps [--gpu nvidia|emulated] [--jobs gpt2,gpt2_xl] [--rounds N]
                                 [--engines replay,native] [--settle SECONDS] [--out FILE.json]

Each job is dumped and restored N times by each of the engines in turn, every time from what the one
before has restored. Milliseconds of each step of replay come from the coordinator's log
(docs/design/replay-engine.md), seconds of the phases and bytes from the commands' own reports. The
table that is printed last has the medians. A restore begins `settle` seconds after the dump, whose
ghost may still be unpinning memory, in which it holds the driver's lock.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.jobs import KNOWN, MANY_STEPS, About
from tests.faults.lanes import lane_name
from tests.gpu.site import Site, Trouble, many_pids

START_SECONDS, FIRST_LINES, ON_SECONDS = 300.0, 6, 1.0
MIB = 1 << 20
SMALL = About(("--step-delay", "0.05"))  # else it would be through before it is dumped


def steps(log: str, request: str) -> dict[str, float]:
    """Milliseconds of the steps of the last STRIP or REBUILD that the log tells of."""
    told = re.findall(rf"task \d+: {request}: (.*)", log)
    found = re.findall(r"([^,]+) ([0-9.]+) ms(?:, )?", told[-1] if told else "")
    return {step.strip(): float(value) for step, value in found}


def measure(site: Site, name: str, engines: Sequence[str], settle: float) -> list[dict[str, Any]]:
    """What each dump and restore of one workload said. Raises Trouble."""
    words = ["run", "--name", name, "--gpu", site.kind, "--engine", "auto", "--"]
    words += [sys.executable, f"workloads/{name}.py", "--steps", str(MANY_STEPS)]
    words += KNOWN.get(name, SMALL).options
    with open(os.devnull, "wb") as null, site.start(*words, stdout=null, stderr=null):
        try:
            return list(rows(site, name, engines, settle))
        finally:
            site.call("kill", name)


def rows(site: Site, name: str, engines: Sequence[str], settle: float) -> Iterator[dict[str, Any]]:
    """Dump and restore the job again and again. Raises Trouble."""
    deadline = time.monotonic() + START_SECONDS
    while len(site.call("logs", name).stdout.splitlines()) < FIRST_LINES:
        if time.monotonic() > deadline:
            raise Trouble(f"{name} does not start")
        time.sleep(0.5)
    log = site.registry.dir(site.registry.find(name).id).coordinator_log
    for number, engine in enumerate(engines):
        time.sleep(ON_SECONDS)
        image = site.images / f"{name}-{number}"
        words = ["pause-and-dump", name, "--engine", engine, "--output", str(image), "--json"]
        dump = site.call(*words).json()
        strip = steps(log.read_text(), "STRIP")
        time.sleep(settle)
        restore = site.call("restore", str(image), "--detach", "--json").json()
        rebuild = steps(log.read_text(), "REBUILD")
        shutil.rmtree(image)
        said = {"engine": engine, "dump": dump, "restore": restore}
        yield said | ({"strip": strip, "rebuild": rebuild} if engine == "replay" else {})


def table(jobs: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Medians of each job by each engine, a line each."""
    yield (
        f"{'job':20} {'engine':8} {'n':>2} {'pause':>6} {'strip':>6} {'restore':>7} {'rebuild':>7}"
        f" {'CPU MiB':>8} {'image MiB':>9}"
    )
    for name, found in jobs.items():
        for engine in dict.fromkeys(row["engine"] for row in found):
            of_engine = [row for row in found if row["engine"] == engine]

            def median(*keys: str, of: list[dict[str, Any]] = of_engine) -> float:
                return statistics.median(functools.reduce(dict.__getitem__, keys, r) for r in of)

            yield (
                f"{name:20} {engine:8} {len(of_engine):2}"
                f" {median('dump', 'pause_seconds'):6.2f} {median('dump', 'phases', 'strip'):6.3f}"
                f" {median('restore', 'restore_seconds'):7.2f}"
                f" {median('restore', 'phases', 'engine'):7.3f}"
                f" {median('dump', 'cpu_bytes') / MIB:8.0f}"
                f" {median('dump', 'image_bytes') / MIB:9.0f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--jobs", default="gpt2,gpt2_xl", help="workloads, joined by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="replay", help="replay, native, or both by a comma")
    parser.add_argument("--settle", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engines = options.engines.split(",") * options.rounds
    jobs: dict[str, Any] = {}
    document = machine.heading("engine-steps", machine.of_module("bench.engine_steps"))
    document |= {"gpu": lane_name(options.gpu, "native"), "jobs": jobs}
    with many_pids(), Site(options.gpu) as site:
        for name in options.jobs.split(","):
            jobs[name] = measure(site, name, engines, options.settle)
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(table(jobs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
