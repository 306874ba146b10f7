"""Sockets in the image files of CRIU: what an image has of them, and what is changed there."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowgpu.host.criu_images import (
    MAGIC_BYTES,
    Message,
    as_varint,
    change_entries,
    messages,
    replaced,
    spans,
)

_INET, _UNIX = 4, 16  # of a file's entry
_OUTSIDE = 1 << 0  # of a Unix socket's flags: no process of the image has it
_RIGHTS = 4  # of a packet's entry
_ESTABLISHED, _CLOSED, _LISTENS = 1, 7, 10  # states of a TCP socket
# These are fields of a socket's entry, _HOSTS those of both ends, and one field of its options.
_STATE, _PORT, _HOSTS, _OPTIONS, _ONLY_6, _SHUT = 6, 7, (11, 12), 14, 15, 19
_REUSE_PORT = 17
_READ, _WRITE = 1, 2  # what is shut down
# A connection's own file says how many bytes the program has not read, and up to which number the
# socket has received; how many it has sent or is to send, up to which, and how many it has not. It
# says what the other end takes, and in which unit; what this one takes, and after which byte.
_UNREAD, _RECEIVED, _QUEUED, _WRITTEN, _NOT_SENT = 1, 2, 3, 4, 12
_WINDOW, _SCALE, _TAKES, _TAKEN = 14, 6, 16, 17
_STREAM = "tcp-stream-{}.img"  # by the inode
_NUMBERS = 1 << 32  # that bytes of a connection can have
MAPPED = "0000000000000000FFFF0000"
"""What an IPv4 address has before it in the kernel's tables of IPv6."""


class TcpStream(NamedTuple):
    """A connection as it was when its socket was dumped: numbers of the last byte that it had
    received and that it was to send, and how many bytes the other end may not have yet."""

    received: int
    queued: int
    written: int


class TcpEnds(NamedTuple):
    """The address of the end that the image has, both ends in words, and the other address. `state`
    is the kernel's number."""

    host: str
    words: str
    other: str = ""
    inode: int = 0
    state: int = 0


class Listener(NamedTuple):
    """Where a socket listens. `only_6`: one of IPv6 leaves IPv4 to others. `shared`: others may
    listen there too (SO_REUSEPORT)."""

    host: str
    port: int
    only_6: bool = False
    shared: bool = False


def socket_paths(images_dir: Path) -> tuple[set[Path], set[Path]]:
    """Where Unix sockets of the image are bound, and where those outside are that it sends to."""
    bound: set[Path] = set()
    outside: set[Path] = set()
    for entry in messages(images_dir / "files.img"):
        if unix := entry.message(_UNIX):
            name = unix.text(11).rstrip(b"\0")
            if name.startswith(b"/"):  # others have no name, or an abstract one
                found = outside if unix.number(6) & _OUTSIDE else bound
                found.add(Path(os.fsdecode(name)))
    return bound, outside


def lost_sockets(images_dir: Path) -> set[int]:
    """Inodes of Unix sockets that CRIU cannot restore: they are on their way in others, no process
    has them, and their other end is closed. Raises ImageDamaged."""
    passed: set[int] = set()
    path = images_dir / "sk-queues.img"
    data, at = path.read_bytes() if path.exists() else b"", MAGIC_BYTES
    while at < len(data):  # each message, then the contents of the packet
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        packet = Message(path, data[at + 4 : end])
        for rights in packet.messages(_RIGHTS):
            passed.update(rights.numbers(2))
        at = end + packet.number(2)
    if passed:
        for table in images_dir.glob("fdinfo-*.img"):
            passed -= {entry.number(1) for entry in messages(table)}
    if not passed:
        return set()
    files = (file.message(_UNIX) for file in messages(images_dir / "files.img"))
    return {
        unix.number(2) for unix in files if unix and unix.number(1) in passed and not unix.number(8)
    }


def tcp_streams(images_dir: Path) -> dict[int, TcpStream]:
    """What the image has of each connected TCP socket, by its inode. Raises ImageDamaged."""
    found = {}
    for path in images_dir.glob(_STREAM.format("*")):
        entry, *_ = _stream(path)
        numbers = (entry.number(key) for key in (_RECEIVED, _QUEUED, _WRITTEN))
        found[int(path.stem.rpartition("-")[2], 16)] = TcpStream(*numbers)
    return found


