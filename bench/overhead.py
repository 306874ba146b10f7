"""What FlowGPU adds to a step of a job, measured so that it can tell 1 % from nothing.

Two runs of the same program, one behind the other, differ by up to 10 % on a shared machine, so all
processes of a job are alive at once and take turns: each makes a block of steps, then the
next one does, in an order that changes from round to round. The machine's own ups and downs meet
neighbouring blocks alike, and the ratio of two neighbours is free of them. What a process has by
chance for all its life (addresses) is seen between the pairs of processes, which
are therefore what the confidence interval is taken over; how far the plain processes differ among
themselves is reported too. Where other machines on the same host take turns with this one, a block
may be a tenth slower than the next: so the same is told of the quiet steps, the tenth of all steps
of a process that was disturbed least.

Beside `flowgpu run`, parts of it tell where a slowdown comes from:

intercept    the intercept library alone
stub         the intercept library and the memory stub, without a coordinator
coordinator  `flowgpu run` of a program that drops both libraries
vmm          no FlowGPU, but PyTorch's own memory from cuMemCreate (expandable segments)
switched     `flowgpu run`, against the same process while its calls go to the driver (switch.py),
             step by step in turns, so that the machine's ups and downs are those of both; beside
             it, as `switched_stub` and `switched_heap`, the memory stub alone and replay's account
             of the driver's heap alone
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench import machine
from bench.machine import ROOT
from bench.switch import MODES
from flowgpu import launch
from tests.gpu.site import Trouble

if TYPE_CHECKING:
    from bench.sections import Bench

PLAIN, FLOWGPU = "plain", "flowgpu"
INTERCEPT, STUB, COORDINATOR = "intercept", "stub", "coordinator"
VMM, SWITCHED = "vmm", "switched"
SWITCHED_PARTS = ("switched_stub", "switched_heap")
PARTS = (INTERCEPT, STUB, COORDINATOR, VMM, SWITCHED)
RUN = (FLOWGPU, COORDINATOR, SWITCHED)  # by `flowgpu run`
PYTORCH_JOBS = ("gpt2", "gpt2_short", "gpt2_xl", "resnet50")
PART_PAIRS = 6
SWITCHED_PROCESSES = 11  # each is a pair by itself
PAIRS_AT_ONCE = {"gpt2_xl": 1}  # of these the GPU holds no more
OTHERS_AT_ONCE = 14
BLOCK_SECONDS = 0.4
FEWEST_STEPS = 3
COUNTED_STEPS = 4
# At the beginning of each block: the caches and the GPU are still another process's, which no job
# meets that has its processor to itself.
SKIPPED_STEPS = 4
START_SECONDS = 150.0
BLOCK_LIMIT_SECONDS = 60.0
END_SECONDS = 20.0
# About: until all processes of a job wait for their turns, a block, and a whole job in small.
READY_SECONDS, SMALL_JOB_SECONDS = 25.0, 15.0
TURN_SECONDS = {"gpt2_xl": 2.2}
OTHERS_TURN_SECONDS = 0.6
# Student's t gives a 95 % interval, both sides, by degrees of freedom from 1.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def overhead(bench: Bench) -> dict[str, Any]:
    """Step times without and with FlowGPU, of processes that take turns."""
    before = {} if bench.again else bench.document["sections"].get("overhead", {}).get("jobs", {})
    found = dict(before)
    troubles = []
    for name in bench.overhead_jobs:
        title = name if bench.overhead_engine == "native" else f"{name}, {bench.overhead_engine}"
        known = found.get(title, {})
        if known.get("blocks") and len(known["pairs"]) >= bench.pairs:
            continue
        if not bench.deadline.fits(_seconds(bench, name)):
            bench.missing.append(f"overhead {title}")
            continue
        try:
            found[title] = _job(bench, name)
        except Trouble as trouble:
            troubles.append(trouble)
            continue
        bench.keep("overhead", {"jobs": found})
        bench.say(f"overhead {title}: {_words(found[title])}")
    if troubles:
        raise troubles[0]
    return {"jobs": found}


def _seconds(bench: Bench, job: str) -> float:
    if bench.small:
        return SMALL_JOB_SECONDS
    parts = _parts(bench, job, range(bench.pairs))
    # A switched process makes each block once in every mode.
    blocks = sum(len(MODES) if part == SWITCHED else 1 for part, _ in parts) + 2 * bench.pairs
    turns = blocks * bench.overhead_blocks * TURN_SECONDS.get(job, OTHERS_TURN_SECONDS)
    return math.ceil(bench.pairs / PAIRS_AT_ONCE.get(job, OTHERS_AT_ONCE)) * READY_SECONDS + turns


@dataclass
class Worker:
    """A process of bench/step_time.py. `group` is the number of the pair it belongs to."""

    variant: str
    group: int
    process: subprocess.Popen[bytes]
    log: Path
    connection: socket.socket | None = None
    blocks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.group}"

    def trouble(self, what: str) -> Trouble:
        said = self.log.read_text(errors="replace")[-2000:]
        return Trouble(f"{self.name} {what}: {said}")

    def run(self, steps: int, how: str = "") -> dict[str, Any]:
        """Have it make a block of `steps` (step_time.py). Raises Trouble when it does not."""
        assert self.connection is not None
        try:
            self.connection.sendall(f"{steps} {how}\n".encode())
            return dict(json.loads(read_line(self.connection)))
        except (OSError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):  # it may still be saying why
                self.process.wait(END_SECONDS)
            raise self.trouble(f"made no steps ({error})") from error

    @property
    def medians(self) -> list[float]:
        """The median step of each block."""
        return [statistics.median(b["step_seconds"][SKIPPED_STEPS:]) for b in self.blocks]

    @property
    def quiet(self) -> float:
        """The step that a tenth of all were quicker than."""
        steps = sorted(s for b in self.blocks for s in b["step_seconds"][SKIPPED_STEPS:])
        return float(steps[len(steps) // 10])

    def a_step(self, key: str) -> float:
        """What the process used for a step, in its median block."""
        return statistics.median(b[key] / len(b["step_seconds"]) for b in self.blocks)


def read_line(connection: socket.socket) -> bytes:
    """One line. Raises ConnectionResetError if the other end closes before."""
    data = b""
    while not data.endswith(b"\n"):
        got = connection.recv(1 << 16)
        if not got:
            raise ConnectionResetError("it ended")
        data += got
    return data


def environment_of(bench: Bench, variant: str) -> dict[str, str]:
    """The environment of a process that is not started by `flowgpu run`."""
    result = dict(bench.site.plain_environment)
    libraries = {
        INTERCEPT: [launch.intercept_library()],
        STUB: [launch.intercept_library(), launch.memory_stub()],
    }.get(variant)
    if libraries:
        theirs = result.get("LD_PRELOAD")
        result["LD_PRELOAD"] = ":".join([*map(str, libraries), *([theirs] if theirs else [])])
        result["FLOWGPU_REAL_LIBCUDA"] = str(bench.site.driver.libcuda)
    if variant == VMM:
        result["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return result


def _start(bench: Bench, job: str, variant: str, group: int, folder: Path) -> Worker:
    name = f"{variant}-{group}"
    command = [sys.executable, "-m", "bench.step_time", "--job", job, "--name", name]
    command += ["--control", str(folder / "turns"), *(["--small"] if bench.small else [])]
    if variant == COORDINATOR:
        plain = bench.site.plain_environment
        path = [f"{key}={plain[key]}" for key in ("LD_LIBRARY_PATH",) if key in plain]
        # It is no job's: else its variables would be handed on.
        command = ["env", "--unset=LD_PRELOAD", "FLOWGPU_SOCKET=", *path, *command]
    # What a process has by chance for all its life is to be the same in all.
    command = ["env", "PYTHONHASHSEED=0", *command]
    if bench.overhead_same_addresses:
        command = ["setarch", "--addr-no-randomize", *command]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        if variant in RUN:
            words = ["run", "--name", job_name(job, variant, group), "--gpu", bench.site.kind]
            words += ["--engine", bench.overhead_engine]
            process = bench.site.start(*words, "--", *command, stdout=out, stderr=out)
        else:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment_of(bench, variant),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
    return Worker(variant, group, process, log)


def job_name(job: str, variant: str, group: int) -> str:
    return f"overhead-{job}-{variant}-{group}"


def parts_of(bench: Bench, job: str) -> list[str]:
    """The parts that are asked for and that there are of this job."""
    return [part for part in bench.overhead_parts if part != VMM or job in PYTORCH_JOBS]


def _parts(bench: Bench, job: str, pairs: range) -> list[tuple[str, int]]:
    """Parts that are measured beside these pairs, each with the number of its group."""
    beside = [g for g in pairs if g < PART_PAIRS]
    few = bench.small or job in PAIRS_AT_ONCE
    alone = beside if few else range(SWITCHED_PROCESSES)
    parts = parts_of(bench, job)
    return [(part, g) for part in parts for g in (alone if part == SWITCHED else beside)]


@contextmanager
def workers(bench: Bench, job: str, pairs: range) -> Iterator[list[Worker]]:
    """Processes of `job` for these pairs, warmed up and waiting for their turns."""
    kinds = [(variant, group) for variant in (PLAIN, FLOWGPU) for group in pairs]
    kinds += _parts(bench, job, pairs)
    with ExitStack() as stack:
        # A folder with a short path: the socket's is limited to 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowgpu-turns-")))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(folder / "turns"))
        listener.listen(len(kinds))
        started: list[Worker] = []
        stack.callback(_end, bench, job, started)
        for kind in kinds:
            started.append(_start(bench, job, *kind, folder))
        _greet(bench, listener, started)
        yield started


def _greet(bench: Bench, listener: socket.socket, started: Sequence[Worker]) -> None:
    """Wait until each process has said that it is ready. Raises Trouble."""
    by_name = {worker.name: worker for worker in started}
    deadline = bench.until(START_SECONDS)
    listener.settimeout(0.2)
    while missing := [worker for worker in started if worker.connection is None]:
        for worker in missing:
            if worker.process.poll() is not None:
                raise worker.trouble("ended before its first step")
        if time.monotonic() > deadline:
            raise missing[0].trouble("did not start in time")
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(bench.deadline.cap(BLOCK_LIMIT_SECONDS))
            by_name[json.loads(read_line(connection))["name"]].connection = connection


def _end(bench: Bench, job: str, started: Sequence[Worker]) -> None:
    """Processes end when their connection does; those that do not are killed."""
    for worker in started:
        if worker.connection is not None:
            worker.connection.close()
    deadline = time.monotonic() + bench.deadline.cap(END_SECONDS)
    for worker in started:
        if worker.connection is not None:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0.1))
        if worker.process.poll() is None and worker.variant in RUN:
            name = job_name(job, worker.variant, worker.group)
            bench.site.call("kill", name, seconds=END_SECONDS)
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()


def _job(bench: Bench, job: str) -> dict[str, Any]:
    at_once = PAIRS_AT_ONCE.get(job, OTHERS_AT_ONCE)
    groups: list[list[Worker]] = []
    all_ways: list[list[Worker]] = []
    for first in range(0, bench.pairs, at_once):
        pairs = range(first, min(first + at_once, bench.pairs))
        with workers(bench, job, pairs) as all_workers:
            single = [w for w in all_workers if w.variant != SWITCHED]
            together = [[w for w in single if w.group == g] for g in pairs]
            switched = [ways(w) for w in all_workers if w.variant == SWITCHED]
            tried = [worker.run(FEWEST_STEPS + SKIPPED_STEPS) for worker in together[0]]
            step = statistics.median(s for block in tried for s in block["step_seconds"])
            steps = max(FEWEST_STEPS, round(BLOCK_SECONDS / step))
            supervisors = _supervisors(bench, all_workers)
            used, began = _cpu_seconds(supervisors), time.monotonic()
            for turn in range(bench.overhead_blocks):
                for group in together:
                    for worker in in_turn(group, turn):
                        worker.blocks.append(worker.run(steps + SKIPPED_STEPS))
                for group in switched:
                    found = group[0].run(steps + SKIPPED_STEPS, "switched")
                    for worker, mode in zip(group, MODES, strict=True):
                        worker.blocks.append(found[mode])
            spent = _cpu_seconds(supervisors) - used
            share = spent / max(len(supervisors) / 2, 1) / (time.monotonic() - began)
            of_flowgpu = next(w for w in together[0] if w.variant == FLOWGPU)
            called = of_flowgpu.run(COUNTED_STEPS, "counted")
        groups += together
        all_ways += switched
    return summary(groups, FLOWGPU) | {
        "steps": steps,
        "blocks": bench.overhead_blocks,
        "same_addresses": bench.overhead_same_addresses,
        "engine": bench.overhead_engine,
        "parts": {part: summary(groups, part) for part in parts_of(bench, job) if part != SWITCHED}
        | {part: summary(all_ways, part) for part in (SWITCHED, *SWITCHED_PARTS) if all_ways},
        "plain_stdev": plain_stdev(groups),
        "supervisor_cores": share,
        "calls_a_step": {name: count / COUNTED_STEPS for name, count in sorted(called.items())},
        "commit": machine.commit(),
    }


def ways(worker: Worker) -> list[Worker]:
    """What a process does by FlowGPU, past it but for a part, and past all of it (switch.MODES)."""
    return [worker, *(replace(worker, variant=v, blocks=[]) for v in (*SWITCHED_PARTS, PLAIN))]


def in_turn(group: Sequence[Worker], turn: int) -> list[Worker]:
    """The group in the order of one round: each comes first, and before and after each other."""
    first = turn % len(group)
    order = [*group[first:], *group[:first]]
    return order[::-1] if turn // len(group) % 2 else order


def _supervisors(bench: Bench, started: Sequence[Worker]) -> list[psutil.Process]:
    """Commands and coordinators of the jobs that take part."""
    commands = [worker.process.pid for worker in started if worker.variant in RUN]
    coordinators = [record.coordinator_pid for record in bench.site.registry.all() if record.live]
    return [psutil.Process(pid) for pid in (*commands, *coordinators)]


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def summary(groups: Sequence[Sequence[Worker]], variant: str) -> dict[str, Any]:
    """The ratios of a variant's steps to plain ones, by pair of processes."""
    pairs = []
    for group in groups:
        by_variant = {worker.variant: worker for worker in group}
        if variant not in by_variant:
            continue
        plain, other = by_variant[PLAIN], by_variant[variant]
        ratios = [b / a for a, b in zip(plain.medians, other.medians, strict=True)]
        ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
        if variant in (SWITCHED, *SWITCHED_PARTS):
            ratio, low, high = step_by_step(plain, other)
        pairs.append(
            {
                "plain": statistics.median(plain.medians),
                "flowgpu": statistics.median(other.medians),
                "ratio": ratio,
                "low": low,
                "high": high,
                "quiet": other.quiet / plain.quiet,
                "a_step": {
                    worker.variant: {
                        "cpu_seconds": worker.a_step("cpu_seconds"),
                        "minor_faults": worker.a_step("minor_faults"),
                        "switches": worker.a_step("switches"),
                    }
                    for worker in (plain, other)
                },
            }
        )
    found = [pair["ratio"] for pair in pairs]
    interval = mean_interval(found)
    quiet = [pair["quiet"] for pair in pairs]
    return {
        "pairs": pairs,
        "ratio_mean": statistics.mean(found),
        "ratio_stdev": statistics.stdev(found) if len(found) > 1 else 0.0,
        "ratio_min": min(found),
        "ratio_max": max(found),
        "ratio_low": interval[0],
        "ratio_high": interval[1],
        "quiet_mean": statistics.mean(quiet),
        "quiet_interval": mean_interval(quiet),
    }


