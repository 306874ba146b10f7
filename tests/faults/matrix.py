"""Every fault of fault.def, in every step that it can meet: what became of the job.

    python -m tests.faults.matrix --lane emulated|fakes [--engine replay] [--faults a,b]
                                  [--actions a,b] [--seconds S] [--resume FILE.json]
                                  [--out FILE.json]

A fault is let fire at its first pass, its second and so on until it fires no more (of the reads and
writes of files: at the first, fifth, 25th ..), in pause-and-dump, with --leave-running and in
restore, of a job of one task and of two; with `--actions suspend`, in a suspension and the resume
after it. After each the job must go on as an undisturbed one does,
or the restore must have left nothing; nothing of a checkpoint may be left; and the same must work
when it is tried again. One job lives through as many faults as it can. The result names what no
time was left for; with --resume that of a result of the same kind of machine is tried, and added to
it: the sum says which commits it is of.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench import machine
from flowgpu.errors import CheckpointFailed, CoordinatorGone, CoordinatorReplaced, FlowError
from flowgpu.image.reader import Image
from flowgpu.jobs import DUMPED, EXITED, RUNNING, SUSPENDED
from flowgpu.launch import EngineChoice
from flowgpu.wire import Fault
from tests.faults.case import Case, Wrong, check_state, must
from tests.faults.halts import Disk
from tests.faults.lanes import TASKS, lane, lane_name
from tests.faults.points import EACH_PASS, TASK, is_tried, passes
from tests.gpu.site import many_pids
from tests.unit.coordinator_job import Jobs

ACTIONS = ("pause-and-dump", "leave-running", "restore")
SUSPEND = "suspend"
"""One more, which is tried where it is asked for."""
# Faults that one job lives through where so many are at work at once: all have work to the end.
UNIT_FAULTS, AT_ONCE = 8, 3
# Where the log does not say it: the step of a restore that a fault belongs to.
STEPS = {
    Fault.CRIU_RESTORE: "criu",
    Fault.CRIU_HANG: "criu",
    Fault.PAGES_READ: "criu",
    Fault.REBUILD: "engine",
    Fault.MAPBACK: "mapback",
}
# What the page server has to say of a dump that went well is logged later.
PHASES = {Fault.PAGES_SHORT: "capture"}

# What is killed at the beginning of a phase.
KILLED = {
    Fault.PHASE_TASK: "task",
    Fault.PHASE_GHOST: "ghost",
    Fault.PHASE_PAGES: "page server",
    Fault.PHASE_COORDINATOR: "coordinator",
}
COMMITTED = ("kill", "release")
"""Phases of a checkpoint that begin when its image is whole."""

GOES_ON, MENDED, NOTHING_LEFT, ENDED = "goes on", "mended", "nothing left", "ended"
RAN = "ran, was ended"  # a restore that failed when gates were open already
TAKEN_OVER, RESTORED = "taken over", "dumped, restored"  # after the coordinator's death
RIGHT = (GOES_ON, MENDED, ENDED, NOTHING_LEFT, RAN, TAKEN_OVER, RESTORED)


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


@dataclasses.dataclass
class Work:
    """Faults to be tried with one action, in jobs of so many tasks, as long as there is time."""

    jobs: Jobs
    program: Sequence[str]
    faults: Sequence[Fault]
    tasks: int
    action: str
    until: float
    left_out: Sequence[Fault] = ()

    def run(self) -> list[Row]:
        """The rows, printed as they come."""
        of = partial(in_one_job, of_dump)
        if self.action == "restore":
            of = of_restores
        elif self.action == SUSPEND:
            of = partial(in_one_job, of_suspension)
        elif set(self.faults) <= set(TASK):
            of = of_tasks
        rows = []
        for row in of(self):
            print(*dataclasses.astuple(row), flush=True)
            rows.append(row)
        return rows

    def in_time(self) -> Iterator[Fault]:
        """The faults; those that no time is left for are left out."""
        for at, fault in enumerate(self.faults):
            if time.monotonic() >= self.until:
                self.left_out = self.faults[at:]
                return
            yield fault

    def rows_of(
        self,
        fault: Fault,
        nth: int,
        phases: Sequence[str],
        error: FlowError | None,
        verdict: str,
        began: float,
        action: str = "",
    ) -> list[Row]:
        """What a command came to that began then, and in which phases the fault was met."""
        code, name = (error.exit_code, type(error).__name__) if error else (0, "")
        taken = since(began)
        return [
            Row(fault, nth, action or self.action, self.tasks, phase, code, name, verdict, taken)
            for phase in phases
        ]

    def case(self, of_task: str = "") -> Case:
        return Case(self.jobs, self.program, self.tasks, of_task)


@contextmanager
def place(work: Work, fault: Fault) -> Iterator[tuple[Path, Disk | None]]:
    """A folder for images, and its disk if that is to be full."""
    folder = Path(tempfile.mkdtemp(dir=work.jobs.states))
    disk = Disk(folder) if fault is Fault.PHASE_DISK else None
    try:
        yield folder, disk
    finally:
        if disk is not None:
            disk.close()


def in_one_job(
    one: Callable[[Work, Case, Fault, int], list[Row] | None], work: Work
) -> Iterator[Row]:
    """All passes of the faults, with `one` for each; another job where one has ended."""
    case: Case | None = None
    try:
        for fault in work.in_time():
            for nth in passes(fault):
                case = case or work.case()
                rows = one(work, case, fault, nth)
                if rows is None:
                    break
                yield from rows
                if any(not is_right(row) or row.verdict == ENDED for row in rows):
                    case.job.kill()
                    case = None
    finally:
        if case is not None:
            case.job.kill()


def of_dump(work: Work, case: Case, fault: Fault, nth: int) -> list[Row] | None:
    """One checkpoint, a row for each phase in which the fault fired; None if it did not. The job
    goes on, or has come to its end."""
    began, leave_running = time.monotonic(), work.action == "leave-running"
    case.set(f"{fault}:{nth}")
    with place(work, fault) as (folder, disk):
        error = case.dump(folder / "image", leave_running, disk)
        if error is None and not case.hit(fault):
            if not leave_running:
                case.go_on_from(folder / "image")
            return None
        phases = case.phases() or [PHASES.get(fault) or case.phase()]
        verdict = judged(case, folder, fault, error, work.action, phases)
    if met_nobody(case, fault, verdict):
        return []
    return work.rows_of(fault, nth, phases, error, verdict, began)


def met_nobody(case: Case, fault: Fault, verdict: str) -> bool:
    """The process that was to be killed was not there, and nothing is wrong."""
    return fault in KILLED and not case.ended and verdict in RIGHT


def judged(
    case: Case,
    folder: Path,
    fault: Fault,
    error: FlowError | None,
    action: str,
    phases: Sequence[str],
) -> str:
    """What became of a checkpoint and of its job."""
    leave_running, whole = action == "leave-running", phases[-1] in COMMITTED
    try:
        must(case.hit(fault), "it failed by itself")
        if fault is Fault.PHASE_SECOND:
            must(error is None, "the first command failed")
            case.were_refused({"kill", "release"})
        if fault is Fault.PHASE_TASK:
            return after_death(case, folder, error, action)
        killed, image = KILLED.get(fault, ""), (folder / "image").exists()
        check_state(case.job.record, action, killed, image)
        if fault is Fault.PHASE_COORDINATOR:
            return after_takeover(case, folder, error, leave_running, whole)
        if fault is Fault.PHASE_GHOST and case.ended:
            # All bytes may be in the files by COMMIT.
            must(error or phases[-1] in ("commit", *COMMITTED), "it succeeded without a ghost")
            must(not error or type(error) is CheckpointFailed, "another error")
            must(not error or not whole, "it failed with a whole image")
        return after_dump(case, folder, error, leave_running)
    except (Wrong, AssertionError, FlowError) as wrong:
        print(case.job.log, file=sys.stderr)
        return f"{error}: {wrong}" if error else str(wrong)


def after_dump(case: Case, folder: Path, error: FlowError | None, leave_running: bool) -> str:
    """The job goes on, from its image if need be, and has left nothing. Raises Wrong."""
    if error is None:
        if leave_running:
            Image(folder / "image").verify()
            case.goes_on()
        else:
            case.go_on_from(folder / "image")
        return MENDED
    must(not list(folder.iterdir()), f"left: {[path.name for path in folder.iterdir()]}")
    try_again(case, folder)
    return GOES_ON


def try_again(case: Case, folder: Path) -> None:
    """The job goes on, and a second checkpoint of it succeeds. Raises Wrong."""
    case.goes_on()
    case.set("")
    again = case.dump(folder / "second", leave_running=True)
    must(again is None, f"a second try: {again}")
    Image(folder / "second").verify()
    case.goes_on()


def after_takeover(
    case: Case, folder: Path, error: FlowError | None, leave_running: bool, whole: bool
) -> str:
    """The coordinator was killed: another one has the job, unless that was dumped by then.

    `whole`: that was after the image's COMMIT. Raises Wrong.
    """
    left = [path.name for path in folder.iterdir()]
    must(left == ["image"] * whole, f"left: {left}")
    if whole and not leave_running:
        must(type(error) is CoordinatorGone, f"its image is whole, and it said {error}")
        case.job.end()
        case.is_over(case.pids)
        case.go_on_from(folder / "image")
        return RESTORED
    must(type(error) is CoordinatorReplaced, f"its coordinator was killed, and it said {error}")
    if whole:
        Image(folder / "image").verify()
    try_again(case, folder)
    return TAKEN_OVER


def after_death(case: Case, folder: Path, error: FlowError | None, action: str) -> str:
    """A task was killed: that is known, what else there is goes on, an image is whole or is none.

    Raises Wrong.
    """
    image = folder / "image"
    must(image.exists() == (error is None), f"an image: {image.exists()}")
    if error is None:
        Image(image).verify()
    left = [path.name for path in folder.iterdir() if path != image]
    must(not left, f"left: {left}")
    others = case.names[1:]
    must(error is None or not others, "the end of a task is no failure")
    if others and case.job.record.state != DUMPED:
        case.wait_steps(5, others)
        case.counts()
        must(case.job.record.state == RUNNING, f"the job is {case.job.record.state}")
    else:
        case.job.end()
        must(case.job.record.state in (DUMPED, EXITED), f"the job is {case.job.record.state}")
        check_state(case.job.record, action, "task", image.exists())
        case.is_over(case.pids)
    return ENDED


def of_suspension(work: Work, case: Case, fault: Fault, nth: int) -> list[Row] | None:
    """One suspension and its resume, a row for each phase in which the fault fired; None if it did
    not. The job goes on."""
    began = time.monotonic()
    case.set(f"{fault}:{nth}")
    error = case.suspend()
    if error is None and not case.hit(fault):
        return None
    phases = case.phases() or [case.phase()]
    try:
        must(case.hit(fault), "it failed by itself")
        verdict = after_suspension(case, fault, error)
    except (Wrong, AssertionError, FlowError) as wrong:
        print(case.job.log, file=sys.stderr)
        verdict = f"{error}: {wrong}" if error else str(wrong)
    if met_nobody(case, fault, verdict):
        return []
    return work.rows_of(fault, nth, phases, error, verdict, began)


def after_suspension(case: Case, fault: Fault, error: FlowError | None) -> str:
    """The job runs, or is suspended and can be resumed; then another suspension succeeds. Raises
    Wrong."""
    case.set("")
    if fault is Fault.PHASE_TASK and case.ended:
        return after_suspended_death(case, error)
    if fault is Fault.PHASE_COORDINATOR:
        must(type(error) is CoordinatorReplaced, f"its coordinator was killed, and it said {error}")
    if case.job.record.state == SUSPENDED:
        must(error is not None, "it is suspended, and nothing failed")
        case.job.ask("resume", drop=True)
    case.goes_on()
    again = case.suspend()
    must(again is None, f"a second try: {again}")
    case.goes_on()
    if error is None:
        return MENDED
    return TAKEN_OVER if fault is Fault.PHASE_COORDINATOR else GOES_ON


def after_suspended_death(case: Case, error: FlowError | None) -> str:
    """A task was killed: what else there is goes on. Raises Wrong."""
    others = case.names[1:]
    if case.job.record.state == SUSPENDED and others:
        case.job.ask("resume", drop=True)
    if others:
        case.wait_steps(5, others)
        case.counts()
        must(case.job.record.state == RUNNING, f"the job is {case.job.record.state}")
    else:
        must(error is not None, "its only task was killed, and nothing failed")
        case.job.end()
        must(case.job.record.state == EXITED, f"the job is {case.job.record.state}")
        case.is_over(case.pids)
    return ENDED


def of_tasks(work: Work) -> Iterator[Row]:
    """All passes of tasks' faults in checkpoints and then in restores: of a job each."""
    for fault in work.in_time():
        for nth in passes(fault):
            case = work.case(f"{fault}:{nth}")
            try:
                rows = of_task(work, case, fault, nth)
            finally:
                case.job.kill()
            if not rows:
                break
            yield from rows


