"""What a checkpoint of a job that is left running costs it: blocks of steps with and without one.

    python -m bench.stall [--gpu nvidia|emulated] [--job gpt2] [--modes any,stop] [--rounds N]
                          [--seconds S] [--out FILE.json]

A round has a block of steps without a checkpoint and one for each mode, in an order that changes
from round to round. A whole checkpoint fits in a block. What a block takes longer than the one
without is all that the checkpoint costs: the stall, and what runs beside the job. The longest step
tells of the stall alone. Each image has a store of its own, so that it shares nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bench import machine, step_time
from bench.overhead import SKIPPED_STEPS, mean_interval
from bench.step_time import JOBS, SMALL_JOBS, WARM_UP, XL_WARM_UP
from flowgpu.vocabulary import MODE_CHOICES
from tests.faults.lanes import lane_name
from tests.gpu.site import Site, Trouble

NAME = "stall"
NONE = "none"
START_SECONDS, BLOCK_SECONDS, END_SECONDS = 180.0, 300.0, 20.0
LOOK_SECONDS = 0.005
ROOM = 1.5
"""How much longer a block is than a checkpoint."""
TOLD = ("stall_seconds", "freeze_seconds", "hold_seconds", "drain_seconds", "total_seconds")


class Job:
    """A process under FlowGPU that makes steps when it is asked to, by files: a connection to us
    could be in no image."""

    def __init__(self, site: Site, job: str, folder: Path, name: str = NAME) -> None:
        """Raises Trouble when it does not start."""
        self._site, self._folder, self._asked, self.name = site, folder, 0, name
        command = [sys.executable, "-m", "bench.stall", "--gpu", site.kind, "--job", job]
        words = ["run", "--name", name, "--gpu", site.kind, "--engine", "replay"]
        with (folder / "log").open("wb") as said:
            self._process = site.start(
                *words, "--", *command, "--worker", str(folder), stdout=said, stderr=said
            )

    def steps(self, count: int, seconds: float = BLOCK_SECONDS) -> list[float]:
        """Seconds of each of so many. Raises Trouble when they do not come."""
        write(self._folder / f"ask-{self._asked}", str(count))
        answer = self._folder / f"answer-{self._asked}"
        self._asked += 1
        end = time.monotonic() + seconds
        while not answer.exists():
            if self._process.poll() is not None or time.monotonic() >= end:
                raise Trouble(f"no steps: {(self._folder / 'log').read_text()[-2000:]}")
            time.sleep(LOOK_SECONDS)
        return [float(word) for word in answer.read_text().split()]

    def end(self) -> None:
        """Have it end, or kill it."""
        write(self._folder / f"ask-{self._asked}", "0")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        if self._process.poll() is None:
            self._site.call("kill", self.name, seconds=END_SECONDS)
            self._process.kill()
            self._process.wait()


def write(path: Path, text: str) -> None:
    """In one piece."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def work(job: str, folder: Path, small: bool) -> None:
    """Make steps when a file asks for some."""
    step = (JOBS | SMALL_JOBS if small else JOBS)[job]()
    for _ in range(XL_WARM_UP if job == "gpt2_xl" else WARM_UP):
        step()
    gc.collect()
    gc.disable()
    for number in itertools.count():
        ask = folder / f"ask-{number}"
        while not ask.exists():
            time.sleep(LOOK_SECONDS)
        if not (count := int(ask.read_text())):
            return
        steps = step_time.block(step, count)["step_seconds"]
        write(folder / f"answer-{number}", " ".join(map(str, steps)))


@contextmanager
def running(site: Site, job: str, name: str = NAME) -> Iterator[Job]:
    """The job, warmed up."""
    with tempfile.TemporaryDirectory(prefix="flowgpu-turns-") as folder:
        made = Job(site, job, Path(folder), name)
        try:
            yield made
        finally:
            made.end()


def checkpoint(site: Site, mode: str) -> dict[str, Any]:
    """Take one, and remove the image. Raises Trouble."""
    store = Path(tempfile.mkdtemp(dir=site.images))
    words = ["--store", str(store), "--every", "3600", "--count", "1", "--mode", mode, "--json"]
    try:
        return site.call("checkpoint", NAME, *words, "--engine", "replay").json()
    finally:
        shutil.rmtree(store)


