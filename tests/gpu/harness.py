"""Run a workload, dump and restore it at random moments, and compare every line it prints."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flowgpu.vocabulary import ModeChoice
from tests.gpu.catalogue import WORK_SECONDS, Workload
from tests.gpu.job import Job, difference, last_step, lines_of
from tests.gpu.site import Site, Trouble

# A job that is done before all its dumps were made is run again for the rest.
MOST_RUNS = 5
MOST_FAILED_DUMPS = 3
KILL_SECONDS = 5.0
Lines = list[str]


@dataclass(frozen=True)
class Plan:
    """What to do to each workload."""

    dumps: int = 10
    seed: int = 0
    leave_running: bool = False
    mode: ModeChoice = "any"
    communicators: str = "keep"  # or rebuild
    suspend: bool = False  # in the place of each dump: away from the GPU and back
    engine: str = ""  # native or replay: jobs are dumped with it
    prepared: str = ""  # and prepared for this one, if it is another
    longest_wait: float = 1.0  # seconds from a restore, or a dump, to the next dump, at most
    work_seconds: float = WORK_SECONDS  # of the uninterrupted run, about
    job_seconds: float = 30.0  # that a job takes without dumps, by sleeping between steps
    deadline: float = 150.0  # seconds for a workload, its uninterrupted run not counted

    @property
    def run_options(self) -> list[str]:
        engine = self.prepared or self.engine
        return ["--engine", engine] if engine else []

    @property
    def dump_options(self) -> list[str]:
        engine = ["--engine", self.engine] if self.engine else []
        if self.suspend:
            return engine
        return ["--mode", self.mode, "--communicators", self.communicators, *engine]


@dataclass
class Baseline:
    """An uninterrupted run without FlowGPU."""

    steps: int
    lines: Lines
    seconds: float
    seconds_per_step: float

    @property
    def done(self) -> bool:
        return bool(self.lines) and self.lines[-1].startswith("done ")


@dataclass
class Outcome:
    """What happened to one workload."""

    workload: str
    steps: int = 0
    step_delay: float = 0.0
    baseline_seconds: float = 0.0
    runs: int = 0
    dumps: list[dict[str, Any]] = field(default_factory=list)
    restores: list[dict[str, Any]] = field(default_factory=list)
    compared: int = 0  # runs whose every line was compared
    identical: bool | None = None
    problems: list[str] = field(default_factory=list)
    not_run: str | None = None
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES names it
    seconds: float = 0.0
    complete: bool = False  # False: it was cut off, and says nothing yet

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Outcome:
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in found.items() if key in known})

    @property
    def ok(self) -> bool:
        return self.identical is True and not self.problems and self.not_run is None

    def compare(self, baseline: Baseline, found: Lines, what: str) -> None:
        """Note whether `found` are the baseline's lines."""
        self.compared += 1
        different = difference(baseline.lines, found)
        self.identical = self.identical is not False and different is None
        if different:
            self.problems.append(f"{what}: {different}")


def run_plain(site: Site, workload: Workload, steps: int, deadline: float) -> Baseline:
    """Run it without FlowGPU. Raises Trouble when it fails or is late."""
    with tempfile.TemporaryDirectory(dir=site.images) as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        began = time.monotonic()
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = site.start_plain(workload.command(steps), stdout, stderr)
        try:
            while last_step(out) < 0 and process.poll() is None:
                time.sleep(0.01)
                if time.monotonic() > deadline:
                    break
            first = time.monotonic()
            process.wait(max(deadline - first, 0.1))
        except subprocess.TimeoutExpired:
            raise Trouble(
                f"without FlowGPU: not done in time, last step {last_step(out)}"
            ) from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        ended = time.monotonic()
        lines = lines_of(out.read_text(errors="replace"))
        if process.returncode != 0 or not lines or not lines[-1].startswith("done "):
            said = err.read_text(errors="replace").strip()[-1000:]
            raise Trouble(f"without FlowGPU: ended with {process.returncode}: {said}")
    return Baseline(steps, lines, ended - began, (ended - first) / max(steps - 1, 1))


def baseline_of(site: Site, workload: Workload, plan: Plan, seconds: float) -> Baseline:
    """An uninterrupted run of about `plan.work_seconds`. Raises Trouble."""
    steps = workload.steps(site.kind, plan.work_seconds)
    return run_plain(site, workload, steps, time.monotonic() + seconds)


