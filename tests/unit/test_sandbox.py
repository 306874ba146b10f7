"""Threads are asked for a sandbox while they run, and do not notice it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flowgpu import probes, sandbox
from flowgpu.proctree import task_states, thread_ids
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


def test_a_search_names_a_sandboxed_thread_and_none_else() -> None:
    wait = "import sys; print('waits', flush=True); sys.stdin.read()"
    enter = THREADS[: THREADS.index("elif")] + wait
    words = [[sys.executable, "-c", text, "sandbox"] for text in (wait, enter)]
    ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    free, caught = (subprocess.Popen(word, **ends) for word in words)
    with free, caught:
        assert [one.stdout.readline() for one in (free, caught)] == [b"waits\n"] * 2
        assert sandbox.Search([free.pid]).result() == (None, [])
        assert sandbox.Search([free.pid, caught.pid]).result() == ((caught.pid, caught.pid), [])
