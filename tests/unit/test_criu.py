"""Dump and restore with the real CRIU. They need root (or CAP_SYS_ADMIN and CAP_SYS_PTRACE)."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import re
import selectors
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import criu_entries
import pytest
from criu_job import COUNTER, Job, restore, taken

from flowgpu import criu as criu_module
from flowgpu import criu_images, criu_log, tcp
from flowgpu.criu import Criu, CriuRun
from flowgpu.criu_images import OpenedFile
from flowgpu.errors import (
    CriuFailed,
    CriuMissing,
    CriuTimeout,
    CriuUnsupported,
    FileChanged,
    FileMissing,
    ImageDamaged,
    MissingCapability,
    PidTaken,
)
from flowgpu.jobs import start_time
from flowgpu.prctl import become_subreaper
from flowgpu.proctree import external_pipes, ids_in_use, resume_tree, task_states, tree_pids
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

StartJob = Callable[..., Job]


@pytest.fixture
def start() -> Iterator[StartJob]:
    """Starts jobs and ends them with the test."""
    jobs: list[Job] = []

    def begin(*args: str, **options: str) -> Job:
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def needs_device(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"this machine has no {path}")


def reap_orphans() -> None:
    """Take the exit status of killed processes that came to this test as their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] > 0:
            pass


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
from flowgpu import criu_images
from flowgpu.criu import Criu

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
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
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
    monkeypatch.setattr("flowgpu.criu._FAIL_SECONDS", 0.2)
    job = start()
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


