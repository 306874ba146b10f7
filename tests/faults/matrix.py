"""Every fault of fault.def, in every step that it can meet: what became of the job.

    python -m tests.faults.matrix --lane emulated|fakes [--engine replay] [--faults a,b]
                                  [--out FILE.json]

A fault is let fire at its first pass, its second and so on until it fires no more, in
pause-and-dump, with --leave-running and in restore, of a job of one task and of two. After each the
job must go on as an undisturbed one does, or the restore must have left nothing; nothing of a
checkpoint may be left; and the same must work when it is tried again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench import machine
from coordinator.process import EMULATED_DEVICE
from flowgpu.errors import FlowError
from flowgpu.image.reader import Image
from flowgpu.launch import EngineChoice
from flowgpu.proctree import fd_targets, tree_pids
from flowgpu.wire import Fault
from tests.faults.lanes import TASKS, lane, lane_name
from tests.unit.coordinator_job import Jobs, wait_for

MOST = 20  # passes of one fault; no loop comes near
SETTLE_SECONDS = 10.0
NAMES = "ab"
TASK_FAULTS = [fault for fault in Fault if fault.startswith("task_")]
# A ghost counts its own passes, so that the ghost of a second try fails as the first one did.
GHOST_FAULTS = [fault for fault in Fault if fault.startswith("ghost_")]
RESTORE_FAULTS = [Fault.CRIU_RESTORE, Fault.FILL, Fault.REBUILD, Fault.MAPBACK]
RESTORE_ONLY = [Fault.CRIU_RESTORE, Fault.FILL, Fault.REBUILD]
DUMP_FAULTS = [fault for fault in Fault if fault not in RESTORE_ONLY]
STEPS = {Fault.CRIU_RESTORE: "criu", Fault.REBUILD: "engine"}
ACTIONS = ("pause-and-dump", "leave-running", "restore")

# A block that has come back to a task keeps its descriptor there, with a number from 512 on
# (native/vmm/memory.cpp): each of these may have one.
BLOCK_FILE, BLOCKS, FIRST_BLOCK = "flowgpu-emu-mem", 3, 512

GOES_ON, MENDED, NOTHING_LEFT = "goes on", "mended", "nothing left"
RAN = "ran, was ended"  # a restore that failed when gates were open already
RIGHT = (GOES_ON, MENDED, NOTHING_LEFT, RAN)


@dataclasses.dataclass
class Row:
    """One fault that fired. `verdict`: what became of it, or what of it is wrong."""

    fault: str
    nth: int
    action: str
    tasks: int
    phase: str
    exit_code: int
    error: str
    verdict: str
    seconds: float


class Wrong(Exception):
    """Something is not as it must be after a fault."""


def must(condition: object, what: str) -> None:
    if not condition:
        raise Wrong(what)


def descriptors(pid: int) -> int:
    """Descriptors of a task, beside those of its blocks."""
    blocks = others = 0
    for fd, target in fd_targets(pid):
        if BLOCK_FILE in target or (fd >= FIRST_BLOCK and target == "/dev/nvidiactl"):
            blocks += 1
        else:
            others += 1
    return others + max(blocks - BLOCKS, 0)


class Case:
    """A job that counts, in one task or two, of which the first has the task's faults."""

    def __init__(self, jobs: Jobs, program: Sequence[str], tasks: int, fault: str) -> None:
        self.jobs, self.names = jobs, NAMES[:tasks]
        self.task_side = fault.partition(":")[0] in TASK_FAULTS
        words = " ".join(program)
        fired = f"FLOWGPU_FAULT={fault} " if self.task_side else ""
        starts = [
            f"{fired if name == 'a' else ''}FAKE_TASK_NAME={name} {words}" for name in self.names
        ]
        environment = {} if self.task_side or not fault else {"FLOWGPU_FAULT": fault}
        self.job = jobs.run(
            ["/bin/sh", "-c", " & ".join([*starts, "wait"])], coordinator_env=environment
        )
        self.said: list[str] = []  # before the last restore
        self.wait_steps(3)
        wait_for(lambda: len(self.job.ask("status")["tasks"]) == tasks, "the tasks")
        self.before = self.held()

    def steps(self, name: str) -> list[str]:
        lines = self.said + self.job.lines
        return [line[1:] for line in lines if line.startswith(name)]

    def wait_steps(self, more: int) -> None:
        wanted = {name: len(self.steps(name)) + more for name in self.names}
        for name, count in wanted.items():
            wait_for(lambda: len(self.steps(name)) >= count, f"steps of {name}")  # noqa: B023

    def held(self) -> tuple[set[int], int, int]:
        """Processes beside the job's, and descriptors: the coordinator's and the job's."""
        coordinator = psutil.Process(self.job.coordinator)
        tree = tree_pids(self.job.record.root_pid)
        beside = set()
        for child in coordinator.children(recursive=True):
            try:
                if child.pid not in tree and child.name() != EMULATED_DEVICE:
                    beside.add(child.pid)
            except psutil.NoSuchProcess:
                continue
        return beside, coordinator.num_fds(), sum(map(descriptors, tree))

    def goes_on(self) -> None:
        """Each task counts on from where it was, without a gap, and nothing else is left."""
        self.wait_steps(5)
        self.counts()
        must(self.job.record.state == "running", f"the job is {self.job.record.state}")
        self.left_nothing()

    def counts(self) -> None:
        for name in self.names:
            steps = self.steps(name)
            wanted = [f"step {n + 1}" for n in range(len(steps))]
            wrong = [
                at for at, pair in enumerate(zip(steps, wanted, strict=True)) if len({*pair}) > 1
            ]
            at = wrong[0] if wrong else 0
            must(not wrong, f"{name} says {steps[max(at - 2, 0) : at + 3]}")

    def left_nothing(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            beside, ours, theirs = self.held()
            strays = beside - self.before[0]
            # A thread's own connection to the emulated device comes and goes with its calls.
            theirs -= len(self.names)
            if not strays and ours <= self.before[1] and theirs <= self.before[2]:
                return
            must(
                time.monotonic() < deadline,
                f"left: processes {sorted(strays)}, {ours - self.before[1]} descriptors of the "
                f"coordinator, {theirs - self.before[2]} of the job",
            )
            time.sleep(0.02)

    def dump(self, image: Path, leave_running: bool) -> FlowError | None:
        try:
            self.job.dump(image, leave_running=leave_running)
        except FlowError as error:
            return error
        return None

    def restore(self, image: Path, fault: str = "") -> FlowError | None:
        """Restore; without an error the job has gone on when this returns."""
        environment = {"FLOWGPU_FAULT": fault} if fault else {}
        # What the job said up to the dump, and no later line of one that was left running.
        self.said = (image / "output.log").read_text().splitlines()
        self.job = self.jobs.restore(image, coordinator_env=environment)
        try:
            self.job.ask("wait-restored")
        except FlowError as error:
            return error
        self.wait_steps(5)
        self.counts()
        return None

    def hit(self, fault: Fault) -> bool:
        """Whether the coordinator's log, of the last start, knows of the fault."""
        text = "tried again" if self.task_side else f"fault injected at {fault}"
        return text in self.job.log

    def phase(self) -> str:
        """The phase that the log names as failed, else the one in which it tried again."""
        failed = re.search(r"checkpoint: (\w+) failed", self.job.log)
        if failed:
            return failed[1]
        before = self.job.log.partition("tried again")[0]
        return re.findall(r"checkpoint: (\w+) \(", before)[-1]


def of_dumps(
    jobs: Jobs, program: Sequence[str], fault: Fault, tasks: int, leave_running: bool
) -> Iterator[Row]:
    """All passes of a fault in checkpoints; then, of a task's, in restores."""
    action = ACTIONS[leave_running]
    for nth in itertools.count(1):
        began = time.monotonic()
        setting = f"{fault}:{nth}"
        case = Case(jobs, program, tasks, setting)
        folder = Path(tempfile.mkdtemp(dir=jobs.states))
        try:
            error = case.dump(folder / "image", leave_running)
            if error is None and not case.hit(fault):
                if fault not in TASK_FAULTS or leave_running:
                    return
                row = of_task_in_restore(case, folder / "image", fault, nth)
                if row is None:
                    return
            else:
                verdict = after_dump(case, folder, fault, error, leave_running)
                row = Row(
                    fault, nth, action, tasks, case.phase(), *told(error), verdict, since(began)
                )
            yield row
        finally:
            case.job.kill()
        must(nth < MOST, f"{fault} fires without end")


def after_dump(
    case: Case, folder: Path, fault: Fault, error: FlowError | None, leave_running: bool
) -> str:
    try:
        if error is None:
            Image(folder / "image").verify()
            if leave_running:
                case.goes_on()
            return MENDED
        if not (case.task_side or fault is Fault.GHOST_DEATH):
            must(case.hit(fault), "it failed by itself")
        case.goes_on()
        must(not list(folder.iterdir()), f"left: {[path.name for path in folder.iterdir()]}")
        if fault in GHOST_FAULTS:
            return GOES_ON
        again = case.dump(folder / "second", leave_running=False)
        must(again is None, f"a second try: {again}")
        must(case.job.end() == 75, "the dumped job ended otherwise")
        Image(folder / "second").verify()
        case.counts()
    except (Wrong, AssertionError) as wrong:
        print(case.job.log, file=sys.stderr)
        return f"{error}: {wrong}" if error else str(wrong)
    return GOES_ON


def of_task_in_restore(case: Case, image: Path, fault: Fault, nth: int) -> Row | None:
    """The task goes on counting its passes where its image has them."""
    began = time.monotonic()
    case.job.end()
    error, wrong = restore(case, image)
    if error is None and not wrong:
        return None
    verdict = wrong or after_restore(case, image, error, again=False)  # it is part of the image
    phase = restore_phase(error, fault)
    return Row(fault, nth, "restore", len(case.names), phase, *told(error), verdict, since(began))


def restore(case: Case, image: Path, setting: str = "") -> tuple[FlowError | None, str]:
    """The error, and what is wrong with a job that was restored without one."""
    try:
        return case.restore(image, setting), ""
    except (Wrong, AssertionError) as wrong:
        print(case.job.log, file=sys.stderr)
        return None, f"restored: {wrong}"


def restore_phase(error: FlowError | None, fault: Fault) -> str:
    """What was asked of a task, else the step that the fault is named after."""
    asked = re.search(r"task \d+: ([A-Z]+): ", str(error))
    if asked or fault in TASK_FAULTS:
        return asked[1].lower() if asked else "open"
    return STEPS.get(fault, str(fault))


def after_restore(case: Case, image: Path, error: FlowError | None, again: bool) -> str:
    try:
        case.job.process.wait(SETTLE_SECONDS)
        must(case.job.record.state == "dumped", f"the job is {case.job.record.state}")
        pids = Image(image).manifest.pids
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        must(not left, f"left: processes {left}")
        opened = restore_phase(error, Fault.MAPBACK) == "open"
        must(opened or not case.job.lines, "the job ran")
        Image(image).verify()
        if again:
            second = case.restore(image)
            must(second is None, f"a second try: {second}")
    except (Wrong, AssertionError) as wrong:
        return f"{error}: {wrong}"
    return RAN if opened else NOTHING_LEFT


def of_restores(
    jobs: Jobs, program: Sequence[str], faults: Sequence[Fault], tasks: int
) -> Iterator[Row]:
    """All passes of the faults in restores of one image."""
    case = Case(jobs, program, tasks, "")
    image = Path(tempfile.mkdtemp(dir=jobs.states)) / "image"
    must(case.dump(image, leave_running=False) is None, "no image")
    case.job.end()
    for fault in faults:
        for nth in itertools.count(1):
            began = time.monotonic()
            setting = f"{fault}:{nth}"
            try:
                error, verdict = restore(case, image, setting)
                if error is None and not verdict:
                    must(not case.hit(fault), f"{setting} was swallowed")
                    break
                if error is not None:
                    must(case.hit(fault), f"the restore failed by itself: {error}")
                    verdict = after_restore(case, image, error, again=True)
            finally:
                case.job.kill()
            phase = restore_phase(error, fault)
            yield Row(fault, nth, "restore", tasks, phase, *told(error), verdict, since(began))
            must(nth < MOST, f"{fault} fires without end")


def told(error: FlowError | None) -> tuple[int, str]:
    return (error.exit_code, type(error).__name__) if error else (0, "")


def since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def run(
    name: str,
    folder: Path,
    faults: Sequence[Fault],
    tasks: Sequence[int],
    engine: EngineChoice = "auto",
    at_once: int = 3,
) -> list[Row]:
    """The rows of a lane, in the order of fault.def; of so many jobs at once, which mostly wait."""
    program = TASKS[name]
    with lane(name, folder, engine) as jobs, ThreadPoolExecutor(at_once) as pool:
        work = [
            lambda fault=fault, count=count, left=left: list(
                of_dumps(jobs, program, fault, count, left)
            )
            for count in tasks
            for fault in faults
            if fault in DUMP_FAULTS
            for left in (False, True)
        ]
        chosen = [fault for fault in RESTORE_FAULTS if fault in faults]
        if chosen:
            work += [
                lambda count=count: list(of_restores(jobs, program, chosen, count))
                for count in tasks
            ]
        rows = [row for part in pool.map(lambda unit: unit(), work) for row in part]
    order = {fault: number for number, fault in enumerate(Fault)}
    return sorted(
        rows, key=lambda r: (order[Fault(r.fault)], ACTIONS.index(r.action), r.tasks, r.nth)
    )


def is_right(row: Row) -> bool:
    return row.verdict in RIGHT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.matrix")
    parser.add_argument("--lane", choices=TASKS, required=True)
    parser.add_argument("--engine", choices=["auto", "replay"], default="auto")
    parser.add_argument("--faults", help="names of fault.def, with commas; default: all")
    parser.add_argument("--tasks", help="1, 2 or 1,2", default="1,2")
    parser.add_argument("--parallel", type=int, default=3, help="jobs at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    faults = [Fault(name) for name in options.faults.split(",")] if options.faults else list(Fault)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        tasks = [int(n) for n in options.tasks.split(",")]
        rows = run(options.lane, Path(folder), faults, tasks, options.engine, options.parallel)
    for row in rows:
        print(*dataclasses.astuple(row))
    wrong = [row for row in rows if not is_right(row)]
    print(f"{len(rows)} faults fired, {len(wrong)} of them with a wrong outcome")
    if options.out:
        document = {
            "kind": "faults",
            "lane": lane_name(options.lane, options.engine),
            "date": datetime.now(UTC).date().isoformat(),
            "command": " ".join(["python -m tests.faults.matrix", *sys.argv[1:]]),
            "commit": machine.commit(),
            "machine": machine.facts(),
            "seconds": since(began),
            "faults": [str(fault) for fault in faults],
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.pop("FLOWGPU_FAULT", None)
    sys.exit(main())
