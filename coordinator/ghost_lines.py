"""Lines of JSON with descriptors, which the coordinator and its ghost send each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

READ_BYTES = 1 << 18
MAX_FDS = 253
"""One message has so many at most: the kernel takes no more."""


def send_line(connection: socket.socket, fields: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Send a line with descriptors, which stay the caller's. Raises OSError."""
    line = json.dumps({**fields, "fds": len(fds)}, default=vars).encode() + b"\n"
    sent = socket.send_fds(connection, [line], list(fds))
    connection.sendall(line[sent:])


def read_lines(connection: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each line's fields and its descriptors, which are the caller's, until the other end's end.

    A line says in `fds` how many it has. Raises OSError.
    """
    buffer = b""
    fds: list[int] = []
    while True:
        data, received, _, _ = socket.recv_fds(connection, READ_BYTES, MAX_FDS)
        if not data:
            return
        fds += received
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            count = fields.pop("fds")
            own, fds = fds[:count], fds[count:]
            yield fields, own
