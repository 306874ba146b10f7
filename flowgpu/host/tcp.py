"""TCP connections of a process tree: which stay within it, and what CRIU does not see of them.

CRIU dumps each socket by itself. While the tree is stopped a connection within it is still: what
one end has sent the other has received. `lost` says where an image shows that it was not so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import struct
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flowgpu.host import criu_sockets, unix_sockets
from flowgpu.host.addresses import is_ours
from flowgpu.host.proctree import fd_targets, user_of
from flowgpu.host.sockets import socket_of

PROC = Path("/proc")
ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1 = 1, 2, 3, 4
TCP_REPAIR = 19
_SOCK_DESTROY, _REQUEST_ACK = 21, 5  # of sock_diag(7)
TIME_WAIT, CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 6, 7, 8, 9, 10, 11
WAITING = (ESTABLISHED, SYN_RECV, CLOSE_WAIT)
"""In which one is that nobody has accepted."""
FIN_WAIT2 = 5
SENDING = (FIN_WAIT1, LAST_ACK, CLOSING)
"""In which a closed end is that may have data on the way."""
CLOSED = (*SENDING, FIN_WAIT2)
_LOOPBACK_6 = "00000000000000000000000001000000"
_HERTZ = 100  # in which the kernel tells times in these tables
_SENT_SECONDS = 0.001
_WAIT_SECONDS, _REUSE_SECONDS, _LOOK_SECONDS = 60.0, 1.0, 0.05
"""How long the kernel keeps the ends of a closed connection, and when loopback's are free again."""


class Row(NamedTuple):
    """A socket of the kernel's table. Addresses are as it writes them; `inode` is 0 when no
    process has the socket."""

    local: str
    remote: str
    state: int
    unsent: int
    left_seconds: float
    inode: int


class Connection(NamedTuple):
    """An end that a process of the tree has."""

    pid: int
    fd: int
    row: Row

    def __str__(self) -> str:
        return f"as fd {self.fd} (process {self.pid})"


@dataclass(frozen=True)
class Found:
    """Connections of a tree. `ends`: all that its processes have. `pairs`: the inodes of both ends
    of those within it, each way.

    `waiting` is for a process of the tree to accept it; `leaving` has data on the way to the tree
    of which the sender has closed its end. Neither is in an image. The rest is within the tree: a
    pair, or one whose other end is gone. `unaccepted`: ends of the tree that no process has yet.
    """

    ends: list[Connection]
    pairs: dict[int, int]
    outside: list[Connection]
    waiting: list[Connection]
    leaving: list[Connection]
    unaccepted: list[Row] = field(default_factory=list)

    @property
    def passing(self) -> str:
        """What an image would not have and is soon elsewhere, in words; empty if there is none."""
        if self.waiting:
            return f"a TCP connection that no process has accepted yet {self.waiting[0]}"
        if self.leaving:
            return f"data that a closed end has sent to a TCP connection {self.leaving[0]}"
        return ""


def look(pids: Iterable[int]) -> Found:
    """The connections of these processes, which are in one network namespace."""
    pids = list(pids)
    held: dict[int, tuple[int, int]] = {}
    for pid in pids:
        for fd, target in fd_targets(pid):
            if target.startswith("socket:[") and _may_be_tcp(pid, fd):
                held[int(target[8:-1])] = pid, fd
    lines = _lines(pids[0]) if held else []
    if not any(int(line[9]) in held for line in lines):
        return Found([], {}, [], [], [])
    rows = [*map(_row, lines)]
    by_ends = {(row.local, row.remote): row for row in rows}
    listening = {_port(row.local) for row in rows if row.state == LISTEN and row.inode in held}
    found = Found([], {}, [], [], [])
    found.unaccepted.extend(
        row
        for row in rows
        if not row.inode and row.state in WAITING and _port(row.local) in listening
    )
    for row in rows:
        if row.inode not in held or row.state in (LISTEN, CLOSE):
            continue
        connection = Connection(*held[row.inode], row)
        found.ends.append(connection)
        peer = by_ends.get((row.remote, row.local))
        if row.state == SYN_SENT or (peer is None and not _is_here(row)):
            found.outside.append(connection)
        elif peer is None or peer.state == TIME_WAIT:
            continue
        elif peer.inode in held:
            found.pairs[row.inode] = peer.inode
        elif peer.inode:
            found.outside.append(connection)
        elif peer.state in SENDING:
            if _is_leaving(peer):
                found.leaving.append(connection)
        elif peer.state in WAITING:
            within = _port(peer.local) in listening
            (found.waiting if within else found.outside).append(connection)
    return found


def _may_be_tcp(pid: int, fd: int) -> bool:
    """What a socket says of itself. The kernel's table takes milliseconds where there is memory for
    many connections, and jobs have sockets of other kinds."""
    try:
        return b"TCP" in os.getxattr(f"{PROC}/{pid}/fd/{fd}", "system.sockprotoname")
    except OSError:
        return True


def closed(pid: int) -> list[Row]:
    """Ends of connections to elsewhere that no process has any more, the tree's and others'."""
    orphans = (_row(line) for line in _lines(pid) if line[9] == "0")
    return [row for row in orphans if row.state in CLOSED and not _is_here(row)]


