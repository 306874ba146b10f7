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
from coordinator.process import SERVICE_THREAD
from coordinator.tasks import Task, TaskError
from flowgpu import wire
from flowgpu.host import ptrace
from flowgpu.host.proctree import task_states
from flowgpu.wire import ManagedStep

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-S", "-X", "utf8", "-m", "coordinator.holding")
OURS = (SERVICE_THREAD, "flowgpu-managed")
"""Names of threads that are not held (native/intercept/held.h)."""
ENDED = "ZX"
HELD, DONE = b"held", b"\n"
CALM_SECONDS = 10.0
"""For all threads to stop: one may be in a system call that nothing interrupts."""

Keeping = Callable[[], AbstractContextManager[bool]]
"""Says whether the threads are held already, and keeps them so meanwhile."""


def leave(task: Task, deadline: float, holder: Holder | None = None) -> None:
    """Let a task behind a closed gate have its managed memory as ordinary memory.

    `holder`: one that was made before the pause, if there is one. Raises TaskError.
    """
    if not task.page.managed_bytes:
        return
    with Holder(task) if holder is None or not holder.serves(task) else holder as holder:
        if _ask(task, ManagedStep.LEAVE, deadline):
            _ask(task, ManagedStep.LEAVE_HELD, deadline, holder)


def come(task: Task, deadline: float, keeping: Keeping) -> None:
    """Let a task with CUDA have it back as managed memory, as far as it is not.

    Raises TaskError.
    """
    if not task.page.managed_bytes:
        return
    with Holder(task) as holder:
        while _ask(task, ManagedStep.COME, deadline):
            with keeping() as held:
                _ask(task, ManagedStep.COME_HELD, deadline, None if held else holder)


def to_host(task: Task, deadline: float) -> None:
    """Let a task that keeps CUDA have its managed memory in the host's. `come` undoes it.

    Raises TaskError.
    """
    try:
        _ask(task, ManagedStep.TO_HOST, deadline)
    except TaskError as error:
        if error.status is not wire.Status.PROTOCOL:
            raise
        log.info("its managed memory stays where it is: %s", error)  # an older library's


def _ask(task: Task, step: ManagedStep, deadline: float, holder: Holder | None = None) -> bool:
    """True if a step with held threads is to follow."""
    packet = wire.packet(wire.Message.MANAGED, count=step)
    send = holder.send if holder else None
    answered = False
    try:
        reply = task.request(wire.Message.MANAGED, deadline, packet=packet, send=send)
        answered = True
    except TaskError as error:
        answered = error.status is not None
        raise
    finally:
        if holder:
            holder.finish(answered)
    return reply.waited_us != 0


class Holder:
    """A process that holds the threads of a task while it answers; started when it is needed."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._inode = task.inode
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serves(self, task: Task) -> bool:
        """False where the task has connected anew."""
        return self._inode == task.inode != 0

    def close(self) -> None:
        """End the process, which holds nobody now."""
        if self._process is not None:
            for end in (self._process.stdin, self._process.stdout):
                if end is not None:
                    end.close()
            self._process.wait()
            self._process = None

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

    def finish(self, answered: bool) -> None:
        """Let the threads go; without an answer they are held until there is one, by itself."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if not answered:
            self._process = None
            process.stdin.close()
            return
        with contextlib.suppress(OSError):
            process.stdin.write(DONE)
            process.stdin.flush()


def _others(pid: int) -> Iterator[int]:
    for thread, state in task_states(pid).items():
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/task/{thread}/comm").read_text(errors="replace").strip()
            if state not in ENDED and (name not in OURS or thread == pid):
                yield thread


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """All threads of a process but ours stand still. Raises OSError."""
    threads: list[int] = []
    deadline = time.monotonic() + CALM_SECONDS
    try:
        # Until a look finds none that is new: who stands still makes no threads.
        while new := [thread for thread in _others(pid) if thread not in threads]:
            for thread in new:
                with contextlib.suppress(ProcessLookupError):
                    ptrace.ptrace(ptrace.SEIZE, thread)
                    threads.append(thread)
                    ptrace.ptrace(ptrace.INTERRUPT, thread)
            for thread in new:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended
                    ptrace.wait_event_stop(thread, deadline)
        yield
    finally:
        ptrace.let_go(pid, threads)


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
