"""What is done where the coordinator has stopped itself (FLOWGPU_FAULT=phase_..)."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flowgpu.client import Connection
from flowgpu.errors import FlowError
from flowgpu.host.proctree import task_states
from flowgpu.jobs import JobDir
from tests.unit.coordinator_job import SECONDS

LOOK_SECONDS = 0.002
STOP_SECONDS = 0.05  # for what is in the pipes and sockets to be there before it goes on
ROOM = "1g"


@contextmanager
def halted(coordinator: Callable[[], int], act: Callable[[int], None]) -> Iterator[None]:
    """Meanwhile: `act` when the coordinator has stopped itself, and then let it go on.

    `coordinator` gives its process id, 0 while there is none; `act` is given it too.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            pid = coordinator()
            if pid and set(task_states(pid).values()) == {"T"}:
                try:
                    act(pid)
                finally:
                    time.sleep(STOP_SECONDS)
                    kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Disk:
    """A file system of its own at a folder, which can be full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mount("-t", "tmpfs", "-o", f"size={ROOM},mode=700", "none")

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words, str(self.path)], check=True, capture_output=True)

    def fill(self) -> None:
        """Take all that is left of it. Somebody may still be writing."""
        while True:
            about = os.statvfs(self.path)
            used = (about.f_blocks - about.f_bfree) * about.f_frsize
            with suppress(subprocess.CalledProcessError):
                # A tmpfs of size 0 has no limit.
                self._mount("-o", f"remount,size={max(used, about.f_frsize)}")
                return

    def empty(self) -> None:
        """Give it its room again."""
        self._mount("-o", f"remount,size={ROOM}")

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


class Second:
    """Other commands that are given while one is under way."""

    def __init__(self, directory: JobDir, folder: Path) -> None:
        self._directory, self._folder = directory, folder
        self._answers: list[FlowError | None] = []
        self._waiting: list[threading.Thread] = []

    def ask(self) -> None:
        """Send one; the coordinator reads it when it goes on."""
        connection = Connection(self._directory.control_socket, "second")
        connection.set_patience(SECONDS)
        connection.send("pause-and-dump", output=str(self._folder / "image"), leave_running=True)
        self._waiting.append(threading.Thread(target=self._wait, args=(connection,)))
        self._waiting[-1].start()

    def _wait(self, connection: Connection) -> None:
        with connection:
            try:
                connection.result()
                self._answers.append(None)
            except FlowError as error:
                self._answers.append(error)

    def answers(self) -> list[FlowError | None]:
        """The error of each command, in the order in which they ended; None: it succeeded."""
        for thread in self._waiting:
            thread.join()
        return self._answers


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process of the job or its coordinator, if it is there (yet)."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
