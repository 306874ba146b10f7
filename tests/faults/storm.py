"""kill -9 of any process at a drawn moment of a checkpoint or restore, again and again.

    python -m tests.faults.storm [--gpu emulated|nvidia] [--engine replay] [--rounds N] [--seed S]
                                 [--out FILE.json]

Each round has a number that says what is drawn: the command, the process and the moment. Round N is
run again by `--seed N --rounds 1`; SIGTERM ends it all after the round under way. Afterwards the
job must go on as an undisturbed one, or be known as dumped or, if a task was killed, as ended, or
as lost where the command of a restore was; an image is whole or is none; a whole one is
restored; nothing else is left; and what the command says is one named error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import machine
from coordinator.process import alive, reap
from flowgpu import errors, jobs, launch
from flowgpu.client import Connection
from flowgpu.errors import FlowError
from flowgpu.host.prctl import become_subreaper
from flowgpu.host.proctree import fd_targets, task_states
from flowgpu.image.reader import Image
from tests.faults.case import Wrong, check_state, descriptors, must
from tests.faults.killing import Target, below, children, kind_of, lifetimes, program, running
from tests.faults.lanes import ON_A_GPU, lane_name
from tests.gpu.site import ROOT, Site, many_pids

COMMAND_SECONDS, SETTLE_SECONDS = 60.0, 15.0
SAME_TASKS = 40  # rounds with as many tasks as the last one, so that the job may be the same
LIVING = 3  # steps that show that a job goes on
BESIDE = ("task", "ghost", "coordinator", "keeper", "criu", "cli")
IN_DUMPS = (*BESIDE, "page server", "criu and coordinator")
TARGETS = {
    "pause-and-dump": IN_DUMPS,
    "leave-running": IN_DUMPS,
    "restore": (*BESIDE, "filler"),
}
CODES = {kind.exit_code: kind.__name__ for kind in errors.all_errors()}
# What a round may come to.
MISSED, GOES_ON, DUMPED, ENDED, LOST, NOTHING_LEFT = VERDICTS = (
    "not hit",
    "goes on",
    "dumped, restored",
    "ended",
    "lost",
    "nothing left, restored",
)


@dataclasses.dataclass(frozen=True)
class Draw:
    seed: int
    tasks: int
    action: str
    target: Target

    @staticmethod
    def of(seed: int) -> Draw:
        rng = random.Random(seed)
        action = rng.choice(list(TARGETS))
        kind = rng.choice(TARGETS[action])
        tasks = 1 + seed // SAME_TASKS % 2
        return Draw(seed, tasks, action, Target(kind, rng.random(), rng.random()))


@dataclasses.dataclass
class Row:
    """A round. `at`: seconds into the command; `image`: one was whole."""

    seed: int
    action: str
    tasks: int
    target: str
    at: float
    exit_code: int
    error: str
    image: bool
    verdict: str  # or what is wrong
    seconds: float


class Job:
    """One job of the site, through dumps and restores."""

    def __init__(self, site: Site, folder: Path, tasks: int, engine: launch.EngineChoice) -> None:
        self.site, self.folder, self.names = site, folder, "ab"[:tasks]
        self.others = set(below([os.getpid()]))  # of who runs the storm, as a test process has some
        self.image = folder / "image"
        words = " ".join(ON_A_GPU)
        starts = [f"FAKE_TASK_NAME={name} {words} &" for name in self.names]
        command = ["/bin/sh", "-c", " ".join([*starts, "wait"])]
        before = len(site.registry.all())
        self.runner: subprocess.Popen[bytes] | None = site.start(
            *("run", "--name", "storm", "--gpu", site.kind, "--engine", engine, "--", *command),
            stdout=subprocess.DEVNULL,  # type: ignore[arg-type]
            stderr=subprocess.DEVNULL,  # type: ignore[arg-type]
        )
        self.settle(lambda: len(site.registry.all()) > before, "the job")
        self.id = site.registry.find("storm").id
        self.settle(lambda: self.living() == self.names, "the tasks", COMMAND_SECONDS)
        self.goes_on(COMMAND_SECONDS)
        self.look()

    @property
    def directory(self) -> jobs.JobDir:
        return self.site.registry.dir(self.id)

    @property
    def record(self) -> jobs.Job:
        return self.directory.read()

    def settle(self, check: Callable[[], Any], what: str, seconds: float = SETTLE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            must(time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}")
            self.reap()
            time.sleep(0.01)

    def reap(self) -> None:
        """Wait for processes that have come to us by the death of their parents."""
        own = self.runner.pid if self.runner is not None else 0
        reap(pid for pid in children(os.getpid()) if pid != own)

    # What the job says

    def steps(self, name: str) -> list[str]:
        with suppress(FileNotFoundError):
            lines = self.directory.output_log.read_text().splitlines()
            return [line[1:] for line in lines if line.startswith(name)]
        return []

    def living(self) -> str:
        """Names of the tasks that are there."""
        found = ""
        for pid in running("task", [self.record.root_pid]):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found += "".join(w.decode()[-1] for w in words if w.startswith(b"FAKE_TASK_NAME="))
        return "".join(sorted(found))

    def goes_on(self, seconds: float = SETTLE_SECONDS) -> None:
        """Each living task counts on from where it was, without a gap."""
        self.settle(lambda: self.record.state == jobs.RUNNING, "a running job", seconds)
        self.settle(self.living, "a task", seconds)
        for name in self.living():
            wanted = len(self.steps(name)) + LIVING
            self.settle(lambda: len(self.steps(name)) >= wanted, f"steps of {name}", seconds)  # noqa: B023
        for name in self.names:
            said = self.steps(name)
            wrong = [n for n, step in enumerate(said, 1) if step != f"step {n}"]
            must(not wrong, f"{name} says {said[wrong[0] - 2 : wrong[0] + 2] if wrong else ''}")

    def held(self) -> tuple[int, int]:
        """Descriptors of the coordinator and of the job."""
        record = self.record
        with suppress(OSError):
            ours = len(os.listdir(f"/proc/{record.coordinator_pid}/fd"))
            return ours, sum(map(descriptors, below([record.root_pid])))
        return 0, 0

    def status(self) -> dict[str, Any] | None:
        """What the coordinator says, after all that it has been asked before; None if nothing."""
        with suppress(FlowError, OSError), Connection(self.directory.control_socket, "storm") as it:
            it.set_patience(SETTLE_SECONDS)
            it.send("status")
            return it.result()
        return None

    def look(self) -> None:
        """Remember what it holds when nothing is under way and all tasks have said HELLO."""

        def all_there() -> bool:
            status = self.status()
            return status is not None and len(status["tasks"]) == len(self.living())

        self.settle(all_there, "the tasks' HELLO")
        self.before, self.targets_before = self.held(), self.targets()

    def targets(self) -> Counter[str]:
        """What the descriptors of the coordinator and of the job refer to."""
        record, found = self.record, Counter[str]()
        for who, pids in (
            ("coordinator", [record.coordinator_pid]),
            ("job", below([record.root_pid])),
        ):
            for pid in pids:
                found.update(f"{who} {target.partition(':[')[0]}" for _, target in fd_targets(pid))
        return found

    def evidence(self) -> str:
        """The job's record, what is left of its processes, the coordinator's log."""
        states = {pid: (kind_of(pid), task_states(pid)) for pid in below([os.getpid()])}
        with suppress(OSError):
            held = f"more descriptors: {self.targets() - self.targets_before}"
            log = self.directory.coordinator_log.read_text()
            return f"{self.record}\n{states}\n{held}\n{log}"
        return f"no record\n{states}"

    # What is left

    def strays(self) -> list[str]:
        """Processes below us that are neither the job's nor its command's."""
        self.reap()
        record = self.record
        mine = self.others | set(below([record.root_pid]) if record.live else ())
        mine |= {record.coordinator_pid, record.keeper_pid} if record.live else set()
        runner = self.runner.pid if self.runner is not None else 0
        left = [pid for pid in below([os.getpid()]) if pid not in {*mine, os.getpid(), runner}]
        return [f"{kind_of(pid) or program(pid)} {pid}" for pid in left]

    def left_nothing(self) -> None:
        self.settle(lambda: not self.strays(), f"the end of {self.strays()}")
        if not self.record.live:
            self.settle(lambda: not list(self.directory.path.glob("*.sock")), "the sockets' end")
        elif len(self.living()) == len(self.names):

            def few() -> bool:
                ours, theirs = self.held()
                return ours <= self.before[0] and theirs <= self.before[1]

            self.settle(few, f"descriptors {self.before}, are {self.held()}")
        left = [path.name for path in self.folder.iterdir() if path != self.image]
        must(not left, f"left: {left}")

    # Commands

    def start(self, action: str) -> subprocess.Popen[str]:
        words = ["pause-and-dump", "storm", "--json", "--output", str(self.image)]
        words += ["--leave-running"] if action == "leave-running" else []
        if action == "restore":
            words = ["restore", str(self.image), "--detach", "--json"]
        return subprocess.Popen(
            [sys.executable, "-m", "flowgpu", *words],
            cwd=ROOT,
            env=self.site.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def roots(self, command: subprocess.Popen[str], action: str) -> list[int]:
        return [command.pid if action == "restore" else self.record.keeper_pid]

    def do(self, action: str) -> dict[str, float]:
        """An undisturbed command, which must succeed; how long its processes lived."""
        with self.start(action) as command:
            found = lifetimes(command, self.roots(command, action))
            report, said = command.communicate(timeout=COMMAND_SECONDS)
        must(command.returncode == 0, f"{action}: {said.strip()}")
        found["criu"] = json.loads(report)["phases"]["criu"]
        if action == "restore":
            self.goes_on()
            self.look()
        elif action == "pause-and-dump":
            self.run_ended(errors.DUMPED_EXIT)
        return found

    def run_ended(self, code: int | None = None) -> None:
        """`flowgpu run` has returned, with this code."""
        runner, self.runner = self.runner, None
        if runner is not None:
            with suppress(subprocess.TimeoutExpired):
                runner.wait(SETTLE_SECONDS)
            must(runner.poll() is not None, "flowgpu run goes on")
            must(code in (None, runner.returncode), f"flowgpu run gave {runner.returncode}")

    def end(self) -> None:
        """End it, whatever its state."""
        record = self.record
        if record.shown_state in (*jobs.LIVE_STATES, jobs.LOST):
            self.site.call("kill", "storm")
        self.run_ended()
        self.settle(lambda: not self.strays(), "the job's end")


class Storm:
    """Rounds, one after another, with a job that lives through as many of them as it can."""

    def __init__(self, site: Site, engine: launch.EngineChoice) -> None:
        self.site, self.engine = site, engine
        self.folder = site.images
        self.job: Job | None = None
        self.spans: dict[str, dict[str, float]] = {}

    def measure(self) -> None:
        """How long each kind of process is there in each command."""
        job = self._job(1)
        self.spans["leave-running"] = job.do("leave-running")
        shutil.rmtree(job.image)
        self.spans["pause-and-dump"] = job.do("pause-and-dump")
        self.spans["restore"] = job.do("restore")
        shutil.rmtree(job.image)

    def _job(self, tasks: int) -> Job:
        if self.job is not None and len(self.job.names) != tasks:
            self.close()
        if self.job is None:
            self.job = Job(self.site, self.folder, tasks, self.engine)
        return self.job

    def close(self) -> None:
        if self.job is not None:
            self.job.end()
            self.job = None

    def round(self, draw: Draw) -> Row:
        began = time.monotonic()
        row = Row(draw.seed, draw.action, draw.tasks, draw.target.kind, 0.0, 0, "", False, "", 0.0)
        try:
            self._round(draw, row)
        except (Wrong, FlowError, OSError, subprocess.SubprocessError) as wrong:
            row.verdict = f"{type(wrong).__name__}: {wrong}"
            if self.job is not None:
                print(row, self.job.evidence(), sep="\n", file=sys.stderr, flush=True)
            self._abandon()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        row.seconds = round(time.monotonic() - began, 2)
        return row

    def _abandon(self) -> None:
        """A job that is not what it must be: nothing of it is to disturb the next one."""
        job, self.job = self.job, None
        with suppress(Exception):
            if job is not None:
                job.end()
        for pid in below([os.getpid()]):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and len(below([os.getpid()])) > 1:
            reap(children(os.getpid()))
            time.sleep(0.01)

    def _round(self, draw: Draw, row: Row) -> None:
        job, action = self._job(draw.tasks), draw.action
        if action == "restore":
            job.do("pause-and-dump")
        with job.start(action) as command:
            roots = job.roots(command, action)
            span = self.spans[action].get(draw.target.first, 0.0)
            victim, at = draw.target.kill(command, roots, span)
            row.at = round(at, 3)
            try:
                _, said = command.communicate(timeout=COMMAND_SECONDS)
            except subprocess.TimeoutExpired:
                command.kill()
                raise Wrong(f"{action} does not end") from None
        row.exit_code = command.returncode
        row.error = one_error(command.returncode, said, of_cli=row.target == "cli")
        self._settled(job, victim)
        row.image = job.image.exists()
        self._check_images(job)
        row.verdict = self._became(job, row, hit=bool(victim))
        if not victim:
            must(row.exit_code == 0, f"it failed by itself: {said.strip()}")
            row.verdict = MISSED
        shutil.rmtree(job.image, ignore_errors=True)

    def _settled(self, job: Job, victim: int) -> None:
        """A command that was killed may leave the coordinator at work."""

        def settled() -> bool:
            if victim and alive(victim):
                return False
            # Else what the command has asked for may still lie in the socket, or be about to begin.
            if (status := job.status()) and status["doing"]:
                return False
            state = job.record.shown_state
            if state == jobs.LOST:  # of the command line, whose coordinator is still to be
                return not running("coordinator", [os.getpid()])
            if state == jobs.RUNNING:  # of a task, whose end the coordinator is still to see
                return bool(job.living()) and alive(job.record.coordinator_pid)
            return state not in jobs.LIVE_STATES

        job.settle(settled, "the end of it", COMMAND_SECONDS)

    def _check_images(self, job: Job) -> None:
        """One that has its name is whole, and no other is taken for one."""
        if job.image.exists():
            Image(job.image).verify()
        for path in self.folder.iterdir():
            if path != job.image:
                with suppress(FlowError):
                    Image(path).verify()
                    raise Wrong(f"{path.name} is taken for an image")
                must(job.record.shown_state == jobs.LOST, f"left: {path.name}")
                shutil.rmtree(path)

    def _became(self, job: Job, row: Row, *, hit: bool) -> str:
        """What became of the job. Afterwards it runs, or there is none."""
        state = job.record.shown_state
        check_state(job.record, row.action, row.target if hit else "", row.image)
        if state == jobs.RUNNING:
            job.goes_on()
            job.left_nothing()
            return self._unless_fewer(job, row, GOES_ON)
        if state == jobs.LOST:
            self._end_lost(job)
        elif state == jobs.EXITED:
            job.run_ended(job.record.exit_code)
        else:
            job.run_ended(errors.DUMPED_EXIT)
        job.left_nothing()
        return self._after_end(job, row, state)

    def _after_end(self, job: Job, row: Row, state: str) -> str:
        if row.image:
            job.do("restore")
            job.left_nothing()
            if state == jobs.DUMPED:
                verdict = NOTHING_LEFT if row.action == "restore" else DUMPED
                return self._unless_fewer(job, row, verdict)
        else:
            self.job = None
        return LOST if state == jobs.LOST else ENDED

    def _unless_fewer(self, job: Job, row: Row, verdict: str) -> str:
        """One of two tasks may have been ended; the other is of no use to later rounds, nor is a
        job without its keeper."""
        if job.living() == job.names:
            if row.target == "keeper" and verdict == GOES_ON:
                self.close()
            return verdict
        must(row.target == "task", "a task has ended")
        self.close()
        return ENDED

    def _end_lost(self, job: Job) -> None:
        """Its helpers end by themselves; what is left of the job is ended by `flowgpu kill`."""

        def helpers() -> list[str]:
            return [text for text in job.strays() if text.split()[0] not in ("task", "sh")]

        job.settle(lambda: not helpers(), f"the end of {helpers()}")
        call = self.site.call("kill", "storm")
        must(call.code in (0, errors.CoordinatorGone.exit_code), f"kill: {call.stderr.strip()}")
        job.run_ended()
        job.settle(lambda: not job.strays(), f"kill leaves {job.strays()}")


def one_error(code: int, said: str, of_cli: bool) -> str:
    """The name of the error. Raises Wrong unless there is exactly one, or none with code 0."""
    if of_cli and code == -9:
        return ""
    lines = [line for line in said.splitlines() if line.startswith("Error: ")]
    must("Traceback" not in said, said.strip())
    must(code == 0 or code in CODES, f"exit code {code}: {said.strip()}")
    must(len(lines) == (code != 0), f"exit code {code} and {lines}")
    return CODES.get(code, "")


DEVICE_FREE = """
from tests.emu.driver_lib import cu, ok, start
start()
print(ok(cu.cuMemGetInfo())[0])
"""


def device_free(site: Site, wanted: int = 0) -> int:
    """Bytes of the GPU that nobody has, as a program of its own sees it; the emulated one looks
    after memory that was exported now and then, so it is waited for until they are `wanted`."""
    words = [sys.executable, "-c", DEVICE_FREE]
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        time.sleep(2.0 if wanted else 0.0)
        output = subprocess.check_output(words, cwd=ROOT, env=site.plain_environment, text=True)
        if int(output) >= wanted or time.monotonic() > deadline:
            return int(output)


def run(
    kind: launch.GpuKind,
    seeds: range,
    tell: Callable[[Row], None],
    stop: Callable[[], bool] = lambda: False,
    engine: launch.EngineChoice = "native",
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the rounds, up to one after which it is to `stop`, and what was measured around."""
    become_subreaper()
    rows = []
    with many_pids(), Site(kind) as site:
        before = device_free(site)
        storm = Storm(site, engine)
        try:
            storm.measure()
            for seed in seeds:
                rows.append(storm.round(Draw.of(seed)))
                tell(rows[-1])
                if stop():
                    break
        finally:
            storm.close()
        lost = before - device_free(site, before)
        return rows, {"lifetimes": storm.spans, "device_bytes_lost": lost}


def is_right(row: Row) -> bool:
    return row.verdict in VERDICTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.storm")
    parser.add_argument("--gpu", choices=["emulated", "nvidia"], default="emulated")
    parser.add_argument("--engine", choices=["native", "replay"], default="native")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    heading = machine.heading("storm", machine.of_module("tests.faults.storm"))
    seeds = range(options.seed, options.seed + options.rounds)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    rows, about = run(
        options.gpu,
        seeds,
        lambda row: print(*dataclasses.astuple(row), flush=True),
        stop.is_set,
        options.engine,
    )
    wrong = [row for row in rows if not is_right(row)]
    counts = Counter(row.verdict for row in rows if is_right(row))
    print(f"{len(rows)} rounds: {dict(counts)}, {len(wrong)} wrong; {about}")
    if options.out:
        document = heading | {
            "lane": lane_name(options.gpu, options.engine),
            "seconds": round(time.monotonic() - began, 1),
            **about,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if wrong or about["device_bytes_lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
