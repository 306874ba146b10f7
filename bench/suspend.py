"""How long a job is away from its GPU and back: suspend, resume and swap.

    python -m bench.suspend [--gpu nvidia|emulated] [--jobs gpt2,gpt2_xl] [--cycles N]
                            [--out FILE.json]

Each job is suspended and resumed in cycles, by turns with everything given back and with its
contexts kept. While it is suspended it is asked for a step: the time from the command to that
step's end is what a user waits. Then another such job comes, and the two are swapped. The first
cycle of a kind prepares memory of the host that the others find, so it is told by itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import machine
from bench.overhead import SKIPPED_STEPS
from bench.stall import START_SECONDS, Job, running
from bench.step_time import JOBS
from tests.faults.lanes import lane_name
from tests.gpu.site import Site

FULL, KEPT = "all given back", "contexts kept"
OPTIONS = {FULL: (), KEPT: ("--keep-context",)}
PAUSE_SECONDS = 2.0
"""A job stays suspended for so long: what ends behind the command has ended then, and the ghost of
the resume is ready."""


def asked(site: Site, *words: str) -> tuple[dict[str, Any], float]:
    """The report of a command, and its seconds. Raises Trouble."""
    called = site.call(*words, "--json")
    return called.json(), called.seconds


def cycle(job: Job, site: Site, how: str) -> dict[str, float]:
    """Away and back. Raises Trouble."""
    away, away_seconds = asked(site, "suspend", job.name, *OPTIONS[how])
    with ThreadPoolExecutor(max_workers=1) as pool:
        stepped = pool.submit(job.steps, 1)
        time.sleep(PAUSE_SECONDS)
        began = time.monotonic()
        back, back_seconds = asked(site, "resume", job.name)
        stepped.result()
        next_step = time.monotonic() - began
    return {
        "suspend": away["suspend_seconds"],
        "suspend_command": away_seconds,
        "resume": back["resume_seconds"],
        "resume_command": back_seconds,
        "next_step": next_step,
        "copy_out": away["copy_seconds"],
        "copy_in": back["phases"]["copy"],
        "bytes": back["gpu_bytes_stored"],
        **{f"out_{name}": value for name, value in away["phases"].items()},
        **{f"in_{name}": value for name, value in back["phases"].items()},
    }


def swap(out: Job, into: Job, site: Site) -> dict[str, float]:
    """One gives way to the other. Raises Trouble."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        stepped = pool.submit(into.steps, 1)
        time.sleep(PAUSE_SECONDS)
        began = time.monotonic()
        found, seconds = asked(site, "swap", out.name, into.name)
        stepped.result()
        next_step = time.monotonic() - began
    return {"swap": found["swap_seconds"], "swap_command": seconds, "next_step": next_step}


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Median of each number over the rows, without the first row where there are others."""
    rows = rows[1:] or rows
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def measure(site: Site, name: str, cycles: int) -> dict[str, Any]:
    """All of one kind of job. Raises Trouble."""
    with running(site, name, "first") as first:
        first.steps(2 * SKIPPED_STEPS, START_SECONDS)
        rows: dict[str, list[dict[str, float]]] = {how: [] for how in OPTIONS}
        for _ in range(cycles):
            for how, found in rows.items():
                found.append(cycle(first, site, how))
        asked(site, "suspend", first.name)
        with running(site, name, "second") as second:
            second.steps(2 * SKIPPED_STEPS, START_SECONDS)
            swaps = []
            for _ in range(cycles):
                swaps.append(swap(second, first, site))
                swaps.append(swap(first, second, site))
            asked(site, "suspend", second.name)
            asked(site, "resume", first.name)
            first.steps(1)
            asked(site, "suspend", first.name)
            asked(site, "resume", second.name)
        asked(site, "resume", first.name)
    return {
        "ways": {how: medians(found) for how, found in rows.items()},
        "first": {how: found[0] for how, found in rows.items()},
        "swap": medians(swaps),
        "cycles": rows,
        "swaps": swaps,
    }


def table(document: dict[str, Any]) -> str:
    """One line a job and way, in seconds."""
    lines = [
        f"medians of {document['cycle_count']} cycles, seconds (the first suspension by itself)",
        "| job | way | GB | suspend (command; first) | resume (command) | to the next step |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for job, found in document["jobs"].items():
        for how, row in found["ways"].items():
            first = found["first"][how]["suspend_command"]
            lines.append(
                f"| {job} | {how} | {row['bytes'] / 1e9:.1f} | {row['suspend']:.2f} "
                f"({row['suspend_command']:.2f}; {first:.2f}) | {row['resume']:.2f} "
                f"({row['resume_command']:.2f}) | {row['next_step']:.2f} |"
            )
        row = found["swap"]
        lines.append(
            f"| {job} | swap | | | {row['swap']:.2f} ({row['swap_command']:.2f}) "
            f"| {row['next_step']:.2f} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.suspend")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--jobs", default="gpt2,gpt2_xl", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--cycles", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if unknown := set(options.jobs.split(",")) - set(JOBS):
        parser.error(f"no job {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = parse()
    document = machine.heading("suspend", machine.of_module("bench.suspend"))
    document |= {"gpu": options.gpu, "cycle_count": options.cycles, "jobs": {}}
    document["lane"] = lane_name(options.gpu, "native")
    with Site(options.gpu) as site:
        for name in options.jobs.split(","):
            document["jobs"][name] = measure(site, name, options.cycles)
            if options.out:  # what there is, should the next job fail
                options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
