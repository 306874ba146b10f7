"""Which Unix sockets are connected to which, as the kernel's socket diagnosis tells (sock_diag(7)).

/proc/net/unix has the paths that they are bound to, and no connections.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
DONE, ERROR = 3, 2  # types of a netlink message
SHOW_NAME, SHOW_PEER = 1, 4
NAME, PEER = 0, 2  # types of an attribute
HEADER, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
QUESTION = struct.Struct("=BBHIII8s")  # unix_diag_req
ANSWER = struct.Struct("=BBBBI8s")  # unix_diag_msg
RECEIVE_BYTES = 1 << 16
SECONDS = 2.0
STREAMS = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)


def peers() -> dict[int, tuple[int, bytes]]:
    """Peers of the sockets of this network namespace that cannot be connected again as they are.

    Gives, by a socket's inode, the peer's inode and the path that the peer is bound to, as an
    accepted one is; empty if it is bound to none. A datagram socket connects again to any peer that
    has a name. Raises OSError where the kernel does not tell.
    """
    connected: dict[int, int] = {}
    names: dict[int, bytes] = {}
    streams = set()
    for inode, kind, attributes in _sockets():
        names[inode] = attributes.get(NAME, b"").rstrip(b"\0")
        if kind in STREAMS:
            streams.add(inode)
        if PEER in attributes:
            connected[inode] = int.from_bytes(attributes[PEER][:4], "little")
    return {
        inode: (peer, names.get(peer, b""))
        for inode, peer in connected.items()
        if inode in streams or not names.get(peer)
    }


def _sockets() -> Iterator[tuple[int, int, dict[int, bytes]]]:
    """Inode, kind and attributes of each Unix socket."""
    question = QUESTION.pack(
        socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, SHOW_NAME | SHOW_PEER, b"\xff" * 8
    )
    header = HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(SECONDS)
        kernel.send(header + question)
        while True:
            for kind, body in parts(HEADER, kernel.recv(RECEIVE_BYTES)):
                if kind == DONE:
                    return
                if kind == ERROR:
                    raise OSError(-int.from_bytes(body[:4], "little", signed=True), "sock_diag")
                _, of_kind, _, _, inode, _ = ANSWER.unpack_from(body)
                yield inode, of_kind, dict(parts(ATTRIBUTE, body[ANSWER.size :]))


def parts(head: struct.Struct, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and contents of each part of a message; each begins with its size, then its type."""
    at = 0
    while at + head.size <= len(data):
        size, kind = head.unpack_from(data, at)[:2]
        if size < head.size:
            raise OSError(errno.EPROTO, "sock_diag")
        yield kind, data[at + head.size : at + size]
        at += size + 3 & ~3
