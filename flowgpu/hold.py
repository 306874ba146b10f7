"""Hold the threads of a stopped process while one of them goes on.

The driver puts CUDA back into a restored process with a thread of its own there. Nothing else of
the program may run before its memory is there, so every other thread is held by ptrace(2). All
calls come from one thread: to the kernel, it is the tracer.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from flowgpu.proctree import task_states

# linux/ptrace.h
PTRACE_DETACH = 17
PTRACE_SEIZE = 0x4206
PTRACE_O_EXITKILL = 1 << 20
# linux/wait.h: without it, only leaders are waited for
WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


def _ptrace(request: int, thread: int, data: int = 0) -> None:
    if _libc.ptrace(request, thread, None, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace of thread {thread}: {os.strerror(error)}")


class Held:
    """The threads of a stopped process but `free`, which runs. They end if this process does."""

    def __init__(self, pid: int, free: int) -> None:
        """Raises OSError, with the process as it was."""
        self._pid = pid
        self._threads: list[int] = []
        try:
            threads = task_states(pid)
            if free not in threads or set(threads.values()) != {"T"}:
                raise OSError(f"process {pid} is not stopped or has no thread {free}")
            for thread in threads.keys() - {free}:
                _ptrace(PTRACE_SEIZE, thread, PTRACE_O_EXITKILL)
                self._threads.append(thread)
                os.waitpid(thread, WALL)
        except OSError:
            self.release()
            raise
        os.kill(pid, signal.SIGCONT)

    def release(self) -> None:
        """Let all go on, as far as the process is not stopped; one that was killed is collected."""
        dead = []
        while self._threads:
            thread = self._threads.pop()
            try:
                _ptrace(PTRACE_DETACH, thread)
            except ProcessLookupError:
                dead.append(thread)
        self._collect(dead)

    def kill(self) -> None:
        """End the process: none of its threads runs again."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._collect(self._threads)
        self._threads.clear()

    def _collect(self, threads: Sequence[int]) -> None:
        """A tracer is told of each thread's end, of the leader's last, and only then its parent."""
        for thread in sorted(threads, key=lambda thread: thread == self._pid):
            with suppress(ChildProcessError):
                os.waitpid(thread, WALL)
