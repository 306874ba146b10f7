"""A coordinator that plays a script: for each verb a list of events to answer with."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.patience import SECONDS

Event = dict[str, Any]
Answer = Iterable[Event] | Callable[[Event], Iterable[Event]]


def output(data: bytes, stream: str = "stdout") -> Event:
    text = base64.b64encode(data).decode()
    return {"event": "output", "stream": stream, "data": text, "end": 0}


class FakeCoordinator:
    """Serves `path` from threads of this process; `requests` has what was asked, in order."""

    def __init__(self, path: Path, answers: dict[str, Answer]) -> None:
        self.requests: list[Event] = []
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> FakeCoordinator:
        return self

    def __exit__(self, *_: object) -> None:
        # shutdown wakes the accept; close alone would leave its thread there.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *self._threads):
            thread.join(SECONDS)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("r") as stream:
            line = stream.readline()
            if not line:
                return
            request = json.loads(line)
            self.requests.append(request)
            answer = self._answers[request["verb"]]
            for event in answer(request) if callable(answer) else answer:
                try:
                    connection.sendall(json.dumps(event).encode() + b"\n")
                except OSError:
                    return
