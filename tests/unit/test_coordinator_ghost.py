"""When the ghost is started: beside the job, with it, or in its place (a full GPU)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flowgpu.errors import DUMPED_EXIT, CheckpointFailed, GpuFull
from flowgpu.image.reader import Image
from flowgpu.jobs import start_time
from flowgpu.launch import GhostChoice
from flowgpu.start import kill_coordinator
from flowgpu.wire import Fault
from tests.unit.coordinator_job import Jobs, Running, children_like, wait_for

FULL = {"FAKE_TASK_FREE": str(4 << 20)}
GHOST = "ghost.py"


def ghosts(job: Running) -> list[int]:
    """Ids of the coordinator's ghosts."""
    return children_like(job.coordinator, GHOST)


def warm_ghost(job: Running) -> int:
    """The one ghost of the job, once it is warm."""
    wait_for(lambda: "has contexts on GPUs [0]" in job.log, "a warm ghost")
    (found,) = wait_for(lambda: ghosts(job), "a ghost")
    return int(found)


def kind(image: Path) -> str:
    return Image(image).manifest.ghost


def goes_on(job: Running, *after: Running) -> None:
    last = (job, *after)[-1]
    last.wait_steps(10)
    lines = [line for one in (job, *after) for line in one.lines]
    assert lines == [f"step {n + 1}" for n in range(len(lines))], last.log


def test_with_room_a_ghost_is_started_beside_the_job(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3)
    assert ghosts(job) == []
    job.dump(tmp_path / "image", leave_running=True)
    assert kind(tmp_path / "image") == "cold"
    wait_for(lambda: not ghosts(job), "the ghost's end")  # which nobody waits for
    goes_on(job)


