"""The turns of `flowgpu share`, with jobs that are records alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowgpu.cli import share
from flowgpu.errors import Busy, FlowError, NothingToSuspend, ResumeFailed
from flowgpu.jobs import EXITED, RUNNING, SUSPENDED, Job, JobDir, Registry, start_time
from flowgpu.options import SuspendOptions

Capture = pytest.CaptureFixture[str]


class Machine:
    """Its jobs do what they are asked for. Each request is noted, and may be refused."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.asked: list[str] = []
        self.errors: dict[str, FlowError] = {}
        self.when: dict[str, Callable[[], None]] = {}  # what happens while one is carried out

    def job(self, name: str, state: str = RUNNING) -> Job:
        made = self.registry.create(command=["prog"], cwd="/", gpu="emulated", name=name)
        mine = {"coordinator_pid": os.getpid(), "coordinator_start": start_time(os.getpid())}
        return self.registry.dir(made.id).update(state=state, **mine)

    def states(self) -> dict[str, str]:
        return {job.name: job.state for job in self.registry.all()}

    def end(self, name: str) -> None:
        self.registry.dir(self.registry.find(name).id).update(state=EXITED)

    def __call__(self, directory: JobDir, job: Job, verb: str, **_: Any) -> dict[str, Any]:
        request = f"{verb} {job.name}"
        self.asked.append(request)
        self.when.pop(request, lambda: None)()
        if request in self.errors:
            raise self.errors[request]
        directory.update(state=SUSPENDED if verb == "suspend" else RUNNING)
        about = {"not_kept": [], "suspend_seconds": 0.1, "resume_seconds": 0.1}
        return {"job": job.name, **about}

    def share(self, *jobs: Job, quantum: float = 0.001) -> int:
        return share.Round(self.registry, jobs, quantum, SuspendOptions(), False).run()


@pytest.fixture
def machine(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(Registry(runtime_dir))
    monkeypatch.setattr(share.start, "ask", made)
    return made


def told() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_each_job_comes_in_once_the_others_are_away(machine: Machine) -> None:
    one, two, three = machine.job("one"), machine.job("two"), machine.job("three", SUSPENDED)
    machine.when["resume one"] = told
    assert machine.share(one, two, three) == signal.SIGTERM
    assert machine.asked[:7] == [
        *("suspend two", "suspend one", "resume two", "suspend two", "resume three"),
        *("suspend three", "resume one"),
    ]
    # Who was suspended before stays so.
    assert machine.states() == {"one": RUNNING, "two": RUNNING, "three": SUSPENDED}


def test_a_signal_between_two_jobs_leaves_one_of_them_running(machine: Machine) -> None:
    jobs = [machine.job(name, SUSPENDED) for name in ("one", "two")]
    machine.when["suspend one"] = told
    assert machine.share(*jobs) == signal.SIGTERM
    assert machine.states() == {"one": RUNNING, "two": SUSPENDED}
    assert machine.asked == ["resume one", "suspend one", "resume one"]


def test_a_job_that_keeps_the_gpu_is_told_once_and_the_next_one_waits(
    machine: Machine, capfd: Capture
) -> None:
    one, two = machine.job("one"), machine.job("two", SUSPENDED)
    machine.errors["suspend one"] = Busy(job="one", action="a checkpoint")

    def free() -> None:
        del machine.errors["suspend one"]
        machine.when["resume two"] = told

    def again() -> None:
        machine.when["suspend one"] = free

    machine.when["suspend one"] = again
    assert machine.share(one, two) == signal.SIGTERM
    assert machine.asked == ["suspend one", "suspend one", "resume two", "resume one"]
    out, err = capfd.readouterr()
    assert err.count("one keeps the GPU") == 1
    assert [line.split()[2] for line in out.splitlines()] == ["one", "one", "two"]


def test_a_job_without_a_gpu_lets_the_others_come(machine: Machine, capfd: Capture) -> None:
    one, two = machine.job("one"), machine.job("two", SUSPENDED)
    machine.errors["suspend one"] = NothingToSuspend(job="one")
    machine.when["resume two"] = told
    assert machine.share(one, two) == signal.SIGTERM
    assert machine.asked == ["suspend one", "resume two"]
    assert "keeps the GPU" not in capfd.readouterr().err


def test_where_none_can_come_they_are_tried_again_a_turn_later(
    machine: Machine, capfd: Capture
) -> None:
    jobs = [machine.job(name, SUSPENDED) for name in ("one", "two")]
    for job in jobs:
        machine.errors[f"resume {job.name}"] = ResumeFailed(job=job.name, reason="it is full")

    def room() -> None:
        machine.when["resume one"] = lambda: (machine.errors.clear(), machine.end("two"))

    machine.when["resume two"] = room
    assert machine.share(*jobs) == 0
    assert machine.asked == ["resume one", "resume two", "resume one"]
    assert machine.states() == {"one": RUNNING, "two": EXITED}
    err = capfd.readouterr().err
    assert err.count("misses its turn") == 2
    assert "two leaves the round: it is exited" in err and "one runs on" in err
