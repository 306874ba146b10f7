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
_CLOSED, _LISTENS = 7, 10  # states of a TCP socket
_PORT, _HOSTS = 7, (11, 12)  # of a socket's entry: the local port, and the hosts of both ends
_NOT_SENT = 12  # how many bytes of a connection, in its own file
_STREAM = "tcp-stream-{}.img"  # by the inode
MAPPED = "0000000000000000FFFF0000"
"""What an IPv4 address has before it in the kernel's tables of IPv6."""


class TcpStream(NamedTuple):
    """A connection as it was when its socket was dumped: numbers of the last byte that it had
    received and that it was to send, and how many bytes the other end may not have yet."""

    received: int
    queued: int
    written: int


class TcpEnds(NamedTuple):
    """The address of the end that the image has, both ends in words, and the other address."""

    host: str
    words: str
    other: str = ""


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
        data = path.read_bytes()  # the message, then the contents of the queues
        size = int.from_bytes(data[MAGIC_BYTES : MAGIC_BYTES + 4], "little")
        entry = Message(path, data[MAGIC_BYTES + 4 :][:size])
        inode = int(path.stem.rpartition("-")[2], 16)
        found[inode] = TcpStream(entry.number(2), entry.number(3), entry.number(4))
    return found


def note_as_sent(images_dir: Path, inodes: Iterable[int]) -> None:
    """Let the image have of these connections that all data of theirs was sent.

    What was not, CRIU sends at a restore, and the other end is not there yet. What was sent and
    not received the kernel sends again.
    """
    for inode in inodes:
        path = images_dir / _STREAM.format(f"{inode:x}")
        data = path.read_bytes()
        end = MAGIC_BYTES + 4 + int.from_bytes(data[MAGIC_BYTES : MAGIC_BYTES + 4], "little")
        entry = data[MAGIC_BYTES + 4 : end]
        if Message(path, entry).number(_NOT_SENT):
            entry += bytes([_NOT_SENT << 3, 0])
            head = data[:MAGIC_BYTES] + len(entry).to_bytes(4, "little")
            path.write_bytes(head + entry + data[end:])


def tcp_ends(images_dir: Path) -> dict[tuple[str, str], TcpEnds]:
    """The TCP connections of the image, by both ends as /proc/net/tcp writes them."""
    found = {}
    for file in messages(images_dir / "files.img"):
        entry = file.message(_INET)
        if entry and (images_dir / _STREAM.format(f"{entry.number(2):x}")).exists():
            ends, hosts, plain = [], [], []
            for addresses, port in ((11, 7), (12, 8)):
                numbers = entry.numbers(addresses)
                host = "".join(f"{number:08X}" for number in numbers)
                ends.append(f"{host.removeprefix(MAPPED)}:{entry.number(port):04X}")
                packed = b"".join(number.to_bytes(4, "little") for number in numbers)
                hosts.append(str(ipaddress.ip_address(packed)))
                plain.append(str(_host(numbers)))
            words = f"{hosts[0]} port {entry.number(7)} to {hosts[1]} port {entry.number(8)}"
            found[ends[0], ends[1]] = TcpEnds(hosts[0], words, plain[1])
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
        after = b"".join(before[at:end] for key, at, end in spans(before) if key not in _HOSTS)
        for key in _HOSTS:
            for (word,) in struct.iter_unpack("<I", moved(found.numbers(key))):
                after += bytes([key << 3]) + as_varint(word)
        return replaced(data, _INET, before, after)

    path = images_dir / "files.img"
    original = path.read_bytes()
    path.unlink()
    path.write_bytes(original)
    change_entries(path, changed)


def exclusive_ports(images_dir: Path) -> set[str]:
    """Ports at which sockets of the image listen without SO_REUSEADDR, as /proc/net/tcp writes
    them."""
    listening = (file.message(_INET) for file in messages(images_dir / "files.img"))
    return {
        f"{entry.number(7):04X}"
        for entry in listening
        if entry
        and entry.number(6) == _LISTENS
        and not ((options := entry.message(14)) and options.number(7))
    }


def close_connections(images_dir: Path, inodes: Container[int]) -> None:
    """Let these TCP sockets be without a connection in the image, as new ones are."""

    def closed(entry: Message, data: bytes) -> bytes:
        found = entry.message(_INET)
        if found is None or found.number(2) not in inodes:
            return data
        (images_dir / _STREAM.format(f"{found.number(2):x}")).unlink(missing_ok=True)
        before = entry.text(_INET)
        return replaced(
            data, _INET, before, before + bytes([6 << 3, _CLOSED, 7 << 3, 0, 8 << 3, 0])
        )

    change_entries(images_dir / "files.img", closed)
