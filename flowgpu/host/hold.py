"""Hold the threads of a stopped process while one of them goes on.

The driver puts CUDA back into a restored process with a thread of its own there. Nothing else of
the program may run before its memory is there, so every other thread is held by ptrace(2). All
calls come from one thread: to the kernel, it is the tracer.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from flowgpu.host import ptrace
from flowgpu.host.proctree import task_states


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
                ptrace.ptrace(ptrace.SEIZE, thread, ptrace.O_EXITKILL)
                self._threads.append(thread)
                ptrace.wait_event_stop(thread, time.monotonic() + ptrace.STOP_SECONDS)
        except OSError:
            self.release()
            raise
        os.kill(pid, signal.SIGCONT)

    def release(self) -> None:
        """Let all go on, as far as the process is not stopped."""
        threads, self._threads = self._threads, []
        ptrace.let_go(self._pid, threads)

    def kill(self) -> None:
        """End the process: none of its threads runs again."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        ptrace.collect(self._pid, self._threads)
        self._threads.clear()
