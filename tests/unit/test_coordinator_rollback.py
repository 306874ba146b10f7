"""Whatever fails before COMMIT, the job runs on: each step of a checkpoint half done.

Real coordinator and CRIU, fake tasks and ghost. A job of two tasks, of which one fails.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.phases import UNDO_SECONDS
from flowgpu.errors import CheckpointFailed, CheckpointTimeout, FlowError, TaskStopped
from flowgpu.host.proctree import is_stopped
from flowgpu.image.reader import Image
from flowgpu.wire import Fault
from tests.unit.coordinator_job import FAKES, Jobs, children_like, wait_for

TASK_FAULTS = [fault for fault in Fault if fault.startswith("task_")]
POINTS = (Fault.EXPORT, Fault.GATE, Fault.HANDOVER, Fault.DETACH, Fault.MAPBACK)
MESSAGES = ["ROOM", "EXPORT", "GATE", "HANDOVER", "DETACH", "MAPBACK", "OPEN"]
# A task that ends in one of these is a part of the image, and nobody on the way back.
ON_THE_WAY_BACK = ["MAPBACK", "OPEN"]


class Two:
    """A job of two tasks; the first has `environment`, and prints `astep N`."""

    def __init__(self, jobs: Jobs, environment: dict[str, str], **options: Any) -> None:
        task = f"{sys.executable} {FAKES / 'task.py'} 3"
        words = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        script = f"{words} FAKE_TASK_NAME=a {task} & FAKE_TASK_NAME=b {task} & wait"
        self.job = jobs.run(["/bin/sh", "-c", script], **options)
        self.wait_steps(3)
        wait_for(lambda: len(self.job.ask("status")["tasks"]) == 2, "both tasks")
        self.descriptors = self.count_descriptors()

    def steps(self, task: str) -> list[str]:
        return [line[1:] for line in self.job.lines if line.startswith(task)]

    def wait_steps(self, more: int, tasks: str = "ab") -> None:
        wanted = {task: len(self.steps(task)) + more for task in tasks}
        for task, count in wanted.items():
            wait_for(lambda: len(self.steps(task)) >= count, f"steps of {task}")  # noqa: B023

    def count_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.job.coordinator}/fd"))

    def goes_on(self, image: Path, tasks: str = "ab") -> None:
        """What a checkpoint that failed must leave behind: the job, and nothing else."""
        self.wait_steps(10, tasks)
        for task in "ab":
            found = self.steps(task)
            assert found == [f"step {n + 1}" for n in range(len(found))], self.job.log
        assert self.job.record.state == "running"
        assert not list(image.parent.glob(f"{image.name}*"))
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        coordinator = self.job.coordinator
        wait_for(lambda: not children_like(coordinator, "ghost.py"), "the end of the ghost")
        wait_for(lambda: self.count_descriptors() <= self.descriptors, "closed descriptors")

    def dump_again(self, image: Path) -> None:
        wait_for(lambda: len(self.job.ask("status")["tasks"]) == 2, "both tasks")
        self.job.dump(image, leave_running=True)
        assert len(Image(image).manifest.tasks) == 2


@pytest.mark.parametrize("fault", TASK_FAULTS)
def test_what_breaks_in_one_task_leaves_all_as_they_were(
    jobs: Jobs, tmp_path: Path, fault: Fault
) -> None:
    """One job lives through the fault at each of its passes."""
    fired, setting = jobs.states / "fired", tmp_path / "fault"
    setting.touch()
    two = Two(jobs, {"FLOWGPU_FAULT": f"@{setting}"})
    failures = 0
    for nth in itertools.count(1):
        image = tmp_path / f"image{nth}"
        setting.write_text(f"{fault}:{nth}")
        try:
            two.job.dump(image, leave_running=True)
        except FlowError as error:
            assert isinstance(error, CheckpointFailed), (error, two.job.log)
            two.goes_on(image)
            failures += 1
        else:
            # The way back is gone twice.
            two.wait_steps(5)
            two.nothing_is_left()
            Image(image).verify()
        if not fired.exists():
            break
        fired.unlink()
        setting.write_text("")
        two.dump_again(tmp_path / f"second{nth}")
    assert failures >= 3


@pytest.mark.parametrize("fault", POINTS)
def test_a_step_that_fails_for_one_of_two_tasks_is_undone_for_both(
    jobs: Jobs, tmp_path: Path, fault: Fault
) -> None:
    setting = tmp_path / "fault"
    setting.touch()
    two = Two(jobs, {}, coordinator_env={"FLOWGPU_FAULT": f"@{setting}"})
    for nth in (1, 2):
        image = tmp_path / f"image{nth}"
        setting.write_text(f"{fault}:{nth}")
        if fault is Fault.MAPBACK:
            two.job.dump(image, leave_running=True)
            two.wait_steps(5)
        else:
            with pytest.raises(CheckpointFailed):
                two.job.dump(image)
            two.goes_on(image)
        setting.write_text("")
        two.dump_again(tmp_path / f"second{nth}")


@pytest.mark.parametrize(
    ("end", "message"),
    [*(("DIE", message) for message in MESSAGES), ("BECOME", "HANDOVER"), ("BECOME", "MAPBACK")],
)
def test_a_task_that_ends_takes_nobody_with_it(
    jobs: Jobs, tmp_path: Path, end: str, message: str
) -> None:
    two = Two(jobs, {f"FAKE_TASK_{end}": message})
    image = tmp_path / "image"
    two.job.dump(image, leave_running=True)
    two.wait_steps(5, "b")
    two.nothing_is_left()
    Image(image).verify()
    manifest = Image(image).manifest
    assert len(manifest.tasks) == (2 if message in ON_THE_WAY_BACK else 1)
    assert sum(len(gpu.blocks) for gpu in manifest.gpus) == 3 * len(manifest.tasks)


def test_a_task_beside_a_busy_one_exports_again(jobs: Jobs, tmp_path: Path) -> None:
    two = Two(jobs, {"FAKE_TASK_BUSY": "3"})
    two.job.dump(tmp_path / "image", leave_running=True)
    two.wait_steps(5)
    two.nothing_is_left()
    assert len(Image(tmp_path / "image").manifest.tasks) == 2


def test_a_task_that_ends_behind_its_export_is_no_part_of_the_image(
    jobs: Jobs, tmp_path: Path
) -> None:
    two = Two(jobs, {"FAKE_TASK_DIE": "after_EXPORT"})
    two.job.dump(tmp_path / "image", leave_running=True)
    two.wait_steps(5, "b")
    two.nothing_is_left()
    manifest = Image(tmp_path / "image").manifest
    assert len(manifest.tasks) == 1 and sum(len(gpu.blocks) for gpu in manifest.gpus) == 3


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("message", ["GATE", "HANDOVER", "DETACH"])
def test_an_answer_that_comes_after_the_time_is_up(
    jobs: Jobs, tmp_path: Path, message: str, when: str
) -> None:
    limit, late = (0.7, 1.5) if message == "GATE" else (4.0, 6.0)  # others are before it
    two = Two(jobs, {"FAKE_TASK_SLOW": f"{message}:{when}:{late}"})
    with pytest.raises(CheckpointTimeout, match=message.replace("DETACH", "STRIP")):
        two.job.dump(tmp_path / "image", timeout=limit)
    two.goes_on(tmp_path / "image")


@pytest.mark.parametrize("message", ["ROOM", "ASK", "EXPORT"])
def test_a_task_that_does_not_answer_delays_the_preparation_for_its_time_only(
    jobs: Jobs, tmp_path: Path, message: str
) -> None:
    two = Two(jobs, {"FAKE_TASK_SLOW": f"{message}:before:60"})
    began = time.monotonic()
    with pytest.raises(CheckpointFailed, match=f"PREPARE: task .*: {message}: no answer"):
        two.job.dump(tmp_path / "image", timeout=1.0)
    assert time.monotonic() - began < 45
    two.goes_on(tmp_path / "image")


@pytest.mark.parametrize("message", ["EXPORT", "GATE", "HANDOVER"])
def test_a_task_that_is_stopped_when_it_is_asked_is_named_and_not_lost(
    jobs: Jobs, tmp_path: Path, message: str
) -> None:
    two = Two(jobs, {"FAKE_TASK_STOP": message})
    began = time.monotonic()
    with pytest.raises(TaskStopped) as caught:
        two.job.dump(tmp_path / "image", timeout=3.0)
    assert time.monotonic() - began < UNDO_SECONDS
    pid = caught.value.fields["pid"]
    wait_for(lambda: is_stopped(pid), "that it is as it was")
    os.kill(pid, signal.SIGCONT)
    two.goes_on(tmp_path / "image")


def test_a_block_freed_since_the_export_is_not_given_back(jobs: Jobs, tmp_path: Path) -> None:
    environment = {"FAKE_TASK_CHURN": "1", "FLOWGPU_FAULT": f"{Fault.TASK_RELEASE}:2"}
    two = Two(jobs, environment)
    with pytest.raises(CheckpointFailed, match="HANDOVER"):
        two.job.dump(tmp_path / "image")
    two.goes_on(tmp_path / "image")


def test_a_ghost_that_dies_on_the_way_back_costs_the_image_only(jobs: Jobs, tmp_path: Path) -> None:
    environment = {"FAKE_CHECKPOINT": "die-RUNNING", "FAKE_FLUSH_SECONDS": "1"}
    two = Two(jobs, {}, ghost_env=environment)
    with pytest.raises(CheckpointFailed, match="COMMIT"):
        two.job.dump(tmp_path / "image", leave_running=True)
    two.goes_on(tmp_path / "image")


def test_a_ghost_without_room_is_followed_by_one_that_gets_each_block_once(
    jobs: Jobs, tmp_path: Path
) -> None:
    two = Two(jobs, {}, ghost_env={"FAKE_IMPORTS": "4"})
    two.job.dump(tmp_path / "image", leave_running=True)
    manifest = Image(tmp_path / "image").manifest
    assert manifest.ghost == "late"
    assert sum(len(gpu.blocks) for gpu in manifest.gpus) == 6
    two.wait_steps(5)
    two.nothing_is_left()
