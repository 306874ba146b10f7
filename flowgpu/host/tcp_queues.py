"""What connections of an image have sent and nobody has received yet.

CRIU gives it to each socket that it makes. The kernel sends it again 0.2 s later, though the socket
is in repair mode (tcp(7)). Where the other end is not made by then, the answer ends the connection.
It is the same with the end of a side: one that has received it says so. So CRIU makes the sockets
open both ways, with nothing to send, and they get the rest once all of them are there.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flowgpu.host import criu_sockets, tcp
from flowgpu.host.sockets import socket_of

TCP_REPAIR_QUEUE, TCP_SEND_QUEUE = 20, 2
SO_SNDBUFFORCE, SO_BUF_LOCK = 32, 72
FIN_AND_ACK = 0x11
END_SECONDS, LOOK_SECONDS = 5.0, 0.0005
SIDES = {
    tcp.ESTABLISHED: (False, False),
    tcp.FIN_WAIT1: (True, False),
    tcp.CLOSE_WAIT: (False, True),
    tcp.LAST_ACK: (True, True),
    tcp.CLOSING: (True, True),
}
"""By the state of a connection: this side closes, and the other end may not know; it has closed."""


class _Queue(NamedTuple):
    image: Path
    inode: int
    closes: bool
    closed: bool


class SendQueues:
    """Those of an image. False if there is none."""

    def __init__(self, images_dir: Path) -> None:
        """Raises ImageDamaged."""
        streams = criu_sockets.tcp_streams(images_dir)
        self._queues: dict[tuple[str, str], _Queue] = {}
        for ends, found in criu_sockets.tcp_ends(images_dir).items():
            sides = SIDES.get(found.state, (False, False))
            if any(sides) or (found.state in SIDES and streams[found.inode].queued):
                path = criu_sockets.stream(images_dir, found.inode).resolve()
                self._queues[ends] = _Queue(path, found.inode, *sides)

    def __bool__(self) -> bool:
        return bool(self._queues)

    def leave_out(self, folder: Path) -> None:
        """Let a folder of links to the images have none of them. Raises ImageDamaged."""
        sides = {one.inode: (one.closes, one.closed) for one in self._queues.values()}
        criu_sockets.leave_out_sent(folder, sides)

    def put_back(self, pids: Iterable[int]) -> None:
        """Give them to the sockets of these processes, which CRIU has made and not let go.

        Raises OSError, ImageDamaged.
        """
        made = {end.row[:2]: end for end in tcp.look(pids).ends} if self else {}
        for ends, queue in self._queues.items():
            if ends not in made:
                raise OSError(f"there is no TCP connection from {ends[0]} to {ends[1]}")
            sent = criu_sockets.sent(queue.image, closes=queue.closes)
            with socket_of(made[ends].pid, made[ends].fd) as found:
                try:
                    if queue.closed:
                        _receive_end(found, sent)
                    _put(found, sent, closes=queue.closes)
                except OSError as error:
                    # The process of the other end is gone, which has said so.
                    over = error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
                    if not (queue.closed and over):
                        raise


def _put(found: socket.socket, sent: criu_sockets.Sent, *, closes: bool) -> None:
    old = len(sent.data) - sent.new
    found.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR_QUEUE, TCP_SEND_QUEUE)
    _send(found, sent.data[:old])
    if sent.new or closes:
        found.setsockopt(socket.IPPROTO_TCP, tcp.TCP_REPAIR, 0)
        _send(found, sent.data[old:])
        if closes:
            found.shutdown(socket.SHUT_WR)
        found.setsockopt(socket.IPPROTO_TCP, tcp.TCP_REPAIR, 1)  # as CRIU has left it


def _receive_end(found: socket.socket, sent: criu_sockets.Sent) -> None:
    """Let a socket receive what it had received: that the other side is closed."""
    peer, own = found.getpeername(), found.getsockname()
    source, target = _plain(peer[0]), _plain(own[0])
    kind = socket.AF_INET if target.version == 4 else socket.AF_INET6
    ports = struct.pack(">HH", peer[1], own[1])
    numbers = struct.pack(">II", sent.end, sent.first)
    segment = ports + numbers + struct.pack(">BBH", 5 << 4, FIN_AND_ACK, sent.window)
    pseudo = source.packed + target.packed + struct.pack(">II", 20, socket.IPPROTO_TCP)
    segment += struct.pack(">HH", _checksum(pseudo + segment + bytes(4)), 0)
    if kind == socket.AF_INET:  # the kernel fills in length and checksum
        head = struct.pack(">BBHHHBBH", 0x45, 0, 0, 0, 0, 64, socket.IPPROTO_TCP, 0)
    else:
        head = struct.pack(">IHBB", 6 << 28, len(segment), socket.IPPROTO_TCP, 64)
    with socket.socket(kind, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        raw.sendto(head + source.packed + target.packed + segment, (str(target), 0))
    deadline = time.monotonic() + END_SECONDS
    while found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == tcp.ESTABLISHED:
        if time.monotonic() >= deadline:
            raise OSError(f"a TCP connection from {target} to {source} has not got its end again")
        time.sleep(LOOK_SECONDS)


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address of IPv4 that one of IPv6 stands for, or itself."""
    found = ipaddress.ip_address(host)
    return (found.version == 6 and found.ipv4_mapped) or found


def _checksum(data: bytes) -> int:
    """RFC 1071."""
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _send(found: socket.socket, data: bytes) -> None:
    at = _send_some(found, data, 0)
    if at < len(data):  # in other pieces it takes more memory than it did
        lock = found.getsockopt(socket.SOL_SOCKET, SO_BUF_LOCK)
        size = found.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        # The kernel doubles what it is given.
        found.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size + len(data))
        at = _send_some(found, data, at)
        found.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, size // 2)
        found.setsockopt(socket.SOL_SOCKET, SO_BUF_LOCK, lock)
    if at < len(data):
        raise OSError(f"a TCP connection takes {at} of {len(data)} bytes that it had sent")


def _send_some(found: socket.socket, data: bytes, at: int) -> int:
    """How many bytes are in the queue once it takes no more."""
    view = memoryview(data)
    try:
        while at < len(data):
            at += found.send(view[at:], socket.MSG_DONTWAIT)
    except BlockingIOError:
        pass
    return at