def stream(images_dir: Path, inode: int) -> Path:
    """The file of a connection."""
    return images_dir / _STREAM.format(f"{inode:x}")


def _stream(path: Path) -> tuple[Message, bytes, bytes]:
    """What the file of a connection has: a message, also as bytes, and what is in both queues."""
    data = path.read_bytes()
    end = MAGIC_BYTES + 4 + int.from_bytes(data[MAGIC_BYTES : MAGIC_BYTES + 4], "little")
    entry = data[MAGIC_BYTES + 4 : end]
    return Message(path, entry), entry, data[end:]


def _rewrite(path: Path, entry: bytes, queues: bytes) -> None:
    """Replace the file of a connection, or a link to it."""
    head = path.read_bytes()[:MAGIC_BYTES] + len(entry).to_bytes(4, "little")
    path.unlink()
    path.write_bytes(head + entry + queues)


def note_as_sent(images_dir: Path, inodes: Iterable[int]) -> None:
    """Let the image have of these connections that all data of theirs was sent, for CRIU alone.

    What was not, it sends when it makes the socket, and the other end is not there yet. What was
    sent and not received the kernel sends again.
    """
    for inode in inodes:
        path = stream(images_dir, inode)
        found, entry, queues = _stream(path)
        if found.number(_NOT_SENT):
            _rewrite(path, entry + bytes([_NOT_SENT << 3, 0]), queues)


class Sent(NamedTuple):
    """What a connection has sent, or was to send, that the other end may not have. `new`: how many
    of the bytes it had not sent. `first` is the number of the first. `end`: that of the other
    side's end, which it has received. `window`: what the other end took, in units of the packet."""

    data: bytes
    new: int
    first: int
    end: int
    window: int


def sent(path: Path, *, closes: bool) -> Sent:
    """By the file of a connection, which closes its side, or does not. Raises ImageDamaged."""
    found, _, queues = _stream(path)
    # The end of a side has a number as a byte has.
    first = found.number(_WRITTEN) - found.number(_QUEUED) - closes
    return Sent(
        queues[found.number(_UNREAD) :],
        # The first number is CRIU's own: `note_as_sent` leaves it there.
        next(iter(found.numbers(_NOT_SENT)), 0),
        first % _NUMBERS,
        (found.number(_RECEIVED) - 1) % _NUMBERS,
        min(found.number(_WINDOW) >> found.number(_SCALE), 0xFFFF),
    )


def leave_out_sent(images_dir: Path, sides: Mapping[int, tuple[bool, bool]]) -> None:
    """Let connections be without that in a folder of links to images, and open both ways.

    `sides`: by their inodes, whether this side closes, and the other one has. Raises ImageDamaged.
    """
    for inode, (closes, closed) in sides.items():
        path = stream(images_dir, inode)
        found, entry, queues = _stream(path)
        changes = {_QUEUED: 0, _NOT_SENT: 0, _WRITTEN: sent(path, closes=closes).first}
        if closed:
            changes[_RECEIVED] = (found.number(_RECEIVED) - 1) % _NUMBERS
            if _TAKEN in found:
                changes[_TAKEN] = (found.number(_TAKEN) - 1) % _NUMBERS
                changes[_TAKES] = found.number(_TAKES) + 1
        for key, value in changes.items():
            entry += as_varint(key << 3) + as_varint(value)
        _rewrite(path, entry, queues[: found.number(_UNREAD)])

    def opened(entry: Message, data: bytes) -> bytes:
        found = entry.message(_INET)
        if found is None or found.number(2) not in sides:
            return data
        before = entry.text(_INET)
        after = _without(before, (_STATE, _SHUT)) + bytes([_STATE << 3, _ESTABLISHED])
        closes, closed = sides[found.number(2)]
        if left := found.number(_SHUT) & ~(closes * _WRITE | closed * _READ):
            after += as_varint(_SHUT << 3) + bytes([left])
        return replaced(data, _INET, before, after)

    change_entries(_own(images_dir / "files.img"), opened)


def _without(entry: bytes, keys: Container[int]) -> bytes:
    return b"".join(entry[at:end] for key, at, end in spans(entry) if key not in keys)


