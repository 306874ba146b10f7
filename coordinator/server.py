"""Serves control.sock.

JSON lines, one request a connection (flowgpu/client.py has the table of verbs).
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.output import chunks
from coordinator.polling import readable
from flowgpu.errors import FlowError, InternalError, OtherUser, words_of

log = logging.getLogger(__name__)

REQUEST_BYTES = 1 << 16
REQUEST_SECONDS = 10.0
PROGRESS_SECONDS = 0.1
ACCEPT_SECONDS = 0.1
GONE_SECONDS = 60.0

Fields = dict[str, Any]


class ClientGone(Exception):
    """The client has closed its end."""


class Client:
    """One connection and its request."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._last_progress: tuple[float, str] = (0.0, "")
        self._rate_from: tuple[float, int] = (0.0, 0)

    def request(self) -> Fields:
        """Read the request. Raises OSError, ValueError."""
        return self.next(REQUEST_SECONDS)

    def next(self, seconds: float | None = None) -> Fields:
        """Read what the client says next. Raises OSError, ValueError."""
        self._connection.settimeout(seconds)
        data = b""
        while not data.endswith(b"\n"):
            got = self._connection.recv(REQUEST_BYTES)
            if not got or len(data) > REQUEST_BYTES:
                raise ValueError("the connection ended within a request")
            data += got
        self._connection.settimeout(None)
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("a request is a JSON object")
        return fields

    def send(self, event: str, fields: Fields) -> None:
        """Send one event. Raises ClientGone."""
        try:
            self._connection.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")
        except OSError as error:
            raise ClientGone from error

    def gone(self) -> bool:
        """True if the client has closed its end."""
        try:
            return self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def peer(self) -> int:
        """Process id of the client."""
        credentials = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("iII", credentials)[0])

    def wait_gone(self) -> None:
        """Until the client closes its end."""
        while not self.gone():
            readable(self._connection, seconds=GONE_SECONDS)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell the client how far it is, not more than ten times a second. Never raises."""
        now = time.monotonic()
        last, last_phase = self._last_progress
        if phase != last_phase:
            self._rate_from = (now, done)
        elif now - last < PROGRESS_SECONDS and done < total:
            return
        self._last_progress = (now, phase)
        since, at = self._rate_from
        rate = (done - at) / (now - since) if now > since else 0.0
        with contextlib.suppress(ClientGone):
            self.send("progress", {"phase": phase, "done": done, "total": total, "rate": rate})

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Server:
    """Accepts clients, one thread each, and calls the handler of their verb.

    A handler gives the fields of the `result` event, or None when it has sent its last event
    itself.
    """

    def __init__(
        self, path: Path, job: str, handlers: dict[str, Callable[[Client, Fields], Fields | None]]
    ) -> None:
        """`job`: its name, for messages."""
        self._job = job
        self._handlers = handlers
        self._path = path
        self._threads: set[threading.Thread] = set()
        self.heard = threading.Event()
        """Set once a client has asked for something else than the status."""
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(os.fspath(path))
        os.chmod(path, 0o600)
        self._listener.listen(64)
        threading.Thread(target=self._run, daemon=True, name="control").start()

    def stop(self) -> None:
        """Let nobody connect any more."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def finish(self, seconds: float) -> None:
        """Give clients `seconds` to take what is left for them."""
        deadline = time.monotonic() + seconds
        for thread in list(self._threads):
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # no descriptor is free, for now
                log.error("a client cannot connect: %s", error)
                time.sleep(ACCEPT_SECONDS)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        client = Client(connection)
        try:
            fields = client.request()  # read, or the client sees a closed end and no answer
            check_peer(connection, self._job)
            if fields.get("verb") != "status":  # who looks at all jobs waits for none
                self.heard.set()
            client_answer(client, fields, self._handlers)
        except OtherUser as error:
            with contextlib.suppress(ClientGone):
                client.send("error", error.as_dict())
        except (OSError, ValueError, ClientGone) as error:
            log.debug("client: %s", error)
        finally:
            client.close()
            self._threads.discard(threading.current_thread())


def client_answer(
    client: Client,
    fields: Fields,
    handlers: dict[str, Callable[[Client, Fields], Fields | None]],
) -> None:
    """Run the handler of the request and send its result or its error. Raises ClientGone."""
    try:
        verb = fields.pop("verb", None)
        handler = handlers.get(str(verb))
        if handler is None:
            raise FlowError(reason=f"unknown request {verb!r}")
        result = handler(client, fields)
    except FlowError as error:
        client.send("error", error.as_dict())
    except ClientGone:
        raise
    except Exception as error:
        log.exception("request %s", verb)
        action = f"the request {verb}"
        client.send("error", InternalError(action=action, error=words_of(error)).as_dict())
    else:
        if result is not None:
            client.send("result", result)


def check_peer(connection: socket.socket, job: str) -> None:
    """Only the job's own user and root may ask. Raises OtherUser."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, _ = struct.unpack("iII", credentials)
    if uid not in (os.geteuid(), 0):
        raise OtherUser(job=job, user=uid)


def stream_output(client: Client, output: Any, position: int) -> None:
    """Send the job's output from `position` until its end. Raises ClientGone."""
    for stream, data, end in chunks(output, position):
        if data:
            text = base64.b64encode(data).decode()
            client.send("output", {"stream": stream, "data": text, "end": end})
        elif client.gone():
            raise ClientGone
