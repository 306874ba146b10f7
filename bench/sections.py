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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.cpu_memory import of_image
from bench.deadline import Deadline
from bench.jobs import Measured
from bench.machine import ROOT, memory, wait_for_memory
from bench.units import Unit, measure
from bench.watch import PID_FILE, StepWatch
from tests.gpu.job import Job, difference
from tests.gpu.site import Site, Trouble

START_SECONDS = STEP_SECONDS = 180.0
SETTLE_SECONDS = 0.5
STEPS_BEFORE, STEPS_AFTER = 10, 3
FREE_MARGIN = 2 << 30

Say = Callable[[str], None]


@dataclass
class Bench:
    """What the sections share."""

    site: Site
    jobs: list[Measured]
    pairs: int
    overhead_jobs: list[str]
    overhead_blocks: int
    overhead_same_addresses: bool
    overhead_engine: str
    overhead_parts: list[str]
    small: bool  # the emulated GPU: few bytes
    mover_gib: float
    say: Say
    keep: Callable[[str, dict[str, Any]], None]  # saves a section, complete or not
    deadline: Deadline
    document: dict[str, Any]  # the results so far
    again: bool = False  # measure also what the results have
    points: int | None = None  # of each row of growth, at most
    growth_repeats: int = 2  # of each point
    breakdown_jobs: list[Measured] = field(default_factory=list)
    periodic_jobs: list[Measured] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what no time was left for
    _folders: list[Path] = field(default_factory=list)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder on the tmpfs, once the memory of the one before has come back."""
        with tempfile.TemporaryDirectory(dir=self.site.images, ignore_cleanup_errors=True) as name:
            before = memory("MemAvailable")
            self._folders.append(Path(name))
            try:
                yield Path(name)
            finally:
                self._folders.remove(Path(name))
        wait_for_memory(before - FREE_MARGIN, self.deadline.cap(60.0))

    def program(
        self, name: str, *words: str, seconds: float = 580.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of bench/ on the device, without FlowGPU. Raises Trouble if it fails."""
        command = [sys.executable, "-m", f"bench.{name}", *words]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.site.plain_environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        limit = self.deadline.cap(seconds)
        try:
            out, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise Trouble(f"bench.{name} took over {limit:.0f} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0:
            raise Trouble(f"bench.{name} ended with {process.returncode}: {error[-2000:]}")
        return subprocess.CompletedProcess(command, 0, out, error)

    def end_programs(self) -> None:
        """End bench's programs, FlowGPU's commands and peers' jobs: this process ends."""
        for process in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for folder in self._folders:
            end_job(folder)

    def until(self, seconds: float) -> float:
        """The moment in so many seconds, or when the time of this call is up."""
        return time.monotonic() + self.deadline.cap(seconds)

    def same_lines(self, job: str, found: list[str]) -> bool:
        """True if the steps that this run and the first one of the job share are equal."""
        known = self.document.setdefault("lines", {}).setdefault(job, found)
        count = min(len(known), len(found))
        return count > STEPS_BEFORE and difference(known[:count], found[:count]) is None


def end_job(folder: Path) -> None:
    """End the job that a peer's program has left there; there is none if that went well."""
    with suppress(OSError, ValueError):
        os.killpg(int((folder / PID_FILE).read_text()), signal.SIGKILL)


def rates(bench: Bench) -> dict[str, Any]:
    words = ["--mib", "64", "--write-mib", "256", "--repeats", "2"] if bench.small else []
    with bench.folder() as folder:
        found = json.loads(bench.program("rates", "--dir", str(folder), *words).stdout)
    for key in ("d2h_gbs", "h2d_gbs"):
        found[f"{key}_median"] = statistics.median(found[key])
    bench.say(f"pinned copies: {found['d2h_gbs_median']:.1f}, {found['h2d_gbs_median']:.1f} GB/s")
    return dict(found)


def flowgpu(bench: Bench) -> dict[str, Any]:
    return _flowgpu(bench, "flowgpu", "native")


def flowgpu_replay(bench: Bench) -> dict[str, Any]:
    """Measure FlowGPU with the replay engine."""
    return _flowgpu(bench, "flowgpu_replay", "replay")


def _flowgpu(bench: Bench, section: str, engine: str) -> dict[str, Any]:
    def unit(job: Measured) -> Unit:
        def once(folder: Path, number: int) -> dict[str, Any]:
            name = f"{job.workload}-{engine}-{number}"
            return flowgpu_once(bench, name, job.command, folder, engine=engine)

        return Unit(job.workload, job.repeats, job.about.flowgpu, once, {"lines_of": job.workload})

    return measure(bench, section, [unit(job) for job in bench.jobs])


def flowgpu_once(
    bench: Bench,
    name: str,
    command: list[str],
    folder: Path,
    options: Sequence[str] = (),
    engine: str = "auto",
) -> dict[str, Any]:
    """Run `command` for `engine`, dump it with `options`, restore it. Raises Trouble."""
    image = folder / "image"
    words = ("--engine", engine)
    job = Job(bench.site, name, command, folder, words)
    deadline = bench.until(START_SECONDS)
    try:
        job.start(deadline)
        with StepWatch(job.directory.output_log) as watch:
            if not job.wait_step(STEPS_BEFORE, deadline):
                raise Trouble("the job ended by itself")
            time.sleep(SETTLE_SECONDS)
            step_seconds = watch.step_seconds()
        paused = job.dump(image, bench.until(STEP_SECONDS), options=[*words, *options])
        if paused is None:
            raise Trouble("the job ended by itself")
        owners = of_image(image)
        last = job.last_step()
        with StepWatch(job.directory.output_log) as watch:
            began = time.monotonic()
            restored = job.restore(image, bench.until(STEP_SECONDS))
            came = watch.first_after(last, bench.deadline.cap(STEP_SECONDS))
            further = watch.first_after(last + STEPS_AFTER - 1, bench.deadline.cap(STEP_SECONDS))
            if came is None or further is None:
                raise Trouble("the restored job made no steps")
        lines = job.lines()
    finally:
        job.kill()
    copied = paused["gpu_bytes_stored"]
    drop = ("job", "image", "wall_seconds", "after_step")
    return {key: value for key, value in paused.items() if key not in drop} | {
        "cpu_bytes_by_owner": owners,
        "steps": last + 1,
        "step_seconds": step_seconds,
        "command_seconds": paused["wall_seconds"],
        "restore_seconds": restored["restore_seconds"],
        "restore_phases": restored["phases"],
        "restore_command_seconds": restored["wall_seconds"],
        "next_step_seconds": came - began,
        "dump_copy_gbs": _rate(copied, paused["phases"]["copy"]),
        "restore_copy_gbs": _rate(copied, restored["moved_seconds"]),
        "lines": lines,
    }


def _rate(size: int, seconds: float) -> float | None:
    return size / 1e9 / seconds if seconds > 0 else None


def peer(bench: Bench) -> dict[str, Any]:
    jobs = [(job, job.about.peer) for job in bench.jobs]
    return measure(bench, "peer", [_peer_unit(bench, "peer_nvidia", *job) for job in jobs])


def peer_torch_save(bench: Bench) -> dict[str, Any]:
    jobs = [(job, job.about.peer_torch_save) for job in bench.jobs]
    units = [_peer_unit(bench, "peer_torch_save", *job) for job in jobs if job[1] > 0]
    return measure(bench, "peer_torch_save", units)


def _peer_unit(bench: Bench, program: str, job: Measured, seconds: float) -> Unit:
    def once(folder: Path, _number: int) -> dict[str, Any]:
        words = ["--folder", str(folder), "--steps", str(STEPS_BEFORE), "--more", str(STEPS_AFTER)]
        try:
            done = bench.program(program, *words, "--", *job.command)
        finally:
            end_job(folder)
        return dict(json.loads(done.stdout))

    # The goal's comparison needs one run of a peer that takes a minute and more.
    repeats = 1 if seconds > 100 else job.repeats
    return Unit(job.workload, repeats, seconds, once, {"lines_of": job.workload})


def mover(bench: Bench) -> dict[str, Any]:
    """The copies of a checkpoint alone, by bench/mover_bench.py."""
    small = ["--arena-gib", "0.25", "--piece-mib", "4"] if bench.small else []
    words = ["--gib", str(bench.mover_gib), "--json", "--driver", str(bench.site.driver.libcuda)]
    with bench.folder() as folder:
        done = bench.program("mover_bench", "--dir", str(folder), *words, *small)
    return {"rows": rows_of(done.stdout)}


def rows_of(text: str) -> list[dict[str, Any]]:
    """The lines that are JSON objects."""
    rows = []
    for line in text.splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows
