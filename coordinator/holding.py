"""Managed memory of a task, exchanged for ordinary memory at the same address and back
(native/intercept/managed.h), with the program's threads held meanwhile.

They are held by a process of its own: if the coordinator is killed, the exchange goes on to its
end. What the task answered is read then by nobody, and the next coordinator asks again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from coordinator.polling import readable
from coordinator.tasks import Task
from flowgpu import ptrace, wire
from flowgpu.proctree import thread_ids
from flowgpu.wire import ManagedStep

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-S", "-X", "utf8", "-m", "coordinator.holding")
OURS = "flowgpu"
"""What the names of threads begin with that are not held."""
HELD, DONE = b"held", b"\n"
LOOK_SECONDS = 0.002
CALM_SECONDS = 10.0
"""For all threads to stop: one may be in a system call that nothing interrupts."""

Keeping = Callable[[], AbstractContextManager[bool]]
"""Says whether the threads are held already, and keeps them so meanwhile."""


def leave(task: Task, deadline: float) -> None:
    """Let a task behind a closed gate have its managed memory as ordinary memory. Raises
    TaskError."""
    if not task.page.managed_bytes:
        return
    with _Holder(task) as holder:
        holder.start()  # it takes as long as what comes before
        if _ask(task, ManagedStep.LEAVE, deadline):
            _ask(task, ManagedStep.LEAVE_HELD, deadline, holder)


def come(task: Task, deadline: float, keeping: Keeping) -> None:
    """Let a task with CUDA have it back as managed memory, as far as it is not.

    Raises TaskError.
    """
    if not task.page.managed_bytes:
        return
    with _Holder(task) as holder:
        while _ask(task, ManagedStep.COME, deadline):
            with keeping() as held:
                _ask(task, ManagedStep.COME_HELD, deadline, None if held else holder)


def _ask(task: Task, step: ManagedStep, deadline: float, holder: _Holder | None = None) -> bool:
    """Whether a step with held threads is to follow."""
    packet = wire.packet(wire.Message.MANAGED, count=step)
    send = holder.send if holder else None
    try:
        reply = task.request(wire.Message.MANAGED, deadline, packet=packet, send=send)
    finally:
        if holder:
            holder.let_go()
    return reply.waited_us != 0


class _Holder:
    """A process that holds the threads of a task while it answers; started when it is needed."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Holder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            for end in (self._process.stdin, self._process.stdout):
                if end is not None:
                    end.close()
            self._process.wait()

    def start(self) -> subprocess.Popen[bytes]:
        """Raises OSError."""
        if self._process is None:
            fd = self._task.fileno()
            self._process = subprocess.Popen(
                [*COMMAND, str(self._task.pid), str(fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(fd,),
                start_new_session=True,  # a takeover ends what is of its own session
            )
        return self._process

    def send(self, packet: bytes, seconds: float) -> None:
        """Have the threads held, and the packet sent. Raises OSError."""
        process = self.start()
        if process.stdin is None or process.stdout is None:
            raise OSError("the process that is to hold threads has no pipes")
        process.stdin.write(packet)
        process.stdin.flush()
        if not readable(process.stdout, seconds=seconds):
            raise TimeoutError("the threads could not be held in time")
        answer = os.read(process.stdout.fileno(), 1 << 10)
        if answer != HELD:
            raise OSError(f"the threads could not be held: {answer.decode() or 'its holder ended'}")

    def let_go(self) -> None:
        """Say that the answer has been read."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(DONE)
                self._process.stdin.flush()


def _names(pid: int) -> Iterator[tuple[int, str]]:
    for thread in thread_ids(pid):
        with contextlib.suppress(OSError):
            yield thread, Path(f"/proc/{pid}/task/{thread}/comm").read_text(errors="replace")


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """All threads of a process but ours stand still. Raises OSError."""
    threads: list[int] = []
    deadline = time.monotonic() + CALM_SECONDS
    try:
        # Until a look finds none that is new: who stands still makes no threads.
        while new := [
            thread
            for thread, name in _names(pid)
            if thread not in threads and not name.startswith(OURS)
        ]:
            for thread in new:
                with contextlib.suppress(ProcessLookupError):
                    ptrace.ptrace(ptrace.SEIZE, thread)
                    threads.append(thread)
                    ptrace.ptrace(ptrace.INTERRUPT, thread)
                    _wait(thread, deadline)
        yield
    finally:
        ptrace.let_go(pid, threads)


def _wait(thread: int, deadline: float) -> None:
    while os.waitpid(thread, ptrace.WALL | os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"thread {thread} does not stop")
        time.sleep(LOOK_SECONDS)


def main() -> None:
    """For each packet on the standard input: hold, send it to the task, and let go when it has
    answered, which is read by who started this process."""
    pid, fd = map(int, sys.argv[1:])
    with socket.socket(fileno=fd) as connection:
        while len(packet := os.read(0, wire.Header.SIZE)) == wire.Header.SIZE:
            try:
                with held(pid):
                    connection.send(packet)
                    with contextlib.suppress(OSError):  # who asked may be gone
                        os.write(1, HELD)
                    _wait_for_answer(connection)
            except OSError as error:
                os.write(1, str(error).encode())
            os.read(0, len(DONE))


def _wait_for_answer(connection: socket.socket) -> None:
    """Or until it is known that it was read. Who was to read it may be gone."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(0, select.POLLIN)
    while not [fd for fd, event in poll.poll() if fd != 0 or event & select.POLLIN]:
        poll.unregister(0)


if __name__ == "__main__":
    main()
