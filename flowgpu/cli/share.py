"""The verb `share`: jobs take turns on their GPUs, by suspensions and resumes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import click

from flowgpu import start
from flowgpu.cli.common import find_live, job_names, note, say, show_json
from flowgpu.cli.periods import SECONDS
from flowgpu.cli.suspend import keep_context_option
from flowgpu.errors import FlowError, NothingToSuspend
from flowgpu.jobs import LIVE_STATES, LOST, SUSPENDED, Job, Registry
from flowgpu.options import SuspendOptions
from flowgpu.render import one_line, seconds

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_SECONDS = 0.1
"""The time between two looks at the job that has its turn, and for a signal."""

Report = dict[str, Any]


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB JOB...", shell_complete=job_names)
@click.option("--quantum", metavar="SECONDS", type=SECONDS, required=True, help="Length of a turn")
@keep_context_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value a turn")
@click.pass_context
def share(
    context: click.Context,
    jobs: Sequence[str],
    quantum: float,
    keep_context: bool,
    as_json: bool,
) -> None:
    """Let JOBs take turns on the GPU: one works, the others are suspended

    A job that ends leaves the round, and the last one runs on alone. A job that cannot be
    suspended keeps its turn. Ctrl-C or SIGTERM ends the round: the job that has its turn runs on,
    and the others that ran before come back where there is room.
    """
    registry = Registry()
    records = list({job.id: job for job in (find_live(registry, name) for name in jobs)}.values())
    if len(records) < 2:
        raise click.UsageError("Give two jobs or more.")
    signum = Round(registry, records, quantum, SuspendOptions(keep_context), as_json).run()
    if signum:
        context.exit(128 + signum)


class Round:
    """Jobs that take turns; `run` once."""

    def __init__(
        self,
        registry: Registry,
        jobs: Sequence[Job],
        quantum: float,
        options: SuspendOptions,
        as_json: bool,
    ) -> None:
        self._registry = registry
        self._jobs = deque(jobs)  # the first is to come next
        self._quantum, self._options, self._as_json = quantum, options, as_json
        self._ran = {job.id for job in jobs if job.state != SUSPENDED}
        self._said: dict[str, str] = {}  # the last of each job and kind
        self._turns = 0
        self._signal = 0

    def run(self) -> int:
        """Until one job is left, which runs. Gives the number of the signal that ended it before,
        or 0."""
        with self._signals():
            try:
                while not self._signal and self._is_on():
                    self._turn()
            except KeyboardInterrupt:  # asked to end twice
                raise
            except BaseException:
                self._bring_back()
                raise
            else:
                self._bring_back()
            finally:
                self._tell()
        return self._signal

    def _is_on(self) -> bool:
        """There are turns to take. Jobs that have ended leave the round."""
        for job in list(self._jobs):
            if (state := self._state(job)) not in LIVE_STATES:
                self._jobs.remove(job)
                _note(f"{job.name} leaves the round: it is {state}")
        return len(self._jobs) > 1 or any(map(self._is_away, self._jobs))

    def _state(self, job: Job) -> str:
        try:
            return self._registry.dir(job.id).read().shown_state
        except (OSError, ValueError):
            return LOST

    def _is_away(self, job: Job) -> bool:
        return self._state(job) == SUSPENDED

    def _runs(self, job: Job) -> bool:
        state = self._state(job)
        return state in LIVE_STATES and state != SUSPENDED

    # A turn

    def _turn(self) -> None:
        """The next job that can have the GPU has it for a while."""
        out: list[Report] = []
        for _ in range(len(self._jobs)):
            into = self._jobs[0]
            stuck = self._clear(into, out)
            if self._signal:
                return
            if stuck and self._is_away(into):
                # Both at a time might not fit. It is tried again when this turn is over.
                self._show(stuck, out, None)
                self._wait(stuck)
                return
            self._jobs.rotate(-1)
            came = self._resume(into) if self._is_away(into) else None
            if self._runs(into):
                self._show(into, out, came)
                self._wait(into)
                return
            if self._signal:
                return
        self._wait(None)  # what takes the room of all of them may be gone then

    def _clear(self, into: Job, out: list[Report]) -> Job | None:
        """Suspend all others, and add the reports to `out`. Gives one that keeps the GPU, if one
        does."""
        stuck = None
        for job in list(self._jobs):
            if self._signal or job is into or not self._runs(job):
                continue
            try:
                report = self._ask(job, "suspend", **self._options.to_fields())
            except NothingToSuspend:
                continue
            except FlowError as error:
                if self._runs(job):
                    self._say_once(job.id, f"{job.name} keeps the GPU: {error}")
                    stuck = job
                continue
            out.append(report)
            self._said.pop(job.id, None)
            for text in report["not_kept"]:
                self._say_once(f"{job.id} {text}", f"{job.name}: not kept: {text}")
        return stuck

    def _resume(self, job: Job) -> Report | None:
        """The report; None: it stays suspended, or has ended."""
        try:
            report = self._ask(job, "resume")
        except FlowError as error:
            if self._is_away(job):
                self._say_once(job.id, f"{job.name} misses its turn: {error}")
            return None
        self._said.pop(job.id, None)
        return report

    def _ask(self, job: Job, verb: str, **fields: Any) -> Report:
        """Without its progress, which would be most of what a round of hours says."""
        record = find_live(self._registry, job.id)
        return start.ask(self._registry.dir(job.id), record, verb, **fields)

    def _say_once(self, about: str, text: str) -> None:
        """Not again each turn."""
        if self._said.get(about) != text:
            self._said[about] = text
            _note(one_line(text))

    def _wait(self, job: Job | None) -> None:
        """For a turn's time, or until this job has left the GPU or is the only one."""
        until = time.monotonic() + self._quantum
        while not self._signal and (left := until - time.monotonic()) > 0:
            if job and (len(self._jobs) == 1 or not self._runs(job)):
                return
            time.sleep(min(left, LOOK_SECONDS))

    def _show(self, job: Job, out: list[Report], came: Report | None) -> None:
        self._turns += 1
        if self._as_json:
            show_json({"turn": self._turns, "job": job.name, "out": out, "in": came})
            return
        did = [f"{one['job']} left in {seconds(one['suspend_seconds'])}" for one in out]
        if came:
            did.append(f"{job.name} came in {seconds(came['resume_seconds'])}")
        say(f"turn {self._turns}: {job.name}" + (f"  ({', '.join(did)})" if did else ""))

    # The end

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal ends the round once what has begun is done; a second one ends the command."""
        before = {number: signal.getsignal(number) for number in ENDING}
        heard = [number for number in ENDING if before[number] is not signal.SIG_IGN]

        def restore() -> None:
            for number in heard:
                signal.signal(number, before[number])

        def end(number: int, _frame: FrameType | None) -> None:
            self._signal = number
            restore()

        for number in heard:
            signal.signal(number, end)
        try:
            yield
        finally:
            restore()

    def _bring_back(self) -> None:
        """Resume who ran before, where there is room, and somebody at all events."""
        for job in reversed(self._jobs):  # the last one has had the last turn
            wanted = job.id in self._ran or not any(map(self._runs, self._jobs))
            if wanted and self._is_away(job):
                self._resume(job)

    def _tell(self) -> None:
        for job in self._jobs:
            if self._is_away(job):
                _note(f"{job.name} is suspended; `flowgpu resume {job.name}` brings it back")
            elif self._runs(job):
                _note(f"{job.name} runs on")


def _note(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        note(f"flowgpu: {text}")
