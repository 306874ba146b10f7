"""Job directories and the registry."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flowgpu import jobs, start
from flowgpu.errors import AmbiguousJob, JobExists, RuntimeDirUnsafe, UnknownJob
from flowgpu.jobs import Job, Registry
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for


@pytest.fixture
def registry(runtime_dir: Path) -> Registry:
    return Registry(runtime_dir)


def make(registry: Registry, name: str | None = None, **changes: object) -> Job:
    job = registry.create(command=["prog", "-x"], cwd="/", gpu="emulated", name=name)
    return registry.dir(job.id).update(**changes) if changes else job


def ended(registry: Registry, name: str) -> Job:
    return make(registry, name, state=jobs.EXITED, exit_code=3, finished=1.0)


def lost(registry: Registry, name: str, **changes: object) -> Job:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    start = jobs.start_time(gone.pid)
    gone.wait()
    fields = {"state": jobs.RUNNING, "coordinator_pid": gone.pid, "coordinator_start": start}
    return make(registry, name, **{**fields, **changes})


def test_the_record_comes_back_as_it_was_written(registry: Registry) -> None:
    job = make(registry, "train", image="/img", root_pid=7)
    assert registry.dir(job.id).read() == job
    assert job.coordinator_pid == os.getpid()


def test_other_users_cannot_read_a_job(registry: Registry) -> None:
    directory = registry.dir(make(registry).id)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.record.stat().st_mode & 0o777 == 0o600
    assert registry.base.stat().st_mode & 0o777 == 0o700


def test_a_reader_never_sees_half_a_record(registry: Registry) -> None:
    directory = registry.dir(make(registry).id)
    stop = threading.Event()

    def rewrite() -> None:
        length = 0
        while not stop.is_set():
            length = (length + 997) % 20000
            directory.update(command=["x" * length])

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(500):
            directory.read()
    finally:
        stop.set()
        writer.join()
    assert [entry.name for entry in directory.path.iterdir()] == ["job.json"]


def test_keys_of_a_newer_version_are_ignored(registry: Registry) -> None:
    job = make(registry)
    record = registry.dir(job.id).record
    record.write_text(json.dumps({**json.loads(record.read_text()), "color": "red"}))
    assert registry.find(job.id) == job


def test_a_directory_without_a_record_is_no_job(registry: Registry) -> None:
    job = make(registry)
    (registry.jobs_dir / "0123456789ab").mkdir()
    (registry.jobs_dir / "notes").mkdir()
    assert registry.all() == [job]


def test_find_takes_a_name_an_id_and_the_start_of_an_id(registry: Registry) -> None:
    job = make(registry, "train")
    make(registry, "eval")
    assert registry.find("train") == registry.find(job.id) == registry.find(job.id[:-1]) == job


def test_find_prefers_the_live_job_of_a_name_then_the_newest(registry: Registry) -> None:
    first = ended(registry, "train")
    second = ended(registry, "train")
    assert registry.find("train").id == second.id
    registry.dir(first.id).update(state=jobs.RUNNING)
    assert registry.find("train").id == first.id


@pytest.mark.parametrize("key", ["nobody", "", "ffffffffffff0"])
def test_find_names_what_it_did_not_find(registry: Registry, key: str) -> None:
    make(registry, "train")
    with pytest.raises(UnknownJob):
        registry.find(key)


def test_find_refuses_a_start_that_fits_two_ids(registry: Registry) -> None:
    for job_id in ("aa0000000000", "aa1111111111"):
        registry.create(command=["p"], cwd="/", gpu="nvidia", job_id=job_id)
    with pytest.raises(AmbiguousJob, match="aa0000000000, aa1111111111"):
        registry.find("aa")


def test_a_name_in_use_is_refused_until_its_job_has_ended(registry: Registry) -> None:
    job = make(registry, "train")
    with pytest.raises(JobExists):
        make(registry, "train")
    registry.dir(job.id).update(state=jobs.EXITED)
    make(registry, "train")


def test_a_name_that_is_made_up_is_one_that_is_free(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["abcd00000000", "abcd11111111", "ef0100000000"])
    monkeypatch.setattr(jobs, "_new_id", lambda: next(ids))
    names = [registry.create(command=["p"], cwd="/", gpu="nvidia").name for _ in range(2)]
    assert names == ["p-abcd", "p-ef01"]


def test_one_of_many_that_ask_for_a_name_at_once_gets_it(registry: Registry) -> None:
    results: list[object] = []

    def ask() -> None:
        try:
            results.append(make(registry, "train").id)
        except JobExists as error:
            results.append(error)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([result for result in results if isinstance(result, str)]) == 1
    assert len(results) == 8


def test_a_restore_takes_the_id_of_an_ended_job_and_leaves_nothing_of_it(
    registry: Registry,
) -> None:
    job = ended(registry, "train")
    registry.dir(job.id).output_log.write_text("old")
    again = registry.create(
        command=["p"], cwd="/", gpu="emulated", name="other", job_id=job.id, image="/img"
    )
    assert (again.id, again.name, again.state) == (job.id, "other", jobs.RESTORING)
    assert os.listdir(registry.dir(job.id).path) == ["job.json"]


@pytest.mark.parametrize("at", ["os.replace", "pathlib.Path.unlink"])
def test_a_job_is_known_whenever_a_restore_of_it_is_killed(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    job = ended(registry, "train")
    registry.dir(job.id).output_log.write_text("old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(at, killed)
        registry.create(command=["p"], cwd="/", gpu="emulated", job_id=job.id, image="/img")
    assert registry.find(job.id).id == job.id


def test_a_restore_is_refused_while_a_job_of_its_id_lives(registry: Registry) -> None:
    job = make(registry, "train")
    with pytest.raises(JobExists):
        registry.create(command=["p"], cwd="/", gpu="emulated", name="x", job_id=job.id)


@pytest.mark.parametrize("bad", ["../../etc", "A" * 12, "0123", "0123456789abc"])
def test_an_id_that_is_none_is_refused(registry: Registry, bad: str) -> None:
    with pytest.raises(ValueError, match="id"):
        registry.create(command=["p"], cwd="/", gpu="emulated", job_id=bad)


def test_a_job_without_its_coordinator_is_lost(registry: Registry) -> None:
    job = lost(registry, "train")
    assert not job.live
    assert job.shown_state == job.as_json()["state"] == jobs.LOST


def test_what_is_left_of_a_lost_job_is_ended_wherever_it_is(registry: Registry) -> None:
    job = lost(registry, "train")  # whose root the record does not know
    directory = registry.dir(job.id)
    for path in (directory.control_socket, directory.task_socket):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    here = str(directory.path)
    left = [
        subprocess.Popen(["sleep", "100"], env={"FLOWGPU_SOCKET": str(directory.task_socket)}),
        subprocess.Popen(["sh", "-c", "sleep 100; :", "criu", "--work-dir", here]),
    ]
    other = subprocess.Popen(["sh", "-c", "sleep 100; :", here], env={"FLOWGPU_SOCKET": here})
    try:
        # Popen returns a moment before /proc shows a program's words and environment.
        wait_for(lambda: len(start._left(directory, 0)) == 2, "both programs")
        later = jobs.start_time(left[-1].pid) + 1000
        assert not start.kill_lost(directory, signal.SIGTERM, since=later)
        assert start.kill_lost(directory, signal.SIGKILL)
        assert [process.wait(SECONDS) for process in left] == [-signal.SIGKILL] * 2
        assert not list(directory.path.glob("*.sock"))
        assert not start.kill_lost(directory, signal.SIGKILL)
        assert other.poll() is None
    finally:
        for process in (*left, other):
            process.kill()
            process.wait()


def test_what_a_look_has_missed_is_ended_all_the_same(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU and what it makes can both escape one look: this before it is the job's, that after."""
    directory = registry.dir(lost(registry, "train").id)
    with subprocess.Popen(["sleep", "100"]) as process:
        looks = iter([[], [process.pid], []])
        monkeypatch.setattr(start, "_left", lambda *_: next(looks, []))
        assert start.kill_lost(directory, signal.SIGKILL)
        assert process.wait(SECONDS) == -signal.SIGKILL


