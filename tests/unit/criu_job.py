"""A small job for the CRIU tests: a counter on a pipe whose other end the test holds."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from coordinator.process import kill_tree
from flowgpu.host.criu import Criu
from flowgpu.launch import library_dir
from tests.patience import SECONDS

DYING = library_dir().parent / "bin" / "libflowgpu_dying_criu.so"
"""Preloaded into CRIU: that is killed at a call of ptrace(2) (native/criu_plugin/dying.cpp)."""
COUNTER = """
import mmap, os, sys, threading, time
memfd = os.memfd_create("job")
os.ftruncate(memfd, 1 << 16)
shared = mmap.mmap(memfd, 1 << 16)
ticks = [0]
def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.001)
for _ in range(3):
    threading.Thread(target=tick, daemon=True).start()
data = bytearray(int(sys.argv[1]) << 20)
for at in range(0, len(data), 4096):
    data[at:at + 8] = at.to_bytes(8, "little")
count = 0
while True:
    shared[:8] = count.to_bytes(8, "little")
    print(int.from_bytes(shared[:8], "little"), flush=True)
    count += 1
    time.sleep(0.01)
"""


class Job:
    """A process whose lines the test reads; it is killed when the test ends."""

    def __init__(self, program: str = COUNTER, *args: str, setup: str = "") -> None:
        self.read_end, self.write_end = os.pipe()
        self.inode = os.fstat(self.write_end).st_ino
        self._rest = b""
        self._number = -1
        self._process = subprocess.Popen(
            [sys.executable, "-c", setup + program, *(args or ("1",))],
            stdin=subprocess.DEVNULL,
            stdout=self.write_end,
            stderr=self.write_end,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def line(self, timeout: float = SECONDS) -> str | None:
        """Next line of the job, or None when none comes in time."""
        end = time.monotonic() + timeout
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            self._rest += os.read(self.read_end, 1 << 16)
        first, _, self._rest = self._rest.partition(b"\n")
        return first.decode()

    def number(self) -> int:
        """Next line as the counter's number."""
        line = self.line()
        assert line is not None, "the job stands still"
        self._number = int(line)
        return self._number

    def last(self) -> int:
        """The counter's last number: of those that wait in the pipe, else the one read last."""
        return [self._number, *self.drain()][-1]

    def drain(self) -> list[int]:
        """Numbers that wait in the pipe."""
        found = []
        while (line := self.line(0.0)) is not None:
            found.append(int(line))
        return found

    def kill(self) -> None:
        """Kill the process and take its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._process.returncode = -signal.SIGKILL

    def end_tree(self) -> None:
        """Kill the process with all that it started: every id of it is free then."""
        kill_tree(self.pid)
        self.kill()

    def close(self) -> None:
        """Kill the process and close the pipe."""
        self.kill()
        os.close(self.read_end)
        os.close(self.write_end)


@contextlib.contextmanager
def taken(number: int, seconds: float = 1000.0) -> Iterator[None]:
    """A process that has this id, for as long (clone3 with `set_tid`, Linux 5.5)."""
    ids = (ctypes.c_int * 1)(number)
    arguments = (ctypes.c_uint64 * 10)()
    arguments[4], arguments[8], arguments[9] = signal.SIGCHLD, ctypes.addressof(ids), 1
    # With the interpreter's lock held: else the child may wait for a thread that it does not have.
    libc = ctypes.PyDLL(None, use_errno=True)
    deadline = time.monotonic() + SECONDS
    # The id of a thread is free a moment after the end of its process has been waited for.
    while (made := libc.syscall(435, arguments, ctypes.sizeof(arguments))) < 0:
        if ctypes.get_errno() != errno.EEXIST or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    if made == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            signal.pause()
    assert made == number, os.strerror(ctypes.get_errno())
    reaper = threading.Thread(target=os.waitpid, args=(number, 0))
    reaper.start()
    try:
        yield
    finally:
        if reaper.is_alive():  # else the id may be somebody else's
            os.kill(number, signal.SIGKILL)
        reaper.join()


def restore(criu: Criu, job: Job, images: Path, **options: bool) -> None:
    """Restore the job on a new pipe, as a supervisor that was started afresh would."""
    os.close(job.read_end)
    os.close(job.write_end)
    job.read_end, job.write_end = os.pipe()
    inherit = {f"pipe:[{job.inode}]": job.write_end}
    assert criu.restore(images, inherit_fds=inherit, **options) == job.pid


def reap_orphans() -> None:
    """Take the exit status of killed processes that came to this test as their subreaper."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] > 0:
            pass


StartJob = Callable[..., Job]
