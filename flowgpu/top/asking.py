"""What coordinators say of their jobs, without waiting for one that does not answer."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT_SECONDS = 0.3
"""For all answers of one look. What comes later is there at the next one."""
OLD_SECONDS = 5.0
"""An answer is shown for so long where no newer one comes."""
READ_BYTES = 1 << 18
REQUEST = b'{"verb": "status"}\n'


@dataclass(frozen=True)
class Task:
    """A process of the job that uses CUDA."""

    pid: int
    allocations: int
    bytes: int
    """What it has of the GPUs' memory."""


@dataclass(frozen=True)
class Status:
    """What a coordinator has answered."""

    tasks: tuple[Task, ...]
    doing: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0

    @property
    def bytes(self) -> int:
        """What the job has of the GPUs' memory."""
        return sum(task.bytes for task in self.tasks)

    @staticmethod
    def of(answer: Mapping[str, Any]) -> Status:
        """Raises ValueError, KeyError or TypeError for what is none."""
        tasks = tuple(
            Task(
                int(row["pid"]),
                int(row["allocations"]),
                int(row["block_bytes"]) + int(row["foreign_bytes"]),
            )
            for row in answer["tasks"]
        )
        # Coordinators of earlier versions tell no step.
        phase, done, total = answer.get("step") or ("", 0, 0)
        return Status(tasks, str(answer["doing"]), str(phase), int(done), int(total))


class _Question:
    """One request, and as much of its answer as has come."""

    def __init__(self, path: Path) -> None:
        """Ask. Raises OSError."""
        self._got = b""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.socket.connect(str(path))
            self.socket.send(REQUEST)
        except OSError:
            self.socket.close()
            raise

    def answer(self) -> Status | None:
        """None while it is not whole. Raises EOFError where none comes."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError from error
        self._got += data
        if not self._got.endswith(b"\n"):
            if not data:
                raise EOFError
            return None
        try:
            return Status.of(json.loads(self._got))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EOFError from error


class Statuses:
    """The newest status of each job.

    A coordinator is asked again only once it has answered: however long one is stopped, no more
    than one request waits for it.
    """

    def __init__(self) -> None:
        self._asked: dict[str, _Question] = {}
        self._known: dict[str, tuple[float, Status]] = {}

    def look(self, sockets: Mapping[str, Path]) -> dict[str, Status]:
        """The status of each of these jobs, by id, as far as it is known."""
        self._forget([*self._asked, *self._known], sockets)
        for job, path in sockets.items():
            if job not in self._asked:
                with suppress(OSError):
                    self._asked[job] = _Question(path)
        self._collect(time.monotonic() + WAIT_SECONDS)
        oldest = time.monotonic() - OLD_SECONDS
        return {job: status for job, (when, status) in self._known.items() if when >= oldest}

    def close(self) -> None:
        """Wait for no answer any more."""
        self._forget(list(self._asked), {})

    def _forget(self, jobs: Iterable[str], kept: Mapping[str, Path]) -> None:
        for job in [job for job in jobs if job not in kept]:
            self._known.pop(job, None)
            if question := self._asked.pop(job, None):
                question.socket.close()

    def _collect(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            for job, question in self._asked.items():
                selector.register(question.socket, selectors.EVENT_READ, job)
            while self._asked:
                left = deadline - time.monotonic()
                for key, _ in selector.select(max(left, 0.0)):
                    self._take(key.data, selector)
                if left <= 0:
                    return  # after one try at least, also on a busy machine

    def _take(self, job: str, selector: selectors.BaseSelector) -> None:
        question = self._asked[job]
        try:
            status = question.answer()
        except EOFError:
            self._known.pop(job, None)
        else:
            if status is None:
                return
            self._known[job] = (time.monotonic(), status)
        selector.unregister(question.socket)
        question.socket.close()
        del self._asked[job]
