"""Jobs that take turns on a GPU by `flowgpu swap`, a hundred times, print what they always print.

    python -m tests.faults.swaps [--gpu emulated|nvidia] [--engine replay|native] [--count N]
                                 [--jobs A,B[,C...]]... [--out FILE.json]

All jobs of a round but one are suspended. Each swap lets the next one in, and waits for a step of
it; every third keeps the contexts of CUDA. At the end each job prints the lines of a run without
FlowGPU. What its processes hold is looked at each time that the first job is back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import machine
from flowgpu.jobs import SUSPENDED
from tests.faults.lanes import lane_name
from tests.faults.soak import Meter, Sample
from tests.faults.soak_page import grows
from tests.gpu.catalogue import catalogue
from tests.gpu.harness import Baseline, run_plain
from tests.gpu.job import Job, difference
from tests.gpu.site import Site, Trouble
from workloads._common import LAST_STEPS

ROUNDS = {
    "emulated": ["segments,graphs", "small_allocs,textures,processes"],
    "nvidia": ["gpt2,jax_mlp", "resnet50_infer,gpt2_segments,openmm_water"],
}
STEPS_A_TURN, FEWEST_STEPS, STEP_DELAY = 10, 200, 0.1
KEPT_EACH = 3  # of so many swaps one keeps the contexts
SECONDS = 600.0
"""What a job's start, a step after a swap and a job's end may take on a busy machine, each."""


def state(job: Job) -> str:
    record = job.record()
    return record.shown_state if record else ""


def next_step(job: Job, steps: int) -> bool:
    """Wait for a step; False: it has said all that it says until it is hurried. Raises Trouble."""
    last = steps - LAST_STEPS - 1
    wanted = min(job.last_step() + 1, last)
    if not job.wait_step(wanted, time.monotonic() + SECONDS):
        raise Trouble(f"{job.name} has ended")
    return wanted < last


@contextmanager
def waiting(site: Site, names: Sequence[str], engine: str, steps: int) -> Iterator[list[Job]]:
    """A job of each workload; all but the first are suspended."""
    with ExitStack() as stack:
        jobs = []
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=site.images))
            command = catalogue()[name].command(steps, STEP_DELAY)
            job = Job(site, name.replace("_", "-"), command, folder, ["--engine", engine])
            stack.callback(job.kill)
            jobs.append(job)
        for job in reversed(jobs):
            job.start(time.monotonic() + SECONDS)
            next_step(job, steps)
            if job is not jobs[0]:
                site.call("suspend", job.name).succeeded()
        yield jobs


def swapped(site: Site, jobs: Sequence[Job], count: int, steps: int) -> Iterator[dict[str, Any]]:
    """What each swap says, with a sample of the first job when that is back."""
    meter = Meter(site, jobs[0].name)
    try:
        for number in range(count):
            out, into = (jobs[(number + more) % len(jobs)] for more in (0, 1))
            options = ["--keep-context"] if number % KEPT_EACH == KEPT_EACH - 1 else []
            report = site.call("swap", out.name, into.name, *options, "--json").json()
            if (run := [job.name for job in jobs if state(job) != SUSPENDED]) != [into.name]:
                raise Trouble(f"after swap {number + 1} these run: {', '.join(run)}")
            worked = next_step(into, steps)
            row = {"seconds": report["swap_seconds"], "kept": bool(options), "worked": worked}
            yield row | ({"sample": meter.sample()} if into is jobs[0] else {})
    finally:
        meter.close()


def end(site: Site, jobs: Sequence[Job], baselines: Sequence[Baseline], hurry: Path) -> list[str]:
    """What is different of the jobs' lines."""
    hurry.touch()
    wrong = []
    for job, baseline in zip(jobs, baselines, strict=True):
        if state(job) == SUSPENDED:
            site.call("resume", job.name).succeeded()
        if code := job.wait_end(time.monotonic() + SECONDS):
            wrong.append(f"{job.name} ended with {code}")
        if found := difference(baseline.lines, job.lines()):
            wrong.append(f"{job.name}: {found}")
    return wrong


def take_turns(site: Site, names: Sequence[str], engine: str, count: int) -> dict[str, Any]:
    """One round of jobs."""
    steps = max(STEPS_A_TURN * count // len(names), FEWEST_STEPS)
    hurry = site.images / f"{'-'.join(names)}.hurry"
    os.environ["WORKLOAD_HURRY"] = str(hurry)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    try:
        baselines = [
            run_plain(site, catalogue()[name], steps, time.monotonic() + SECONDS) for name in names
        ]
        with waiting(site, names, engine, steps) as jobs:
            for row in swapped(site, jobs, count, steps):
                rows.append(row)
                print(",".join(names), len(rows), row, flush=True)
            problems += end(site, jobs, baselines, hurry)
    except Trouble as trouble:
        problems.append(str(trouble))
    samples: list[Sample] = [row["sample"] for row in rows if "sample" in row]
    return {
        "jobs": list(names),
        "swaps": len(rows),
        "worked": sum(row["worked"] for row in rows),
        "seconds": statistics.median(row["seconds"] for row in rows) if rows else None,
        "grows": grows(samples) if samples else [],
        "samples": samples,
        "problems": problems,
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    with Site(options.gpu) as site:
        for words in options.jobs or ROUNDS[options.gpu]:
            names = words.split(",")
            lacking = [what for name in names if (what := catalogue()[name].missing())]
            if lacking:
                found.append({"jobs": names, "problems": [f"{lacking[0]} is not here"]})
            else:
                found.append(take_turns(site, names, options.engine, options.count))
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.swaps")
    parser.add_argument("--gpu", choices=["emulated", "nvidia"], default="emulated")
    parser.add_argument("--engine", choices=["native", "replay"], default="replay")
    parser.add_argument("--count", type=int, default=100, help="swaps of each round")
    parser.add_argument("--jobs", action="append", metavar="A,B", help="workloads; repeatable")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for words in options.jobs or ():
        unknown = sorted(set(words.split(",")) - set(catalogue()))
        if unknown or "," not in words:
            parser.error(f"--jobs {words} needs two workloads or more of the catalogue")
    return options


def main() -> int:
    options = parse()
    heading = machine.heading("swaps", machine.of_module("tests.faults.swaps"))
    rounds = run(options)
    if options.out:
        lane = lane_name(options.gpu, options.engine)
        options.out.write_text(json.dumps(heading | {"lane": lane, "rounds": rounds}) + "\n")
    for one in rounds:
        about = {key: value for key, value in one.items() if key != "samples"}
        print(json.dumps(about))
    return 1 if any(one["problems"] or one["grows"] for one in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
