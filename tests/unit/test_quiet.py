"""Zero pages are taken from real processes that check themselves. It needs root, as CRIU does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowgpu import criu_images, quiet
from flowgpu.criu import Criu
from flowgpu.proctree import become_subreaper, kill_tree, task_states, tree_pids

MIB = 1 << 20
Start = Callable[..., "Job"]


class Job:
    """A process in a session of its own whose lines the test reads."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        self.pid = self.process.pid
        assert self.line().startswith("ready")

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def say(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        for pid in reversed(tree_pids(self.pid)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs and kills them with the test."""
    jobs: list[Job] = []

    def begin(*command: str) -> Job:
        jobs.append(Job(*command))
        return jobs[-1]

    yield begin
    for job in reversed(jobs):  # a debugger before what it holds
        job.close()


def checker(start: Start, seconds: float, mebibytes: int = 32) -> Job:
    return start(str(quiet.program().with_name("flowgpu-quiet-job")), str(seconds), str(mebibytes))


def python(start: Start, source: str) -> Job:
    return start(sys.executable, "-c", source)


def tracers(pid: int) -> set[str]:
    found = set()
    for tid in task_states(pid):
        status = Path(f"/proc/{pid}/task/{tid}/status").read_text()
        found.add(status.split("TracerPid:\t")[1].split("\n")[0])
    return found


ZEROS = """
import mmap, sys
private = dict(flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
a = mmap.mmap(-1, 64 << 20, **private)
a[:] = bytes(len(a))
a[5 << 20] = 7
print("ready", flush=True)
sys.stdin.readline()
print(sum(a[:]), flush=True)
"""


def test_zero_pages_go_and_read_as_zeros(start: Start) -> None:
    job = python(start, ZEROS)
    stats = quiet.drop_zero_pages([job.pid])
    assert stats.skipped == () and stats.processes == 1
    assert 63 * MIB < stats.dropped <= stats.zero < stats.scanned
    assert quiet.drop_zero_pages([job.pid]).dropped < MIB
    assert tracers(job.pid) == {"0"}
    job.say()
    assert job.line() == "7"


def test_a_process_that_checks_itself_loses_no_step_and_no_byte(start: Start) -> None:
    job = checker(start, 4.0)
    dropped = 0
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        # Every page that is zero just now, of counters that change all the time.
        stats = quiet.drop_zero_pages(tree_pids(job.pid), minimum_run=4096)
        assert stats.skipped == ()
        dropped += stats.dropped
    assert dropped > 32 * MIB
    assert job.line() == "good: memory 1, wrong steps 0, child 0"


def test_a_helper_killed_at_any_moment_leaves_the_job_as_it_was(start: Start) -> None:
    job = checker(start, 5.0)
    choose = random.Random(1)
    end = time.monotonic() + 4.0
    ended = []
    while time.monotonic() < end:
        command = [str(quiet.program()), "2", "4096", "1000", *map(str, tree_pids(job.pid))]
        helper = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(choose.uniform(0.001, 0.08))
        helper.kill()
        ended.append(helper.wait())
        assert tracers(job.pid) == {"0"}
    assert ended.count(-signal.SIGKILL) >= 3
    assert job.line() == "good: memory 1, wrong steps 0, child 0"


def test_a_job_killed_in_the_middle_is_no_failure(start: Start) -> None:
    choose = random.Random(2)
    for _ in range(8):
        job = checker(start, 20.0)
        pids = tree_pids(job.pid)
        command = [str(quiet.program()), "2", "4096", "1000", *map(str, pids)]
        helper = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(choose.uniform(0.001, 0.05))
        os.kill(job.pid, signal.SIGKILL)
        assert helper.wait(timeout=10) == 0
        for orphan in pids[1:]:
            os.kill(orphan, signal.SIGKILL)


def test_a_stopped_job_stays_stopped(start: Start) -> None:
    job = python(start, ZEROS)
    os.kill(job.pid, signal.SIGSTOP)
    while set(task_states(job.pid).values()) != {"T"}:
        time.sleep(0.001)
    assert quiet.drop_zero_pages([job.pid]).dropped > 60 * MIB
    time.sleep(0.05)
    assert set(task_states(job.pid).values()) == {"T"}
    os.kill(job.pid, signal.SIGCONT)
    job.say()
    assert job.line() == "7"


def test_a_stop_that_comes_meanwhile_is_kept(start: Start) -> None:
    job = python(
        start, ZEROS.replace("a[5 << 20] = 7", "for i in range(0, len(a), 8192): a[i] = 1")
    )
    command = [str(quiet.program()), "1", "4096", "1000", str(job.pid)]
    helper = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    time.sleep(0.05)
    os.kill(job.pid, signal.SIGSTOP)
    assert helper.wait() == 0
    time.sleep(0.05)
    assert set(task_states(job.pid).values()) == {"T"}
    os.kill(job.pid, signal.SIGCONT)
    job.say()
    assert job.line() == str((64 << 20) // 8192)


def test_signals_are_neither_lost_nor_refused(start: Start) -> None:
    # The wakeup fd gets a byte for each signal, Python's own handlers may run once for several.
    source = ZEROS.replace(
        "import mmap, sys",
        "import mmap, os, signal, sys\nr, w = os.pipe()\nos.set_blocking(w, False)\n"
        "signal.set_wakeup_fd(w)\nsignal.signal(signal.SIGRTMIN, lambda *_: None)",
    ).replace("print(sum(a[:])", "print(len(os.read(r, 1000))")
    job = python(start, source)
    for _ in range(50):
        helper = subprocess.Popen(
            [str(quiet.program()), "1", "4096", "1000", str(job.pid)], stdout=subprocess.DEVNULL
        )
        os.kill(job.pid, signal.SIGRTMIN)
        time.sleep(0.004)
        assert helper.wait() == 0
    time.sleep(0.1)
    job.say()
    assert job.line() == "50"


def test_a_process_with_a_seccomp_filter_is_left_alone(start: Start) -> None:
    filtering = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.prctl(38, 1, 0, 0, 0)\n"
        "class F(ctypes.Structure):\n"
        "    _fields_ = [('n', ctypes.c_ushort), ('p', ctypes.c_void_p)]\n"
        "allow = ctypes.create_string_buffer(b'\\x06\\0\\0\\0\\0\\0\\xff\\x7f', 8)\n"
        "assert libc.prctl(22, 2, ctypes.byref(F(1, ctypes.addressof(allow))), 0, 0) == 0\n"
    )
    job = python(start, filtering + ZEROS)
    stats = quiet.drop_zero_pages([job.pid])
    assert stats.dropped == 0
    assert [pid for pid, _ in stats.skipped] == [job.pid]


def test_a_process_that_is_gone_is_skipped(
    start: Start,
) -> None:
    job = python(start, ZEROS)
    gone = subprocess.Popen(["true"])
    gone.wait()
    stats = quiet.drop_zero_pages([gone.pid, job.pid])
    assert [pid for pid, _ in stats.skipped] == [gone.pid] and stats.dropped > 60 * MIB


def test_a_process_with_a_debugger_is_refused(start: Start) -> None:
    job, other = python(start, ZEROS), python(start, ZEROS)
    # PTRACE_SEIZE
    python(
        start,
        "import ctypes, time\n"
        f"assert ctypes.CDLL(None).ptrace(0x4206, {other.pid}, None, None) == 0\n"
        "print('ready', flush=True)\ntime.sleep(1000)\n",
    )
    with pytest.raises(quiet.QuietFailed, match="cannot be held"):
        quiet.drop_zero_pages([job.pid, other.pid])
    assert tracers(job.pid) == {"0"}


def test_a_dump_is_smaller_and_restores_the_same_bytes(
    criu: Criu, start: Start, tmp_path: Path
) -> None:
    # A child has zeros where the parent has not: CRIU restores memory in common before that of one.
    source = """
import hashlib, mmap, os, random, signal, sys, time
pages = random.Random(3)
a = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(a), 1 << 16):
    a[at:at + (1 << 16)] = pages.randbytes(1 << 16) if pages.random() < 0.3 else bytes(1 << 16)
os.set_blocking(0, True)
folder = sys.argv[1]
child = os.fork()
if child == 0:
    a[:24 << 20] = bytes(24 << 20)
def report(*_):
    name = "child" if child == 0 else "parent"
    with open(f"{folder}/{name}.{time.monotonic_ns()}", "w") as file:
        file.write(hashlib.sha256(a).hexdigest())
signal.signal(signal.SIGUSR1, report)
null = os.open("/dev/null", os.O_RDWR)
with open(f"{folder}/{'child' if child == 0 else 'parent'}.0", "w") as file:
    file.write(hashlib.sha256(a).hexdigest())
print("ready", flush=True)
for fd in (0, 1, 2):
    os.dup2(null, fd)
while True:
    time.sleep(0.01)
"""
    folder = tmp_path / "sums"
    folder.mkdir()
    job = start(sys.executable, "-c", source, str(folder))

    def sums() -> dict[str, set[str]]:
        found: dict[str, set[str]] = {"child": set(), "parent": set()}
        for path in folder.iterdir():
            found[path.name.partition(".")[0]].add(path.read_text())
        return found

    while len(list(folder.glob("*.0"))) < 2 or any(not p.stat().st_size for p in folder.iterdir()):
        time.sleep(0.01)
    time.sleep(0.2)
    pids = tree_pids(job.pid)
    criu.dump(job.pid, tmp_path / "before", leave_stopped=False, leave_running=True)
    stats = quiet.drop_zero_pages(pids)
    assert stats.skipped == () and stats.dropped > 50 * MIB
    criu.dump(job.pid, tmp_path / "after")
    become_subreaper()
    kill_tree(job.pid)
    written = [
        criu_images.dump_stats(tmp_path / name).pages_written for name in ("before", "after")
    ]
    assert written[0] - written[1] > 30 * MIB // 4096

    # A restore on another session's terms: the root becomes a child of this process.
    root = criu.restore(tmp_path / "after", work_dir=tmp_path)
    try:
        before = len(list(folder.iterdir()))
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        end = time.monotonic() + 10
        while len(list(folder.iterdir())) < before + 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        assert len(list(folder.iterdir())) == before + 2
        assert all(len(found) == 1 for found in sums().values())
    finally:
        kill_tree(root)
