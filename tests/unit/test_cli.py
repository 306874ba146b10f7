"""The command line, against a coordinator that plays a script."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from fake_coordinator import Answer, Event, FakeCoordinator, output

from flowgpu import jobs, launch, start
from flowgpu.cli import cli, main
from flowgpu.cli import jobs as verbs
from flowgpu.cli.checkpoint import member_of
from flowgpu.errors import (
    Busy,
    CommandNotFound,
    CoordinatorGone,
    NoGpu,
    StartFailed,
    UnknownJob,
    all_errors,
)
from flowgpu.image import job_file, layout
from flowgpu.image.manifest import Manifest
from flowgpu.jobs import Job, Registry
from flowgpu.launch import Spec
from tests.patience import SECONDS

GOLDEN = Path(__file__).parents[1] / "golden"
Capture = pytest.CaptureFixture[str]

DUMPED = {
    "job": "train",
    "image": "/img",
    "engine": "native",
    "gpu": "emulated",
    "pause_seconds": 0.81,
    "total_seconds": 1.5,
    "phases": {"prepare": 0.69, "criu": 0.035},
    "gpu_bytes_reserved": 8 << 30,
    "gpu_bytes_active": 1 << 30,
    "gpu_bytes_stored": 1 << 30,
    "cpu_bytes": 890 << 20,
    "image_bytes": 2 << 30,
    "allocations": 12,
}


def flowgpu(*args: str | Path) -> int:
    """Run the command line here and give its exit code."""
    with pytest.raises(SystemExit) as raised:
        main([str(arg) for arg in args])
    return int(raised.value.code or 0)


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A runtime folder of this test alone, and libraries that are empty files."""
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(runtime_dir))
    monkeypatch.setenv("FLOWGPU_LIB", str(tmp_path / "lib"))
    for name in (
        "intercept/libcuda.so.1",
        "libflowgpu_memstub.so",
        "libflowgpu_nccl.so",
        "libflowgpu_exec.so",
        "emu/libcuda.so.1",
        "emu/flowgpu-emud",
    ):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(start, "start_emulator", lambda _base: None)
    return Registry()


@pytest.fixture
def serve(registry: Registry) -> Iterator[Callable[..., FakeCoordinator]]:
    """Start a fake coordinator for a job."""
    running: list[FakeCoordinator] = []

    def make(job_id: str, answers: dict[str, Answer]) -> FakeCoordinator:
        running.append(FakeCoordinator(registry.dir(job_id).control_socket, answers))
        return running[-1]

    yield make
    for fake in running:
        fake.__exit__()


class Started:
    """What stands for the coordinator's process."""

    def __init__(self, returncode: int | None = None) -> None:
        self.returncode = returncode
        self.killed = False

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, _timeout: float | None = None) -> int:
        if self.returncode is None and not self.killed:
            raise subprocess.TimeoutExpired("coordinator", 0)
        return self.returncode or 0

    def kill(self) -> None:
        self.killed = True


class Launcher:
    """Takes the place of start_coordinator; `spec` and `fake` are of the last job."""

    def __init__(self, serve: Callable[..., FakeCoordinator], registry: Registry) -> None:
        self.answers: dict[str, Answer] = {}
        self.process = Started()
        self.spec: Spec
        self.fake: FakeCoordinator
        self._serve = serve
        self._registry = registry

    def __call__(self, spec: Spec) -> Started:
        self.spec = spec
        if self.process.returncode is None:
            self.update(state=jobs.RUNNING)
            self.fake = self._serve(spec.id, self.answers)
        return self.process

    def update(self, **changes: Any) -> Job:
        return self._registry.dir(self.spec.id).update(**changes)


