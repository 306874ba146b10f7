"""Messages between the nodes of a job: JSON in frames over TCP, which nobody else can send.

Both ends have the job's secret. Each sends 32 random bytes first, and a key of HMAC-SHA256 over
both is that of the connection. Each frame is

    length (4 bytes, big-endian) | HMAC of direction, number and text (32 bytes) | text

so that a frame cannot be made, changed, left out, repeated or sent back without the secret. What is
said is not encrypted: names, paths, counts and digests, and no memory of the job.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]

PROTOCOL = b"flowgpu nodes 1\n"
"""What both ends say first; another number for what another version would not understand."""
NONCE_BYTES = 32
MAC_BYTES = hashlib.sha256().digest_size
FIRST_BYTES = 1 << 14
"""A frame from somebody who has not shown the secret yet is no longer."""
MOST_BYTES = 16 << 20
HANDSHAKE_SECONDS = 10.0
BEAT_SECONDS = 5.0
SILENT_SECONDS = 3 * BEAT_SECONDS
"""After which the other end counts as gone."""
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">BQ")


class StreamEnded(Exception):
    """The connection has ended, or is not what it should be; the message says why."""


class NodeStream:
    """One end of a connection. One thread receives; any may send."""

    def __init__(self, connection: socket.socket, secret: str, *, dialled: bool) -> None:
        """Shake hands. Owns `connection` from the call on. Raises StreamEnded."""
        self._connection = connection
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self._ours, self._theirs = (0, 1) if dialled else (1, 0)
        try:
            connection.settimeout(HANDSHAKE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.urandom(NONCE_BYTES)
            connection.sendall(PROTOCOL + nonce)
            if self._read(len(PROTOCOL)) != PROTOCOL:
                raise StreamEnded("the other end is no node of this version of FlowGPU")
            other = self._read(NONCE_BYTES)
            both = nonce + other if dialled else other + nonce
            self._key = hmac.digest(secret.encode(), both, "sha256")
        except OSError as error:
            self.close()
            raise StreamEnded(_words(error)) from error
        except StreamEnded:
            self.close()
            raise

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises StreamEnded."""
        text = json.dumps({"is": kind, **fields}).encode()
        with self._sending:
            mac = self._mac(self._ours, self._sent, text)
            self._sent += 1
            try:
                self._connection.sendall(_LENGTH.pack(len(text)) + mac + text)
            except OSError as error:
                raise StreamEnded(_words(error)) from error

    def receive(self) -> Message:
        """Wait for the next message. Raises StreamEnded."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > (MOST_BYTES if self._received else FIRST_BYTES):
            raise StreamEnded("a message is too long")
        mac = self._read(MAC_BYTES)
        text = self._read(length)
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._received, text)):
            raise StreamEnded("the other end has not the job's secret (FLOWGPU_JOIN)")
        self._received += 1
        try:
            self._connection.settimeout(SILENT_SECONDS)
        except OSError as error:  # another thread has closed it
            raise StreamEnded(_words(error)) from error
        message = json.loads(text)
        if not isinstance(message, dict) or not isinstance(message.get("is"), str):
            raise StreamEnded("a message is none")
        return message

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        """End the connection; who receives from it hears of it. A second call does nothing."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster
        self._connection.close()

    def _mac(self, direction: int, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, _NUMBER.pack(direction, number) + text, "sha256")

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                got = self._connection.recv(min(count - len(data), 1 << 16))
            except OSError as error:
                raise StreamEnded(_words(error)) from error
            if not got:
                raise StreamEnded("the connection has ended")
            data += got
        return bytes(data)


def dial(address: tuple[str, int], secret: str, seconds: float) -> NodeStream:
    """Connect to who listens there. Raises StreamEnded."""
    try:
        connection = socket.create_connection(address, seconds)
    except OSError as error:
        raise StreamEnded(_words(error)) from error
    return NodeStream(connection, secret, dialled=True)


def _words(error: OSError) -> str:
    return "it is silent" if isinstance(error, TimeoutError) else error.strerror or str(error)