def of_task(work: Work, case: Case, fault: Fault, nth: int) -> list[Row]:
    began, leave_running = time.monotonic(), work.action == "leave-running"
    folder = Path(tempfile.mkdtemp(dir=work.jobs.states))
    error = case.dump(folder / "image", leave_running)
    if error is None and not case.hit(fault):
        return [] if leave_running else of_task_in_restore(work, case, folder / "image", nth)
    phase = case.phase()
    try:
        verdict = after_dump(case, folder, error, leave_running)
    except (Wrong, AssertionError, FlowError) as wrong:
        print(case.job.log, file=sys.stderr)
        verdict = f"{error}: {wrong}" if error else str(wrong)
    return work.rows_of(fault, nth, [phase], error, verdict, began)


def of_task_in_restore(work: Work, case: Case, image: Path, nth: int) -> list[Row]:
    """The task goes on counting its passes where its image has them."""
    began, (fault,) = time.monotonic(), work.faults
    case.job.end()
    error, wrong = restore(case, image)
    if error is None and not wrong:
        return []
    verdict = wrong or after_restore(case, image, error, fault, again=False)
    phase = restore_phase(case, error, fault)
    return work.rows_of(fault, nth, [phase], error, verdict, began, "restore")


def restore(case: Case, image: Path) -> tuple[FlowError | None, str]:
    """The error, and what is wrong with a job that was restored without one."""
    try:
        return case.restore(image), ""
    except (Wrong, AssertionError) as wrong:
        print(case.job.log, file=sys.stderr)
        return None, f"restored: {wrong}"