class Soak:
    """Dumps and restores of one workload; `run` once."""

    def __init__(
        self,
        site: Site,
        workload: Workload,
        baseline: Baseline,
        plan: Plan,
        evidence: Path,
        save: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        """`evidence` takes the logs of what goes wrong; `save` is called after each dump."""
        self._save = save
        self._site, self._workload, self._plan = site, workload, plan
        self._baseline, self._evidence = baseline, evidence
        self._random = random.Random(f"{plan.seed}/{workload.name}")
        missing = plan.job_seconds - baseline.seconds_per_step * baseline.steps
        # Not nothing: the uninterrupted run may have had more beside it, and so been slower.
        self._delay = round(max(missing, plan.job_seconds / 4) / baseline.steps, 4)
        self._images = Path(tempfile.mkdtemp(prefix=f"{workload.name}-", dir=site.images))
        self._failed_dumps = 0
        self._number = 0
        self._deadline = 0.0
        self.outcome = Outcome(
            workload.name,
            steps=baseline.steps,
            step_delay=self._delay,
            baseline_seconds=baseline.seconds,
        )

    def run(self) -> Outcome:
        """Do it; failures are in the outcome."""
        began = time.monotonic()
        self._deadline = began + self._plan.deadline
        try:
            while self._dumps_left() > 0 and self.outcome.runs < MOST_RUNS:
                if not self._one_run():
                    break
            else:
                if self._dumps_left() > 0:
                    done, wanted = len(self.outcome.dumps), self._plan.dumps
                    self.outcome.problems.append(f"only {done} of {wanted} dumps were made")
        finally:
            shutil.rmtree(self._images, ignore_errors=True)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _dumps_left(self) -> int:
        return self._plan.dumps - len(self.outcome.dumps) - self._failed_dumps

    def _one_run(self) -> bool:
        """One job from its start to its end; False when another makes no sense."""
        self.outcome.runs += 1
        number = self.outcome.runs
        if number > 1:
            self._delay = round(self._plan.job_seconds / self._baseline.steps, 4)
        name = f"{self._workload.name}-{number}"
        folder = self._images / f"run-{number}"
        folder.mkdir()
        command = self._workload.command(self._baseline.steps, self._delay)
        job = Job(self._site, name, command, folder, self._plan.run_options)
        image: Path | None = None
        try:
            job.start(self._deadline)
            if job.wait_step(0, self._deadline):
                if self._plan.suspend:
                    self._suspend(job)
                elif self._plan.leave_running:
                    image = self._leave_running(job)
                else:
                    self._chain(job)
            self._finish(job, "the job")
            if image is not None:
                # Back to the moment of the last dump, although the job has ended since.
                self._restore(job, image)
                self._finish(job, "the last image")
        except Trouble as trouble:
            self._note(job, str(trouble))
            return False
        finally:
            job.kill()
        return self._failed_dumps < MOST_FAILED_DUMPS

    def _finish(self, job: Job, what: str) -> None:
        code = job.wait_end(self._deadline)
        if code != 0:
            raise Trouble(f"{what} ended with exit code {code}")
        before = len(self.outcome.problems)
        self.outcome.compare(self._baseline, job.lines(), what)
        if len(self.outcome.problems) > before:
            self._keep(job)

    def _next_image(self) -> Path:
        self._number += 1
        return self._images / f"image-{self._number}"

    def _wait(self) -> None:
        time.sleep(self._random.uniform(0, self._plan.longest_wait))

    def _chain(self, job: Job) -> None:
        """Dump, restore, and dump the restored job again, while there is work left."""
        while self._may_dump(job):
            self._wait()
            image = self._next_image()
            if self._dump(job, image):
                self._restore(job, image)
            _remove(image)

    def _suspend(self, job: Job) -> None:
        """Suspend and resume the job while there is work left, by turns with CUDA kept."""
        while self._may_dump(job):
            self._wait()
            keeps = len(self.outcome.dumps) % 2
            options = ["--keep-context"] if keeps else self._plan.dump_options
            if (report := job.suspend(self._deadline, options)) is not None:
                self.outcome.dumps.append(report)
                self._save(self.outcome)

    def _leave_running(self, job: Job) -> Path | None:
        """Dump the job as it runs; gives its last image."""
        last: Path | None = None
        while self._may_dump(job):
            self._wait()
            image = self._next_image()
            if self._dump(job, image):
                if last is not None:
                    _remove(last)
                last = image
            else:
                _remove(image)
        return last

    def _may_dump(self, job: Job) -> bool:
        return self._dumps_left() > 0 and self._failed_dumps < MOST_FAILED_DUMPS and job.live

    def _dump(self, job: Job, image: Path) -> bool:
        """False if it failed while the job runs on, or the job was done before."""
        try:
            report = job.dump(
                image,
                self._deadline,
                leave_running=self._plan.leave_running,
                options=self._plan.dump_options,
            )
        except Trouble as trouble:
            if time.monotonic() > self._deadline or not job.live:
                raise
            # The promise is that the job goes on as before: its lines will tell.
            self._failed_dumps += 1
            self._note(job, f"dump {self._number}: {trouble}", image)
            return False
        if report is not None:
            self.outcome.dumps.append(report)
            self._save(self.outcome)
        return report is not None

    def _restore(self, job: Job, image: Path) -> None:
        """Once more if it fails: the image must be as it was, and the record tells of both."""
        try:
            report = job.restore(image, self._deadline)
        except Trouble as trouble:
            self._note(job, f"restore {self._number}: {trouble}", image)
            if time.monotonic() > self._deadline or job.live:
                raise
            report = job.restore(image, self._deadline)
        self.outcome.restores.append(report)

    def _note(self, job: Job, problem: str, image: Path | None = None) -> None:
        if problem not in self.outcome.problems:
            self.outcome.problems.append(problem)
        self._keep(job, image)

    def _keep(self, job: Job, image: Path | None = None) -> None:
        with suppress(OSError):
            number = len(self.outcome.problems)
            job.keep_evidence(self._evidence / f"{self._workload.name}-{number}", image)


def _remove(image: Path) -> None:
    """Remove an image behind the caller's back: freeing gigabytes of a tmpfs takes its time."""
    threading.Thread(target=shutil.rmtree, args=(image, True), daemon=True).start()
