"""Runs jobs under the real coordinator, with CRIU real and the GPU fake (tests/fakes)."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flowgpu.client import Connection, read_output, what_became
from flowgpu.errors import CoordinatorGone
from flowgpu.jobs import Job, JobDir, Registry
from flowgpu.launch import EngineChoice, GhostChoice, GpuKind, Spec, answers
from flowgpu.start import kill_coordinator
from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "fakes"


def wait_for(check: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """Poll until `check` gives something true."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.005)
    return found


class Forked:
    """A coordinator that has been forked, as subprocess.Popen would have it."""

    def __init__(self, spec: int, log: int, environment: dict[str, str]) -> None:
        self._code, code = os.pipe()
        text = json.dumps(environment).encode()
        with _starting:
            try:
                self.pid = self._fork(text, [spec, log, code])
            except OSError:  # a test has ended the one that forks: another one does
                _forks_coordinators.cache_clear()
                self.pid = self._fork(text, [spec, log, code])
            os.close(code)
        self.returncode: int | None = None

    @staticmethod
    def _fork(text: bytes, descriptors: list[int]) -> int:
        channel = _forks_coordinators()
        socket.send_fds(channel, [text], descriptors)
        if not (answer := channel.recv(16)):
            raise BrokenPipeError
        return int(answer)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._code], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired("coordinator", seconds or 0)
            self.returncode = int(os.read(self._code, 16))
            os.close(self._code)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


_starting = threading.Lock()


