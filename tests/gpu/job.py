"""One job under FlowGPU, through its dumps and restores, and the lines that it prints."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowgpu import jobs, start
from flowgpu.errors import DUMPED_EXIT
from tests.gpu.site import Call, Site, Trouble

LINE = re.compile(r"step \d+ \S+|done \S+")
TAIL_BYTES = 16384
LOOK_SECONDS = 0.005
SETTLE_SECONDS = 20.0
KILL_SECONDS = 30.0

PAUSE_KEYS = {
    *("job", "image", "engine", "gpu", "pause_seconds", "total_seconds", "phases"),
    *("gpu_bytes_reserved", "gpu_bytes_active", "gpu_bytes_stored", "cpu_bytes", "image_bytes"),
    "allocations",
}
PAUSE_PHASES = {"prepare", "gate", "handover", "strip", "copy", "criu", "commit", "end"}
RESTORE_KEYS = {"job", "restore_seconds", "phases"}
RESTORE_PHASES = {"verify", "ghost", "criu", "copy", "engine", "mapback"}


def lines_of(text: str) -> list[str]:
    """The lines of the workloads' output contract; what libraries print in between is left out."""
    return [line for line in text.splitlines() if LINE.fullmatch(line)]


def last_step(path: Path) -> int:
    """Number of the last complete step line in the file; -1 when its end has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    except FileNotFoundError:
        return -1
    for line in reversed(tail.split(b"\n")[:-1]):
        words = line.split()
        if len(words) == 3 and words[0] == b"step" and words[1].isdigit():
            return int(words[1])
    return -1


def difference(expected: list[str], found: list[str]) -> str | None:
    """The first difference in words; None when both are the same lines."""
    for index, (left, right) in enumerate(zip(expected, found, strict=False)):
        if left != right:
            return f"line {index} is {right!r}, without a checkpoint {left!r}"
    if len(expected) != len(found):
        return f"{len(found)} lines, without a checkpoint {len(expected)}"
    return None


def check_report(report: dict[str, Any], keys: set[str], phases: set[str], verb: str) -> None:
    """Raise Trouble unless the report has what is promised."""
    missing = sorted(keys - report.keys()) + sorted(phases - report.get("phases", {}).keys())
    if missing:
        raise Trouble(f"the report of {verb} lacks {', '.join(missing)}")


class Job:
    """A job of `site` called `name`; `folder` takes what `flowgpu run` prints."""

    def __init__(
        self,
        site: Site,
        name: str,
        command: list[str],
        folder: Path,
        options: Sequence[str] = (),
    ) -> None:
        """`options` are further words for run."""
        self.site, self.name, self.command, self.folder = site, name, command, folder
        self._options = options
        self._runner: subprocess.Popen[bytes] | None = None
        self._id: str | None = None
        self._before: set[str] = set()  # jobs that there were, of which some may have its name

    def start(self, deadline: float) -> None:
        """Start it and wait until it is known by name."""
        words = ["run", "--name", self.name, "--gpu", self.site.kind, *self._options, "--"]
        words += self.command
        self._before = {job.id for job in self.site.registry.all()}
        with (self.folder / "run.out").open("wb") as out, (self.folder / "run.err").open("wb") as e:
            self._runner = self.site.start(*words, stdout=out, stderr=e)
        while self.record() is None:
            if self._runner.poll() is not None:
                said = (self.folder / "run.err").read_text(errors="replace").strip()
                raise Trouble(f"flowgpu run ended with {self._runner.returncode}: {said[-2000:]}")
            if time.monotonic() > deadline:
                raise Trouble("the job did not start in time")
            time.sleep(LOOK_SECONDS)

    def record(self) -> jobs.Job | None:
        """Its record; None while there is none."""
        try:
            if self._id is None:
                later = (job for job in self.site.registry.all() if job.id not in self._before)
                self._id = next((job.id for job in later if job.name == self.name), None)
            return self.directory.read() if self._id else None
        except (OSError, ValueError):
            return None

    @property
    def directory(self) -> jobs.JobDir:
        assert self._id is not None, "the job has been started"
        return self.site.registry.dir(self._id)

    @property
    def live(self) -> bool:
        record = self.record()
        return record is not None and record.live

    def last_step(self) -> int:
        return last_step(self.directory.output_log) if self._id else -1

    def wait_step(self, step: int, deadline: float) -> bool:
        """Wait until `step` was printed; False if the job ended before. Raises Trouble if late."""
        while self.last_step() < step:
            if not self.live:
                return self.last_step() >= step
            if time.monotonic() > deadline:
                raise Trouble(f"step {step} did not come in time, the last was {self.last_step()}")
            time.sleep(LOOK_SECONDS)
        return True

    def dump(
        self,
        image: Path,
        deadline: float,
        *,
        leave_running: bool = False,
        options: Sequence[str] = (),
    ) -> dict[str, Any] | None:
        """Dump into `image` and give the report; None if the job ended before. Raises Trouble.

        `options` are further words for pause-and-dump.
        """
        options = [*options, "--leave-running"] if leave_running else list(options)
        before = self.last_step()
        began = time.monotonic()
        call = self.site.call(
            *("pause-and-dump", self.name, "--output", str(image), *options, "--json"),
            seconds=deadline - began,
        )
        if call.code != 0 and self._ended_by_itself(deadline):
            return None
        report = call.json()
        check_report(report, PAUSE_KEYS, PAUSE_PHASES, "pause-and-dump")
        if report["gpu"] != self.site.kind:
            raise Trouble(f"the report of pause-and-dump says GPU {report['gpu']!r}")
        if not (image / "manifest.json").is_file():
            raise Trouble("pause-and-dump succeeded, but the image has no manifest")
        if not leave_running:
            self._check_dumped(deadline)
        elif not self.live and self.exit_code() != 0:
            raise Trouble(f"the job left running ended with {self.exit_code()}")
        return report | {"wall_seconds": call.seconds, "after_step": before}

    def suspend(self, deadline: float, options: Sequence[str] = ()) -> dict[str, Any] | None:
        """Away from the GPU and back: the reports; None if the job ended before. Raises Trouble."""
        before = self.last_step()

        def ask(verb: str, *words: str) -> Call:
            left = deadline - time.monotonic()
            return self.site.call(verb, self.name, *words, "--json", seconds=left)

        call = ask("suspend", *options)
        # One that needs CUDA no more ends while it is suspended.
        if (call.code != 0 or not self.live) and self._ended_by_itself(deadline):
            return None
        report = call.json()
        record = self.record()
        if record is None or record.state != jobs.SUSPENDED:
            raise Trouble(f"the suspended job is {record and record.state}")
        resumed = ask("resume").json()
        return report | {"wall_seconds": call.seconds, "after_step": before, "resume": resumed}

    def _ended_by_itself(self, deadline: float) -> bool:
        """True if the dump failed only because the job was done."""
        until = min(deadline, time.monotonic() + 1.0)
        while self.live and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return not self.live and self.exit_code() == 0

    def _check_dumped(self, deadline: float) -> None:
        """The job must say that it was dumped away, and so must the command that ran it."""
        deadline = min(deadline, time.monotonic() + SETTLE_SECONDS)
        while self.live and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        record = self.record()
        if record is None or record.state != jobs.DUMPED or record.exit_code != DUMPED_EXIT:
            raise Trouble(f"the dumped job is recorded as {record}")
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        try:
            code = runner.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._runner = runner
            raise Trouble("flowgpu run goes on although the job was dumped") from None
        if code != DUMPED_EXIT:
            raise Trouble(f"flowgpu run of the dumped job ended with {code}, not {DUMPED_EXIT}")

    def restore(self, image: Path, deadline: float) -> dict[str, Any]:
        """Restore it from `image` and give the report. Raises Trouble."""
        before = self.last_step()
        call = self.site.call(
            *("restore", str(image), "--detach", "--json"), seconds=deadline - time.monotonic()
        )
        report = call.json()
        check_report(report, RESTORE_KEYS, RESTORE_PHASES, "restore")
        if report["job"] != self.name:
            raise Trouble(f"the restored job is called {report['job']!r}")
        return report | {"wall_seconds": call.seconds, "after_step": before}

    def wait_end(self, deadline: float) -> int:
        """Wait for its end and give its exit code. Raises Trouble if it is late or lost."""
        while self.live:
            if time.monotonic() > deadline:
                raise Trouble(f"the job was not done in time, its last step is {self.last_step()}")
            time.sleep(0.02)
        record = self.record()
        if record is None or record.exit_code is None:
            raise Trouble(f"the job ended as {record and record.shown_state}, without exit code")
        if self._runner is not None:
            runner, self._runner = self._runner, None
            code = runner.wait(SETTLE_SECONDS)
            if code != record.exit_code:
                raise Trouble(f"flowgpu run says {code}, the job's record {record.exit_code}")
        return record.exit_code

    def exit_code(self) -> int | None:
        record = self.record()
        return record.exit_code if record else None

    def lines(self) -> list[str]:
        """Its step and done lines, as `flowgpu logs` has them."""
        return lines_of(self.site.call("logs", self.name).succeeded().stdout)

    def kill(self) -> None:
        """End it if it still runs, also when its coordinator is gone or does not answer."""
        if self.live:
            with suppress(Trouble):
                self.site.call("kill", self.name, seconds=KILL_SECONDS)
        record = self.record()
        if record is not None and record.root_pid:
            start.kill_coordinator(self.directory)
            start.kill_lost(self.directory, signal.SIGKILL)
        if self._runner is not None:
            self._runner.kill()
            self._runner.wait()
            self._runner = None

    def keep_evidence(self, folder: Path, image: Path | None = None) -> None:
        """Copy logs of the job, of CRIU and of `flowgpu logs` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        sources = list(self.folder.glob("run.*"))
        if self._id:
            sources += [path for path in self.directory.path.iterdir() if path.is_file()]
        if image is not None:
            for place in image.parent.glob(f"{image.name}*"):
                sources += [*place.rglob("*.log"), *place.rglob("manifest.json")]
        for source in sources:
            with suppress(OSError):
                shutil.copyfile(source, folder / source.name)
        with suppress(Trouble):
            (folder / "flowgpu-logs").write_text(self.site.call("logs", self.name).stdout)