def block(job: Job, site: Site, mode: str, count: int) -> dict[str, Any]:
    """A block of steps, with a checkpoint in that mode or none."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        under_way: Future[dict[str, Any]] | None = None
        if mode != NONE:
            under_way = pool.submit(checkpoint, site, mode)
        steps = job.steps(count)
        in_time = under_way is None or under_way.done()
        report = under_way.result() if under_way else {}
    # The first steps of a block have caches that another process has used.
    return {
        "mode": mode,
        "seconds": sum(steps[SKIPPED_STEPS:]),
        "longest": max(steps[SKIPPED_STEPS:]),
        "usual": statistics.median(steps),
        "in_time": in_time,
        **{key: report.get(key) for key in (*TOLD, "rung", "rung_reason", "phases")},
    }


def measure(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds of blocks. Raises Trouble."""
    modes = [NONE, *options.modes.split(",")]
    with running(site, options.job) as job:
        step = statistics.median(job.steps(2 * SKIPPED_STEPS, START_SECONDS))
        began = time.monotonic()
        for mode in modes[1:]:  # the first of a mode finds less prepared than those after it
            block(job, site, mode, SKIPPED_STEPS + 1)
        longest = (time.monotonic() - began) / len(modes[1:])
        seconds = options.seconds or ROOM * longest
        count = SKIPPED_STEPS + max(math.ceil(seconds / step), 2 * SKIPPED_STEPS)
        rounds = []
        for number in range(options.rounds):
            order = modes[number % len(modes) :] + modes[: number % len(modes)]
            order = order[::-1] if number // len(modes) % 2 else order
            rounds.append({mode: block(job, site, mode, count) for mode in order})
    return {
        "step_seconds": step,
        "block_steps": count - SKIPPED_STEPS,
        "modes": {mode: summary(rounds, mode) for mode in modes[1:]},
        "rounds": rounds,
    }


def summary(rounds: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """What a checkpoint in that mode costs, in the mean."""
    costs = [one[mode]["seconds"] - one[NONE]["seconds"] for one in rounds]
    found = [one[mode] for one in rounds]
    told = {key: [one[key] for one in found if one[key] is not None] for key in TOLD}
    return {
        "cost_seconds": statistics.mean(costs),
        "cost_median": statistics.median(costs),
        "cost_interval": mean_interval(costs),
        "longest_step": statistics.median(one["longest"] - one["usual"] for one in found),
        "rungs": sorted({one["rung"] for one in found}),
        "late": sum(not one["in_time"] for one in found),
        **{key: statistics.median(values) if values else None for key, values in told.items()},
    }


def table(document: dict[str, Any]) -> str:
    """One line a mode, in milliseconds."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.1f}"

    lines = [
        f"{document['job']}: steps of {ms(document['step_seconds'])} ms, blocks of "
        f"{document['block_steps']}, {len(document['rounds'])} rounds; milliseconds",
        "| mode | rung | whole cost (95 %) | median | longest "
        "| stall | freeze | hold | drain | total |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for mode, row in document["modes"].items():
        low, high = row["cost_interval"]
        told = " | ".join(ms(row[key]) for key in TOLD)
        lines.append(
            f"| {mode} | {', '.join(row['rungs'])} | {ms(row['cost_seconds'])} ({ms(low)} to "
            f"{ms(high)}) | {ms(row['cost_median'])} | {ms(row['longest_step'])} | {told} |"
        )
        if row["late"]:
            lines.append(f"{row['late']} checkpoints in mode {mode} ended after their blocks")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.stall")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--job", choices=JOBS, default="gpt2")
    parser.add_argument("--modes", default="any,stop", help=f"of {', '.join(MODE_CHOICES)}")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, help="of a block (default: a checkpoint's, x 1.5)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.modes.split(",")) - set(MODE_CHOICES):
        parser.error(f"no mode {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = parse()
    if options.worker:
        work(options.job, options.worker, small=options.gpu == "emulated")
        return 0
    document = machine.heading("stall", machine.of_module("bench.stall"))
    document |= {key: getattr(options, key) for key in ("gpu", "job", "modes")}
    document["lane"] = lane_name(options.gpu, "native")
    with Site(options.gpu) as site:
        document |= measure(site, options)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
