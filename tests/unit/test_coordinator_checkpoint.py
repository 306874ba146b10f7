"""Checkpoint and restore of jobs that use a GPU: real coordinator and CRIU, fake task and ghost."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator import process
from flowgpu.errors import (
    Busy,
    CheckpointFailed,
    CheckpointSpoilt,
    CheckpointTimeout,
    FlowError,
    GpuMismatch,
    ImageDamaged,
    JobEnded,
    ModeUnusable,
    NotEnoughDisk,
    OtherVersion,
    PidTaken,
    Unsupported,
)
from flowgpu.host.criu import Criu
from flowgpu.image.reader import Image
from flowgpu.launch import answers
from flowgpu.start import kill_coordinator
from flowgpu.wire import Fault
from tests.patience import SECONDS
from tests.unit.coordinator_job import FAKES, Jobs, Running, wait_for

BLOCK_BYTES = 2 << 20
CHUNK_BYTES = 32 << 10
RESTORE_FAULTS = (Fault.CRIU_RESTORE, Fault.FILL, Fault.REBUILD, Fault.MAPBACK)
# By tests/faults/matrix.py alone: they do not fail everywhere, or not in what is a fake here.
ELSEWHERE = (
    *("task_", "phase_", "criu_hang", "ghost_room", "ghost_short", "ghost_read", "pages_"),
    "look_",
)
# Points of the intercept library are passed in tasks, which here are Python.
DUMP_FAULTS = [
    fault for fault in Fault if fault not in RESTORE_FAULTS and not fault.startswith(ELSEWHERE)
]


def is_counting(lines: list[str]) -> bool:
    return lines == [f"step {n + 1}" for n in range(len(lines))]


def goes_on_as_before(job: Running, image: Path) -> None:
    """What every failed checkpoint must leave behind: the job, and nothing else."""
    job.wait_steps(10)
    assert is_counting(job.lines), job.log
    assert job.record.state == "running"
    assert not list(image.parent.glob(f"{image.name}*"))


def test_dump_and_restore_bring_processes_and_memory_back(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(70)  # more than one message of blocks
    result = job.dump(tmp_path / "image")
    assert job.end() == 75
    assert result["engine"] == "native"
    assert result["gpu"] == "emulated"
    assert result["gpu_bytes_reserved"] == 70 * BLOCK_BYTES
    # Every block counts the same in one chunk, and is zero elsewhere.
    assert result["gpu_bytes_active"] == 70 * BLOCK_BYTES
    assert result["gpu_bytes_nonzero"] == 70 * CHUNK_BYTES
    assert result["gpu_bytes_distinct"] == result["gpu_bytes_stored"] == CHUNK_BYTES
    assert result["allocations"] == 70
    image = Image(tmp_path / "image")
    image.verify()
    assert [block.address for block in image.manifest.gpus[0].blocks] == [
        0x200000000000 + n * BLOCK_BYTES for n in range(70)
    ]

    again = jobs.restore(tmp_path / "image")
    report = again.ask("wait-restored")
    steps = {"verify", "ghost", "criu", "copy", "engine", "mapback", "open"}
    assert set(report["phases"]) == steps
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines), again.log
    # What was restored can be dumped again: the task kept what it imported.
    again.dump(tmp_path / "second")
    third = jobs.restore(tmp_path / "second")
    third.wait_steps(10)
    assert is_counting(job.lines + again.lines + third.lines)


@pytest.mark.parametrize(
    ("without", "environment", "stored"),
    [
        (["dedup"], {}, 4 * CHUNK_BYTES),
        (["zero"], {}, 2 * CHUNK_BYTES),
        (["zero", "dedup"], {}, 4 * BLOCK_BYTES),
        # A GPU without room for the kernels' scratch memory stores everything.
        ([], {"FAKE_NO_KERNELS": "1"}, 4 * BLOCK_BYTES),
    ],
)
def test_each_reduction_can_be_left_out(
    jobs: Jobs,
    tmp_path: Path,
    without: list[str],
    environment: dict[str, str],
    stored: int,
) -> None:
    job = jobs.task(4, ghost_env=environment)
    result = job.dump(tmp_path / "image", without=without)
    assert result["gpu_bytes_stored"] == stored
    image = Image(tmp_path / "image")
    image.verify()
    used = [name for name in ("active", "zero", "dedup") if name not in without]
    assert list(image.manifest.reductions) == (["active"] if environment else used)
    again = jobs.restore(tmp_path / "image")
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_a_program_dumped_in_its_exit_ends_after_the_restore(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3, task_env={"FAKE_TASK_ENDING": "1"})
    job.dump(tmp_path / "image")
    assert job.end() == 75
    again = jobs.restore(tmp_path / "image")
    again.ask("wait-restored")
    assert again.end() == 6


def test_leave_running_gives_the_job_back_while_the_bytes_are_written(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs.task(4)
    result = job.dump(tmp_path / "image", leave_running=True)
    job.wait_steps(10)
    assert is_counting(job.lines)
    assert result["pause_seconds"] < result["total_seconds"]
    Image(tmp_path / "image").verify()
    job.dump(tmp_path / "second")
    again = jobs.restore(tmp_path / "second")
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_several_gpus_have_a_file_each(jobs: Jobs, tmp_path: Path) -> None:
    gpus = {"FAKE_GPUS": "3"}
    job = jobs.task(5, task_env=gpus, ghost_env=gpus)
    job.dump(tmp_path / "image")
    manifest = Image(tmp_path / "image").manifest
    assert [gpu.data_bytes // BLOCK_BYTES for gpu in manifest.gpus] == [2, 2, 1]
    again = jobs.restore(tmp_path / "image", ghost_env=gpus)
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_several_tasks_of_one_tree_are_one_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    task = f"{sys.executable} {FAKES / 'task.py'} 3"
    job = jobs.run(["/bin/sh", "-c", f"{task} & {task} & wait"])
    wait_for(lambda: job.lines.count("step 5") == 2, "both tasks")
    wait_for(lambda: len(job.ask("status")["tasks"]) == 2, "the connections of both")
    job.dump(tmp_path / "image")
    assert len(Image(tmp_path / "image").manifest.tasks) == 2
    again = jobs.restore(tmp_path / "image")
    wait_for(lambda: (job.lines + again.lines).count("step 20") == 2, "step 20 of both")
    lines = sorted(job.lines + again.lines, key=lambda line: int(line.split()[1]))
    assert "torn" not in lines
    assert lines[0::2][:20] == lines[1::2][:20] == [f"step {n + 1}" for n in range(20)]


def test_a_job_that_is_still_to_come_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(1)
    job.dump(tmp_path / "image")
    for start in range(4):
        words = [sys.executable, "-c", "import time; time.sleep(1000)"]
        coming = jobs.restore(tmp_path / "image") if start % 2 else jobs.run(words)
        coming.ask("kill")
        coming.process.wait(SECONDS)
        assert not coming.record.live


def test_blocks_freed_and_made_during_the_export_are_seen(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(4, task_env={"FAKE_TASK_CHURN": "1"})
    job.dump(tmp_path / "image")
    blocks = Image(tmp_path / "image").manifest.gpus[0].blocks
    assert sorted(block.id for block in blocks) == [1, 2, 3, 4]
    again = jobs.restore(tmp_path / "image")
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_a_task_that_frees_its_only_block_during_the_export(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(1, task_env={"FAKE_TASK_CHURN": "1"})
    job.dump(tmp_path / "image")
    again = jobs.restore(tmp_path / "image")
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_a_busy_gate_is_tried_again(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_BUSY": "3"})
    job.dump(tmp_path / "image")
    assert job.end() == 75


def test_a_gate_that_stays_busy_is_a_timeout(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_BUSY": "1000000"})
    with pytest.raises(CheckpointTimeout, match="GATE"):
        job.dump(tmp_path / "image", timeout=0.5)
    goes_on_as_before(job, tmp_path / "image")


@pytest.mark.parametrize("fault", DUMP_FAULTS)
@pytest.mark.parametrize("leave_running", [False, True], ids=["dump", "leave-running"])
def test_every_fault_leaves_the_job_as_it_was(
    jobs: Jobs, tmp_path: Path, fault: Fault, leave_running: bool
) -> None:
    """One job lives through the fault at each of its passes."""
    setting = tmp_path / "fault"
    setting.touch()
    job = jobs.task(3, coordinator_env={"FLOWGPU_FAULT": f"@{setting}"})
    # A job that is left running differs at the end only; `make fault-matrix` tries all its passes.
    for nth in range(1, 3) if leave_running else itertools.count(1):
        setting.write_text(f"{fault}:{nth}")
        image = tmp_path / f"image{nth}"
        try:
            job.dump(image, leave_running=leave_running)
        except FlowError as error:
            assert isinstance(error, CheckpointFailed | NotEnoughDisk), (error, job.log)
            goes_on_as_before(job, image)
        else:
            assert nth > 1, f"fault point {fault} was never passed"
            break
    if leave_running:
        setting.write_text("")
        job.dump(tmp_path / "last")
    assert job.end() == 75


@pytest.mark.parametrize("fault", RESTORE_FAULTS)
def test_a_restore_that_fails_leaves_nothing_and_can_be_repeated(
    jobs: Jobs, tmp_path: Path, fault: Fault
) -> None:
    job = jobs.task(3)
    job.dump(tmp_path / "image")
    job.end()
    failed = jobs.restore(tmp_path / "image", coordinator_env={"FLOWGPU_FAULT": f"{fault}:1"})
    with pytest.raises(FlowError, match="fault injected"):
        failed.ask("wait-restored")
    failed.process.wait(SECONDS)
    assert failed.record.state == "dumped"
    pids = Image(tmp_path / "image").manifest.pids
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    again = jobs.restore(tmp_path / "image")
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_folders_that_were_made_for_sockets_go_when_the_restore_fails(
    jobs: Jobs, tmp_path: Path
) -> None:
    upper = tmp_path / "upper"
    server = (
        "import os, socket, time\n"
        f"os.makedirs('{upper}/lower')\n"
        f"named = socket.socket(socket.AF_UNIX); named.bind('{upper}/lower/server')\n"
        "named.listen()\ntime.sleep(1000)"
    )
    words = shlex.join([sys.executable, "-c", server])
    task = shlex.join([sys.executable, str(FAKES / "task.py"), "3"])
    job = jobs.run(["/bin/sh", "-c", f"{words} & exec {task}"])
    job.wait_line("step 3")
    wait_for((upper / "lower" / "server").exists, "the server")
    job.dump(tmp_path / "image")
    job.end()
    shutil.rmtree(upper)
    fault = {"FLOWGPU_FAULT": f"{Fault.REBUILD}:1"}
    failed = jobs.restore(tmp_path / "image", coordinator_env=fault)
    with pytest.raises(FlowError, match="fault injected"):
        failed.ask("wait-restored")
    failed.process.wait(SECONDS)
    assert not upper.exists()
    jobs.restore(tmp_path / "image").wait_steps(5)
    assert (upper / "lower" / "server").exists()


@pytest.mark.parametrize("message", ["EXPORT", "GATE", "HANDOVER", "DETACH"])
def test_a_task_that_refuses_is_named_and_goes_on(jobs: Jobs, tmp_path: Path, message: str) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_REFUSE": message})
    with pytest.raises(Unsupported, match="an open graph"):
        job.dump(tmp_path / "image")
    goes_on_as_before(job, tmp_path / "image")


@pytest.mark.parametrize("message", ["EXPORT", "GATE", "HANDOVER", "DETACH"])
def test_a_task_that_dies_on_the_way_is_said_to_have_ended(
    jobs: Jobs, tmp_path: Path, message: str
) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_DIE": message})
    with pytest.raises(JobEnded):
        job.dump(tmp_path / "image")
    assert job.end() == 3
    assert not list(tmp_path.glob("image*"))


def test_criu_is_ended_when_a_task_that_it_waits_for_has_ended(jobs: Jobs, tmp_path: Path) -> None:
    waits, begun = tmp_path / "criu", tmp_path / "begun"
    waits.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "if sys.argv[1] == 'dump':\n"
        f"    open({str(begun)!r}, 'w')\n"
        "    time.sleep(1000)\n"
        f"os.execv({str(Criu.locate().program)!r}, sys.argv)\n"
    )
    waits.chmod(0o755)
    job = jobs.task(2, coordinator_env={"FLOWGPU_CRIU": str(waits)})

    def kill() -> None:
        wait_for(begun.exists, "CRIU")
        os.kill(job.record.root_pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    began = time.monotonic()
    with pytest.raises(JobEnded):
        job.dump(tmp_path / "image")
    assert time.monotonic() - began < 20  # of the 60 that a pause may take
    killer.join()
    assert job.end() == 128 + signal.SIGKILL
    assert not list(tmp_path.glob("image*"))


@pytest.mark.parametrize("state", ["LOCKED", "CHECKPOINTED"])
def test_an_engine_that_fails_is_undone(jobs: Jobs, tmp_path: Path, state: str) -> None:
    job = jobs.task(2, ghost_env={"FAKE_CHECKPOINT": f"fail-{state}"})
    with pytest.raises(CheckpointFailed, match="STRIP"):
        job.dump(tmp_path / "image")
    if state == "CHECKPOINTED":
        goes_on_as_before(job, tmp_path / "image")


def test_a_process_that_was_spoilt_is_not_stopped_again(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, ghost_env={"FAKE_CHECKPOINT": "full-CHECKPOINTED"})
    for _ in range(2):
        with pytest.raises(CheckpointSpoilt, match=f"Process {job.record.root_pid}"):
            job.dump(tmp_path / "image")
        goes_on_as_before(job, tmp_path / "image")
    assert job.log.count("checkpoint: gate (") == 1
    # Nor by the next coordinator.
    before = job.record.coordinator_pid
    os.kill(before, signal.SIGKILL)
    wait_for(
        lambda: job.record.coordinator_pid != before and answers(job.directory.control_socket),
        "another coordinator",
    )
    with pytest.raises(CheckpointSpoilt, match=f"Process {job.record.root_pid}"):
        job.dump(tmp_path / "image")
    assert job.log.count("checkpoint: gate (") == 1


def test_an_engine_that_hangs_is_a_timeout(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, ghost_env={"FAKE_CHECKPOINT": "hang-CHECKPOINTED"})
    with pytest.raises(CheckpointTimeout, match="STRIP"):
        job.dump(tmp_path / "image", timeout=5.0)
    goes_on_as_before(job, tmp_path / "image")


def test_a_copy_that_is_too_slow_is_a_timeout(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(4, ghost_env={"FAKE_COPY_SECONDS": "100"})
    with pytest.raises(CheckpointTimeout, match="CAPTURE"):
        job.dump(tmp_path / "image", timeout=8.0)
    goes_on_as_before(job, tmp_path / "image")


def test_a_driver_without_checkpoints_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, ghost_env={"FAKE_DRIVER_OLD": "1"})
    with pytest.raises(Unsupported, match="driver"):
        job.dump(tmp_path / "image")
    goes_on_as_before(job, tmp_path / "image")


@pytest.mark.parametrize("what", ["wire", "page"])
def test_a_task_of_another_version_is_refused_before_it_is_asked_anything(
    jobs: Jobs, tmp_path: Path, what: str
) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_OTHER": what})
    with pytest.raises(OtherVersion, match="version"):
        job.dump(tmp_path / "image")
    assert "gate" not in job.log
    goes_on_as_before(job, tmp_path / "image")


def test_copies_before_the_pause_want_a_ghost_beside_the_job(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2, task_env={"FAKE_TASK_FREE": str(8 << 20)})
    with pytest.raises(ModeUnusable, match="mode recopy: the ghost has no room beside the job"):
        job.dump(tmp_path / "image", mode="recopy")
    assert "gate" not in job.log
    goes_on_as_before(job, tmp_path / "image")


@pytest.mark.parametrize("free", ["much", "little"])
@pytest.mark.parametrize("other", ["", "live"])
def test_what_a_live_set_says_counts_unless_it_is_of_another_version(
    jobs: Jobs, tmp_path: Path, free: str, other: str
) -> None:
    full = {"FAKE_TASK_FREE": str(8 << 20)} if free == "little" else {}
    block = 2 * BLOCK_BYTES
    own = {"FAKE_TASK_LIVE": "1", "FAKE_TASK_OTHER": other, "FAKE_TASK_BLOCK": str(block)}
    job = jobs.task(2, task_env=own | full)
    result = job.dump(tmp_path / "image", leave_running=True)
    assert result["ghost"] == ("late" if full else "cold")
    assert result["gpu_bytes_active"] == (2 * block if other else 0)
    assert ("counts as active" in job.log) == bool(other)


def test_a_second_checkpoint_at_once_is_busy(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(4, ghost_env={"FAKE_COPY_SECONDS": "1"})
    first = threading.Thread(target=lambda: job.dump(tmp_path / "image"))
    first.start()
    wait_for(lambda: job.record.state == "checkpointing", "the first checkpoint")
    with pytest.raises(Busy):
        job.dump(tmp_path / "second")
    first.join()
    assert job.end() == 75
    Image(tmp_path / "image").verify()


def test_a_damaged_image_is_refused_and_nothing_is_restored(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(3)
    job.dump(tmp_path / "image")
    job.end()
    with open(tmp_path / "image" / "gpu0.data", "r+b") as file:
        file.seek(3 << 20)
        file.write(b"\xff")
    failed = jobs.restore(tmp_path / "image")
    with pytest.raises(ImageDamaged, match=r"gpu0\.data"):
        failed.ask("wait-restored")


def test_an_ended_process_has_its_id_until_its_parent_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        with monkeypatch.context() as patched, pytest.raises(PidTaken, match=str(ended.pid)):
            patched.setattr(process, "UNHEARD_SECONDS", 0.0)
            process.refuse_taken([ended.pid])
        monkeypatch.setattr(process.time, "sleep", lambda _: ended.wait())
        process.refuse_taken([ended.pid])
        assert ended.returncode == 0  # it was waited for until then


def test_a_taken_pid_is_named_before_anything_else(jobs: Jobs, tmp_path: Path) -> None:
    words = "import time; print('ready', flush=True); time.sleep(1000)"
    job = jobs.run([sys.executable, "-c", words])
    job.wait_line("ready")
    job.dump(tmp_path / "image", leave_running=True)
    pid = job.record.root_pid
    kill_coordinator(job.directory)  # its job lives on without it
    job.process.wait()
    wait_for(lambda: not job.record.live, "the coordinator's end")  # that was only its keeper's
    try:
        again = jobs.restore(tmp_path / "image")
        with pytest.raises(PidTaken, match=str(pid)):
            again.ask("wait-restored")
    finally:
        os.kill(pid, 9)


def test_another_gpu_of_the_same_model_will_do(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2)
    job.dump(tmp_path / "image")
    again = jobs.restore(tmp_path / "image", ghost_env={"FAKE_GPU_SALT": "7"})
    again.wait_steps(10)
    assert is_counting(job.lines + again.lines)


def test_another_model_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.task(2)
    job.dump(tmp_path / "image")
    again = jobs.restore(
        tmp_path / "image", ghost_env={"FAKE_GPU_SALT": "7", "FAKE_GPU_MODEL": "another"}
    )
    with pytest.raises(GpuMismatch, match="another"):
        again.ask("wait-restored")