def step_by_step(plain: Worker, other: Worker) -> tuple[float, float, float]:
    """The ratio of steps that took turns, and what it lies between at 95 %.

    A mean without the fifth at either end, where the machine was away (Yuen 1974).
    """
    logs = sorted(
        math.log(b / a)
        for before, after in zip(plain.blocks, other.blocks, strict=True)
        for a, b in zip(
            before["step_seconds"][SKIPPED_STEPS:],
            after["step_seconds"][SKIPPED_STEPS:],
            strict=True,
        )
    )
    ends = len(logs) // 5
    kept = logs[ends : len(logs) - ends]
    mean = statistics.mean(kept)
    spread = statistics.pstdev([kept[0]] * ends + kept + [kept[-1]] * ends)
    half = 2 * spread * math.sqrt(len(logs)) / len(kept)
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def plain_stdev(groups: Sequence[Sequence[Worker]]) -> float:
    """How far plain processes differ from each other for all their life: what a ratio may be off
    by chance, for one pair."""
    plain = [worker.medians for group in groups for worker in group if worker.variant == PLAIN]
    rounds = [statistics.mean(medians) for medians in zip(*plain, strict=True)]
    relative = [
        statistics.median(a / b for a, b in zip(medians, rounds, strict=True)) for medians in plain
    ]
    return statistics.stdev(relative) if len(relative) > 1 else 0.0


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between these two the median lies, at 95 %, whatever the distribution."""
    ordered = sorted(values)
    count = len(ordered)
    outside, below = 0.0, 0
    while below < count // 2:
        outside += math.comb(count, below) / 2**count
        if 2 * outside > 0.05:
            break
        below += 1
    below = max(below - 1, 0)
    return ordered[below], ordered[-1 - below]


def mean_interval(ratios: Sequence[float]) -> tuple[float | None, float | None]:
    """Between these two the mean lies, at 95 %, by Student's t; None of a single pair."""
    degrees = len(ratios) - 1
    if degrees < 1:
        return None, None
    t = T95[degrees - 1] if degrees <= len(T95) else 1.96 + 2.5 / degrees
    half = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    mean = statistics.mean(ratios)
    return mean - half, mean + half


def _words(found: Mapping[str, Any]) -> str:
    plain = statistics.median(pair["plain"] for pair in found["pairs"])
    words = [f"a step {1000 * plain:.3f} ms, under FlowGPU {found['ratio_mean']:.4f} times that"]
    if found["ratio_low"] is not None:
        words[0] += f" ({found['ratio_low']:.4f} to {found['ratio_high']:.4f} at 95 %)"
        low, high = found["quiet_interval"]
        words += [f"quiet steps {found['quiet_mean']:.4f} times ({low:.4f} to {high:.4f})"]
    for name, part in found["parts"].items():
        words.append(f"{name} alone {part['ratio_mean']:.4f} (quiet {part['quiet_mean']:.4f})")
    words.append(f"plain processes differ by {100 * found['plain_stdev']:.2f} %")
    return ", ".join(words)