def _is_leaving(end: Row) -> bool:
    """True if data of a closed end are on the way."""
    return end.state in SENDING and end.unsent > 1  # one is the end itself


Ends = tuple[str, str]
"""The two of a connection: the local one, and the other."""


class Elsewhere:
    """The ends that other nodes of the job have of TCP connections."""

    def __init__(self, said: Iterable[Mapping[str, Any]], seen: Container[int] | None) -> None:
        """`said` is what `tell` has made on them. `seen`: inodes of the connections that are old
        enough to be in it; None: all are."""
        self._seen = seen
        self._held: set[Ends] = set()
        self._waiting: set[Ends] = set()
        self._closed: set[Ends] = set()
        self._leaving: set[Ends] = set()
        for one in said:
            self._closed |= {(remote, local) for local, remote in one["closed"]}
            self._leaving |= {(remote, local) for local, remote in one["leaving"]}
            self._held |= {(remote, local) for local, remote in one["held"]}
            self._waiting |= {(remote, local) for local, remote in one["waiting"]}

    def has(self, one: Connection) -> bool:
        """True if they have the other end of this connection, or had it until they closed it."""
        return one.row[:2] in self._held | self._closed

    def may_have(self, one: Connection) -> bool:
        """True if they have it, or that is not known yet."""
        return one.row[:2] in self._held | self._closed | self._waiting or (
            self._seen is not None and one.row.inode not in self._seen
        )

    def waits(self, one: Connection) -> bool:
        """True if no process there has accepted it yet."""
        return one.row[:2] in self._waiting

    def leaves(self, one: Connection) -> bool:
        """True if data of the other end, which they have closed, are on the way."""
        return one.row[:2] in self._leaving


NOWHERE = Elsewhere((), None)


def tell(found: Found, ended: Sequence[Row] = ()) -> dict[str, list[Ends]]:
    """For other nodes: the ends of which they may have the other ones."""
    return {
        "held": [one.row[:2] for one in found.outside],
        "waiting": [row[:2] for row in found.unaccepted],
        "closed": [row[:2] for row in ended],
        "leaving": [row[:2] for row in ended if _is_leaving(row)],
    }


def _table(pid: int | str) -> list[Row]:
    return [*map(_row, _lines(pid))]


def _lines(pid: int | str) -> list[list[str]]:
    """The kernel's tables of TCP, in words."""
    lines: list[list[str]] = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # it has ended, or the kernel has no IPv6
            text = (PROC / f"{pid}/net/{name}").read_text()
            lines += map(str.split, text.splitlines()[1:])
    return lines


def _row(line: list[str]) -> Row:
    unsent, timer = line[4].partition(":")[0], line[5].partition(":")[2]
    return Row(
        line[1].removeprefix(criu_sockets.MAPPED),
        line[2].removeprefix(criu_sockets.MAPPED),
        int(line[3], 16),
        int(unsent, 16),
        int(timer, 16) / _HERTZ,
        int(line[9]),
    )


def _port(address: str) -> str:
    return address.rpartition(":")[2]


def _is_here(row: Row) -> bool:
    """True if the other end is one of this machine's addresses."""
    same = row.local.rpartition(":")[0] == row.remote.rpartition(":")[0]
    return same or _is_loopback(row.remote)


def wait_sent(pid: int, connections: Iterable[Connection], seconds: float) -> None:
    """Wait until the other ends of these have what was sent, for so long at most."""
    inodes = {one.row.inode for one in connections}
    deadline = time.monotonic() + seconds
    while inodes and time.monotonic() < deadline:
        if not any(row.unsent for row in _table(pid) if row.inode in inodes):
            return
        time.sleep(_SENT_SECONDS)


def lost(images_dir: Path, pairs: Mapping[int, int]) -> bool:
    """True if bytes were on their way between the dumps of two ends. Raises ImageDamaged."""
    streams = criu_sockets.tcp_streams(images_dir)
    return any(
        inode in streams and peer in streams and _is_lost(streams[inode], streams[peer])
        for inode, peer in pairs.items()
    )


def _is_lost(sender: criu_sockets.TcpStream, receiver: criu_sockets.TcpStream) -> bool:
    # The end of what is sent counts as a byte, which the queue's length has not.
    return (sender.written - receiver.received) % (1 << 32) > sender.queued + 1


Streams = list[tuple[Ends, criu_sockets.TcpStream]]


def streams(images_dir: Path, connections: Iterable[Connection]) -> Streams:
    """For other nodes: what an image has of these connections. Raises ImageDamaged."""
    found = criu_sockets.tcp_streams(images_dir)
    return [(one.row[:2], found[one.row.inode]) for one in connections if one.row.inode in found]


def lost_between(ours: Streams, theirs: Iterable[Streams]) -> bool:
    """As `lost`, of what our processes have sent to those of other nodes."""
    there = {
        (remote, local): criu_sockets.TcpStream(*stream)
        for node in theirs
        for (local, remote), stream in node
    }
    return any(ends in there and _is_lost(stream, there[ends]) for ends, stream in ours)


