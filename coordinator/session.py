"""What a checkpoint and a restore have in common.

The job they work on, its ghost, its tasks and their blocks.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coordinator import faults
from coordinator.blocks import Block, send_blocks
from coordinator.ghost_client import Answer, Ghost, GhostError, GhostGone
from coordinator.output import Output
from coordinator.tasks import Task, TaskChannel
from flowgpu import wire
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

T = TypeVar("T")
GHOST_START_SECONDS = 60.0

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all); quickly and often."""


@dataclass
class Job:
    """The job as its supervisor runs it."""

    id: str
    name: str
    gpu: str
    command: list[str]
    cwd: str
    channel: TaskChannel
    output: Output
    directory: Path
    start_ghost: Callable[[], Ghost]
    root_pid: int = 0
    pipes: dict[str, int] = field(default_factory=dict)  # stdout, stderr -> inode


class GhostLink:
    """The ghost of a session: started when first needed, and again when it has died."""

    def __init__(self, start: Callable[[], Ghost]) -> None:
        self._start = start
        self._ghost: Ghost | None = None
        self.gpus: list[dict[str, Any]] = []
        self.driver_version = 0
        self.has_engine = False

    @property
    def alive(self) -> bool:
        """True while there is a ghost that can be asked."""
        return self._ghost is not None and self._ghost.alive()

    @property
    def ghost(self) -> Ghost:
        """The ghost. Raises GhostGone when there is none."""
        if self._ghost is None:
            raise GhostGone("there is no ghost")
        return self._ghost

    def start(self) -> None:
        """Start a ghost with the driver initialised, in place of one that died."""
        if self.alive:
            return
        self.kill()
        self._ghost = self._start()
        answer = self._ghost.ask("hello", time.monotonic() + GHOST_START_SECONDS)
        self.gpus, self.driver_version = answer["gpus"], answer["version"]
        self.has_engine = answer["engine"]

    def ask(self, do: str, deadline: float, fds: Sequence[int] = (), **fields: Any) -> Answer:
        """See Ghost.ask."""
        return self.ghost.ask(do, deadline, fds, **fields)

    def submit(self, do: str, fds: Sequence[int] = (), **fields: Any) -> Future[Answer]:
        """See Ghost.submit; a ghost that is gone fails the future instead."""
        try:
            return self.ghost.submit(do, fds, **fields)
        except GhostError as error:
            failed: Future[Answer] = Future()
            failed.set_exception(error)
            return failed

    def rebuild(self, pids: Sequence[int], gpus: dict[str, str], deadline: float) -> None:
        """Put CUDA back into `pids`, with a fresh ghost if need be."""
        self.start()
        self.ask("rebuild", deadline, pids=list(pids), gpus=gpus)

    def quit(self) -> None:
        """Let the ghost end."""
        if self._ghost is not None:
            self._ghost.quit()
            self._ghost = None

    def kill(self) -> None:
        """End the ghost at once."""
        if self._ghost is not None:
            self._ghost.kill()
            self._ghost = None


def wait_copy(ghost: Ghost, stage: str, deadline: float, report: Callable[[int, int], None]) -> int:
    """Wait until the ghost's copies are `out` or `done`, reporting bytes; gives the bytes moved."""
    future = ghost.submit("wait", stage=stage, seconds=max(deadline - time.monotonic(), 0.0))
    while True:
        try:
            answer = future.result(0.1)
            break
        except TimeoutError:
            if future.done():
                raise
            if time.monotonic() > deadline + 1.0:
                raise GhostGone(f"the copy was not {stage} in time") from None
            answer = ghost.ask("progress", deadline + 1.0)
            report(answer["done"], answer["total"])
    moved = int(answer["bytes"])
    report(moved, moved)
    return moved


def each(tasks: Sequence[Task], action: Callable[[Task], T]) -> list[T]:
    """Run `action` for all tasks at once.

    Every one runs to its end, then the first failure is raised.
    """
    if len(tasks) == 1:
        return [action(tasks[0])]
    with ThreadPoolExecutor(max_workers=max(len(tasks), 1)) as pool:
        futures = [pool.submit(action, task) for task in tasks]
    return [future.result() for future in futures]


def map_back(task: Task, blocks: Sequence[Block], deadline: float) -> None:
    """Give a task its blocks: it maps each at its address. Raises TaskError, OSError."""
    faults.check(Fault.MAPBACK)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    failures: list[OSError] = []

    def send() -> None:
        try:
            send_blocks(ours, blocks, deadline)
        except OSError as error:
            failures.append(error)

    with ours:
        sender = threading.Thread(target=send, name=f"mapback-{task.pid}")
        with theirs:
            sender.start()
            reply = task.request(wire.Message.MAPBACK, deadline, fds=[theirs.fileno()])
        sender.join()
    if failures:
        raise failures[0]
    if reply.blocks != len(blocks):
        raise RuntimeError(f"task {task.pid} mapped {reply.blocks} of {len(blocks)} blocks")


def open_gates(tasks: Iterable[Task], deadline: float) -> None:
    """Let the tasks call the driver again."""
    each(list(tasks), lambda task: task.request(wire.Message.OPEN, deadline))
