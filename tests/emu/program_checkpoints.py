"""A coordinator and a ghost that take the memory of a running program and give it back."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial
from pathlib import Path

from flowgpu.wire import Engine, Message, Status, WireError
from tests.emu.intercept_lib import (
    Connection,
    Coordinator,
    Ghost,
    map_back,
    wait_until,
)

STICKY = (700, 715, 716, 719)  # CUDA_ERROR_*: what a kernel's fault leaves behind


class Checkpoints:
    """Listens at `path` for programs that ask, one at a time; tasks connect in `folder`.

    With the replay engine CUDA ends in between, and is made anew; with the native one it stays.
    """

    def __init__(self, folder: Path, engine: Engine = Engine.NATIVE) -> None:
        self.engine = engine
        self.path = folder / "checkpoint.sock"
        self.done = 0
        self.coordinator = Coordinator(folder / "task.sock")
        self.coordinator.listener.settimeout(None)
        self.tasks: dict[int, Connection] = {}
        self.asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.asked.bind(str(self.path))
        self.asked.listen()
        self.threads = [threading.Thread(target=body) for body in (self._accept, self._answer)]
        for thread in self.threads:
            thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer = self.coordinator.listener.accept()[0]
                try:
                    task = Connection(peer)
                except (OSError, WireError):  # a program that ended at once
                    peer.close()
                    continue
                for gone in self.coordinator.connections:
                    gone.close()
                self.coordinator.connections = [task]
                self.tasks = {task.hello.pid: task}

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.asked.accept()
                with peer:
                    pid = int(peer.recv(20))
                    peer.sendall(self.checkpoint(pid).encode() if pid else b"")

    def checkpoint(self, pid: int) -> str:
        """What went wrong, in a word. Neither what refuses nor a broken context can be saved."""
        wait_until(lambda: pid in self.tasks, f"a connection of {pid}")
        task, ghost = self.tasks[pid], Ghost()
        between = (Message.STRIP, Message.REBUILD) if self.engine is Engine.REPLAY else ()
        try:
            with ghost.theirs:
                begun = task.ask(Message.EXPORT, fds=(ghost.theirs.fileno(),))
            for name, reply in (
                ("EXPORT", lambda: begun),
                ("GATE", lambda: task.gate(engine=self.engine)),
                ("HANDOVER", lambda: task.ask(Message.HANDOVER)),
                *((step.name, partial(task.ask, step)) for step in between),
                ("MAPBACK", lambda: map_back(task, ghost)),
                ("OPEN", lambda: task.ask(Message.OPEN)),
            ):
                answer = reply()
                if answer.status == Status.REFUSED or answer.driver_result in STICKY:
                    return ""
                if answer.status != Status.OK:
                    return f"{name}: {Status(answer.status).name} {answer.detail}"
            self.done += 1
            return ""
        finally:
            ghost.close()

    def close(self) -> None:
        for listener in (self.asked, self.coordinator.listener):
            listener.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.asked.close()
        self.coordinator.close()