def note(ends: Iterable[Connection], notes: Path) -> None:
    """Write down what CRIU is going to change of these sockets, for `let_go`. Raises OSError."""
    rows = []
    for end in ends:
        with contextlib.suppress(OSError), socket_of(end.pid, end.fd) as found:  # it has ended
            reuse = found.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
            rows.append((end.pid, end.fd, end.row.inode, reuse))
    if rows:
        notes.write_text(json.dumps(rows))


def let_go(notes: Path, but: Container[int] = ()) -> None:
    """Let the sockets that a dump has left in repair mode (tcp(7)) be as they were.

    Those of the inodes `but` stay so: with their processes they end at once and without a word, and
    a restore may have their addresses. Raises OSError.
    """
    if not notes.exists():
        return
    for pid, fd, inode, reuse in json.loads(notes.read_text()):
        with contextlib.suppress(OSError), socket_of(pid, fd) as found:  # it has ended
            repairs = found.getsockopt(socket.IPPROTO_TCP, TCP_REPAIR)
            if repairs and os.fstat(found.fileno()).st_ino == inode and inode not in but:
                found.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 0)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    notes.unlink()


def hindered(images_dir: Path, seconds: float) -> str:
    """Why the image's sockets cannot be made again, in words; empty if they can.

    Waits until nobody has the ends of its connections: the kernel has those of closed ones for a
    minute, on loopback for a second. It lets go of them at once for who may ask for that.

    Waits for the ports at which its sockets listen as well. What is left of a connection that one
    without SO_REUSEADDR had accepted keeps its port. So does a connection that another program has
    made from there meanwhile.
    """
    wanted = criu_sockets.tcp_ends(images_dir)
    listeners = criu_sockets.listeners(images_dir)
    for ends in wanted.values():
        if not is_ours(ends.host):
            return f"this machine has not the address of its TCP connection from {ends.words}"
    deadline = time.monotonic() + seconds
    while wanted or listeners:
        rows = _table("self")
        taken = [row for row in rows if row[:2] in wanted and not _is_reusable(row)]
        held = {one.port for one in listeners if _is_held(one)}
        if not taken and not held:
            break
        late = time.monotonic() >= deadline
        if taken and (late or any(row.inode for row in taken)):
            return f"its TCP connection from {wanted[taken[0][:2]].words} is another's"
        holders = [row for row in rows if int(_port(row.local), 16) in held]
        holders.sort(key=lambda row: row.state != LISTEN)
        if held and (late or (holders and holders[0].state == LISTEN)):
            return f"its TCP port {min(held)} is another's{_who(holders)}"
        with contextlib.suppress(OSError):  # the kernel cannot, or we may not
            for row in taken + [row for row in holders if row.state == TIME_WAIT]:
                _destroy(row)
        time.sleep(_LOOK_SECONDS)
    return ""


def _is_held(one: criu_sockets.Listener) -> bool:
    """True if CRIU could not bind a socket there, as it does with SO_REUSEADDR."""
    family = socket.AF_INET6 if ":" in one.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, one.shared)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, one.only_6)
            probe.bind((one.host, one.port))
    except OSError as error:  # CRIU says what else may be
        return error.errno == errno.EADDRINUSE
    return False


def _who(rows: Sequence[Row]) -> str:
    """A process that has one of these sockets, in words; empty where that is not known."""
    for row in rows:
        if row.inode and (pid := user_of(f"socket:[{row.inode}]")):
            return f" (process {pid})"
    return ""


def _destroy(row: Row) -> None:
    """End a socket that no process has. Raises OSError."""
    ends = [end.partition(":") for end in (row.local, row.remote)]
    ports = struct.pack(">HH", *(int(port, 16) for _, _, port in ends))
    mapped = len(ends[0][0]) == 8 and criu_sockets.MAPPED  # a table for IPv6 may have it, too
    for before in {"", mapped or ""}:
        hosts = [
            struct.pack("=4I", *(int(part, 16) for part in re.findall("." * 8, f"{host:0<32}")))
            for host in (before + end[0] for end in ends)
        ]
        family = socket.AF_INET if len(before + ends[0][0]) == 8 else socket.AF_INET6
        body = struct.pack("=4BI", family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ports
        body += hosts[0] + hosts[1] + bytes(4) + b"\xff" * 8
        length = unix_sockets.HEADER.size + len(body)
        question = unix_sockets.HEADER.pack(length, _SOCK_DESTROY, _REQUEST_ACK, 1, 0)
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM, unix_sockets.NETLINK_SOCK_DIAG
        ) as kernel:
            kernel.settimeout(unix_sockets.SECONDS)
            kernel.send(question + body)
            kernel.recv(4096)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    return host == _LOOPBACK_6 or (len(host) == 8 and host.endswith("7F"))


def _is_reusable(row: Row) -> bool:
    """True if the kernel lets a program use the ends of a closed connection again already."""
    waited = _WAIT_SECONDS - row.left_seconds
    return row.state == TIME_WAIT and _is_loopback(row.local) and waited > _REUSE_SECONDS