def _own(path: Path) -> Path:
    """Let a link to a file of the image be a file that may be changed."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    return path


def tcp_ends(images_dir: Path) -> dict[tuple[str, str], TcpEnds]:
    """The TCP connections of the image, by both ends as /proc/net/tcp writes them."""
    found = {}
    for file in messages(images_dir / "files.img"):
        entry = file.message(_INET)
        if entry and stream(images_dir, entry.number(2)).exists():
            ends, hosts, plain = [], [], []
            for addresses, port in ((11, 7), (12, 8)):
                numbers = entry.numbers(addresses)
                host = "".join(f"{number:08X}" for number in numbers)
                ends.append(f"{host.removeprefix(MAPPED)}:{entry.number(port):04X}")
                packed = b"".join(number.to_bytes(4, "little") for number in numbers)
                hosts.append(str(ipaddress.ip_address(packed)))
                plain.append(str(_host(numbers)))
            words = f"{hosts[0]} port {entry.number(7)} to {hosts[1]} port {entry.number(8)}"
            about = entry.number(2), entry.number(_STATE)
            found[ends[0], ends[1]] = TcpEnds(hosts[0], words, plain[1], *about)
    return found


def local_hosts(images_dir: Path) -> set[str]:
    """Addresses of hosts that sockets of the image are bound to, but those that any host has."""
    found = set()
    for file in messages(images_dir / "files.img"):
        if (entry := file.message(_INET)) and entry.number(_PORT):
            host = _host(entry.numbers(_HOSTS[0]))
            if host and not (host.is_unspecified or host.is_loopback or host.is_multicast):
                found.add(str(host))
    return found


def leads_to(images_dir: Path, hosts: Container[str]) -> str:
    """Both ends, in words, of a TCP connection to one of these that the image has one end of; empty
    if there is none."""
    ends = tcp_ends(images_dir)
    for (local, remote), found in ends.items():
        if (remote, local) not in ends and found.other in hosts:
            return found.words
    return ""


def _host(words: Sequence[int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    if len(packed) not in (4, 16):
        return None
    found = ipaddress.ip_address(packed)
    return (found.version == 6 and found.ipv4_mapped) or found


def move_hosts(images_dir: Path, moves: Mapping[str, str]) -> None:
    """Let both ends of the image's sockets be at other addresses of the same kind. In a folder of
    links the link to the changed file becomes a file."""

    def moved(words: Sequence[int]) -> bytes:
        data = b"".join(word.to_bytes(4, "little") for word in words)
        if now := moves.get(str(_host(words))):
            packed = ipaddress.ip_address(now).packed
            data = data[: -len(packed)] + packed
        return data

    def changed(entry: Message, data: bytes) -> bytes:
        found = entry.message(_INET)
        if found is None:
            return data
        before = entry.text(_INET)
        after = _without(before, _HOSTS)
        for key in _HOSTS:
            for (word,) in struct.iter_unpack("<I", moved(found.numbers(key))):
                after += bytes([key << 3]) + as_varint(word)
        return replaced(data, _INET, before, after)

    change_entries(_own(images_dir / "files.img"), changed)


def listeners(images_dir: Path) -> list[Listener]:
    """Where sockets of the image listen."""
    found = []
    for file in messages(images_dir / "files.img"):
        entry = file.message(_INET)
        if entry and entry.number(_STATE) == _LISTENS and (host := _host(entry.numbers(_HOSTS[0]))):
            options = entry.message(_OPTIONS)
            shared = bool(options and options.number(_REUSE_PORT))
            port, only_6 = entry.number(_PORT), bool(entry.number(_ONLY_6))
            found.append(Listener(str(host), port, only_6, shared))
    return found


def close_connections(images_dir: Path, inodes: Container[int]) -> None:
    """Let these TCP sockets be without a connection in the image, as new ones are."""

    def closed(entry: Message, data: bytes) -> bytes:
        found = entry.message(_INET)
        if found is None or found.number(2) not in inodes:
            return data
        stream(images_dir, found.number(2)).unlink(missing_ok=True)
        before = entry.text(_INET)
        return replaced(
            data, _INET, before, before + bytes([_STATE << 3, _CLOSED, 7 << 3, 0, 8 << 3, 0])
        )

    change_entries(images_dir / "files.img", closed)
