"""A job that faults are injected into, what it holds, and what must be left of it afterwards."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from coordinator.faults import HALTS
from coordinator.process import alive
from flowgpu.errors import Busy, CoordinatorGone, FlowError
from flowgpu.host import unix_sockets
from flowgpu.host.proctree import fd_targets, tree_pids
from flowgpu.image.reader import Image
from flowgpu.jobs import EXITED, LOST, RUNNING, Job
from flowgpu.launch import emulator_socket
from flowgpu.start import end_started
from flowgpu.wire import Fault
from tests.faults.halts import LOOK_SECONDS, Disk, Second, halted, kill
from tests.faults.killing import below, running
from tests.unit.coordinator_job import Jobs, wait_for

SETTLE_SECONDS = 10.0
NAMES = "ab"

# A block that has come back to a task keeps its descriptor there, with a number from 512 on
# (native/vmm/memory.cpp): each of these may have one.
BLOCK_FILE, BLOCKS, FIRST_BLOCK = "flowgpu-emu-mem", 3, 512
SHARED_MEMORY = Path("/dev/shm")
DEVICE = os.fsencode(emulator_socket(Path("/")))


class Wrong(Exception):
    """Something is not as it must be after a fault."""


def must(condition: object, what: str) -> None:
    if not condition:
        raise Wrong(what)


def check_state(record: Job, action: str, killed: str, image: bool) -> None:
    """A job may have come to what its record says when a process of that kind (none: empty) was
    killed in a command. `image`: there is one, of the name that was asked for. Raises Wrong."""
    state = record.shown_state
    if state == RUNNING:
        must(action != "pause-and-dump" or not image, "it was dumped and it runs")
    elif state == LOST:
        must(killed == "cli", "the job is lost")
    elif state == EXITED:
        must(killed == "task", f"the job has ended: {record.exit_code}")
    else:
        must(image, f"the job is {state} without an image")


def descriptors(pid: int) -> int:
    """Descriptors of a task, beside those of its blocks and its connections to the emulated device:
    the driver keeps as many as there have been calls at one time."""
    blocks = others = 0
    peers = unix_sockets.peers()
    for fd, target in fd_targets(pid):
        inode = int(target[8:-1]) if target.startswith("socket:[") else 0
        if peers.get(inode, (0, b""))[1].endswith(DEVICE):
            continue
        if BLOCK_FILE in target or (fd >= FIRST_BLOCK and target == "/dev/nvidiactl"):
            blocks += 1
        else:
            others += 1
    return others + max(blocks - BLOCKS, 0)


@dataclass(frozen=True)
class Held:
    """Processes beside coordinator and job, descriptors of both, and names."""

    beside: frozenset[int]
    ours: int
    theirs: int
    files: frozenset[str]  # of the job's folder, its sockets among them
    shared: frozenset[str]  # of /dev/shm

    def unlike(self, before: Held) -> list[str]:
        """What there is more than before, and the files that are missing."""
        found = [f"process {pid}" for pid in sorted(self.beside - before.beside)]
        if self.ours > before.ours:
            found.append(f"{self.ours - before.ours} descriptors of the coordinator")
        if self.theirs > before.theirs:
            found.append(f"{self.theirs - before.theirs} descriptors of the job")
        found += sorted(self.files - before.files)
        found += [f"no {name}" for name in sorted(before.files - self.files)]
        return found + [f"/dev/shm/{name}" for name in sorted(self.shared - before.shared)]


class Case:
    """A job that counts, in one task or two, of which the first has the task's faults."""

    def __init__(self, jobs: Jobs, program: Sequence[str], tasks: int, of_task: str = "") -> None:
        """`of_task`: the setting of a task's fault; for others see `set`."""
        self.jobs, self.names, self.of_task = jobs, NAMES[:tasks], of_task
        self._setting = Path(tempfile.mkdtemp(dir=jobs.states)) / "fault"
        self._environment = {"FLOWGPU_FAULT": f"@{self._setting}"}
        self.set("")
        words = " ".join(program)
        fired = f"FLOWGPU_FAULT={of_task} " if of_task else ""
        starts = [
            f"{fired if name == 'a' else ''}FAKE_TASK_NAME={name} {words}" for name in self.names
        ]
        self.job = jobs.run(
            ["/bin/sh", "-c", " & ".join([*starts, "wait"])], coordinator_env=self._environment
        )
        self.said: list[str] = []  # before the last restore
        self.pids: list[int] = []  # of the tasks
        self.ended: list[int] = []  # processes that were killed by the last fault
        self._helpers: list[int] = []  # those that a coordinator had when it was killed
        self._suspends = False  # it has a ghost ready then
        self._asked = threading.Event()  # a restore is under way, and somebody waits for it
        self._log_began = 0
        self.wait_steps(3)
        self.look()

    def set(self, setting: str) -> None:
        """The fault of what comes next, in the coordinator and its helpers; empty: none."""
        self._setting.write_text(setting)
        self.fault = Fault(setting.partition(":")[0]) if setting else None
        if setting:
            self.ended, self._helpers = [], []

    def look(self) -> None:
        """Remember what is held when nothing is under way."""

        def tasks() -> list[int]:
            self.pids = [task["pid"] for task in self.job.ask("status")["tasks"]]
            return self.pids

        wait_for(lambda: len(tasks()) == len(self.names), "the tasks")
        self.before = self.held()

    # What it says

    def steps(self, name: str) -> list[str]:
        lines = self.said + self.job.lines
        return [line[1:] for line in lines if line.startswith(name)]

    def wait_steps(self, more: int, names: str = "") -> None:
        """Wait until each task, or each of those named, has gone on by so many steps."""
        wanted = {name: len(self.steps(name)) + more for name in names or self.names}
        for name, count in wanted.items():
            wait_for(lambda: len(self.steps(name)) >= count, f"steps of {name}")  # noqa: B023

    def counts(self) -> None:
        """No task has left out a step."""
        for name in self.names:
            steps = self.steps(name)
            wanted = [f"step {n + 1}" for n in range(len(steps))]
            wrong = [
                at for at, pair in enumerate(zip(steps, wanted, strict=True)) if len({*pair}) > 1
            ]
            at = wrong[0] if wrong else 0
            must(not wrong, f"{name} says {steps[max(at - 2, 0) : at + 3]}")

    @property
    def log(self) -> str:
        """What the coordinator has said of the last command."""
        return self.job.log[self._log_began :]

    def hit(self, fault: Fault) -> bool:
        """True if the coordinator's log knows that the fault has fired in the last command."""
        return ("tried again" if self.of_task else f"fault injected at {fault}") in self.log

    def phases(self) -> list[str]:
        """Phases in which the coordinator has stopped itself."""
        return re.findall(
            r"^fault injected at phase_\w+\nfault injected at (\w+)$", self.log, re.MULTILINE
        )

    def phase(self) -> str:
        """The phase that the log names as failed, else the one in which the fault was met."""
        failed = re.search(r"checkpoint: (\w+) failed", self.log)
        if failed:
            return failed[1]
        before = re.split("tried again|fault injected", self.log)[0]
        return re.findall(r"(?:checkpoint|resume): (\w+)", before)[-1]

    # What it holds

    def held(self) -> Held:
        coordinator = self.job.coordinator
        tree = tree_pids(self.job.record.root_pid)
        # What an earlier coordinator has left is the keeper's.
        beside = {*below([self.job.process.pid])} - {self.job.process.pid, coordinator, *tree}
        folder = self.job.directory
        # Each checkpoint notes in these what became of it.
        notes = {folder.counts, folder.timeline}
        files = frozenset(
            str(path.relative_to(folder.path)) for path in {*folder.path.rglob("*")} - notes
        )
        theirs = sum(map(descriptors, tree))
        ours = psutil.Process(coordinator).num_fds()
        ghosts = beside & {child.pid for child in psutil.Process(coordinator).children()}
        if self._suspends and ghosts:
            # One waits for the next suspension, at the end of a socket.
            beside.discard(ghosts.pop())
            ours -= 1
        return Held(frozenset(beside), ours, theirs, files, self.shared())

    def shared(self) -> frozenset[str]:
        """Shared memory of this job, and links that CRIU may have made for deleted files."""
        names = [path.name for path in SHARED_MEMORY.iterdir()]
        return frozenset(n for n in names if self.job.spec.id in n or n.startswith("link_remap"))

    def goes_on(self) -> None:
        """Each task counts on from where it was, without a gap, and nothing else is left."""
        self.wait_steps(5)
        self.counts()
        must(self.job.record.state == RUNNING, f"the job is {self.job.record.state}")
        self.left_nothing()

    def left_nothing(self) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while more := self.held().unlike(self.before):
            must(time.monotonic() < deadline, f"left: {', '.join(more)}")
            time.sleep(0.02)

    def is_over(self, pids: Sequence[int]) -> None:
        """The job, of these processes, has ended: its record and its logs are there, no more."""
        self.job.process.wait(SETTLE_SECONDS)
        left = [pid for pid in [*pids, *self._helpers] if alive(pid)]
        must(not left, f"left: processes {left}")
        sockets = [path.name for path in self.job.directory.path.glob("*.sock")]
        must(not sockets, f"left: {sockets}")
        must(not self.shared(), f"left: {sorted(self.shared())} in /dev/shm")

    # Commands

    def dump(self, image: Path, leave_running: bool, disk: Disk | None = None) -> FlowError | None:
        """`disk` is where the image goes, if that is to be full."""
        self._log_began = len(self.job.log)
        self._asked.set()
        with self._halts(lambda: self.pids[0], disk):
            try:
                self.job.dump(image, leave_running=leave_running)
            except FlowError as error:
                return error
            finally:
                self._end_others()
                if disk is not None:
                    disk.empty()
        return None

    def suspend(self) -> FlowError | None:
        """Suspend, and resume with nothing kept."""
        self._suspends = True
        self._log_began = len(self.job.log)
        self._asked.set()
        with self._halts(lambda: self.pids[0]):
            try:
                self.job.ask("suspend")
                self.job.ask("resume", drop=True)
            except FlowError as error:
                return error
        return None

    def restore(self, image: Path) -> FlowError | None:
        """Restore; without an error the job has gone on when this returns."""
        # What the job said up to the dump, and no later line of one that was left running.
        self.said = (image / "output.log").read_text().splitlines()
        self._log_began = 0
        last = Image(image).manifest.pids[-1]
        self._asked.clear()
        with self._halts(lambda: last):
            self.job = self.jobs.restore(image, coordinator_env=self._environment)
            try:
                self.job.ask("wait-restored", on_sent=self._asked.set)
            except FlowError as error:
                if self.fault is Fault.PHASE_COORDINATOR:
                    # The command that has started the job does so too.
                    end_started(self.job.process, self.job.spec, self.job.directory)
                return error
            finally:
                self._end_others()
        # One that was killed in the restore, the last, has ended; the others go on.
        self.wait_steps(5, self.names[: len(self.names) - len(self.ended)])
        self.counts()
        return None

    def go_on_from(self, image: Path) -> None:
        """The job was dumped: its image is whole, and it is restored for what comes next."""
        must(self.job.end() == 75, "the dumped job ended otherwise")
        Image(image).verify()
        self.set("")
        error = self.restore(image)
        must(error is None, f"its restore: {error}")
        self.look()

    def _halts(
        self, task: Callable[[], int], disk: Disk | None = None
    ) -> AbstractContextManager[None]:
        """`task` gives the process id of the one that is to be killed."""
        if self.fault not in HALTS:
            return nullcontext()
        self.second = Second(self.job.directory, Path(tempfile.mkdtemp(dir=self.jobs.states)))
        acts: dict[Fault, Callable[[int], None]] = {
            Fault.PHASE_STOP: lambda _: None,
            Fault.PHASE_SECOND: lambda _: self.second.ask(),
            Fault.PHASE_TASK: lambda _: self._kill([task()]),
            Fault.PHASE_GHOST: self._kill_ghost,
            Fault.PHASE_PAGES: lambda pid: self._kill(running("page server", [pid])),
            Fault.PHASE_COORDINATOR: self._kill_coordinator,
        }
        if disk is not None:
            acts[Fault.PHASE_DISK] = lambda _: disk.fill()
        return halted(self._coordinator, acts[self.fault])

    def _kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            kill(pid)
        self.ended += pids

    def _kill_ghost(self, pid: int) -> None:
        """Where it is only being started beside this phase, as soon as it is there."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not (found := running("ghost", [pid])) and time.monotonic() < deadline:
            kill(pid, signal.SIGCONT)
            time.sleep(LOOK_SECONDS)
        self._kill(found)

    def _kill_coordinator(self, pid: int) -> None:
        self._asked.wait(SETTLE_SECONDS)
        tree = tree_pids(self.job.record.root_pid)
        self._helpers = [other for other in below([pid]) if other not in tree]
        self._kill([pid])

    def _end_others(self) -> None:
        """Wait for other commands: one may be at work by now, and stop the coordinator too."""
        if self.fault is Fault.PHASE_SECOND:
            self.set("")
            self.second.answers()

    def _coordinator(self) -> int:
        with suppress(OSError, ValueError):
            return self.job.coordinator
        return 0

    def were_refused(self, last: set[str]) -> None:
        """Other commands were, all but those of the `last` phases: the first is as good as over
        then, and what is asked for may be done, or finds nobody."""
        answers = self.second.answers()
        late = len({*self.phases()} & last)
        for answer in answers[: len(answers) - late]:
            must(isinstance(answer, Busy), f"another command: {answer or 'no error'}")
        for answer in answers[len(answers) - late :]:
            fine = isinstance(answer, Busy | CoordinatorGone | None)
            must(fine, f"another command: {answer}")
