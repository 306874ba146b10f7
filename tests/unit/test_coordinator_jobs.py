"""Jobs under the coordinator: running, output, ends, and checkpoints of jobs without CUDA."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.reach import obstacle
from flowgpu.errors import CriuUnsupported, OutputNotEmpty, StartFailed, Unsupported
from flowgpu.host.proctree import thread_state
from flowgpu.image.reader import Image
from flowgpu.jobs import is_process, start_time
from tests.patience import SECONDS
from tests.unit.coordinator_job import Jobs, wait_for

COUNTER = """
import sys, time
n = 0
while True:
    n += 1
    print("step", n, flush=True)
    if n % 10 == 0:
        print("tenth", n, file=sys.stderr, flush=True)
    time.sleep(0.002)
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_run_gives_both_streams_and_the_exit_code(jobs: Jobs) -> None:
    words = "import os; os.write(1, b'out\\xff'); os.write(2, b'err'); raise SystemExit(7)"
    job = jobs.run(python(words))
    assert job.end() == 7
    assert job.output == {"stdout": b"out\xff", "stderr": b"err"}
    assert job.record.state == "exited"
    assert job.record.exit_code == 7
    assert sorted(job.directory.output_log.read_bytes()) == sorted(b"out\xfferr")


def test_a_killed_job_ends_with_128_and_the_signal(jobs: Jobs) -> None:
    job = jobs.run(python(COUNTER))
    job.wait_steps()
    job.ask("signal", signum=signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM


def test_kill_ends_the_whole_tree(jobs: Jobs) -> None:
    job = jobs.run(["/bin/sh", "-c", "sleep 1000 & sleep 1000 & wait"])
    wait_for(lambda: job.record.state == "running", "the job")
    root = job.record.root_pid
    job.ask("kill")
    assert job.end() == 128 + signal.SIGKILL
    assert not is_process(root, job.record.root_start)


def test_a_program_that_cannot_start_is_a_named_error(jobs: Jobs) -> None:
    job = jobs.run(["/nowhere/to/be/found"])
    job.process.wait(SECONDS)
    wait_for(lambda: job.error, "the error")
    assert isinstance(job.error, StartFailed)
    assert job.record.state == "exited"


def test_dump_and_restore_go_on_where_the_job_was(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(python(COUNTER))
    job.wait_steps(20)
    result = job.dump(tmp_path / "image")
    assert job.end() == 75
    assert job.record.state == "dumped"
    assert result["job"] == job.spec.name
    assert result["engine"] == "none"
    assert result["gpu_bytes_reserved"] == 0
    assert 0 < result["cpu_bytes"] < result["image_bytes"]
    assert 0 < result["pause_seconds"] <= result["total_seconds"]
    assert set(result["phases"]) == {
        *("prepare", "gate", "handover", "strip", "copy", "criu", "commit", "end")
    }
    Image(tmp_path / "image").verify()

    again = jobs.restore(tmp_path / "image")
    report = again.ask("wait-restored")
    assert report["job"] == job.spec.name
    assert report["restore_seconds"] > 0
    again.wait_steps(20)
    before = job.lines
    assert before + again.lines == [f"step {n + 1}" for n in range(len(before + again.lines))]
    log = again.directory.output_log.read_text()
    assert log.startswith("step 1\n") and "tenth" in log
    Image(tmp_path / "image").verify()


def test_leave_running_goes_on_and_both_copies_can_be_had(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(python(COUNTER))
    job.wait_steps()
    job.dump(tmp_path / "image", leave_running=True)
    assert job.record.state == "running"
    job.wait_steps(20)
    assert job.lines == [f"step {n + 1}" for n in range(len(job.lines))]
    job.dump(tmp_path / "second")
    assert job.end() == 75
    again = jobs.restore(tmp_path / "image")
    again.wait_steps()


def test_who_sees_a_job_at_work_can_have_an_image_of_it(jobs: Jobs, tmp_path: Path) -> None:
    """Also while its coordinator is still busy with the start."""
    job = jobs.run(python(COUNTER), coordinator_env={"FAKE_LATE_START": "0.5"})
    job.wait_steps(1)
    job.dump(tmp_path / "image")
    assert job.end() == 75


def test_a_thread_that_ends_by_an_exception_shows_in_the_record(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run(python(COUNTER), coordinator_env={"FAKE_FAILING_THREAD": "by mistake"})
    wait_for(lambda: job.record.trouble, "the record")
    expected = "thread load of its coordinator ended: RuntimeError: by mistake"
    assert job.record.trouble == expected
    assert "Traceback" in job.log and "CRITICAL" in job.log
    job.dump(tmp_path / "image")
    assert job.end() == 75


def test_a_tree_of_processes_comes_back(jobs: Jobs, tmp_path: Path) -> None:
    child = f"{sys.executable} -c 'import time\nwhile 1: print(\"c\", flush=1); time.sleep(.01)'"
    job = jobs.run(["/bin/sh", "-c", f"({child}) & {child} | cat; wait"])
    job.wait_steps(10)
    job.dump(tmp_path / "image")
    assert job.end() == 75
    again = jobs.restore(tmp_path / "image")
    again.wait_steps(10)
    assert len(Image(tmp_path / "image").manifest.pids) >= 4


def test_output_that_exists_is_refused_and_the_job_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "file").touch()
    job = jobs.run(python(COUNTER))
    job.wait_steps()
    with pytest.raises(OutputNotEmpty):
        job.dump(tmp_path / "image")
    job.wait_steps(20)
    assert job.record.state == "running"


def test_a_pipe_to_the_outside_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    ends = os.pipe()
    words = (
        f"import os, time; os.open('/proc/{os.getpid()}/fd/{ends[1]}', os.O_WRONLY); "
        "print('ready', flush=True); time.sleep(1000)"
    )
    job = jobs.run(python(words))
    try:
        job.wait_line("ready")
        with pytest.raises(Unsupported, match="pipe"):
            job.dump(tmp_path / "image")
    finally:
        for end in ends:
            os.close(end)
    assert not list(tmp_path.glob("image*"))


def test_a_job_starts_without_what_only_a_checkpoint_needs() -> None:
    program = (
        "import sys\nimport coordinator.supervisor\n"
        "print([m for m in ('numpy', 'coordinator.checkpoint') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_a_search_of_ours_in_the_job_is_no_debugger(jobs: Jobs, tmp_path: Path) -> None:
    """Processes are looked at for sandboxes by one that traces them, a moment each."""
    script = "for i in $(seq 80); do sleep 1000 & done; echo ready; wait"
    slow = {"FAKE_SEARCH_SECONDS": "0.5"}
    job = jobs.run(["/bin/sh", "-c", script], coordinator_env=slow)
    job.wait_line("ready")
    job.dump(tmp_path / "image")
    assert job.end() == 75


# Its first thread ends before another, which goes on.
HEADLESS = """
import ctypes, itertools, threading, time
def work():
    for number in itertools.count(1):
        print("step", number, flush=True)
        time.sleep(0.01)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60, 0)  # exit(2)
"""


def test_a_job_whose_first_thread_has_ended_is_no_job_that_ends(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run([sys.executable, "-c", HEADLESS])
    job.wait_steps(3)
    root = job.record.root_pid
    wait_for(lambda: thread_state(root, root) == "Z", "the end of the thread")
    with pytest.raises(CriuUnsupported, match="a first thread that has ended before others"):
        job.dump(tmp_path / "image")
    assert obstacle(root, 0, managed=False) == "its first thread has ended"
    job.wait_steps(3)
    job.ask("kill")
    assert job.end() == 128 + signal.SIGKILL
    assert not start_time(root)
