"""What CRIU works on is stopped, and is as it was when CRIU is killed in the middle of that."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from difflib import unified_diff
from pathlib import Path

import criu_entries
import pytest
from criu_job import DYING, Job, restore

from flowgpu.errors import CriuFailed
from flowgpu.host import criu_images, ptrace
from flowgpu.host.criu import Criu
from flowgpu.host.criu_images import GUARD
from flowgpu.host.proctree import is_stopped, resume_tree, task_states, tree_pids
from flowgpu.host.settings import Survey
from flowgpu.host.sockets import PEEK_BEGINS
from flowgpu.host.standstill import Process, Standstill, take_up
from tests.emu.intercept_lib import compile_program
from tests.patience import SECONDS
from tests.unit.coordinator_job import ROOT, wait_for

# Two processes of several threads each. The first thread of each is deep in its stack or not, at
# any moment, and says so if what it computes is wrong. The first process counts, and has memory
# that nobody may read, and begins when all threads of both have begun; the second has a handler of
# SIGTRAP, which it never gets.
WORKERS = """
import mmap, os, signal, threading, time
def tick(number):
    while os.getppid() == parent:  # it goes with what has started it
        time.sleep(0.001)
        passes[number] += 1
    os._exit(1)
def forever(number):
    while True:
        threading.Event().wait(0.001)
        passes[number] += 1
guard, (read, write) = mmap.mmap(-1, 1 << 16, prot=0), os.pipe()
os.umask(0o27)
second = os.fork() == 0
parent, passes = os.getppid(), [0, 0, 0]
if second:
    signal.signal(signal.SIGTRAP, lambda *_: print("SIGTRAP", flush=True))
for number, target in enumerate((tick, forever, tick)):
    threading.Thread(target=target, args=(number,), daemon=True).start()
deep = []
for _ in range(60):
    deep = [deep, 1]
wanted, count = repr(deep), 0
while min(passes) < 3:
    time.sleep(0.001)
if second:
    os.close(read)
    os.close(write)
else:
    os.close(write)
    os.read(read, 1)  # it ends when the second process is here
    os.close(read)