def test_a_pid_used_again_is_not_the_coordinator(registry: Registry) -> None:
    job = make(registry, coordinator_start=jobs.start_time(os.getpid()) + 1)
    assert not job.live


def test_a_zombie_is_no_coordinator() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    start = jobs.start_time(child.pid)
    assert child.stdout
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not jobs.is_process(child.pid, start)
    child.stdout.close()
    child.wait()


def test_start_time_reads_past_brackets_in_a_program_name(tmp_path: Path) -> None:
    script = tmp_path / "a) R 1 (b"
    script.write_text("#!/bin/sh\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([str(script)], stdin=subprocess.PIPE) as child:
        assert jobs.start_time(child.pid) >= jobs.start_time(os.getpid())
        child.communicate()


def test_prune_forgets_what_has_ended_and_keeps_what_runs(registry: Registry) -> None:
    running, done, gone = make(registry, "a"), ended(registry, "b"), lost(registry, "c")
    assert {job.id for job in registry.prune()} == {done.id, gone.id}
    assert [job.id for job in registry.all()] == [running.id]


def test_prune_keeps_a_lost_job_whose_process_still_runs(registry: Registry) -> None:
    job = lost(registry, "c", root_pid=os.getpid(), root_start=jobs.start_time(os.getpid()))
    assert registry.prune() == []
    assert registry.find("c").id == job.id


def test_prune_by_age_keeps_what_ended_lately(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ended(registry, "old")
    new = make(registry, "new", state=jobs.DUMPED)
    later = jobs.uptime() + 7200
    monkeypatch.setattr(jobs, "uptime", lambda: later)
    assert [job.id for job in registry.prune(older_than=3600)] == [old.id]
    assert [job.id for job in registry.all()] == [new.id]


def test_a_job_has_not_ended_earlier_than_it_began_whatever_the_clock_says(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(registry, "now")
    before_boot = 100 * int(jobs.uptime() + 1e6)
    last_boot = make(
        registry, "last", state=jobs.EXITED, finished=1.0, coordinator_start=before_boot
    )
    days = time.time() + 3 * 86400
    monkeypatch.setattr(time, "time", lambda: days)
    assert [job.id for job in registry.prune(older_than=86400)] == [last_boot.id]


def test_the_newest_job_of_a_name_is_the_one_made_last_whatever_the_clock_says(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for days in (3, 0, -3):
        moment = time.time() + days * 86400
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda moment=moment: moment)
            made.append(ended(registry, "train").id)
    assert [job.id for job in registry.all()] == made
    assert registry.find("train").id == made[-1]
    # A record of FlowGPU before there were numbers.
    record = registry.dir(made[-1]).record
    record.write_text(record.read_text().replace('"number": 3', '"number": 0'))
    assert [job.id for job in registry.all()] == [made[-1], *made[:-1]]


def test_nothing_ran_here_yet(registry: Registry) -> None:
    assert registry.all() == []
    assert registry.prune() == []
    assert not registry.base.exists()


def test_the_runtime_dir_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(tmp_path / "x"))
    assert jobs.runtime_dir() == tmp_path / "x"
    monkeypatch.delenv("FLOWGPU_RUNTIME_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert jobs.runtime_dir() == Path("/run/flowgpu")
    session = tmp_path / "session"
    session.mkdir()
    user = os.getuid() or 54321
    os.chown(session, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert jobs.runtime_dir() == session / "flowgpu"
    monkeypatch.setattr(os, "geteuid", lambda: 54322)
    assert jobs.runtime_dir() == Path("/tmp/flowgpu-54322"), "the folder is another user's"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert jobs.runtime_dir() == Path("/tmp/flowgpu-54322")


def test_a_runtime_dir_that_others_may_write_to_is_refused(registry: Registry) -> None:
    registry.base.mkdir()
    registry.base.chmod(0o777)
    with pytest.raises(RuntimeDirUnsafe, match="other users may write"):
        make(registry)


def test_a_runtime_dir_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(RuntimeDirUnsafe, match="belongs to user"):
        jobs.prepare_runtime_dir(tmp_path)


def test_a_runtime_dir_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirUnsafe, match="longer than"):
        jobs.prepare_runtime_dir(tmp_path / ("d" * 100))


def test_a_runtime_dir_that_is_a_link_or_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(RuntimeDirUnsafe):
            jobs.prepare_runtime_dir(tmp_path / name)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3.11", "-u", "/x/train.py", "--lr", "1"], "train-abcd"),
        (["python", "-c", "print()"], "python-abcd"),
        (["./a b/..weird név!"], "weirdnv-abcd"),
        (["/bin/@"], "job-abcd"),
        (["x" * 99], f"{'x' * 48}-abcd"),
    ],
)
def test_a_job_without_a_name_is_called_by_its_program(command: list[str], name: str) -> None:
    assert jobs.default_name(command, "abcd12345678") == name
    assert jobs.is_name(name)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", ".x", "x" * 65, "a\n"])
def test_what_cannot_be_a_name(name: str) -> None:
    assert not jobs.is_name(name)
