"""flowgpu.host.ptrace: who does not stop is not waited for without end, and no signal is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.host import inject, probes, ptrace
from flowgpu.host.proctree import children, is_stopped, status_numbers, thread_state
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

pytestmark = pytest.mark.skipif(
    "CAP_SYS_PTRACE" not in probes.capabilities(), reason="others may not be traced"
)

PAUSE = 34  # asm/unistd_64.h
# Its thread waits, as in vfork(2), until a child has opened the FIFO.
SPAWNS = """
import os, sys
actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]
os.posix_spawn("/bin/true", ["true"], {}, file_actions=actions)
print("goes on", flush=True)
"""
WAITS = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got it\\n"))
os.write(1, b"up\\n")
while True:
    signal.pause()
"""


@contextmanager
def running(text: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", text, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def in_a_thread(work: Callable[[], Any]) -> BaseException | None:
    """What it raises. The thread has ended then, and traces nobody any more."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()
    return found[0] if found else None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptrace, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(ptrace, "END_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_a_thread_that_cannot_stop_is_given_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with running(SPAWNS, str(fifo)) as process:
        wait_for(lambda: children(process.pid), "the child")
        error = in_a_thread(lambda: ptrace.seccomp_filters(process.pid, process.pid))
        assert isinstance(error, TimeoutError), error
        wait_for(lambda: status_numbers(process.pid, "TracerPid") == [0], "no tracer")
        with open(fifo, "wb"):
            assert process.stdout
            assert process.stdout.readline() == b"goes on\n"


@pytest.mark.usefixtures("impatient")
def test_a_process_that_runs_again_is_not_waited_for() -> None:
    def work() -> None:
        with inject.seized(process.pid, [process.pid]):
            pass

    with running(WAITS) as process:
        assert process.stdout
        process.stdout.readline()
        assert isinstance(in_a_thread(work), TimeoutError)
        os.kill(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == b"got it\n"


def test_a_call_that_does_not_end_is_given_up_and_the_thread_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The thread, interrupted in its call, has to get a processor in this time, too.
    monkeypatch.setattr(ptrace, "STOP_SECONDS", 3.0)

    def work() -> None:
        maps = Path(f"/proc/{process.pid}/maps").read_bytes()
        instruction = inject.syscall_instruction(process.pid, maps)
        with (
            inject.seized(process.pid, [process.pid]),
            inject.calling(process.pid, lambda: instruction, filtered=False) as caller,
        ):
            caller.call(PAUSE)

    with running(WAITS) as process:
        assert process.stdout
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        inject.wait_stopped(process.pid, time.monotonic() + SECONDS)
        error = in_a_thread(work)
        assert isinstance(error, TimeoutError) and f"thread {process.pid}" in str(error), error
        assert status_numbers(process.pid, "TracerPid") == [0]
        wait_for(lambda: is_stopped(process.pid), "the stop that its tracer broke off")
        os.kill(process.pid, signal.SIGCONT)
        os.kill(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == b"got it\n"


def test_a_signal_that_comes_before_a_stop_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = ptrace.ptrace

    def signal_first(request: int, thread: int, *others: Any) -> int:
        answer = trace(request, thread, *others)
        if request == ptrace.SEIZE:
            os.kill(thread, signal.SIGUSR1)
            wait_for(lambda: thread_state(thread, thread) == "t", "the signal")
        return answer

    with running(WAITS) as process:
        assert process.stdout
        process.stdout.readline()
        monkeypatch.setattr(ptrace, "ptrace", signal_first)
        with pytest.raises(OSError, match="Invalid argument"):  # it has none
            ptrace.seccomp_filters(process.pid, process.pid)
        assert process.stdout.readline() == b"got it\n"
