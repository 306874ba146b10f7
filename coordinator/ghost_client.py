"""The coordinator's end of a ghost: starts the process and asks it for one thing at a time, or
several.

ghost_commands.py has what it can be asked for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ClassVar

from coordinator.ghost_commands import QUIT_SECONDS, Answer, Command, Quit, parts_of
from coordinator.ghost_lines import read_lines, send_line
from flowgpu import codec
from flowgpu.host.proctree import end_before_others, how_ended

log = logging.getLogger(__name__)

EXIT_SECONDS = 0.2

COMMAND = (sys.executable, "-P", "-S", "-X", "utf8", "-m", "coordinator.ghost_main")


class GhostError(Exception):
    """The ghost answered that it failed.

    `kind` is the mover's status or the exception's class there.
    """

    def __init__(self, text: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(text)

    @property
    def no_room(self) -> bool:
        """True when a GPU had too little memory for what was asked."""
        return "CUDA_ERROR_OUT_OF_MEMORY" in str(self)


class GhostGone(GhostError):
    """The ghost ended, or did not answer in time."""


class Asked(Future[Answer]):
    """The answer to a command of this kind, once it is there. Raises GhostError."""

    def __init__(self, kind: type[Command[Answer]]) -> None:
        super().__init__()
        self.kind = kind

    def until(self, deadline: float) -> Answer:
        """Wait for the answer. Raises GhostError, and GhostGone at the deadline."""
        try:
            return self.result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeout:
            raise GhostGone(f"the ghost did not answer `{self.kind.do}` in time") from None


class Ghost:
    """A ghost process."""

    leaving: ClassVar[set[int]] = set()
    """Process ids of those of this process that end behind it."""

    def __init__(self, env: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        """Start it. Raises GhostGone if it cannot be started."""
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Asked[Any]] = {}
        self._gone = False
        self._reason = "the ghost has ended"
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    env=dict(env),
                    cwd="/",
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except OSError as error:
                self._socket.close()
                raise GhostGone(f"the ghost did not start: {error}") from error
        end_before_others(self.pid)
        self._reader = threading.Thread(target=self._read_loop, daemon=True, name="ghost")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the ghost."""
        return self._process.pid

    def alive(self) -> bool:
        """False once the ghost has ended or its connection has."""
        return not self._gone and self._process.poll() is None

    def submit(self, command: Command[Answer]) -> Asked[Answer]:
        """Send a command, whose descriptors stay the caller's; those of its answer are the
        caller's, too."""
        asked = Asked(type(command))
        with self._lock:
            if self._gone:
                raise GhostGone(self._reason)
            number = next(self._ids)
            self._waiting[number] = asked
            fields, fds = parts_of(command)
            try:
                send_line(self._socket, {"id": number, "do": command.do, **fields}, fds)
            except OSError as error:
                raise GhostGone(f"the ghost has ended: {error}") from error
        return asked

    def ask(self, command: Command[Answer], deadline: float) -> Answer:
        """Send a command and wait for its answer.

        Raises GhostError, and GhostGone at the deadline.
        """
        return self.submit(command).until(deadline)

    def quit(self) -> None:
        """Let the ghost end, or end it."""
        self._ask_to_quit()
        self.kill(grace=QUIT_SECONDS)

    def leave(self) -> None:
        """Let the ghost end behind the caller.

        Its device memory is free on return; to unpin what it moved takes a while.
        """
        self._ask_to_quit()
        self.leaving.add(self.pid)
        threading.Thread(target=self.kill, args=(QUIT_SECONDS,), daemon=True).start()

    def _ask_to_quit(self) -> None:
        with contextlib.suppress(GhostError):
            self.ask(Quit(), time.monotonic() + QUIT_SECONDS)

    def kill(self, grace: float = 0.0) -> None:
        """End the ghost for certain and wait for it."""
        try:
            self._process.wait(grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.leaving.discard(self.pid)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read_loop(self) -> None:
        try:
            self._read()
        except OSError:
            pass
        except Exception:  # who waits for an answer is to hear of it now
            log.exception("what the ghost answers")
        with self._lock:
            self._gone = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := self._process.wait(EXIT_SECONDS):
                self._reason = f"the ghost {how_ended(code)}"
                log.warning("%s", self._reason)
        for asked in waiting:
            asked.set_exception(GhostGone(self._reason))

    def _read(self) -> None:
        """Read answers until the ghost's end. Raises OSError."""
        for answer, fds in read_lines(self._socket):
            self._deliver(answer, fds)

    def _deliver(self, answer: dict[str, Any], fds: list[int]) -> None:
        with self._lock:
            asked = self._waiting.pop(answer.pop("id"))
        error = answer.pop("error", None)
        if error is not None:
            log.warning("ghost: %s", error)
            asked.set_exception(GhostError(error, answer["kind"]))
        else:
            if fds:
                answer["fds"] = fds
            kind = asked.kind
            none = kind.answer is type(None)
            asked.set_result(None if none else codec.decode(kind.answer, answer, kind.do))
