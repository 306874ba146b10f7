"""Who answers for a block that a task has imported (native/intercept/ipc.h)."""

from __future__ import annotations

import socket
import struct

from coordinator.blocks import Token

ADDRESS = "\0flowgpu-ipc-{:016x}{:016x}"
"""Where the owner listens, an abstract address; handlers_ipc.cpp makes it."""


def owner_of(token: Token) -> int | None:
    """The process that has this token and blocks for others; None where it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        try:
            asking.connect(ADDRESS.format(*token))
        except OSError:
            return None
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[0])