@functools.cache
def _forks_coordinators() -> socket.socket:
    """A channel to a process that has loaded what a coordinator needs; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [*Jobs.coordinator, "--channel", str(theirs.fileno())]
        process = subprocess.Popen(
            words, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Running:
    """A job and what a client that is attached to it has received."""

    def __init__(
        self,
        registry: Registry,
        spec: Spec,
        coordinator: list[str],
        coordinator_env: dict[str, str],
    ) -> None:
        self.registry = registry
        self.spec = spec
        self.directory = JobDir(Path(spec.job_dir))
        self.output = {"stdout": b"", "stderr": b""}
        self.exit_code: int | None = None
        self.error: Exception | None = None
        read, write = os.pipe()
        os.write(write, spec.to_json())
        os.close(write)
        self.process: subprocess.Popen[bytes] | Forked
        with open(self.directory.coordinator_log, "ab") as log:
            # A fork has loaded its modules already.
            same_modules = coordinator_env.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
            if tuple(coordinator) == Jobs.coordinator and same_modules:
                self.process = Forked(read, log.fileno(), coordinator_env)
            else:
                self.process = subprocess.Popen(
                    [*coordinator, "--spec-fd", str(read)],
                    pass_fds=(read,),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=coordinator_env,
                    start_new_session=True,
                )
        os.close(read)
        try:
            wait_for(lambda: answers(self.directory.control_socket), "the coordinator")
            self._attached = Connection(self.directory.control_socket, self.spec.name)
            self._attached.send("attach", **{"from": "start"})
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            self._read_events()
        except Exception as error:
            self.error = error

    def _read_events(self) -> None:
        def write(stream: str, data: bytes) -> None:
            self.output[stream] += data

        with self._attached:
            self.exit_code = read_output(self._attached, write)

    @property
    def lines(self) -> list[str]:
        return self.output["stdout"].decode().splitlines()

    @property
    def record(self) -> Job:
        return self.directory.read()

    @property
    def log(self) -> str:
        return self.directory.coordinator_log.read_text()

    def ask(
        self, verb: str, on_sent: Callable[[], None] = lambda: None, **fields: Any
    ) -> dict[str, Any]:
        with Connection(self.directory.control_socket, self.spec.name) as connection:
            connection.set_patience(SECONDS)
            try:
                connection.send(verb, **fields)
                on_sent()
                return connection.result()
            except CoordinatorGone as gone:
                raise what_became(connection) from gone

    def dump(self, output: Path, **fields: Any) -> dict[str, Any]:
        return self.ask("pause-and-dump", output=str(output), **fields)

    def wait_line(self, line: str) -> None:
        wait_for(lambda: line in self.lines or self.exit_code is not None, f"{line!r}")
        assert line in self.lines, (self.exit_code, self.lines[-3:], self.log)

    def wait_steps(self, more: int = 5) -> None:
        """Wait until the job has gone on by `more` lines."""
        count = len(self.lines) + more
        wait_for(lambda: len(self.lines) >= count or self.exit_code is not None, "the job's steps")
        assert len(self.lines) >= count, (self.exit_code, self.lines[-3:], self.log)

    def end(self) -> int:
        """The exit code that the client got, after the coordinator has ended."""
        self._thread.join(SECONDS)
        self.process.wait(SECONDS)
        assert self.exit_code is not None, (self.error, self.log)
        return self.exit_code

    @property
    def coordinator(self) -> int:
        """Its process id; `process` is its keeper."""
        return self.record.coordinator_pid

    def kill(self) -> None:
        if self.process.poll() is None:
            try:
                self.ask("kill")
                self.process.wait(SECONDS)
            except Exception:
                kill_coordinator(self.directory)
                self.process.wait()
        self._thread.join(SECONDS)


class Jobs:
    """Starts and restores jobs in a runtime folder of their own."""

    coordinator = (sys.executable, str(FAKES / "coordinator_main.py"))
    engine: EngineChoice = "native"
    """What jobs are run with that do not say so themselves."""
    gpu: GpuKind = "emulated"

    def __init__(self, base: Path, states: Path) -> None:
        self.registry = Registry(base)
        self.states = states
        self.running: list[Running] = []

    def _environment(self, **extra: str) -> dict[str, str]:
        return {"FAKE_STATES": str(self.states), "PATH": os.environ["PATH"], **extra}

    def task_environment(self, directory: JobDir) -> dict[str, str]:
        return self._environment(FLOWGPU_SOCKET=str(directory.task_socket))

    def ghost_environment(self) -> dict[str, str]:
        return self._environment()

    def coordinator_environment(self) -> dict[str, str]:
        return dict(os.environ)

    def run(
        self,
        command: list[str],
        *,
        task_env: dict[str, str] | None = None,
        ghost_env: dict[str, str] | None = None,
        coordinator_env: dict[str, str] | None = None,
        stdin: str | None = None,
        ghost: GhostChoice = "auto",
        engine: EngineChoice | None = None,
    ) -> Running:
        job = self.registry.create(command=command, cwd="/", gpu=self.gpu)
        directory = self.registry.dir(job.id)
        prepared = {"FLOWGPU_REPLAY": "1"} if (engine or self.engine) == "replay" else {}
        env = {**self.task_environment(directory), **prepared, **(task_env or {})}
        return self._start(job, env, ghost_env, coordinator_env, stdin=stdin, ghost=ghost)

    def task(self, *arguments: object, **options: Any) -> Running:
        """A job that uses the fake GPU and has made its first steps."""
        words = [sys.executable, str(FAKES / "task.py"), *map(str, arguments)]
        running = self.run(words, **options)
        running.wait_line("step 3")
        return running

    def restore(
        self,
        image: Path,
        *,
        ghost_env: dict[str, str] | None = None,
        coordinator_env: dict[str, str] | None = None,
        ghost: GhostChoice = "auto",
    ) -> Running:
        manifest = json.loads((image / "manifest.json").read_bytes())
        saved, gpus = manifest["job"], [gpu["uuid"] for gpu in manifest["gpus"]]
        job = self.registry.create(
            command=saved["command"],
            cwd=saved["cwd"],
            gpu=self.gpu,
            name=saved["name"],
            job_id=saved["id"],
            image=str(image),
        )
        return self._start(
            job, {}, ghost_env, coordinator_env, image=str(image), gpus=gpus, ghost=ghost
        )

    def _start(
        self,
        job: Job,
        env: dict[str, str],
        ghost_env: dict[str, str] | None,
        coordinator_env: dict[str, str] | None,
        image: str | None = None,
        gpus: Sequence[str] = (),
        stdin: str | None = None,
        ghost: GhostChoice = "auto",
    ) -> Running:
        faults = {k: v for k, v in (coordinator_env or {}).items() if k == "FLOWGPU_FAULT"}
        spec = Spec(
            kind="restore" if image else "run",
            id=job.id,
            name=job.name,
            command=job.command,
            cwd=job.cwd,
            gpu=self.gpu,
            job_dir=str(self.registry.dir(job.id).path),
            env=env,
            ghost_env={**self.ghost_environment(), **faults, **(ghost_env or {})},
            stdin=stdin,
            image=image,
            wait_for_client=True,
            ghost=ghost,
            gpus=list(gpus),
        )
        environment = {**self.coordinator_environment(), **(coordinator_env or {})}
        self.running.append(Running(self.registry, spec, list(self.coordinator), environment))
        return self.running[-1]

    def close(self) -> None:
        for running in self.running:
            running.kill()


def children_like(pid: int, word: str) -> list[int]:
    """Ids of the children of `pid` with `word` in their arguments; one that has ended has none."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(child.cmdline()):
                found.append(child.pid)
    return found