def test_a_ghost_may_let_go_of_what_it_pinned_after_the_job_has_ended(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The kernel takes longer, and keeps everybody out of the driver meanwhile."""
    job = jobs.task(3, ghost_env={"FAKE_UNPIN": "yes"})
    job.dump(tmp_path / "image")
    assert job.end() == DUMPED_EXIT
    assert not (jobs.states / "unpinned").exists()  # nobody has waited for it
    (jobs.states / "may-unpin").touch()
    wait_for(lambda: (jobs.states / "unpinned").exists(), "what it does at its end")


def test_a_ghost_that_does_not_end_behind_its_job_is_ended(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, ghost_env={"FAKE_UNPIN": "yes"})
    job.dump(tmp_path / "image")
    assert job.end() == DUMPED_EXIT
    ghost = int((jobs.states / "unpins").read_text())
    assert start_time(ghost)
    wait_for(lambda: not start_time(ghost), "the ghost's end")
    assert not (jobs.states / "unpinned").exists()


@pytest.mark.parametrize("leave_running", [False, True])
def test_without_room_the_ghost_waits_for_the_strip(
    jobs: Jobs, tmp_path: Path, leave_running: bool
) -> None:
    job = jobs.task(70, task_env=FULL)
    job.dump(tmp_path / "image", leave_running=leave_running)
    assert kind(tmp_path / "image") == "late"
    Image(tmp_path / "image").verify()
    if leave_running:
        goes_on(job)
        job.dump(tmp_path / "second")
        assert kind(tmp_path / "second") == "late"
        goes_on(job, jobs.restore(tmp_path / "second"))
    else:
        goes_on(job, jobs.restore(tmp_path / "image"))


def test_blocks_that_come_and_go_are_seen_without_a_ghost(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(4, task_env={**FULL, "FAKE_TASK_CHURN": "1"})
    job.dump(tmp_path / "image")
    assert kind(tmp_path / "image") == "late"
    goes_on(job, jobs.restore(tmp_path / "image"))


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault.EXPORT, Fault.GATE, Fault.HANDOVER, Fault.DETACH, Fault.STRIP, Fault.COPY_START),
        *(Fault.CRIU_DUMP, Fault.COPY_WAIT, Fault.COMMIT),
        *(Fault.GHOST_CHECKPOINT, Fault.GHOST_IMPORT, Fault.GHOST_DUMP, Fault.GHOST_DEATH),
    ],
)
def test_what_fails_without_room_is_undone(jobs: Jobs, tmp_path: Path, fault: Fault) -> None:
    job = jobs.task(3, task_env=FULL, coordinator_env={"FLOWGPU_FAULT": f"{fault}:1"})
    with pytest.raises(CheckpointFailed):
        job.dump(tmp_path / "image")
    goes_on(job)
    assert ghosts(job) == []
    assert not list(tmp_path.glob("image*"))


@pytest.mark.parametrize("ghost", ["auto", "warm"])
@pytest.mark.parametrize("when", ["FAKE_TASK_FREE", "FAKE_TASK_FREE_AWAY"])
def test_without_room_for_the_driver_nothing_is_stripped(
    jobs: Jobs, tmp_path: Path, when: str, ghost: GhostChoice
) -> None:
    # The second is told after HANDOVER only: others have taken what was free before.
    job = jobs.task(3, task_env={when: str((4 << 20) - 1)}, ghost=ghost)
    with pytest.raises(GpuFull, match="the driver's own checkpoint needs 4 MiB, 3 MiB are free"):
        job.dump(tmp_path / "image")
    assert "checkpoint: gate" in job.log or when == "FAKE_TASK_FREE"
    goes_on(job)
    assert not list(tmp_path.glob("image*"))


def test_a_restore_into_a_full_gpu_ends_the_ghost_before_the_rebuild(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs.task(3)
    job.dump(tmp_path / "image")
    again = jobs.restore(tmp_path / "image", ghost_env={"FAKE_GPU_FREE": "1000"})
    goes_on(job, again)
    # One filled the memory and was killed, the next one rebuilt the task.
    assert again.log.count("the ghost was ended by SIGKILL") == 1
    wait_for(lambda: not ghosts(again), "the ghost's end")  # which nobody else waits for


def test_one_warm_ghost_serves_every_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, ghost="warm")
    ghost = warm_ghost(job)
    for name in ("first", "second"):
        job.dump(tmp_path / name, leave_running=True)
        assert kind(tmp_path / name) == "warm"
        assert ghosts(job) == [ghost]
    goes_on(job)
    job.dump(tmp_path / "third")
    assert job.end() == 75
    assert not start_time(ghost)
    again = jobs.restore(tmp_path / "third", ghost="warm")
    goes_on(job, again)
    warm_ghost(again)
    again.dump(tmp_path / "fourth")
    assert kind(tmp_path / "fourth") == "warm"


def test_a_warm_ghost_that_comes_too_late_leaves_the_job_its_memory(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs.task(3, task_env=FULL, ghost="warm")
    wait_for(lambda: "the job has taken the device memory" in job.log, "a line of the log")
    job.dump(tmp_path / "image")
    assert kind(tmp_path / "image") == "late"
    goes_on(job, jobs.restore(tmp_path / "image"))


def test_a_warm_ghost_that_dies_is_replaced(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, ghost="warm")
    ghost = warm_ghost(job)
    os.kill(ghost, signal.SIGKILL)
    wait_for(lambda: not start_time(ghost), "its end")
    job.dump(tmp_path / "image", leave_running=True)
    wait_for(lambda: ghosts(job) not in ([], [ghost]), "another ghost")
    assert ghost not in ghosts(job)
    goes_on(job)


def test_a_checkpoint_that_fails_with_a_warm_ghost_is_undone(jobs: Jobs, tmp_path: Path) -> None:
    fault = {"FLOWGPU_FAULT": "ghost_death:1"}
    job = jobs.task(3, ghost="warm", coordinator_env=fault)
    warm_ghost(job)
    with pytest.raises(CheckpointFailed):
        job.dump(tmp_path / "image")
    goes_on(job)
    wait_for(lambda: ghosts(job), "another ghost")


def test_a_warm_ghost_ends_with_its_coordinator(jobs: Jobs) -> None:
    job = jobs.task(3, ghost="warm")
    ghost = warm_ghost(job)
    kill_coordinator(job.directory)  # the fake task ends by itself, the ghost has to as well
    wait_for(lambda: not start_time(ghost), "the end of the ghost")
    assert not Path(f"/proc/{ghost}/exe").exists()
