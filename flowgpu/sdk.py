"""A checkpoint that a program takes of itself: `flowgpu.checkpoint(path)`.

The program runs on as soon as it can: the image has it as it stood within this call, and a
restored copy of it returns from the same call. It asks its coordinator over `control.sock`, and
closes that connection, which no image could have, before the checkpoint begins. What became of it
is in a link of the job's folder, the *ticket*: a word (`waiting`, `running`, `done`, `failed`) and
what belongs to it. A restored copy knows by the time at which its process began: it is another.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgpu.client import Connection
from flowgpu.errors import CoordinatorGone, FlowError
from flowgpu.jobs import JobDir, start_time

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
LOOK_SECONDS = 0.001
GONE_SECONDS = 30.0  # for another coordinator to say what became of it
_warned = False


@dataclass
class Checkpoint:
    """What `checkpoint` has begun. `ticket` is None where FlowGPU does not run the program."""

    path: Path
    ticket: Path | None
    stall_seconds: float = 0.0
    """The time for which the program's calls of CUDA had to wait."""
    restored: bool = False
    """True if this process was restored from the image, or is the child of one that was."""
    _pid: int = field(default_factory=os.getpid, repr=False)
    _began: int = field(default_factory=lambda: start_time(os.getpid()), repr=False)
    _cut: bool = field(default=False, repr=False)
    _complete: bool = field(default=False, repr=False)
    _gone: float | None = field(default=None, repr=False)

    def done(self) -> bool:
        """True once the image is complete. Raises the FlowError that the checkpoint failed with."""
        return self._state() == DONE

    def wait(self) -> Checkpoint:
        """Wait until the image is complete. Raises the FlowError that the checkpoint failed
        with."""
        return self._until(DONE)

    def _until(self, *states: str) -> Checkpoint:
        while self._state() not in states:
            time.sleep(LOOK_SECONDS)
        return self

    def _state(self) -> str:
        if self.ticket is None or self._complete:
            return DONE
        text = ""
        with suppress(FileNotFoundError):
            text = os.readlink(self.ticket)
        if self._is_copy():  # asked last: any line above may be where the copy begins
            self.restored, self._complete = not self._cut, True
            return DONE
        if not text:
            raise CoordinatorGone(job="of this program")
        state, _, text = text.partition(" ")
        if state == FAILED:
            raise FlowError.from_dict(json.loads(text))
        if state == WAITING:
            self._watch(int(text))
        else:
            self._cut = True  # a copy of what follows is of a later image
            self._complete = state == DONE
            self.stall_seconds = float(text)
        return state

    def _is_copy(self) -> bool:
        """This process was restored, from whichever image. A child by fork was not."""
        return os.getpid() == self._pid and start_time(self._pid) != self._began

    def _watch(self, coordinator: int) -> None:
        """The next coordinator writes into the ticket what became of it; it may be that none is."""
        if Path(f"/proc/{coordinator}").exists():
            self._gone = None
        elif self._gone is None:
            self._gone = time.monotonic()
        elif time.monotonic() - self._gone > GONE_SECONDS:
            raise CoordinatorGone(job="of this program")


def checkpoint(path: str | os.PathLike[str], *, wait: bool = False, **options: Any) -> Checkpoint:
    """Write an image of the job that this program is a part of into `path`, absent or empty.

    Returns once the program can run on, or with `wait` once the image is complete. `options` are
    the other fields of `flowgpu.options.CheckpointOptions`, such as `timeout` and `mode`; it always
    leaves the job running. Without FlowGPU it does nothing and says so once. Raises what the
    checkpoint failed of, a FlowError; the program runs on.
    """
    global _warned
    output = Path(path).absolute()
    task_socket = os.environ.get("FLOWGPU_SOCKET")
    if not task_socket:
        if not _warned:
            _warned = True
            warnings.warn(
                "flowgpu.checkpoint does nothing: `flowgpu run` has not started this program",
                stacklevel=2,
            )
        return Checkpoint(output, None)
    folder = JobDir(Path(task_socket).parent)
    with Connection(folder.control_socket, folder.path.name) as connection:
        connection.send("checkpoint", output=str(output), leave_running=True, **options)
        ticket = Path(connection.result()["ticket"])
    made = Checkpoint(output, ticket)
    return made._until(DONE) if wait else made._until(RUNNING, DONE)