@pytest.fixture
def launcher(
    serve: Callable[..., FakeCoordinator], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> Launcher:
    made = Launcher(serve, registry)
    monkeypatch.setattr(start, "start_coordinator", made)
    monkeypatch.setattr(start, "KILL_SECONDS", 0.1)
    return made


def make(registry: Registry, name: str, **changes: Any) -> Job:
    job = registry.create(command=["prog", "-x"], cwd="/", gpu="emulated", name=name)
    return registry.dir(job.id).update(state=jobs.RUNNING, **changes)


# run


def test_run_streams_the_job_and_returns_its_exit_code(
    launcher: Launcher, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher.answers["attach"] = [
        output(b"loss 1\n"),
        output(b"warn\n", "stderr"),
        {"event": "exit", "code": 7},
    ]
    assert flowgpu("run", "--gpu", "emulated", "--name", "train", "--", "sh", "-c", "x") == 7
    assert capfd.readouterr() == ("loss 1\n", "warn\n")
    spec = launcher.spec
    assert (spec.kind, spec.name, spec.command) == ("run", "train", ["sh", "-c", "x"])
    assert (spec.cwd, spec.gpu, spec.wait_for_client) == (str(tmp_path), "emulated", True)
    assert spec.env["FLOWGPU_SOCKET"] == f"{spec.job_dir}/task.sock"
    assert spec.env["PATH"] == os.environ["PATH"]
    assert launcher.fake.requests == [{"verb": "attach", "from": "start"}]


@pytest.mark.parametrize("engine", ["auto", "native", "replay"])
def test_run_prepares_for_an_engine(launcher: Launcher, registry: Registry, engine: str) -> None:
    launcher.answers["attach"] = [{"event": "exit", "code": 0}]
    words = ["run", "--gpu", "emulated", "--name", "train", "--engine", engine, "--", "true"]
    assert flowgpu(*words) == 0
    assert launcher.spec.engine == registry.find("train").engine == engine
    assert launcher.spec.env.get("FLOWGPU_REPLAY") == (None if engine == "native" else "1")


def test_run_leaves_options_after_the_command_to_the_command(launcher: Launcher) -> None:
    launcher.answers["attach"] = [{"event": "exit", "code": 0}]
    assert flowgpu("run", "--gpu=emulated", "sh", "--name", "x", "--", "--help") == 0
    assert launcher.spec.command == ["sh", "--name", "x", "--", "--help"]


def test_run_says_which_gpu_auto_came_to(
    launcher: Launcher, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "nvidia_device", lambda: None)
    launcher.answers["attach"] = [{"event": "exit", "code": 0}]
    assert flowgpu("run", "--", "true") == 0
    assert re.fullmatch(
        r"flowgpu: using the emulated GPU \(no NVIDIA device.*\)\n", capfd.readouterr().err
    )


def test_run_refuses_nvidia_without_one(
    launcher: Launcher, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "nvidia_device", lambda: None)
    assert flowgpu("run", "--gpu", "nvidia", "--", "true") == NoGpu.exit_code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("Error: No usable GPU")
    assert err.splitlines()[1].startswith("hint: ")


def test_run_names_a_program_that_is_not_there(
    capfd: Capture, registry: Registry, tmp_path: Path
) -> None:
    assert flowgpu("run", "--gpu", "emulated", "--", "no-such-program") == 127
    assert CommandNotFound.exit_code == 127
    assert "no-such-program" in capfd.readouterr().err
    script = tmp_path / "train.py"
    script.write_text("print()")
    assert flowgpu("run", "--gpu", "emulated", "--", script) == 127
    assert "A script that may not be executed needs its interpreter" in capfd.readouterr().err
    assert registry.all() == []


def test_run_tells_where_a_dumped_job_went(launcher: Launcher, capfd: Capture) -> None:
    def script(_request: Event) -> Iterator[Event]:
        launcher.update(state=jobs.DUMPED, image="/img", exit_code=75)
        yield {"event": "exit", "code": 75}

    launcher.answers["attach"] = script
    assert flowgpu("run", "--gpu", "emulated", "--name", "train", "--", "true") == 75
    assert "train was dumped to /img" in capfd.readouterr().err


def test_run_does_not_take_a_75_of_the_program_for_a_dump(
    launcher: Launcher, capfd: Capture
) -> None:
    launcher.answers["attach"] = [{"event": "exit", "code": 75}]
    assert flowgpu("run", "--gpu", "emulated", "--", "true") == 75
    assert capfd.readouterr().err == ""


def test_run_shows_why_a_coordinator_did_not_start(
    launcher: Launcher, capfd: Capture, registry: Registry
) -> None:
    launcher.process = Started(returncode=1)
    assert flowgpu("run", "--gpu", "emulated", "--", "true") == StartFailed.exit_code
    assert "could not be started" in capfd.readouterr().err
    [job] = registry.all()
    assert (job.state, job.exit_code) == (jobs.EXITED, StartFailed.exit_code)


def test_run_reports_a_coordinator_that_dies(launcher: Launcher, capfd: Capture) -> None:
    launcher.answers["attach"] = [output(b"half")]
    assert flowgpu("run", "--gpu", "emulated", "--", "true") == CoordinatorGone.exit_code
    assert capfd.readouterr().out == "half"


@pytest.mark.parametrize("name", ["", "a/b", "-x", "x" * 65])
def test_run_refuses_what_is_no_name(name: str, capfd: Capture) -> None:
    assert flowgpu("run", f"--name={name}", "--", "true") == 2
    assert "is not a name" in capfd.readouterr().err


def test_run_passes_on_a_file_as_standard_input_and_nothing_else(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_text("1\n2\n")
    program = [
        sys.executable,
        "-c",
        "import os; from flowgpu.cli.jobs import stdin_file as f;"
        "print(f()); os.read(0, 1); print(f())",
    ]

    def answer(stdin: int) -> list[str]:
        done = subprocess.run(program, stdin=stdin, capture_output=True, text=True, check=True)
        return done.stdout.split()

    with data.open() as file:
        assert answer(file.fileno()) == [str(data), "None"]
    data.unlink()
    with data.open("w+") as file:
        file.write("1")
        file.seek(0)
        data.unlink()
        assert answer(file.fileno()) == ["None", "None"]
    assert answer(subprocess.DEVNULL) == ["None", "None"]


# ps, logs, kill


def test_ps_lists_running_and_lost_jobs_and_with_all_the_others(
    registry: Registry, capfd: Capture
) -> None:
    make(registry, "train", root_pid=123)
    lost = make(registry, "gone", coordinator_start=1)
    done = make(registry, "done")
    registry.dir(done.id).update(state=jobs.EXITED, exit_code=3)
    away = make(registry, "away")
    registry.dir(away.id).update(state=jobs.DUMPED, image="/img")
    assert flowgpu("ps") == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "ID", "STATE", "GPU", "PID", "AGE", "COMMAND"]
    assert [line.split()[0] for line in lines[1:]] == ["train", "gone"]
    assert re.search(r"running +emulated +123 +\d+ s +prog -x$", lines[1])
    assert lost.id in lines[2]
    assert " lost " in lines[2]
    assert flowgpu("ps", "--all") == 0
    text = capfd.readouterr().out
    assert "exited (3)" in text
    assert "dumped (/img)" in text


def test_ps_json_has_every_field_of_the_record(registry: Registry, capfd: Capture) -> None:
    job = make(registry, "train")
    assert flowgpu("ps", "--json") == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert json.loads(out) == [job.as_json()]


def test_ps_of_nothing(capfd: Capture) -> None:
    assert flowgpu("ps", "--json") == 0
    assert json.loads(capfd.readouterr().out) == []


def test_ps_prune_forgets_what_has_ended(registry: Registry, capfd: Capture) -> None:
    make(registry, "train")
    make(registry, "gone", coordinator_start=1)
    assert flowgpu("ps", "--all", "--prune", "--json") == 0
    out, err = capfd.readouterr()
    assert [job["name"] for job in json.loads(out)] == ["train"]
    assert err == "flowgpu: forgot 1 job\n"


def test_ps_forgets_what_ended_more_than_a_day_ago(registry: Registry, capfd: Capture) -> None:
    for name, days in (("old", 1.1), ("new", 0.9)):
        job = make(registry, name, finished=time.time() - days * 86400)
        # The record seems to be of an earlier boot, because this machine may have booted just now.
        registry.dir(job.id).update(state=jobs.EXITED, coordinator_start=1 << 62)
    assert flowgpu("ps", "--all", "--json") == 0
    assert [job["name"] for job in json.loads(capfd.readouterr().out)] == ["new"]


def test_ps_starts_without_what_it_does_not_need() -> None:
    program = (
        "import sys\nfrom flowgpu.cli import main\ntry: main(['ps', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('rich', 'numpy', 'psutil', 'cuda', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


def test_logs_prints_both_streams_of_a_job_that_has_ended(
    registry: Registry, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = make(registry, "train")
    registry.dir(job.id).output_log.write_bytes(b"one\n\xff\x00")
    registry.dir(job.id).update(state=jobs.EXITED)
    assert flowgpu("logs", "train") == 0
    assert flowgpu("logs", "--follow", job.id[:6]) == 0
    assert capfdbinary.readouterr().out == b"one\n\xff\x00" * 2


def test_logs_follow_goes_on_until_the_job_ends(
    registry: Registry, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make(registry, "train")
    log = registry.dir(job.id).output_log
    log.write_text("1\n")
    steps = iter(["2\n", "3\n"])

    def sleep(_seconds: float) -> None:
        with log.open("a") as stream:
            text = next(steps)
            stream.write(text)
            if text == "3\n":
                registry.dir(job.id).update(state=jobs.EXITED)

    monkeypatch.setattr(verbs.time, "sleep", sleep)
    assert flowgpu("logs", "--follow", "train") == 0
    assert capfd.readouterr().out == "1\n2\n3\n"


def test_logs_of_a_job_that_has_said_nothing(registry: Registry, capfd: Capture) -> None:
    make(registry, "train")
    assert flowgpu("logs", "train") == 0
    assert capfd.readouterr().out == ""


def test_kill_ends_the_job(
    registry: Registry, capfd: Capture, serve: Callable[..., FakeCoordinator]
) -> None:
    job = make(registry, "train")

    def end(_request: Event) -> Iterator[Event]:
        registry.dir(job.id).update(state=jobs.EXITED, exit_code=137)
        yield {"event": "result"}

    fake = serve(job.id, {"kill": end})
    assert flowgpu("kill", "train", "--json") == 0
    assert fake.requests == [{"verb": "kill"}]
    expected = {"job": "train", "id": job.id, "signal": "SIGKILL"}
    assert json.loads(capfd.readouterr().out) == expected


@pytest.mark.parametrize("text", ["USR1", "SIGUSR1", "10", "sigusr1"])
def test_kill_sends_the_signal_asked_for(
    text: str, registry: Registry, serve: Callable[..., FakeCoordinator]
) -> None:
    job = make(registry, "train")
    fake = serve(job.id, {"signal": [{"event": "result"}]})
    assert flowgpu("kill", "train", "--signal", text) == 0
    assert fake.requests == [{"verb": "signal", "signum": 10}]


@pytest.mark.parametrize("text", ["NOPE", "99", ""])
def test_kill_refuses_what_is_no_signal(text: str, registry: Registry) -> None:
    make(registry, "train")
    assert flowgpu("kill", "train", "--signal", text) == 2


def test_kill_ends_what_runs_of_a_lost_job(registry: Registry) -> None:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as root:
        make(
            registry,
            "train",
            coordinator_start=1,
            root_pid=root.pid,
            root_start=jobs.start_time(root.pid),
        )
        assert flowgpu("kill", "train") == 0
        assert root.wait(SECONDS) == -9
    assert flowgpu("kill", "train") == CoordinatorGone.exit_code


def test_verbs_of_running_jobs_refuse_one_that_has_ended(registry: Registry) -> None:
    job = make(registry, "train")
    registry.dir(job.id).update(state=jobs.EXITED)
    assert flowgpu("kill", "train") == UnknownJob.exit_code
    assert flowgpu("pause-and-dump", "train", "--output", "/x") == UnknownJob.exit_code
    assert flowgpu("logs", "nobody") == UnknownJob.exit_code


# pause-and-dump


def test_pause_and_dump_prints_the_result_as_json_and_nothing_else_on_stdout(
    registry: Registry,
    capfd: Capture,
    serve: Callable[..., FakeCoordinator],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    job = make(registry, "train")
    copy = {"event": "progress", "phase": "copy", "done": 1 << 30, "total": 2 << 30, "rate": 5e10}
    fake = serve(job.id, {"pause-and-dump": [copy, {"event": "result", **DUMPED}]})
    args = ["pause-and-dump", "train", "--output", "img", "--timeout", "5", "--leave-running"]
    assert flowgpu(*args, "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == DUMPED
    assert err == "flowgpu: copy 1.00 GiB of 2.00 GiB, 50.0 GB/s\n"
    asked = {"output": str(tmp_path / "img"), "leave_running": True, "timeout": 5.0}
    asked |= {
        "compress": False,
        "without": [],
        "engine": "auto",
        "mode": "any",
        "communicators": "keep",
        "tcp": "job",
        "wait_minimum": 0.5,
    }
    assert fake.requests == [{"verb": "pause-and-dump", **asked}]


def test_pause_and_dump_passes_its_options_on(
    registry: Registry, serve: Callable[..., FakeCoordinator]
) -> None:
    fake = serve(make(registry, "train").id, {"pause-and-dump": [{"event": "result", **DUMPED}]})
    options = ["--without", "active", "--without", "dedup", "--compress", "--tcp", "close"]
    assert flowgpu("pause-and-dump", "train", "--output", "/x", "--leave-running", *options) == 0
    (asked,) = fake.requests
    assert asked["without"] == ["active", "dedup"]
    assert asked["compress"] and asked["tcp"] == "close"


@pytest.mark.parametrize("reason", ["asked for", "no replay: cuArrayCreate (process 7)"])
def test_pause_and_dump_passes_the_engine_on_and_says_why_it_was_taken(
    registry: Registry, capfd: Capture, serve: Callable[..., FakeCoordinator], reason: str
) -> None:
    result = {"event": "result", **DUMPED, "engine_reason": reason}
    fake = serve(make(registry, "train").id, {"pause-and-dump": [result]})
    words = ["pause-and-dump", "train", "--output", "/x", "--leave-running"]
    assert flowgpu(*words, "--engine", "native") == 0
    assert fake.requests[0]["engine"] == "native"
    assert f"engine native: {reason}" in capfd.readouterr().out.splitlines()


def test_pause_and_dump_says_what_it_did(
    registry: Registry, capfd: Capture, serve: Callable[..., FakeCoordinator]
) -> None:
    job = make(registry, "train")

    def dump(_request: Event) -> Iterator[Event]:
        yield {"event": "result", **DUMPED}
        registry.dir(job.id).update(state=jobs.DUMPED)

    serve(job.id, {"pause-and-dump": dump})
    assert flowgpu("pause-and-dump", "train", "--output", "/img") == 0
    assert registry.find("train").state == jobs.DUMPED  # so that a restore can follow at once
    assert capfd.readouterr().out.splitlines() == [
        "dumped train to /img",
        "paused 0.81 s of 1.50 s",
        "phases prepare 0.69 s, criu 35 ms",
        "GPU    8.00 GiB reserved, 1.00 GiB active, 1.00 GiB stored",
        "CPU    890 MiB",
        "image  2.00 GiB",
    ]


def test_pause_and_dump_passes_on_the_error_of_the_coordinator(
    registry: Registry, capfd: Capture, serve: Callable[..., FakeCoordinator]
) -> None:
    job = make(registry, "train")
    error = Busy(job="train", action="a checkpoint")
    serve(job.id, {"pause-and-dump": [{"event": "error", **error.as_dict()}]})
    assert flowgpu("pause-and-dump", "train", "--output", "/img", "--json") == Busy.exit_code
    assert capfd.readouterr() == ("", f"Error: {error}\nhint: {error.hint}\n")


def test_pause_and_dump_of_a_lost_job(registry: Registry) -> None:
    make(registry, "train", coordinator_start=1)
    assert flowgpu("pause-and-dump", "train", "--output", "/x") == CoordinatorGone.exit_code


# restore


def test_restore_keeps_the_choices_that_the_job_was_run_with(
    launcher: Launcher, registry: Registry, tmp_path: Path
) -> None:
    image = Path(shutil.copytree(GOLDEN / "image-v2", tmp_path / "image"))
    saved = Manifest.load(image)
    job = dataclasses.replace(saved.job, engine="replay", ghost="warm")
    changed = dataclasses.replace(saved, job=job, gpu="emulated")
    (image / "manifest.json").write_bytes(changed.to_bytes())
    done = {"event": "result", "job": "golden", "restore_seconds": 1.0, "phases": {}}
    launcher.answers["wait-restored"] = [done]
    assert flowgpu("restore", image, "--detach") == 0
    assert (launcher.spec.engine, launcher.spec.ghost) == ("replay", "warm")
    assert registry.find(job.id).engine == "replay"


def restored_golden(launcher: Launcher, tmp_path: Path, *options: str, **report: Any) -> None:
    image = Path(shutil.copytree(GOLDEN / "image-v2", tmp_path / "image"))
    changed = dataclasses.replace(Manifest.load(image), gpu="emulated")
    (image / "manifest.json").write_bytes(changed.to_bytes())
    done = {"event": "result", "job": "golden", "restore_seconds": 1.0, "phases": {}, **report}
    launcher.answers["wait-restored"] = [done]
    assert flowgpu("restore", image, "--detach", *options) == 0


@pytest.mark.parametrize(
    ("options", "files"), [((), "truncate"), (("--files", "refuse"), "refuse")]
)
def test_restore_cuts_what_has_grown_unless_told_not_to(
    launcher: Launcher, tmp_path: Path, options: tuple[str, ...], files: str
) -> None:
    restored_golden(launcher, tmp_path, *options)
    assert launcher.spec.options.files == files


def test_restore_says_what_it_has_cut(launcher: Launcher, tmp_path: Path, capfd: Capture) -> None:
    cut = [{"path": f"/log\n\x1b{n}", "bytes": 2048, "cut_bytes": 5} for n in range(22)]
    restored_golden(launcher, tmp_path, cut_files=cut, cut_folder="/images/1.cut-now")
    lines = capfd.readouterr().out.splitlines()
    assert lines[2] == r"cut    /log\n\x1b0 by 5 B, back to 2.00 KiB"
    assert lines[22:] == ["cut    2 files more", "       what was cut is in /images/1.cut-now"]


# inspect and verify


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_inspect_shows_what_is_left_after_each_reduction(version: int, capfd: Capture) -> None:
    golden = GOLDEN / f"image-v{version}"
    assert flowgpu("inspect", golden, "--json") == 0
    data = json.loads(capfd.readouterr().out)
    assert flowgpu("inspect", golden) == 0
    text = capfd.readouterr().out
    assert re.search(rf"^version: +{version}$", text, re.MULTILINE)
    stages = [line.split()[0] for line in text.splitlines()[-5:]]
    assert stages == ["reserved", "active", "nonzero", "distinct", "stored"]
    assert all(f"gpu_bytes_{stage}" in data for stage in stages)
    assert flowgpu("verify", golden) == 0


# all verbs


def test_there_are_these_verbs_and_their_help_follows_the_rule() -> None:
    assert sorted(cli.commands) == [
        "advise",
        "checkpoint",
        "container",
        "doctor",
        "inspect",
        "kill",
        "logs",
        "metrics",
        "pause-and-dump",
        "ps",
        "report",
        "restore",
        "resume",
        "run",
        "share",
        "store",
        "suspend",
        "swap",
        "top",
        "trace",
        "verify",
    ]
    groups = [cli, *(one for one in cli.commands.values() if isinstance(one, click.Group))]
    for command in (one for group in groups for one in group.commands.values()):
        lines = [command.get_short_help_str(200)]
        lines += [
            option.help or "" for option in command.params if isinstance(option, click.Option)
        ]
        for line in lines:
            assert line[:1].isupper(), line
            assert not line.endswith("."), line


@pytest.mark.parametrize(
    "verb",
    [(), *((name,) for name in cli.commands), *(("store", n) for n in ("ls", "rm", "verify"))],
)
def test_the_help_of_a_verb_fits_a_screen_and_has_an_example(
    verb: tuple[str, ...], capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert flowgpu(*verb, "--help") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) <= 40
    example = "".join(lines[lines.index(next(x for x in lines if "Example:" in x)) :])
    assert " ".join(("flowgpu", *verb)) in example


@pytest.mark.parametrize("error", list(all_errors()))
def test_every_error_comes_out_with_its_hint_and_exit_code(
    error: Any, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = error(**dict.fromkeys(error.field_names(), "x"))

    def fail(*_args: object) -> None:
        raise raised

    monkeypatch.setattr(Registry, "find", fail)
    assert flowgpu("logs", "train") == error.exit_code
    assert capfd.readouterr() == ("", f"Error: {raised}\nhint: {error.hint}\n")


def test_the_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flowgpu", "--version"], capture_output=True, text=True
    )
    assert re.fullmatch(r"flowgpu, version [\d.]+\n", done.stdout)


@pytest.mark.parametrize(
    ("env", "options", "leader"),
    [
        ({}, {"node": 1}, "old:7000"),
        ({"SLURM_STEP_NUM_NODES": "2"}, {}, "new1:25683"),
        ({"SLURM_STEP_NUM_NODES": "3"}, {"node": 1}, "old:7000"),
        ({"SLURM_STEP_NUM_NODES": "2"}, {"leader": "other:1"}, "other:1"),
    ],
)
def test_a_restore_under_slurm_finds_the_leader_on_the_nodes_that_it_has_now(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    env: dict[str, str],
    options: dict[str, Any],
    leader: str,
) -> None:
    for number in range(2):
        (tmp_path / f"node-{number}").mkdir()
        (tmp_path / f"node-{number}" / layout.MANIFEST).write_text("{}")
    parts = tuple(job_file.Part(n, job_file.part_digest(tmp_path / f"node-{n}")) for n in range(2))
    job = job_file.JobFile("0" * 16, "train", "old:7000", "key", parts)
    (tmp_path / job_file.JOB_FILE).write_text(job.to_json())
    given = {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "new[1-2]", "SLURM_JOB_ID": "5"}
    for name, value in {**given, **env}.items():
        monkeypatch.setenv(name, value)
    _, member = member_of(tmp_path, options.get("node"), options.get("leader"))
    assert member is not None
    assert (member.node, member.leader) == (1, leader)
