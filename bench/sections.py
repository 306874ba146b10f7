"""The sections of a results file: each function takes its measurements and gives them as JSON."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine import ROOT, memory, wait_for_memory
from bench.watch import PID_FILE, StepWatch
from tests.gpu.job import Job, difference
from tests.gpu.site import Site, Trouble

START_SECONDS = STEP_SECONDS = 180.0
SETTLE_SECONDS = 0.5
STEPS_BEFORE, STEPS_AFTER = 10, 3
WARM_UP = 20
MANY_STEPS = 2000  # more than any measured job gets to
FREE_MARGIN = 2 << 30

Say = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A job that is checkpointed: a workload, its further options, and how often."""

    workload: str
    repeats: int
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        words = [sys.executable, f"workloads/{self.workload}.py", "--steps", str(MANY_STEPS)]
        return [*words, *self.options]


@dataclass
class Bench:
    """What the sections share."""

    site: Site
    jobs: list[Measured]
    pairs: int
    overhead_jobs: list[str]
    overhead_steps: int
    small: bool  # the emulated GPU: few bytes
    mover_gib: float
    say: Say
    keep: Callable[[str, dict[str, Any]], None]  # saves a section, complete or not
    lines: dict[str, list[str]]  # of the first run of each job, for the runs after it

    @contextmanager
    def folder(self) -> Any:
        """An empty folder on the tmpfs, once the memory of the one before has come back."""
        with tempfile.TemporaryDirectory(dir=self.site.images, ignore_cleanup_errors=True) as name:
            before = memory("MemAvailable")
            yield Path(name)
        wait_for_memory(before - FREE_MARGIN)

    def program(
        self, name: str, *words: str, seconds: float = 580.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of bench/ on the device, without FlowGPU. Raises Trouble if it fails."""
        command = [sys.executable, "-m", f"bench.{name}", *words]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.site.plain_environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode != 0:
            raise Trouble(f"bench.{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done

    def same_lines(self, job: str, found: list[str]) -> bool:
        """True if the steps that this run and the first one of the job share are equal."""
        known = self.lines.setdefault(job, found)
        count = min(len(known), len(found))
        return count > STEPS_BEFORE and difference(known[:count], found[:count]) is None


def rates(bench: Bench) -> dict[str, Any]:
    words = ["--mib", "64", "--write-mib", "256", "--repeats", "2"] if bench.small else []
    with bench.folder() as folder:
        found = json.loads(bench.program("rates", "--dir", str(folder), *words).stdout)
    for key in ("d2h_gbs", "h2d_gbs"):
        found[f"{key}_median"] = statistics.median(found[key])
    bench.say(f"pinned copies: {found['d2h_gbs_median']:.1f}, {found['h2d_gbs_median']:.1f} GB/s")
    return dict(found)


def flowgpu(bench: Bench) -> dict[str, Any]:
    return {"jobs": _repeat(bench, "flowgpu", _flowgpu_once)}


def peer(bench: Bench) -> dict[str, Any]:
    return {"jobs": _repeat(bench, "peer", _peer_once)}


def _repeat(
    bench: Bench, system: str, once: Callable[[Bench, Measured, Path, int], dict[str, Any]]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for job in bench.jobs:
        runs = found[job.workload] = []
        for number in range(job.repeats):
            try:
                with bench.folder() as folder:
                    run = once(bench, job, folder, number)
                run["identical"] = bench.same_lines(job.workload, run.pop("lines"))
            except (Trouble, subprocess.TimeoutExpired) as trouble:
                run = {"failed": str(trouble)}
            runs.append(run)
            bench.keep(system, {"jobs": found})
            bench.say(f"{system} {job.workload}: {_words(run)}")
    return found


def _words(run: dict[str, Any]) -> str:
    if "failed" in run:
        return str(run["failed"])
    return (
        f"paused {run['pause_seconds']:.2f} s, image {run['image_bytes'] / 2**30:.2f} GiB, restore "
        f"to the next step {run['next_step_seconds']:.2f} s"
        f"{'' if run['identical'] else ', LINES DIFFER'}"
    )


def _flowgpu_once(bench: Bench, measured: Measured, folder: Path, number: int) -> dict[str, Any]:
    image = folder / "image"
    job = Job(bench.site, f"{measured.workload}-{number}", measured.command, folder)
    deadline = time.monotonic() + START_SECONDS
    try:
        job.start(deadline)
        with StepWatch(job.directory.output_log) as watch:
            if not job.wait_step(STEPS_BEFORE, deadline):
                raise Trouble("the job ended by itself")
            time.sleep(SETTLE_SECONDS)
            step_seconds = watch.step_seconds()
        paused = job.dump(image, time.monotonic() + STEP_SECONDS)
        if paused is None:
            raise Trouble("the job ended by itself")
        last = job.last_step()
        with StepWatch(job.directory.output_log) as watch:
            began = time.monotonic()
            restored = job.restore(image, began + STEP_SECONDS)
            came = watch.first_after(last, STEP_SECONDS)
            if came is None or watch.first_after(last + STEPS_AFTER - 1, STEP_SECONDS) is None:
                raise Trouble("the restored job made no steps")
        lines = job.lines()
    finally:
        job.kill()
    copied = paused["gpu_bytes_stored"]
    drop = ("job", "image", "wall_seconds", "after_step")
    return {key: value for key, value in paused.items() if key not in drop} | {
        "steps": last + 1,
        "step_seconds": step_seconds,
        "command_seconds": paused["wall_seconds"],
        "restore_seconds": restored["restore_seconds"],
        "restore_phases": restored["phases"],
        "restore_command_seconds": restored["wall_seconds"],
        "next_step_seconds": came - began,
        "dump_copy_gbs": _rate(copied, paused["phases"]["copy"]),
        "restore_copy_gbs": _rate(copied, restored["phases"]["copy"]),
        "lines": lines,
    }


def _rate(size: int, seconds: float) -> float | None:
    return size / 1e9 / seconds if seconds > 0 else None


def _peer_once(bench: Bench, measured: Measured, folder: Path, number: int) -> dict[str, Any]:
    words = ["--folder", str(folder), "--steps", str(STEPS_BEFORE), "--more", str(STEPS_AFTER)]
    try:
        done = bench.program("peer_nvidia", *words, "--", *measured.command)
    finally:
        with suppress(OSError, ValueError):  # there only if the program was ended halfway
            os.killpg(int((folder / PID_FILE).read_text()), signal.SIGKILL)
    return dict(json.loads(done.stdout))


def overhead(bench: Bench) -> dict[str, Any]:
    """Median step time with and without FlowGPU, in pairs of changing order."""
    return {"jobs": {name: _pairs(bench, name) for name in bench.overhead_jobs}}


def _pairs(bench: Bench, name: str) -> dict[str, Any]:
    steps = WARM_UP + bench.overhead_steps
    words = ["--job", name, "--steps", str(steps)]

    def plain(_: int) -> str:
        return bench.program("step_time", *words).stdout

    def under_flowgpu(number: int) -> str:
        command = [sys.executable, "-m", "bench.step_time", *words]
        job = ["--name", f"overhead-{name}-{number}", "--gpu", bench.site.kind, "--", *command]
        return bench.site.call("run", *job).succeeded().stdout

    pairs = []
    for number in range(bench.pairs):
        order = [("plain", plain), ("flowgpu", under_flowgpu)]
        medians = {}
        for system, run in order if number % 2 == 0 else order[::-1]:
            seconds = json.loads(run(number).splitlines()[-1])["step_seconds"][WARM_UP:]
            medians[system] = statistics.median(seconds)
        pairs.append(medians | {"ratio": medians["flowgpu"] / medians["plain"]})
        bench.say(
            f"{name}: a step {medians['plain'] * 1000:.3f} ms, under FlowGPU "
            f"{medians['flowgpu'] * 1000:.3f} ms"
        )
    ratios = [pair["ratio"] for pair in pairs]
    return {
        "steps": bench.overhead_steps,
        "pairs": pairs,
        "ratio_mean": statistics.mean(ratios),
        "ratio_stdev": statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def mover(bench: Bench) -> dict[str, Any]:
    """The copies of a checkpoint alone, by bench/mover_bench.py."""
    small = ["--arena-gib", "0.25", "--piece-mib", "4"] if bench.small else []
    words = ["--gib", str(bench.mover_gib), "--json", "--driver", str(bench.site.driver.libcuda)]
    with bench.folder() as folder:
        done = bench.program("mover_bench", "--dir", str(folder), *words, *small)
    rows = []
    for line in done.stdout.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return {"rows": rows}


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "rates": rates,
    "flowgpu": flowgpu,
    "peer": peer,
    "overhead": overhead,
    "mover": mover,
}
