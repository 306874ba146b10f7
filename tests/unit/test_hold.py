"""flowgpu.host.hold: a thread of a stopped process runs, the others only when they are released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.host.hold import Held
from flowgpu.host.proctree import task_states
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

SLEEPS = {"230", "219"}  # clock_nanosleep(2) and restart_syscall(2), asm/unistd_64.h

PROGRAM = """
import ctypes, mmap, os, sys, threading, time
shared = mmap.mmap(int(sys.argv[1]), 4096)
def count(place):
    while True:
        shared[8 * place] = (shared[8 * place] + 1) % 256
        time.sleep(0.001)
threads = [threading.Thread(target=count, args=(place,), daemon=True) for place in (1, 2)]
for thread in threads:
    thread.start()
print(*(thread.native_id for thread in threads), flush=True)
count(0)
"""


class Program:
    def __init__(self) -> None:
        self.memory = os.memfd_create("counters")
        os.ftruncate(self.memory, 4096)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.memory)],
            stdout=subprocess.PIPE,
            pass_fds=(self.memory,),
        )
        assert self.process.stdout
        self.pid = self.process.pid
        self.threads = [self.pid, *map(int, self.process.stdout.readline().split())]

    def counters(self) -> list[int]:
        data = os.pread(self.memory, 24, 0)
        return [data[0], data[8], data[16]]

    def stop(self) -> None:
        """While all threads sleep: one with the interpreter's lock would keep others from it."""

        def stops_asleep() -> bool:
            os.kill(self.pid, signal.SIGSTOP)
            wait_for(lambda: set(task_states(self.pid).values()) == {"T"}, "its stop")
            folder = Path(f"/proc/{self.pid}/task")
            calls = {(folder / str(t) / "syscall").read_text().split()[0] for t in self.threads}
            if calls <= SLEEPS:
                return True
            os.kill(self.pid, signal.SIGCONT)
            return False

        wait_for(stops_asleep, "a stop in the sleep of all threads")

    def run_alone(self, *places: int) -> bool:
        """Waits until the threads of these places have gone on; true if no other has by then."""
        before = self.counters()
        time.sleep(0.1)

        def moved() -> list[int]:
            return [place for place in range(3) if self.counters()[place] != before[place]]

        wait_for(lambda: set(places) <= {*moved()}, "the threads that run")
        return moved() == [*places]


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    made.process.kill()
    made.process.wait()
    assert made.process.stdout
    made.process.stdout.close()
    os.close(made.memory)


@pytest.mark.parametrize("free", [0, 2])
def test_only_the_free_thread_runs_until_the_others_are_released(
    program: Program, free: int
) -> None:
    program.stop()
    assert program.run_alone()
    held = Held(program.pid, program.threads[free])
    assert program.run_alone(free)
    held.release()
    assert program.run_alone(0, 1, 2)


def test_killed_while_held_it_is_gone_and_waited_for(program: Program) -> None:
    program.stop()
    held = Held(program.pid, program.threads[1])
    held.kill()
    assert not Path(f"/proc/{program.pid}").exists()


@pytest.mark.parametrize("free", [0, 1])
def test_killed_by_another_its_end_is_left_to_its_parent_when_it_is_released(
    program: Program, free: int
) -> None:
    program.stop()
    held = Held(program.pid, program.threads[free])
    os.kill(program.pid, signal.SIGKILL)
    held.release()
    # To the tracer they would be zombies.
    wait_for(lambda: not task_states(program.pid).keys() - {program.pid}, "the end of the others")
    assert program.process.wait() == -signal.SIGKILL  # of which we are the parent


def test_what_cannot_be_held_stays_as_it_was(program: Program) -> None:
    with pytest.raises(OSError, match="not stopped"):
        Held(program.pid, program.threads[1])
    assert program.run_alone(0, 1, 2)
    program.stop()
    with pytest.raises(OSError, match="has no thread 1"):
        Held(program.pid, 1)
    assert program.run_alone()
    os.kill(program.pid, signal.SIGCONT)
    assert program.run_alone(0, 1, 2)


def test_the_end_of_the_holder_ends_what_it_holds(program: Program) -> None:
    program.stop()
    code = f"from flowgpu.host.hold import Held; Held({program.pid}, {program.threads[1]})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert program.process.wait(SECONDS) == -signal.SIGKILL
