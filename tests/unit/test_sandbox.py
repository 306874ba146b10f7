"""Threads are asked for a sandbox while they run, and do not notice it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.host import inject, probes, ptrace, sandbox
from flowgpu.host.proctree import is_dead, status_numbers, task_states, thread_ids
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

pytestmark = [
    pytest.mark.skipif(not sandbox.is_supported(), reason="there is no Landlock here"),
    pytest.mark.skipif(
        "CAP_SYS_PTRACE" not in probes.capabilities(), reason="others may not be traced"
    ),
]

# Threads wait in calls that an interruption ends with EINTR, sleep, and reckon; a signal comes
# every millisecond. What goes wrong is said. argv: a user to become, or "sandbox".
THREADS = """
import ctypes, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
if sys.argv[1] == "sandbox":
    rules = libc.syscall(444, (ctypes.c_uint64 * 3)(0, 1, 0), 24, 0)
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.syscall(446, rules, 0) == 0
elif sys.argv[1]:
    os.setresgid(*[int(sys.argv[1])] * 3)
    os.setresuid(*[int(sys.argv[1])] * 3)
def ended(name, result):
    print(name, result, ctypes.get_errno(), flush=True)
def epoll():
    events = ctypes.create_string_buffer(64)
    ended("epoll_wait", libc.epoll_wait(libc.epoll_create1(0), events, 4, -1))
def receive():
    ends = socket.socketpair()
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 1000, 0))
    ended("recv", libc.recv(ends[0].fileno(), ctypes.create_string_buffer(4), 4, 0))
def waited_signal():
    ended("sigtimedwait", libc.sigtimedwait(ctypes.byref(ctypes.c_uint64(1 << 50)), None, None))
def sleep():
    while True:
        begin = time.monotonic()
        time.sleep(0.5)
        if time.monotonic() - begin < 0.5:
            print("slept too little", flush=True)
def reckon():
    while sum(range(1000)) == 499500:
        pass
    print("reckons wrong", flush=True)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
for work in epoll, receive, waited_signal, sleep, reckon:
    threading.Thread(target=work, daemon=True).start()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread may wait for a processor before it can stop."""
    monkeypatch.setattr(sandbox, "STOP_SECONDS", SECONDS)


@pytest.fixture
def decoys() -> Iterator[sandbox.Decoys]:
    found = sandbox.Decoys()
    yield found
    found.end()


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process of six threads, all of which are at work."""
    words = [sys.executable, "-c", THREADS, request.param]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            assert process.stdout.readline() == "ready\n"
            wait_for(lambda: len(thread_ids(process.pid)) == 6, "all threads")
            yield process
        finally:
            process.kill()


@contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended however its test ends, also one that is traced."""
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **ends) as process:
        try:
            yield process
        finally:
            process.kill()


def goes_on(cat: subprocess.Popen[bytes]) -> None:
    cat.stdin.write(b"goes on\n")
    cat.stdin.flush()
    assert cat.stdout.readline() == b"goes on\n"


@pytest.mark.parametrize("threads", ["", "12345", "sandbox"], indirect=True)
def test_threads_that_are_asked_do_not_notice_it(
    threads: subprocess.Popen[str], decoys: sandbox.Decoys, request: pytest.FixtureRequest
) -> None:
    sandboxed = "sandbox" in request.node.name.partition("[")[2]
    for _ in range(50):
        for thread in thread_ids(threads.pid):
            assert sandbox.is_sandboxed(threads.pid, thread, decoys) == sandboxed
    # In the end one call is made to return: what was said before it would have come first.
    assert threads.poll() is None
    os.kill(threads.pid, signal.SIGTERM)
    assert threads.wait(SECONDS) == -signal.SIGTERM
    assert threads.stdout
    assert threads.stdout.read() == ""


@pytest.mark.parametrize("threads", [""], indirect=True)
def test_a_process_that_is_stopped_stays_so(
    threads: subprocess.Popen[str], decoys: sandbox.Decoys
) -> None:
    os.kill(threads.pid, signal.SIGSTOP)
    wait_for(lambda: set(task_states(threads.pid).values()) == {"T"}, "stopped")
    for thread in thread_ids(threads.pid):
        assert not sandbox.is_sandboxed(threads.pid, thread, decoys)
    wait_for(lambda: set(task_states(threads.pid).values()) == {"T"}, "stopped again")


def test_a_search_names_a_sandboxed_thread_and_none_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # The search is a process of its own, and on a busy machine a thread stops late.
    patient = f"import sys; from flowgpu.host import sandbox as s; s.STOP_SECONDS = {SECONDS}; "
    patient += f"s.MOST_SECONDS = {SECONDS}; s.main([int(word) for word in sys.argv[1:]])"
    monkeypatch.setattr(sandbox, "COMMAND", (*sandbox.COMMAND[:-2], "-c", patient))
    wait = "import sys; print('waits', flush=True); sys.stdin.read()"
    enter = THREADS[: THREADS.index("elif")] + wait
    words = [[sys.executable, "-c", text, "sandbox"] for text in (wait, enter)]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    free, caught = (subprocess.Popen(word, **ends) for word in words)
    with free, caught:
        assert [one.stdout.readline() for one in (free, caught)] == [b"waits\n"] * 2
        assert sandbox.Search([free.pid]).result() == (None, [])
        assert sandbox.Search([free.pid, caught.pid]).result() == ((caught.pid, caught.pid), [])


def test_a_process_may_execute_a_program_just_before_it_is_asked(
    decoys: sandbox.Decoys, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = ptrace.ptrace
    words = ["sh", "-c", "read word; exec cat"]
    with running(*words) as process:

        def trace_another_program(request: int, *arguments: Any) -> int:
            if request == ptrace.SEIZE:
                process.stdin.write(b"go\n")
                process.stdin.flush()
                name = Path(f"/proc/{process.pid}/comm")
                wait_for(lambda: name.read_text() == "cat\n", "the program that is executed")
            return trace(request, *arguments)

        monkeypatch.setattr(ptrace, "ptrace", trace_another_program)
        assert not sandbox.is_sandboxed(process.pid, process.pid, decoys)
        goes_on(process)


def test_a_call_that_runs_into_a_fault_ends() -> None:
    with running("cat") as process:
        os.kill(process.pid, signal.SIGSTOP)
        inject.wait_stopped(process.pid, time.monotonic() + SECONDS)
        with (
            inject.seized(process.pid, [process.pid]),
            inject.calling(process.pid, lambda: 0, filtered=False) as caller,
            pytest.raises(OSError, match="ran into SIGSEGV"),
        ):
            caller.call(sandbox.GET_ROBUST_LIST, 0, 0, 0)
        os.kill(process.pid, signal.SIGCONT)
        goes_on(process)


def test_a_search_that_does_not_end_is_left_and_names_who_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = "import sys, time; from flowgpu.host import ptrace; ptrace.ptrace(ptrace.SEIZE, "
    waits += "int(sys.argv[1])); time.sleep(1000)"
    monkeypatch.setattr(sandbox, "COMMAND", (sys.executable, "-c", waits))
    with running("sleep", "1000") as asked:
        search = sandbox.Search([asked.pid])
        wait_for(lambda: status_numbers(asked.pid, "TracerPid") != [0], "the search")
        monkeypatch.setattr(sandbox, "ANSWER_SECONDS", 0.1)
        try:
            with pytest.raises(TimeoutError, match=f"thread {asked.pid} of process {asked.pid}$"):
                search.result()
            search.close()
        finally:
            os.kill(*status_numbers(asked.pid, "TracerPid"), signal.SIGKILL)
            search._process.wait(SECONDS)


def test_a_process_that_has_ended_is_not_called_unknown() -> None:
    with running("true") as ended:
        wait_for(lambda: is_dead(ended.pid), "its end")
        assert sandbox.Search([ended.pid]).result() == (None, [])


def test_a_decoy_ends_with_its_search() -> None:
    waits = "from flowgpu.host import sandbox; print(sandbox.Decoys().of(12345, 12345), flush=True)"
    waits += "; input()"
    with running(sys.executable, "-c", waits) as search:
        decoy = int(search.stdout.readline())
        search.kill()
        wait_for(lambda: is_dead(decoy), "the decoy's end")
