"""Where jobs run: driver, folders and environment of every process, and FlowGPU's commands."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from flowgpu import launch, start
from flowgpu.jobs import Registry

ROOT = Path(__file__).resolve().parents[2]
TMPFS = Path("/dev/shm")
CALL_SECONDS = 300.0
STDERR_SHOWN = 2000
PID_MAX, MOST_PIDS = Path("/proc/sys/kernel/pid_max"), 1 << 22


@contextmanager
def many_pids() -> Iterator[None]:
    """Let the kernel have as many process ids as it can meanwhile, where that is allowed.

    A restore wants its old ones, threads' among them: of 32,768, which a small machine has, others
    that run beside it take them all in turn within minutes.
    """
    before = PID_MAX.read_text()
    allowed = int(before) < MOST_PIDS and os.access(PID_MAX, os.W_OK)
    if allowed:
        try:
            PID_MAX.write_text(str(MOST_PIDS))
        except OSError:  # read-only in a container
            allowed = False
    try:
        yield
    finally:
        # Jobs that another of us runs beside this may have ids that must be had again.
        if allowed and max(psutil.pids()) < int(before):
            PID_MAX.write_text(before)


class Trouble(Exception):
    """Something did not go as it should; the message says what."""


@dataclass(frozen=True)
class Call:
    """A command of FlowGPU that has ended."""

    words: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float

    def succeeded(self) -> Call:
        """This call. Raises Trouble if it failed."""
        if self.code != 0:
            said = self.stderr.strip()[-STDERR_SHOWN:]
            raise Trouble(f"flowgpu {self.words[0]} ended with {self.code}: {said}")
        return self

    def json(self) -> dict[str, Any]:
        """The object that the command printed. Raises Trouble if it failed or printed another."""
        self.succeeded()
        try:
            answer = json.loads(self.stdout)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Trouble(f"flowgpu {self.words[0]} did not print one JSON object")
        return answer


class Site:
    """A runtime directory of its own, a folder for images, and the chosen driver.

    Raises NoGpu or NotBuilt (flowgpu/errors.py) when the driver is not there.
    """

    def __init__(self, kind: launch.GpuKind, images: Path | None = None) -> None:
        """`images` is where image folders are made; by default a tmpfs."""
        self.kind = kind
        self.driver = launch.choose_driver(kind)
        # Short: the paths of sockets below it are limited to 107 bytes.
        self.runtime = Path(tempfile.mkdtemp(prefix="flowgpu-"))
        self.images = Path(tempfile.mkdtemp(prefix="flowgpu-images-", dir=images or TMPFS))
        self.registry = Registry(self.runtime)
        self._gpu: str | None = None

    def on(self, gpu: str) -> Site:
        """A site for jobs that see only this GPU, a word of CUDA_VISIBLE_DEVICES."""
        result = copy.copy(self)
        result._gpu = gpu
        return result

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the emulated device if there is one, and remove both folders."""
        for pid in self._emulators():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        shutil.rmtree(self.images, ignore_errors=True)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def end_when_terminated(self) -> None:
        """On SIGTERM end every job and this process at once: threads may be waiting for them."""

        def end(signum: int, _frame: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice
            for record in self.registry.all():
                start.kill_coordinator(self.registry.dir(record.id))
                start.kill_lost(self.registry.dir(record.id), signal.SIGKILL)
            self.close()
            os._exit(128 + signum)

        signal.signal(signal.SIGTERM, end)

    def _emulators(self) -> list[int]:
        socket = os.fsencode(launch.emulator_socket(self.runtime))
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = entry.read_bytes().split(b"\0")
                if b"flowgpu-emud" in words[0] and socket in words:
                    found.append(int(entry.parent.name))
        return found

    @property
    def environment(self) -> dict[str, str]:
        """For FlowGPU's commands."""
        return self._of_user() | {"FLOWGPU_RUNTIME_DIR": str(self.runtime)}

    def _of_user(self) -> dict[str, str]:
        chosen = {} if self._gpu is None else {"CUDA_VISIBLE_DEVICES": self._gpu}
        return launch.clean_env(os.environ) | chosen

    @property
    def plain_environment(self) -> dict[str, str]:
        """For programs that run on the same device without FlowGPU."""
        if self.kind == "nvidia":
            return self._of_user()
        launch.start_emulator(self.runtime)
        result = launch.ghost_env(self._of_user(), self.driver, self.runtime)
        result.pop("FLOWGPU_REAL_LIBCUDA")
        return result

    def call(self, *words: str, seconds: float = CALL_SECONDS) -> Call:
        """Run `flowgpu WORDS` to its end. Raises Trouble when that takes too long."""
        began = time.monotonic()
        command = [sys.executable, "-m", "flowgpu", *words]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(seconds, 0.1),
            )
        except subprocess.TimeoutExpired:
            raise Trouble(f"flowgpu {words[0]} took over {seconds:.0f} s") from None
        took = time.monotonic() - began
        return Call(words, done.returncode, done.stdout, done.stderr, took)

    def start(self, *words: str, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start `flowgpu WORDS`."""
        return subprocess.Popen(
            [sys.executable, "-m", "flowgpu", *words],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )

    def start_plain(
        self, command: list[str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start `command` on the same device without FlowGPU, in a session of its own."""
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.plain_environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