while True:
    if repr(deep) != wanted:
        print("wrong", flush=True)
    count += 1
    if count % 20 == 0:
        time.sleep(0.0005)
        if not second:
            print(count // 20, flush=True)
"""
ANY = 0  # request of ptrace(2)


@contextmanager
def _started(program: str, *args: str) -> Iterator[Job]:
    """A job that has said its first number."""
    job = Job(program, *args)
    try:
        job.number()
        yield job
    finally:
        job.end_tree()
        job.close()


@pytest.fixture
def job() -> Iterator[Job]:
    with _started(WORKERS) as job:
        wait_for(lambda: len(_all_threads(job)) == 8, "all threads")
        yield job


def _all_threads(job: Job) -> list[int]:
    return [thread for pid in tree_pids(job.pid) for thread in task_states(pid)]


def _dying(folder: Path, at: int, request: int) -> Criu:
    """The CRIU in use, which is killed at that call of ptrace(2), of those for `request`."""
    criu, program = Criu.locate(), folder / "dying-criu"
    words = f"DIES_AT={at}" + (f" DIES_OF={request}" if request else "")
    program.write_text(f'#!/bin/sh\nLD_PRELOAD="{DYING}" {words} exec "{criu.program}" "$@"\n')
    program.chmod(0o755)
    return Criu(program, criu.version)


def _masks(pid: int) -> list[str]:
    lines = re.compile("^(?:Umask|Sig...|ShdPnd):.*$", re.MULTILINE)
    return [
        f"thread {thread} {line}"
        for thread in task_states(pid)
        for line in lines.findall(Path(f"/proc/{pid}/task/{thread}/status").read_text())
    ]


def _code_at(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return int(re.search("^([0-9a-f]+)-[0-9a-f]+ r-x", maps, re.MULTILINE)[1], 16)  # type: ignore[index]


def _facts(job: Job) -> list[str]:
    """What a dump may change of the processes."""
    facts = []
    for pid in tree_pids(job.pid):
        folder = Path(f"/proc/{pid}")
        with (folder / "mem").open("rb") as memory:
            memory.seek(_code_at(pid))
            code = memory.read(4096).hex()
        facts += [f"{pid} {line}" for line in (folder / "maps").read_text().splitlines()]
        facts += [f"{pid} code {code}", f"{pid} fds {sorted(os.listdir(folder / 'fd'))}"]
        facts += _masks(pid)
    return facts


def _changes(before: list[str], job: Job) -> list[str]:
    """Lines that are gone, and those that are new."""
    return list(unified_diff(before, _facts(job), n=0, lineterm=""))


def _goes_on(job: Job) -> None:
    """All threads go on, and the first process counts from where it was."""
    numbers = [job.last(), *(job.number() for _ in range(3))]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    before = {thread: _switches(thread) for thread in _all_threads(job)}
    assert len(before) == 8
    wait_for(lambda: all(_switches(t) > count for t, count in before.items()), "all threads")


def _switches(thread: int) -> int:
    """How often it has slept."""
    text = Path(f"/proc/{thread}/status").read_text()
    return int(text.rpartition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_all_threads_are_stopped_before_criu_begins(job: Job) -> None:
    """On one processor, where a thread has to wait for us before it can stop again."""
    processors = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(processors)})
        for thread in _all_threads(job):
            os.sched_setaffinity(thread, {min(processors)})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        found = set()
        for _ in range(20):
            still = Standstill(job.pid, SECONDS)
            found |= {state for pid in tree_pids(job.pid) for state in task_states(pid).values()}
            still.finish()
            still.end()
    finally:
        os.sched_setaffinity(0, processors)
    assert found == {"T"}
    _goes_on(job)


@pytest.mark.parametrize(
    ("request_of", "step", "taken_up"), [(ANY, 23, False), (ptrace.CONT, 2, False), (ANY, 31, True)]
)
def test_a_criu_that_is_killed_leaves_all_as_it_was(
    job: Job,
    request_of: int,
    step: int,
    taken_up: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`taken_up`: with its coordinator, and it is another one that puts all back."""
    before = _facts(job)
    notes = tmp_path / "notes"
    if taken_up:
        monkeypatch.setattr(Standstill, "put_back", lambda _: [])
        monkeypatch.setattr(Standstill, "end", lambda _: None)
    killed = 0
    for at in range(step, 5000, step):
        dying = _dying(tmp_path, at, request_of)
        run = dying.start_dump(job.pid, tmp_path / f"{at}", notes=notes)
        assert notes.exists()
        try:
            run.wait()
            break  # it makes no more calls
        except CriuFailed as error:
            assert f"status -{signal.SIGKILL}" in str(error)
        if taken_up:
            with notes.open("ab") as file:
                file.write(notes.read_bytes()[:1000])  # of a process that was not touched yet
            assert take_up(notes, job.pid) == []
            resume_tree(job.pid)
        assert not notes.exists()
        killed += 1
        _goes_on(job)
        assert _changes(before, job) == []
    assert not notes.exists()
    resume_tree(job.pid)
    _goes_on(job)
    assert _changes(before, job) == []
    assert killed >= 10


# Stops a tree and puts it back, asks it for what CRIU forgets or for descriptors, and kills itself
# when it has let a thread run for the N-th time, or is about to.
DYING_TRACER = """
import os, signal, sys
from pathlib import Path
from flowgpu.host import inject, settings, standstill
from flowgpu.host.proctree import tree_pids
root, turns, let_run = int(sys.argv[1]), int(sys.argv[3]), inject.let_run
def dying(*arguments):
    for part in (lambda: None, lambda: let_run(*arguments)):
        global turns
        part()
        turns -= 1
        if turns == 0:
            os.kill(os.getpid(), signal.SIGKILL)
inject.let_run = dying
track = sys.argv[4] == "track"
still = standstill.Standstill(root, 10.0, Path(sys.argv[2]), all_threads=not track)
if track:
    assert sorted(still.userfaultfds()) == sorted(tree_pids(root))
    still.finish()
elif sys.argv[4] == "ask":
    survey = settings.Survey()
    survey.look(tree_pids(root))
    still.finish(survey)
    assert survey.not_kept == []
else:
    still.put_back()
still.end()
"""


# To put back takes three calls of two stops each, of both processes; the questions are more.
@pytest.mark.parametrize(
    ("work", "step", "least"), [("put back", 3, 8), ("ask", 7, 10), ("track", 1, 16)]
)
def test_who_is_killed_at_work_in_a_process_leaves_all_as_it_was(
    work: str, step: int, least: int, job: Job, tmp_path: Path
) -> None:
    before, notes = _facts(job), tmp_path / "notes"
    words, killed = [sys.executable, "-c", DYING_TRACER, str(job.pid), str(notes)], 0
    while subprocess.call([*words, str(step * killed + 1), work], cwd=ROOT) == -signal.SIGKILL:
        killed += 1
        assert take_up(notes, job.pid) == []
        assert not notes.exists()
        resume_tree(job.pid)
        _goes_on(job)
        assert _changes(before, job) == []
    assert not notes.exists()
    _goes_on(job)
    assert killed >= least


def test_a_process_that_can_make_no_call_is_put_back_all_the_same(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no system call in its vDSO")

    monkeypatch.setattr(Process, "_call", refuse)
    before = _facts(job)
    still = Standstill(job.pid, 10.0)
    with Path(f"/proc/{job.pid}/mem").open("r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), b"CRIU", _code_at(job.pid))
    assert still.put_back() == []
    still.end()
    _goes_on(job)
    assert _changes(before, job) == []


def test_an_image_has_nothing_of_the_standstill(job: Job, tmp_path: Path) -> None:
    first, second = tree_pids(job.pid)
    os.kill(second, signal.SIGSTOP)
    wait_for(lambda: set(task_states(second).values()) == {"T"}, "the second one")
    before = {pid: _masks(pid) for pid in (first, second)}
    Criu.locate().dump(job.pid, tmp_path / "images")
    assert criu_images.stopped_pids(tmp_path / "images") == [second]
    (one,), (two,) = (criu_entries.load(tmp_path / "images" / f"core-{pid}.img") for pid in before)
    actions = [entry["tc"]["sigactions"][signal.SIGTRAP - 1]["sigaction"] for entry in (one, two)]
    assert actions[0] == 0
    assert actions[1] not in (0, GUARD.handler)
    last = job.last()
    job.end_tree()
    restore(Criu.locate(), job, tmp_path / "images", leave_stopped=True)
    resume_tree(job.pid)
    assert job.number() == last + 1
    _goes_on(job)
    assert {pid: _masks(pid) for pid in (first, second)} == before


def test_a_dump_leaves_nothing_of_the_standstill(job: Job, tmp_path: Path) -> None:
    before = _facts(job)
    Criu.locate().dump(job.pid, tmp_path, leave_stopped=False, leave_running=True)
    _goes_on(job)
    assert _changes(before, job) == []


def _said_over_a_dump(job: Job, images: Path) -> list[int]:
    """Numbers that a job has said until some time after a dump that leaves it running."""
    Criu.locate().dump(job.pid, images, leave_stopped=False, leave_running=True)
    return [*job.drain(), *(job.number() for _ in range(5))]


def test_no_parent_sees_a_child_stopped(tmp_path: Path) -> None:
    program = """
import os, signal, time
def look(*_):
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if not pid:
            return
        print("-1" if os.WIFSTOPPED(status) else "-2", flush=True)
signal.signal(signal.SIGCHLD, look)
if os.fork() == 0:
    while True:
        time.sleep(0.001)
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.005)
"""
    with _started(program) as job:
        for turn in range(8):
            assert min(_said_over_a_dump(job, tmp_path / f"{turn}")) > 0


# What a signal says of a child, and then the end of that child.
TOLD_OF_STOPS = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
child = os.fork()
if child == 0:
    while True:
        time.sleep(0.001)
count = 0
while True:
    count += 1
    told = signal.sigtimedwait([signal.SIGCHLD], 0.005)
    stop = told and told.si_code == os.CLD_STOPPED
    end = told and told.si_code == os.CLD_KILLED and os.waitpid(child, os.WNOHANG)[0] == child
    print(-1 if stop else -2 if end else count, flush=True)
"""


def test_no_parent_is_told_of_our_stop_of_its_child(tmp_path: Path) -> None:
    with _started(TOLD_OF_STOPS) as job:
        for turn in range(4):
            assert min(_said_over_a_dump(job, tmp_path / f"{turn}")) > 0
        os.kill(tree_pids(job.pid)[1], signal.SIGKILL)
        wait_for(lambda: job.number() == -2, "the end of the child")


def test_a_parent_is_told_of_another_stop_of_its_child(tmp_path: Path) -> None:
    with _started(TOLD_OF_STOPS) as job:
        child = tree_pids(job.pid)[1]
        os.kill(job.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(job.pid), "the stop of the parent")
        os.kill(child, signal.SIGSTOP)
        wait_for(lambda: is_stopped(child), "the stop of the child")
        Criu.locate().dump(job.pid, tmp_path, leave_stopped=False, leave_running=True)
        os.kill(job.pid, signal.SIGCONT)
        wait_for(lambda: job.number() == -1, "the signal of it")


def test_calls_with_a_time_limit_do_not_end_early(tmp_path: Path) -> None:
    """Also those that a stop has interrupted before."""
    program = """
import ctypes, threading, time
poll = ctypes.CDLL(None, use_errno=True).poll
def wait():
    print(-1 if poll(None, 0, 1_000_000) < 0 else -2, flush=True)
threading.Thread(target=wait, daemon=True).start()
count = 0
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.005)
"""
    with _started(program) as job:
        asleep = lambda: list(task_states(job.pid).values()).count("S") == 2  # noqa: E731
        wait_for(asleep, "the thread in its call")
        for turn in range(3):
            images = tmp_path / f"{turn}"
            Criu.locate().dump(job.pid, images, leave_stopped=True)
            resume_tree(job.pid)
            assert min([*job.drain(), *(job.number() for _ in range(5))]) > 0
            os.kill(job.pid, signal.SIGSTOP)
            wait_for(lambda: is_stopped(job.pid), "the stop")
            os.kill(job.pid, signal.SIGCONT)
        job.end_tree()
        restore(Criu.locate(), job, images, leave_stopped=True)
        resume_tree(job.pid)
        assert min(job.number() for _ in range(5)) > 0


@pytest.mark.parametrize("seconds", [0.6, 1000.0])
def test_a_parent_in_vfork_is_waited_for(seconds: float, tmp_path: Path) -> None:
    program = """
import ctypes, os, signal, sys, time
CLONE, CLONE_VFORK = 56, 0x4000
print(1, flush=True)
if ctypes.CDLL(None).syscall(CLONE, CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
    time.sleep(float(sys.argv[1]))
    os._exit(0)
count = 1
while True:
    count += 1
    print(count, flush=True)
    time.sleep(0.005)
"""
    with _started(program, str(seconds)) as job:
        wait_for(lambda: len(tree_pids(job.pid)) == 2, "the child")
        if seconds < 10:
            Criu.locate().dump(job.pid, tmp_path)
            # A thread that is traced no more runs for a moment before it stops again.
            wait_for(lambda: set(task_states(job.pid).values()) == {"T"}, "the stop")
            resume_tree(job.pid)
        else:
            with pytest.raises(CriuFailed, match=f"process {job.pid} does not stop"):
                Criu.locate().dump(job.pid, tmp_path, timeout=1)
            os.kill(tree_pids(job.pid)[1], signal.SIGKILL)
        assert [job.number() for _ in range(3)] == [2, 3, 4]


def test_the_end_of_a_child_that_is_killed_meanwhile_is_its_parents() -> None:
    with _started(WORKERS) as job, ExitStack() as stack:
        still = Standstill(job.pid, 5)
        # Nobody's any more then, and stopped: it does not see that it is to end.
        stack.callback(os.kill, tree_pids(job.pid)[1], signal.SIGKILL)
        os.kill(job.pid, signal.SIGKILL)
        assert still.put_back() == []
        still.finish()
        still.end()
        assert os.waitpid(job.pid, 0) == (job.pid, signal.SIGKILL)


def test_a_32_bit_program_is_noted_and_goes_on(tmp_path: Path) -> None:
    """The kernel has another register set for it, and it makes no call for us."""
    flags = ("-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie", "-fno-stack-protector")
    narrow = compile_program("narrow.c", tmp_path / "narrow", *flags)
    with subprocess.Popen([narrow, tmp_path / "stop"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = Path(f"/proc/{process.pid}/maps").read_bytes()
        standstill = Standstill(process.pid, 10, tmp_path / "notes")
        (noted,) = standstill._processes
        assert (noted.was.maps, noted.action) == (before, None)
        assert standstill.put_back() == []
        standstill.finish()
        standstill.end()
        (tmp_path / "stop").touch()
        assert process.stdout.read().endswith(b"narrow end\n")
        assert process.wait() == 0


def test_a_survey_that_fails_is_told_of(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    before, survey = _facts(job), Survey()
    monkeypatch.setattr(Survey, "look", fail)
    Criu.locate().start_dump(
        job.pid, tmp_path, leave_stopped=False, leave_running=True, survey=survey
    ).wait()
    assert survey.not_kept == ["what CRIU forgets of the processes (no such luck)"]
    _goes_on(job)
    assert _changes(before, job) == []


def test_where_criu_peeks_is_not_where_the_program_does() -> None:
    """CRIU reads what waits in a socket by SO_PEEK_OFF, while it is looked at."""
    survey = Survey()
    with ExitStack() as stack:
        usual, peeking = map(stack.enter_context, socket.socketpair(type=socket.SOCK_SEQPACKET))
        peeking.setsockopt(*PEEK_BEGINS, 3)
        for it in (usual, peeking):
            it.setsockopt(*PEEK_BEGINS, it.getsockopt(*PEEK_BEGINS) + 17)
        survey.look([os.getpid()])
        for it in (usual, peeking):
            it.setsockopt(*PEEK_BEGINS, it.getsockopt(*PEEK_BEGINS) - 17)
        survey.settle()
        found = {
            tuple(one.values): one.text
            for one in survey.settings
            if one.kind == "socket_option" and one.values[0] in (usual.fileno(), peeking.fileno())
        }
        assert found == {(peeking.fileno(), *PEEK_BEGINS): "03000000"}