def restore_phase(case: Case, error: FlowError | None, fault: Fault) -> str:
    """What was asked of a task, else the step that the log or the fault's name says."""
    asked = re.search(r"task \d+: ([A-Z]+): ", str(error))
    if asked and asked[1] != "HELLO":
        return asked[1].lower()
    if fault in TASK:
        return "open"
    began = re.findall(r"fault injected at (criu|fill|engine|mapback)$", case.log, re.MULTILINE)
    return began[-1] if began else STEPS.get(fault, "fill")


def after_restore(
    case: Case, image: Path, error: FlowError | None, fault: Fault, again: bool
) -> str:
    try:
        must(error is not None, "no error")
        case.is_over(Image(image).manifest.pids)
        must(case.job.record.state == DUMPED, f"the job is {case.job.record.state}")
        opened = restore_phase(case, error, fault) == "open"
        must(opened or not case.job.lines, "the job ran")
        Image(image).verify()
        if again:
            case.set("")
            second = case.restore(image)
            must(second is None, f"a second try: {second}")
    except (Wrong, AssertionError) as wrong:
        return f"{error}: {wrong}"
    return RAN if opened else NOTHING_LEFT


def of_restores(work: Work) -> Iterator[Row]:
    """All passes of the faults in restores of one image."""
    case: Case | None = None
    image = Path(tempfile.mkdtemp(dir=work.jobs.states)) / "image"
    for fault in work.in_time():
        case = case or dumped(work, image)
        for nth in passes(fault):
            try:
                rows = of_restore(work, case, image, fault, nth)
            finally:
                case.job.kill()
            if rows is None:
                break
            yield from rows


