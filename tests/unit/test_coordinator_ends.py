"""A restored task that ends before it has all back is an end like any other.

Real coordinator and CRIU, fake tasks and ghost.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from flowgpu.errors import CoordinatorReplaced
from flowgpu.host.proctree import is_stopped
from flowgpu.image.reader import Image
from flowgpu.launch import EngineChoice
from tests.unit.coordinator_job import FAKES, Jobs, Running, wait_for

TASK = [sys.executable, str(FAKES / "task.py"), "3"]
ENDS: list[tuple[EngineChoice, str]] = [
    ("native", "HELLO"),
    ("native", "MAPBACK"),
    ("native", "after_MAPBACK"),
    ("native", "OPEN"),
    ("replay", "HELLO"),
    ("replay", "REBUILD"),
    ("replay", "after_REBUILD"),
    ("replay", "MAPBACK"),
]


def environment(end: str, states: Path) -> dict[str, str]:
    """A restored task ends there."""
    if end == "HELLO":
        return {"FAKE_TASK_DIE_WITH": str(states / "ends")}
    return {"FAKE_TASK_DIE": end}


def restored(jobs: Jobs, image: Path) -> Running:
    (jobs.states / "ends").touch()
    return jobs.restore(image)


@pytest.mark.parametrize(("engine", "end"), ENDS)
def test_its_parent_sees_it_and_the_others_go_on(
    jobs: Jobs, tmp_path: Path, engine: EngineChoice, end: str
) -> None:
    words = " ".join(f"{k}={shlex.quote(v)}" for k, v in environment(end, jobs.states).items())
    task = shlex.join(TASK)
    script = f"({words} FAKE_TASK_NAME=a {task}; echo ended $?) & FAKE_TASK_NAME=b {task} & wait"
    job = jobs.run(["/bin/sh", "-c", script], engine=engine)
    for line in ("astep 3", "bstep 3"):
        job.wait_line(line)
    wait_for(lambda: len(job.ask("status")["tasks"]) == 2, "both tasks")
    job.dump(tmp_path / "image")
    assert job.end() == 75
    assert len(Image(tmp_path / "image").manifest.tasks) == 2
    for number in range(2):
        again = restored(jobs, tmp_path / "image")
        again.wait_line("ended 3")
        again.wait_steps(10)
        steps = [line for line in job.lines + again.lines if line.startswith("b")]
        assert steps == [f"bstep {n + 1}" for n in range(len(steps))]
        again.dump(tmp_path / f"image{number}", leave_running=True)
        again.ask("kill")
        again.end()


@pytest.mark.parametrize(("engine", "end"), ENDS)
def test_of_a_job_it_is_the_end_with_its_last_words_and_exit_code(
    jobs: Jobs, tmp_path: Path, engine: EngineChoice, end: str
) -> None:
    environ = {**environment(end, jobs.states), "FAKE_TASK_LAST_WORDS": "last words\n"}
    job = jobs.task(3, engine=engine, task_env=environ)
    job.dump(tmp_path / "image")
    assert job.end() == 75
    for _ in range(2):
        again = restored(jobs, tmp_path / "image")
        assert again.end() == 3
        assert again.lines[-1] == "last words"
        assert again.record.state == "exited"


@pytest.mark.parametrize("end", ["MAPBACK", "OPEN"])
def test_it_ends_while_the_next_coordinator_gives_memory_back(
    jobs: Jobs, tmp_path: Path, end: str
) -> None:
    task = shlex.join(TASK)
    script = f"(FAKE_TASK_DIE={end} FAKE_TASK_NAME=a {task}; echo ended $?) & FAKE_TASK_NAME=b "
    fault = {"FLOWGPU_FAULT": "phase_stop:4"}  # where STRIP begins
    job = jobs.run(["/bin/sh", "-c", f"{script}{task} & wait"], coordinator_env=fault)
    for line in ("astep 3", "bstep 3"):
        job.wait_line(line)
    wait_for(lambda: len(job.ask("status")["tasks"]) == 2, "both tasks")
    first = job.coordinator

    def kill() -> None:
        wait_for(lambda: is_stopped(first), "its stop")
        os.kill(first, signal.SIGKILL)

    with pytest.raises(CoordinatorReplaced):
        job.dump(tmp_path / "image", on_sent=kill)
    log = job.directory.output_log
    wait_for(lambda: "ended 3" in log.read_text(), "the end of a task")
    said = log.read_text().count("bstep")
    wait_for(lambda: log.read_text().count("bstep") > said + 5, "steps of the other")
    assert job.record.state == "running"
