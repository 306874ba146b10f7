"""A coordinator and a ghost that take the memory of a running program and give it back."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
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
from tests.emu.replay_cases_graphs import UNREADABLE

BROKEN = r"a CUDA context whose work has failed \(CUDA_ERROR_\w+\)"

# What drawn programs do that each engine refuses by name.
EXPECTED: dict[Engine, tuple[str, ...]] = {
    Engine.NATIVE: (),
    Engine.REPLAY: (
        "cuDeviceSetMemPool",
        "memory from cuMemCreate that is not plain device memory",
        "the addresses of module variables: counter",  # asked for after a launch of its library
        "a context with attributes of a thread's default stream (cuStreamSetAttribute)",
        *(f"a {kind} object of an array that has ended" for kind in ("texture", "surface")),
        "a graph executable of which a kernel, an event or memory has ended",
        "a graph executable where every context has ended",
        *(f"a graph{kind} {lost.why}" for lost in UNREADABLE for kind in ("", " executable")),
    ),
}


class Checkpoints:
    """Listens at `path` for programs that ask, one at a time; tasks connect in `folder`.

    With the replay engine CUDA ends in between, and is made anew; with the native one it stays.
    """

    def __init__(self, folder: Path, engine: Engine = Engine.NATIVE) -> None:
        self.engine = engine
        self.path = folder / "checkpoint.sock"
        self.done = 0
        self.refused: Counter[str] = Counter()  # by what the answer says
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
        """What went wrong, in a word. Neither what refuses nor a broken context can be saved: the
        answer to GATE says so, before anything has changed."""
        wait_until(lambda: pid in self.tasks, f"a connection of {pid}")
        task, ghost = self.tasks[pid], Ghost()
        replays = self.engine is Engine.REPLAY
        taking = Message.LEND if replays else Message.HANDOVER
        between = (Message.STRIP, Message.REBUILD) if replays else ()
        try:
            with ghost.theirs:
                begun = task.ask(Message.EXPORT, fds=(ghost.theirs.fileno(),))
            for name, reply in (
                ("EXPORT", lambda: begun),
                ("GATE", lambda: task.gate(engine=self.engine)),
                ("HANDOVER", lambda: task.ask(taking)),
                *((step.name, partial(task.ask, step)) for step in between),
                ("MAPBACK", lambda: map_back(task, ghost)),
                ("OPEN", lambda: task.ask(Message.OPEN)),
            ):
                answer = reply()
                if name == "GATE" and answer.status == Status.REFUSED:
                    self.refused[answer.detail] += 1
                    return ""
                if answer.status != Status.OK:
                    return f"{name}: {Status(answer.status).name} {answer.detail}"
            self.done += 1
            return ""
        finally:
            ghost.close()

    def take_unexpected(self) -> list[str]:
        """Refusals for other reasons than drawn programs have, each told once."""
        one = "|".join(map(re.escape, EXPECTED[self.engine]))
        expected = re.compile(f"({one})(, ({one}))*|{BROKEN}")
        found = [said for said in self.refused if not expected.fullmatch(said)]
        for said in found:
            del self.refused[said]
        return found

    def share_refused(self) -> float:
        refused = self.refused.total()
        return refused / (refused + self.done)

    def close(self) -> None:
        for listener in (self.asked, self.coordinator.listener):
            listener.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self.asked.close()
        self.coordinator.close()