def test_sockets_by_a_path_are_told_from_those_outside(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    outside = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    outside.bind(str(tmp_path / "daemon"))
    binds = (
        "import socket\n"
        f"named = socket.socket(socket.AF_UNIX); named.bind({str(folder / 'listener')!r})\n"
        "named.listen(1)\n"
        "pair = socket.socketpair()\n"
        "client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"client.connect({str(tmp_path / 'daemon')!r})\n"
    )
    job = start(setup=binds)
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    outside.close()
    paths = {folder / "listener"}, {tmp_path / "daemon"}
    assert criu_images.socket_paths(tmp_path / "images") == paths


def test_image_files_are_read_as_pycriu_reads_them(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    zombie = "import os\nif os.fork() == 0: os._exit(0)\n"
    job = start(setup="import socket; pair = socket.socketpair()\n" + zombie)
    job.number()
    criu.dump(job.pid, tmp_path)
    pids = [e["pid"] for e in criu_entries.load(tmp_path / "pstree.img")]
    assert criu_images.pids(tmp_path) == pids
    assert len(pids) == 2
    assert criu_images.living_pids(tmp_path) == [job.pid]
    found_files = [m.reg for m in criu_entries.messages(tmp_path / "files.img", "file_entry")]
    regular = [reg for reg in found_files if stat.S_ISREG(reg.mode)]
    assert criu_images.regular_files(tmp_path) == [
        OpenedFile(reg.id, reg.name, reg.flags, reg.size if reg.HasField("size") else None)
        for reg in regular
    ]
    found, stats = criu_images.dump_stats(tmp_path), criu_entries.load(tmp_path / "stats-dump")[0]
    assert found.pages_written == stats["dump"]["pages_written"] > 0
    assert found.pages_scanned == stats["dump"]["pages_scanned"]
    assert found.memory_dump_s == stats["dump"]["memdump_time"] / 1e6
    assert found.memory_write_s == stats["dump"]["memwrite_time"] / 1e6
    assert found.frozen_s == stats["dump"]["frozen_time"] / 1e6
    assert found.freezing_s == stats["dump"]["freezing_time"] / 1e6


# A signal stack, whose bytes are the argument, in a thread beside the first.
SIGNAL_STACK = """
import ctypes, threading, time
def with_stack():
    memory = ctypes.create_string_buffer(65536)
    stack = (ctypes.c_uint64 * 3)(ctypes.addressof(memory), 0, len(memory))
    assert ctypes.CDLL(None).sigaltstack(stack, None) == 0
    while True:
        time.sleep(1)
threading.Thread(target=with_stack, daemon=True).start()
"""


def test_threads_in_the_image(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    """Their signal stacks, and registers that CRIU has no place for, as in the middle of AMX."""
    job = start(setup=SIGNAL_STACK)
    job.number()
    criu.dump(job.pid, tmp_path)
    assert criu_images.smallest_signal_stack(tmp_path) == 65536
    assert criu_images.unsaved_registers(tmp_path) is None
    thread = criu_images.thread_ids(tmp_path)[2]
    path = tmp_path / f"core-{thread}.img"
    (core,) = criu_entries.messages(path, "core_entry")
    core.thread_info.fpregs.xsave.xstate_bv |= 1 << 18 | 1 << 40
    data = core.SerializeToString()
    path.write_bytes(path.read_bytes()[:8] + len(data).to_bytes(4, "little") + data)
    found = criu_images.unsaved_registers(tmp_path)
    assert found == (thread, "AMX tiles, state component 40")


@pytest.mark.parametrize(
    "data", [b"\x02\0\0\0\x08", b"\x02\0\0\0\x08\x81", b"\x02\0\0\0\x0f\0", b"\1", b""]
)
def test_a_damaged_image_file_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "pstree.img").write_bytes(bytes(8) + data)
    with pytest.raises(ImageDamaged, match=r"pstree\.img"):
        criu_images.pids(tmp_path)
    (tmp_path / "pstree.img").unlink()
    with pytest.raises(ImageDamaged, match="No such file"):
        criu_images.pids(tmp_path)


def test_restore_names_a_taken_pid(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    resume_tree(job.pid)
    with pytest.raises(PidTaken, match=f"Process id {job.pid}"):
        criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    job.drain()
    assert job.number() >= 0


def test_restore_names_the_taken_id_of_a_thread(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start()
    job.number()
    criu.dump(job.pid, tmp_path)
    ids = sorted(task_states(job.pid))
    assert criu_images.thread_ids(tmp_path) == ids and len(ids) == 4
    job.kill()
    with taken(ids[2]), pytest.raises(PidTaken, match=f"Process id {ids[2]}, "):
        criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    assert not (tmp_path / "restore.log").exists()
    # Meanwhile it is found by CRIU itself.
    with taken(ids[2]), pytest.MonkeyPatch.context() as patched:
        patched.setattr(criu_module, "ids_in_use", lambda _: [])
        with pytest.raises(PidTaken, match=f"of a thread of process {job.pid}"):
            criu.restore(tmp_path, inherit_fds={f"pipe:[{job.inode}]": job.write_end})
    with taken(ids[2], seconds=0.2):
        restore(criu, job, tmp_path)
    assert sorted(task_states(job.pid)) == ids


def test_an_id_is_in_use_while_it_is_that_of_a_session() -> None:
    words = "trap '' HUP; sleep 1000 & echo $!; exit 0"
    leader = subprocess.Popen(
        ["bash", "-c", words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout
    with leader.stdout as out:
        member = int(out.readline())
    try:
        leader.wait()
        assert not Path(f"/proc/{leader.pid}").exists()
        assert ids_in_use([leader.pid, os.getpid(), member]) == [leader.pid, os.getpid(), member]
    finally:
        os.kill(member, signal.SIGKILL)

    def is_free() -> bool:
        reap_orphans()
        return not ids_in_use([leader.pid, member])

    wait_for(is_free, "both ids to be free")


def test_restore_names_a_file_that_grew(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    job = start(setup=f"log = open({str(log)!r}, 'w'); log.write('abc'); log.flush()\n")
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    assert (str(log), 3) in [
        (file.path, file.size) for file in criu_images.regular_files(tmp_path / "images")
    ]
    job.kill()
    log.write_text("abcdef")
    with pytest.raises(FileChanged, match=r"log\.txt has 6 bytes now and had 3"):
        restore(criu, job, tmp_path / "images")
    log.unlink()
    with pytest.raises(FileMissing, match=r"log\.txt"):
        restore(criu, job, tmp_path / "images")
    log.write_text("abc")
    restore(criu, job, tmp_path / "images")
    job.number()


def test_deleted_file_and_lock_come_back(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    setup = f"""
import fcntl, os
kept = open({str(tmp_path / "deleted")!r}, "w+b")
kept.write(bytes(range(256)) * (20 << 12))  # 20 MiB, past what CRIU takes by default
kept.flush()
os.unlink(kept.name)
lock = open({str(tmp_path / "lock")!r}, "w")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""
    job = start(setup=setup)
    job.number()
    criu.dump(job.pid, tmp_path / "images")
    job.kill()
    restore(criu, job, tmp_path / "images")
    job.number()
    assert Path(f"/proc/{job.pid}/fd/3").read_bytes() == bytes(range(256)) * (20 << 12)
    with (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_dump_names_an_outside_unix_socket(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        job = start(
            setup=f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})\n"
        )
        with server.accept()[0]:
            job.number()
            with pytest.raises(CriuUnsupported, match="Unix socket"):
                criu.dump(job.pid, tmp_path / "images")
            job.drain()
            assert job.number() > 0


# Prints 1 when its connection to itself works, and 2 more while it has the one outside.
CONNECTED = """
import socket, sys, time
outside = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
server = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
other, _ = server.accept()
def is_connected():
    try:
        return bool(outside.getpeername())
    except OSError:
        return False
while True:
    inside.send(b"x")
    print((other.recv(1) == b"x") + 2 * is_connected(), flush=True)
    time.sleep(0.01)
"""


def test_a_connection_is_closed_in_an_image_and_the_others_are_kept(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = start(CONNECTED, str(server.getsockname()[1]))
        with server.accept()[0]:
            assert job.number() == 3
            criu.dump(job.pid, tmp_path / "images")
            found = tcp.look([job.pid])
            (outside,) = found.outside
            assert len(found.pairs) == 2 and outside.pid == job.pid
            assert not tcp.lost(tmp_path / "images", found.pairs)
            criu_images.close_connections(tmp_path / "images", {outside.row.inode})
            job.last()
            job.kill()
            assert tcp.hindered(tmp_path / "images", 0) == ""
            restore(criu, job, tmp_path / "images")
            assert job.number() == 1


def test_dump_names_a_device_it_cannot_save(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    needs_device("/dev/loop-control")
    job = start(setup="device = open('/dev/loop-control', 'rb')\n")
    job.number()
    with pytest.raises(CriuUnsupported, match="/dev/loop-control open as fd 3"):
        criu.dump(job.pid, tmp_path)
    job.drain()
    assert job.number() > 0


def test_dump_names_an_io_uring(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    setup = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(425, 4, ctypes.create_string_buffer(256)) < 0:  # io_uring_setup
    print("none", flush=True)
    sys.exit()
"""
    job = start(setup=setup)
    if job.line() == "none":
        pytest.skip("this kernel has io_uring switched off")
    with pytest.raises(CriuUnsupported, match="an io_uring as fd 3"):
        criu.dump(job.pid, tmp_path)


def test_dump_names_a_device_mapping(criu: Criu, start: StartJob, tmp_path: Path) -> None:
    needs_device("/dev/loop0")
    setup = """
import mmap, os
device = os.open("/dev/loop0", os.O_RDONLY)
held = mmap.mmap(device, 4096, mmap.MAP_SHARED, mmap.PROT_READ)
os.close(device)
"""
    job = start(setup=setup)
    job.number()
    with pytest.raises(CriuUnsupported, match="a mapping of /dev/loop0"):
        criu.dump(job.pid, tmp_path)


def test_dump_of_a_gone_process_fails_by_name(criu: Criu, tmp_path: Path) -> None:
    with pytest.raises(CriuFailed, match="CRIU could not dump"):
        criu.dump(2**22 - 7, tmp_path)


def test_external_pipes_lists_outside_pipes_with_their_direction(start: StartJob) -> None:
    job = start(
        "import os, time\ninner = os.pipe()\nprint(0, flush=True)\ntime.sleep(60)\n",
    )
    job.number()
    (pipe,) = external_pipes(job.pid)
    assert (pipe.inode, pipe.direction) == (job.inode, "write")
    assert pipe.holders == ((job.pid, 1), (job.pid, 2))
    assert pipe.key == f"pipe:[{job.inode}]"


def test_stdin_from_an_outside_pipe_is_connected_again(criu: Criu, tmp_path: Path) -> None:
    code = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdin and process.stdout
        process.stdin.write(b"one\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"ONE\n"
        pipes = external_pipes(process.pid)
        assert {pipe.direction for pipe in pipes} == {"read", "write"}
        criu.dump(process.pid, tmp_path)
        process.kill()
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    ends = {"read": in_read, "write": out_write}
    pid = criu.restore(tmp_path, inherit_fds={p.key: ends[p.direction] for p in pipes})
    os.close(in_read)
    os.close(out_write)
    os.write(in_write, b"two\n")
    assert os.read(out_read, 100) == b"TWO\n"
    os.close(in_write)
    assert os.waitpid(pid, 0) == (pid, 0)
    os.close(out_read)


def test_dump_stats_count_the_pages_that_were_written(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start(COUNTER, "20")
    job.number()
    criu.dump(job.pid, tmp_path)
    stats = criu_images.dump_stats(tmp_path)
    assert stats.pages_written * 4096 >= 20 << 20
    assert 0 < stats.memory_write_s <= stats.frozen_s


def test_preload_and_settings_of_the_caller_do_not_reach_criu(
    criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "absent.so"))
    monkeypatch.setenv("CRIU_FAULT", "1")
    shown = tmp_path / "environment"
    program = tmp_path / "criu"
    program.write_text(f"#!/bin/sh\nenv > {shown}\necho Version: 9.9\n")
    program.chmod(0o755)
    monkeypatch.setenv("FLOWGPU_CRIU", str(program))
    assert Criu.locate().version == (9, 9)
    assert not re.search("LD_PRELOAD|CRIU_FAULT", shown.read_text())


def test_locate_refuses_an_old_criu_by_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "criu"
    program.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    program.chmod(0o755)
    monkeypatch.setenv("FLOWGPU_CRIU", str(program))
    with pytest.raises(CriuMissing, match=r"version 3\.17\.1, version 4\.2 or newer is needed"):
        Criu.locate()
    monkeypatch.setenv("FLOWGPU_CRIU", str(tmp_path / "nowhere"))
    with pytest.raises(CriuMissing, match="nowhere not found"):
        Criu.locate()


def test_check_passes_here(criu: Criu) -> None:
    criu.check()
    assert criu.has_feature("pagemap_scan") in (True, False)


def test_fetched_criu_runs_from_another_folder(criu: Criu, tmp_path: Path) -> None:
    if not (criu.program.parent / "root").is_dir():
        pytest.skip("the CRIU in use is an installed one")
    shutil.copytree(criu.program.parent, tmp_path / "moved")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "moved" / "criu")
    done = subprocess.run([link, "--version"], capture_output=True, text=True, check=True)
    assert ".".join(map(str, criu.version)) in done.stdout


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
