"""Dump and restore with the real CRIU. They need root (or CAP_SYS_ADMIN and CAP_SYS_PTRACE)."""

from __future__ import annotations

import itertools
import os
import random
import re
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from criu_job import COUNTER, StartJob, reap_orphans, restore

from flowgpu.errors import (
    CriuFailed,
    CriuMissing,
    CriuTimeout,
    LimitTooLow,
    MissingCapability,
)
from flowgpu.host import criu as criu_module
from flowgpu.host import criu_images, criu_log
from flowgpu.host.criu import Criu, CriuRun
from flowgpu.host.prctl import become_subreaper
from flowgpu.host.proctree import resume_tree, task_states, tree_pids
from flowgpu.jobs import start_time
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for


def states(pid: int) -> set[str]:
    return set(task_states(pid).values())


def wait_stopped(pid: int) -> None:
    """A thread may still be on its way back from CRIU's code."""
    wait_for(lambda: states(pid) == {"T"}, "all threads to stop")


def test_dump_leaves_tasks_stopped_and_they_go_on_exactly(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    wait_stopped(job.pid)
    before = job.last()
    assert job.line(0.2) is None
    resume_tree(job.pid)
    assert [job.number() for _ in range(3)] == [before + 1, before + 2, before + 3]


def test_restore_goes_on_where_the_dump_stopped(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    before = job.last()
    job.kill()
    restore(criu, job, tmp_path)
    assert [job.number() for _ in range(3)] == [before + 1, before + 2, before + 3]
    assert len(task_states(job.pid)) == 4


def test_restore_left_stopped_waits_for_sigcont(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    before = job.last()
    job.kill()
    restore(criu, job, tmp_path, leave_stopped=True)
    wait_stopped(job.pid)
    assert job.line(0.2) is None
    resume_tree(job.pid)
    assert job.number() == before + 1


def test_restored_root_is_a_child_that_can_be_waited_for(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    program = "import os, sys, time\nprint(0, flush=True)\n"
    program += "while not os.path.exists(sys.argv[1]): time.sleep(0.001)\nsys.exit(23)\n"
    job = start(program, str(tmp_path / "end"))
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    job.kill()
    restore(criu, job, tmp_path / "images")
    (tmp_path / "end").touch()
    pid, status = os.waitpid(job.pid, 0)
    assert (pid, os.waitstatus_to_exitcode(status)) == (job.pid, 23)


def test_dump_can_leave_the_job_running_and_the_image_still_restores(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path, leave_stopped=False, leave_running=True)
    numbers = [*job.drain(), job.number(), job.number()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    job.kill()
    restore(criu, job, tmp_path)
    assert job.number() <= numbers[-1]


def test_dump_kills_the_tree_when_asked_for_neither(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path, leave_stopped=False)
    _, status = os.waitpid(job.pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_tree_with_children_and_inner_pipes_is_restored(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    become_subreaper()
    program = """
import os, time
r, w = os.pipe()
if os.fork() == 0:
    os.close(r)
    count = 0
    while True:
        os.write(w, b"%d\\n" % count)
        count += 1
        time.sleep(0.01)
os.close(w)
for line in os.fdopen(r):
    print(line, end="", flush=True)
"""
    job = start(program)
    job.number()
    criu.dump(job.pid, tmp_path)
    before = job.last()
    pids = tree_pids(job.pid)
    job.end_tree()
    restore(criu, job, tmp_path)
    assert job.number() == before + 1
    assert tree_pids(job.pid) == pids == criu_images.pids(tmp_path)
    job.end_tree()


SHELL_JOB = """
import os, signal, subprocess, sys, time
from pathlib import Path
from flowgpu.host import criu_images
from flowgpu.host.criu import Criu

criu, images = Criu.locate(), Path(sys.argv[1])
code = "import time\\nwhile True: time.sleep(0.01)"
process = subprocess.Popen([sys.executable, "-c", code], stdin=-3, stdout=-3, stderr=-3)
time.sleep(0.2)
try:
    criu.dump(process.pid, images)
finally:
    process.kill()
    process.wait()
assert criu_images.is_shell_job(images)
pid = criu.restore(images)
assert pid == process.pid
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
"""


def test_shell_job_in_the_session_of_another_process_is_dumped_and_restored(
    criu: Criu, tmp_path: Path
) -> None:
    # In a session of its own: that of the tests may lead out of their PID namespace (a container's
    # `exec`), and CRIU refuses such a one.
    done = subprocess.run(
        [sys.executable, "-c", SHELL_JOB, str(tmp_path)], start_new_session=True, check=False
    )
    assert done.returncode == 0


def test_cancelled_dump_leaves_the_job_running_at_whatever_moment(
    criu: Criu, start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowgpu.host.criu._FAIL_SECONDS", SECONDS)
    job = start(COUNTER, "200")
    job.number()
    began = time.monotonic()
    criu.dump(job.pid, tmp_path / "whole")
    whole = time.monotonic() - began
    resume_tree(job.pid)
    maps = Path(f"/proc/{job.pid}/maps")
    dice = random.Random(20)
    for attempt in range(12):
        run = criu.start_dump(job.pid, tmp_path / str(attempt))
        time.sleep(dice.uniform(0.0, whole))
        run.cancel()
        # Killed, it would take the job with it at some of these moments.
        assert run._process.returncode != -signal.SIGKILL
        job.drain()
        first = job.number()
        assert [job.number() for _ in range(3)] == [first + 1, first + 2, first + 3]
        assert states(job.pid) <= {"S", "R"}
        shutil.rmtree(tmp_path / str(attempt), ignore_errors=True)
    assert "rwxp" not in maps.read_text()
    criu.dump(job.pid, tmp_path / "last")
    job.drain()
    job.kill()
    restore(criu, job, tmp_path / "last")
    first = job.number()
    assert job.number() == first + 1


def test_cancelled_dump_that_hangs_is_killed(
    criu: Criu, start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowgpu.host.criu._FAIL_SECONDS", 0.2)
    job = start(COUNTER, "200")  # Its dump is not over before it is stopped.
    job.number()
    run = criu.start_dump(job.pid, tmp_path)
    os.kill(run._process.pid, signal.SIGSTOP)
    # Before the job where memory runs out.
    assert Path(f"/proc/{run.pid}/oom_score_adj").read_text() == "1000\n"
    run.cancel()
    assert run._process.returncode == -signal.SIGKILL
    job.drain()
    first = job.number()
    assert job.number() == first + 1


def test_dump_past_its_time_fails_by_name_and_the_job_runs_on(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(COUNTER, "200")
    job.number()
    # Too little for its memory, and enough for the processes to stop, which has a name of its own.
    timeout, said = 0.1, ""
    for turn in itertools.count():
        try:
            criu.dump(job.pid, tmp_path / f"{turn}", timeout=timeout)
        except CriuTimeout as error:
            said = str(error)
            break
        except CriuFailed as error:
            assert "does not stop" in str(error)
            timeout *= 2
        else:
            resume_tree(job.pid)
            timeout /= 1.5
    assert said.startswith(f"CRIU did not dump within {timeout} s")
    job.drain()
    first = job.number()
    assert job.number() == first + 1


def test_a_criu_that_was_killed_leaves_no_helper_behind(tmp_path: Path) -> None:
    helper = tmp_path / "helper"
    script = f"sleep 100 & echo $! > {helper}; kill -STOP $!; kill -9 $$"
    run = CriuRun(
        ["/bin/sh", "-c", script],
        action="dump",
        log=tmp_path / "dump.log",
        timeout=SECONDS,
        cleanup=lambda: None,
    )
    with pytest.raises(CriuFailed, match="status -9"):
        run.wait()
    pid = int(helper.read_text())
    wait_for(lambda: not start_time(pid), "the end of the helper")


@pytest.mark.parametrize("reaped", [False, True])
def test_a_restore_that_waits_for_a_dead_task_ends_by_name(reaped: bool, tmp_path: Path) -> None:
    undone = []
    task = subprocess.Popen(["sleep", "100"])
    run = CriuRun(
        ["/bin/sh", "-c", "sleep 100"],
        action="restore",
        log=tmp_path / "restore.log",
        timeout=SECONDS,
        tasks=[os.getpid(), task.pid],
        cleanup=lambda: undone.append(True),
    )
    killer = threading.Timer(0.7, lambda: (task.kill(), reaped and task.wait()))
    killer.start()
    with pytest.raises(CriuFailed, match=f"could not restore: process {task.pid} was killed"):
        run.wait()
    killer.join()
    task.wait()
    assert undone == [True]
    assert run._process.returncode == -signal.SIGKILL


def test_dump_in_progress_can_be_polled_and_selected(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(COUNTER, "200")
    job.number()
    run = criu.start_dump(job.pid, tmp_path)
    assert not run.poll()
    with selectors.DefaultSelector() as selector:
        selector.register(run, selectors.EVENT_READ)
        assert selector.select(SECONDS)
    assert run.poll()
    assert run.wait() > 0


def test_killed_dump_does_not_wake_a_job_that_was_stopped_before(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(COUNTER, "200")
    job.number()
    os.kill(job.pid, signal.SIGSTOP)
    wait_stopped(job.pid)
    run = criu.start_dump(job.pid, tmp_path)
    time.sleep(0.05)
    run.cancel()
    wait_stopped(job.pid)
    job.drain()
    assert job.line(0.2) is None
    assert states(job.pid) == {"T"}


def test_restore_past_its_time_leaves_nothing_behind(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    become_subreaper()
    forks = "import os, time\nfor _ in range(6):\n    if os.fork() == 0: time.sleep(600)\n"
    job = start(COUNTER, "40", setup=forks)
    job.number()
    time.sleep(0.5)
    criu.dump(job.pid, tmp_path)
    pids = tree_pids(job.pid)
    assert len(pids) == 7
    job.end_tree()
    began = time.monotonic()
    restore(criu, job, tmp_path)
    whole = time.monotonic() - began
    job.number()
    job.end_tree()
    late = 0

    def is_gone() -> bool:
        reap_orphans()
        return not any(Path(f"/proc/{pid}").exists() for pid in pids)

    for part in range(1, 16):
        began = time.monotonic()
        try:
            restore(criu, job, tmp_path, timeout=whole * part / 16)
        except CriuTimeout:
            late += 1
        else:  # quicker than before, and what comes is a part of that
            whole = min(whole, time.monotonic() - began)
            job.end_tree()
        wait_for(is_gone, "the end of what was restored")
    assert late >= 5
    restore(criu, job, tmp_path)
    job.number()
    job.end_tree()


def test_dump_stats_count_the_pages_that_were_written(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(COUNTER, "20")
    job.number()
    criu.dump(job.pid, tmp_path)
    stats = criu_images.dump_stats(tmp_path)
    assert stats.pages_written * 4096 >= 20 << 20
    assert 0 < stats.memory_write_s <= stats.frozen_s


def criu_that(folder: Path, does: str) -> Path:
    """A program in the place of CRIU: these lines of a shell script."""
    program = folder / "criu"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return program


def test_preload_and_settings_of_the_caller_do_not_reach_criu(
    criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "absent.so"))
    monkeypatch.setenv("CRIU_FAULT", "1")
    shown = tmp_path / "environment"
    program = criu_that(tmp_path, f"env > {shown}\necho Version: 9.9")
    monkeypatch.setenv("FLOWGPU_CRIU", str(program))
    assert Criu.locate().version == (9, 9)
    assert not re.search("LD_PRELOAD|CRIU_FAULT", shown.read_text())


def test_locate_refuses_an_old_criu_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = criu_that(tmp_path, "echo Version: 3.17.1")
    monkeypatch.setenv("FLOWGPU_CRIU", str(program))
    with pytest.raises(CriuMissing, match=r"version 3\.17\.1, version 4\.2 or newer is needed"):
        Criu.locate()
    monkeypatch.setenv("FLOWGPU_CRIU", str(tmp_path / "nowhere"))
    with pytest.raises(CriuMissing, match="nowhere not found"):
        Criu.locate()


def test_check_passes_here(criu: Criu) -> None:
    criu.check()
    assert criu.has_feature("pagemap_scan") in (True, False)


def test_a_check_that_does_not_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = criu_that(tmp_path, "exec sleep 60")
    monkeypatch.setattr(criu_module, "CHECK_SECONDS", 0.1)
    criu = Criu(program, (4, 2))
    for check in (criu.check, lambda: criu.has_feature("compat_cr")):
        with pytest.raises(CriuMissing, match="does not end"):
            check()


def test_fetched_criu_runs_from_another_folder(criu: Criu, tmp_path: Path) -> None:
    if not (criu.program.parent / "root").is_dir():
        pytest.skip("the CRIU in use is an installed one")
    shutil.copytree(criu.program.parent, tmp_path / "moved")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "moved" / "criu")
    done = subprocess.run([link, "--version"], capture_output=True, text=True, check=True)
    assert ".".join(map(str, criu.version)) in done.stdout


def test_a_log_that_is_cut_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    log = tmp_path / "dump.log"
    log.write_text("(00.000001) Dumping a process\n" * 200)
    error = criu_log.explain_file(log, "dump", "it was ended by SIGXFSZ")
    assert isinstance(error, LimitTooLow)
    assert "CRIU's dump does not work where `ulimit -f` is 4096 bytes" in str(error)


def test_the_right_that_a_restore_lacks_is_named_behind_what_is_harmless() -> None:
    """Lines of a restore in a container that has no CAP_SYS_TIME."""
    log = (
        "(00.003655) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory\n"
        "(00.113284)   1005: Error (criu/timens.c:101): Unable to set a monotonic clock offset: "
        "Operation not permitted\n"
        "(00.123532) Error (criu/cr-restore.c:1265): 1005 exited, status=1\n"
    )
    error = criu_log.explain(log, "restore", "")
    assert isinstance(error, MissingCapability)
    assert "CAP_SYS_TIME" in str(error)