def dumped(work: Work, image: Path) -> Case:
    case = work.case()
    must(case.dump(image, leave_running=False) is None, "no image")
    case.job.end()
    return case


def of_restore(work: Work, case: Case, image: Path, fault: Fault, nth: int) -> list[Row] | None:
    """One restore, a row for each step in which the fault fired; None if it did not."""
    began = time.monotonic()
    case.set(f"{fault}:{nth}")
    error, verdict = restore(case, image)
    if not case.hit(fault):
        must(error is None and not verdict, f"the restore failed by itself: {error or verdict}")
        return None
    phases = case.phases() if nth == EACH_PASS else [restore_phase(case, error, fault)]
    try:
        if fault is Fault.PHASE_SECOND:
            case.were_refused({"mapback"})
        if not verdict and error is None:
            must(case.job.record.state == RUNNING, f"the job is {case.job.record.state}")
            verdict = ENDED if fault is Fault.PHASE_TASK and case.ended else MENDED
        if fault is Fault.PHASE_COORDINATOR:
            must(type(error) is CoordinatorGone, f"its coordinator was killed, and it said {error}")
    except Wrong as wrong:
        verdict = str(wrong)
    verdict = verdict or after_restore(case, image, error, fault, again=True)
    if met_nobody(case, fault, verdict):
        return []
    return work.rows_of(fault, nth, phases, error, verdict, began)


def since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def shares(faults: Sequence[Fault], at_once: int) -> list[Sequence[Fault]]:
    """The faults in pieces for a job each; a task's are alone, since they take several."""
    shared = [fault for fault in faults if fault not in TASK]
    unit = max(1, UNIT_FAULTS * AT_ONCE // at_once)
    pieces = [shared[at : at + unit] for at in range(0, len(shared), unit)]
    return [*([fault] for fault in faults if fault in TASK), *pieces]


def run(
    name: str,
    folder: Path,
    faults: Sequence[Fault],
    tasks: Sequence[int],
    engine: EngineChoice = "native",
    at_once: int = AT_ONCE,
    actions: Sequence[str] = ACTIONS,
    seconds: float = math.inf,
    only: Collection[Sequence[object]] | None = None,
) -> tuple[list[Row], list[Work]]:
    """The rows of a lane, in the order of fault.def; of so many jobs at once, which mostly wait.

    No fault is begun with after so many `seconds`; `only` names actions, tasks and faults to be
    tried. Also the work, of which some faults may have been left out.
    """
    until = time.monotonic() + seconds
    with many_pids(), lane(name, folder, engine) as jobs, ThreadPoolExecutor(at_once) as pool:
        work = [
            Work(jobs, TASKS[name], some, count, action, until)
            for count in tasks
            for action in actions
            for some in shares(
                [
                    fault
                    for fault in faults
                    if (
                        is_tried(fault, count, action, list(tasks))
                        if only is None
                        else [action, count, fault] in only
                    )
                ],
                at_once,
            )
        ]
        rows = [row for part in pool.map(Work.run, work) for row in part]
    return in_order(rows), work


def in_order(rows: Sequence[Row]) -> list[Row]:
    order = {fault: number for number, fault in enumerate(Fault)}
    return sorted(
        rows,
        key=lambda r: (order[Fault(r.fault)], (*ACTIONS, SUSPEND).index(r.action), r.tasks, r.nth),
    )


def together(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """A document and the one that goes on with it. Raises Wrong if they are not of one lane, or of
    unlike machines."""

    def kind(document: dict[str, Any]) -> dict[str, Any]:
        return document["machine"] | {"lane": document["lane"], "memory_bytes": 0}

    for key, value in kind(earlier).items():
        must(kind(later)[key] == value, f"the result to go on with has another {key}")
    commit = earlier["commit"]
    if later["commit"] != commit:
        commit = f"{commit}, the last {len(later['rows'])} runs at {later['commit']}"
    rows = in_order([Row(**row) for document in (earlier, later) for row in document["rows"]])
    return later | {
        "command": f"{earlier['command']} && {later['command']}",
        "commit": commit,
        "seconds": round(earlier["seconds"] + later["seconds"], 2),
        "faults": earlier["faults"],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def is_right(row: Row) -> bool:
    return row.verdict in RIGHT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.matrix")
    parser.add_argument("--lane", choices=TASKS, required=True)
    parser.add_argument("--engine", choices=["native", "replay"], default="native")
    parser.add_argument("--faults", help="names of fault.def, with commas; default: all")
    parser.add_argument("--actions", help=f"of {', '.join((*ACTIONS, SUSPEND))}, with commas")
    parser.add_argument("--tasks", help="1, 2 or 1,2", default="1,2")
    parser.add_argument("--parallel", type=int, default=AT_ONCE, help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="to begin with faults in")
    parser.add_argument("--resume", type=Path, help="a result that has left out something")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    earlier = json.loads(options.resume.read_text()) if options.resume else None
    if earlier and options.faults:
        parser.error("--resume tries the faults that its result has left out")
    faults = [Fault(name) for name in options.faults.split(",")] if options.faults else list(Fault)
    began = time.monotonic()
    document = machine.heading("faults", machine.of_module("tests.faults.matrix")) | {
        "lane": lane_name(options.lane, options.engine),
        "seconds": 0.0,
        "faults": [str(fault) for fault in faults],
        "left_out": [],
        "rows": [],
    }
    if earlier:
        together(earlier, document)  # which refuses another's result before anything is tried
    with tempfile.TemporaryDirectory(prefix="fg-") as folder:
        tasks = [int(n) for n in options.tasks.split(",")]
        rows, all_work = run(
            options.lane,
            Path(folder),
            faults,
            tasks,
            options.engine,
            options.parallel,
            actions=options.actions.split(",") if options.actions else ACTIONS,
            seconds=options.seconds,
            only=earlier and earlier["left_out"],
        )
    wrong = [row for row in rows if not is_right(row)]
    print(f"{len(rows)} faults fired, {len(wrong)} of them with a wrong outcome")
    left_out = [
        [work.action, work.tasks, str(fault)] for work in all_work for fault in work.left_out
    ]
    print(f"no time was left for {len(left_out)} faults")
    if options.out:
        document["seconds"] = since(began)
        document["left_out"] = left_out
        document["rows"] = [dataclasses.asdict(row) for row in rows]
        if earlier:
            document = together(earlier, document)
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.pop("FLOWGPU_FAULT", None)
    sys.exit(main())
