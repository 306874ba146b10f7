"""Addresses of hosts that an image has, and where they are on the hosts of a restore.

A host that lacks an address of the image gives it another one: in CRIU's images of sockets, and in
a table of each process (native/exec/addresses.h), by which programs go on with what they know. Each
node of a job chooses for its own addresses, and tells the others.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from flowgpu.host import unix_sockets
from flowgpu.host.proctree import PROC
from flowgpu.image.manifest import Address
from flowgpu.launch import ADDRESSES, EXEC_HOOKS

Moves = Mapping[str, str]
"""Addresses of the image, and what each is here."""

NOWHERE = "192.0.2.1"
"""An address for documents, which is of no host."""
MAGIC = b"flowgpu-hosts-1\0"
_HEAD = struct.Struct("=16sQQQQQ")  # AddressTable
_COUNT_AT = _HEAD.size - 8
_ROW_BYTES = 32
_GET_ADDRESSES = 22  # RTM_GETADDR
_ANSWER = struct.Struct("=BBBBI")  # ifaddrmsg
_ADDRESS, _LOCAL = 1, 2
_LINK = 253  # scopes from here on: of one network, or of this host alone
_MAPPED = b"\0" * 10 + b"\xff\xff"


def here(path: str) -> list[Address]:
    """Those of this network namespace's interfaces that others may reach, `path` first. Raises
    OSError."""
    return sorted(_interfaces(), key=lambda one: one.host != path)


def own_toward(host: str = "") -> str:
    """This host's end of what is sent to the host, or to all that is outside; empty if nothing
    leads there."""
    to = host if host not in ("", "0.0.0.0", "::") else NOWHERE
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(to, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as tried:
                tried.connect(place)  # which sends nothing
                return str(tried.getsockname()[0])
    return ""


def _interfaces() -> Iterable[Address]:
    header, ask = unix_sockets.HEADER, _ANSWER.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    size = header.size + len(ask)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(unix_sockets.SECONDS)
        kernel.send(header.pack(size, _GET_ADDRESSES, unix_sockets.REQUEST_DUMP, 1, 0) + ask)
        while True:
            for kind, body in unix_sockets.parts(header, kernel.recv(unix_sockets.RECEIVE_BYTES)):
                if kind == unix_sockets.DONE:
                    return
                if kind == unix_sockets.ERROR:
                    raise OSError(-int.from_bytes(body[:4], "little", signed=True), "rtnetlink")
                _, _, _, scope, index = _ANSWER.unpack_from(body)
                found = dict(unix_sockets.parts(unix_sockets.ATTRIBUTE, body[_ANSWER.size :]))
                host = found.get(_LOCAL) or found.get(_ADDRESS)
                if host and scope < _LINK:
                    yield Address(socket.if_indextoname(index), str(ipaddress.ip_address(host)))


def is_ours(host: str) -> bool:
    """True if a socket of this host may have the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as tried:
            tried.bind((host, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


@dataclass
class Choice:
    """What a host gives for addresses of the image that were its own."""

    moves: dict[str, str] = field(default_factory=dict)
    """Those that it has itself are among them."""
    lacking: list[str] = field(default_factory=list)
    """For which there is nothing."""


def choose(
    saved: Sequence[Address],
    used: Iterable[str],
    now: Sequence[Address],
    path: str,
    alone: bool,
    given: Moves = MappingProxyType({}),
    is_here: Callable[[str], bool] = is_ours,
) -> Choice:
    """For each address that the image's host had, or that its sockets use.

    `given` comes before all. Else what the host has itself stays; then in this order: what leads
    where the old one has led (`path`, this host's end), what the interface of that name has, `path`
    again, and any. Where `path` is one of loopback, all nodes are on this host, and each address
    has one of loopback. So it has in a job of one node (`alone`) where there is nothing else.
    One of loopback that the job has by that goes back to where others reach it.
    """
    found = Choice()
    old = {one.host: one.interface for one in saved}
    used = {*used}
    wanted = {host: old.get(host, "") for host in (*old, *sorted(used - {*old}))}
    way = [path] if path and not is_loopback(path) else []
    for host in wanted:
        if host in given or (is_here(host) and not (way and is_loopback(host))):
            found.moves[host] = given.get(host, host)
    for host, interface in wanted.items():
        if host in found.moves:
            continue
        if path and not way and not alone:
            candidates = [_loopback(host)]
        else:
            led = way if saved and host == saved[0].host else []
            same = [one.host for one in now if one.interface == interface]
            candidates = [*led, *same, *way, *(one.host for one in now)]
            candidates += [_loopback(host)] if alone else []
        fitting = [one for one in candidates if (":" in one) == (":" in host)]
        free = [one for one in fitting if one not in found.moves.values()]
        if fitting:
            found.moves[host] = (free or fitting)[0]
        elif host in used:
            found.lacking.append(host)
    return found


def is_loopback(host: str) -> bool:
    """True for an address by which a host reaches itself alone."""
    return ipaddress.ip_address(host).is_loopback


def _loopback(host: str) -> str:
    """An address of this host alone, and hardly another one's."""
    if ":" in host:
        return "::1"
    _, second, *rest = host.split(".")
    return ".".join(("127", str(int(second) | 128), *rest))


@dataclass(frozen=True)
class Agreement:
    """What addresses of the image are, by what all nodes say."""

    own: dict[str, str]
    """Those that this node had."""
    moves: dict[str, str]
    """Those of all nodes."""
    unclear: frozenset[str]
    """Another node says something else of these."""


def agree(path: str, own: Moves, others: Iterable[tuple[str, Moves]]) -> Agreement:
    """Each node says by which address it is reached (`path`), and what it has chosen.

    Nodes that all have one path are on one host: there each old address has one of loopback. What
    several nodes had, as the address of a bridge, means this node's own.
    """
    others = [*others]
    on_one = bool(others) and all(other == path for other, _ in others)

    def apart(moves: Moves) -> dict[str, str]:
        return {
            known: _loopback(known) if on_one and known != now == path else now
            for known, now in moves.items()
        }

    said: dict[str, set[str]] = {}
    for _, moves in others:
        for known, now in apart(moves).items():
            said.setdefault(known, set()).add(now)
    ours = apart(own)
    clear = {known: next(iter(now)) for known, now in said.items() if len(now) == 1}
    found = {**clear, **ours}
    unclear = frozenset(known for known, now in said.items() if now != {found.get(known)})
    return Agreement(ours, found, unclear)


def moved(moves: Moves) -> dict[str, str]:
    """Those that are another address now."""
    return {known: now for known, now in moves.items() if known != now}


def _composed(before: Sequence[tuple[bytes, bytes]], moves: Moves) -> list[tuple[bytes, bytes]]:
    """A table that was right before these moves, after them.

    What a program knew first comes first: it is what it is told. One that is back where it was
    keeps the rows, since programs may have been started with what was right before.
    """
    packed = {_packed(known): _packed(now) for known, now in moves.items()}
    rows = [(known, packed.get(now, now)) for known, now in before]
    names = {known for known, _ in rows}
    fresh = [(known, now) for known, now in packed.items() if known not in names]
    taken = {now for known, now in fresh if known != now}
    rows += [(known, now) for known, now in fresh if known == now and now in taken]
    return rows + [(known, now) for known, now in fresh if known != now]


def _packed(host: str) -> bytes:
    found = ipaddress.ip_address(host)
    return found.packed if found.version == 6 else _MAPPED + found.packed


def _text(host: bytes) -> str:
    found = ipaddress.IPv6Address(host)
    return str(found.ipv4_mapped or found)


def tell(pids: Iterable[int], moves: Moves) -> None:
    """Write the moves into the tables of these stopped processes. Raises OSError.

    One that has not our library knows nothing of them.
    """
    for pid in pids:
        if (at := _table_of(pid)) is not None:
            _write(pid, at, moves)


def _table_of(pid: int) -> int | None:
    """Where the process has its table; None if it has none."""
    try:
        lines = (PROC / str(pid) / "maps").read_text().splitlines()
    except ProcessLookupError:  # it is dead, and its parent has not looked yet
        return None
    for line in lines:
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[1].startswith("rw") and Path(words[5]).name == EXEC_HOOKS:
            begin, end = (int(word, 16) for word in words[0].split("-"))
            place = _read(pid, begin, end - begin).find(MAGIC)
            if place >= 0:
                return begin + place
    return None


def _write(pid: int, at: int, moves: Moves) -> None:
    _, capacity, rows_at, text_bytes, text_at, count = _HEAD.unpack(_read(pid, at, _HEAD.size))
    data = _read(pid, rows_at, min(count, capacity) * _ROW_BYTES)
    before = [(data[n : n + 16], data[n + 16 : n + 32]) for n in range(0, len(data), _ROW_BYTES)]
    rows = _composed(before, moves)
    words = ",".join(f"{_text(known)}={_text(now)}" for known, now in rows)
    text = f"{ADDRESSES}={words}".encode() + b"\0"
    if len(rows) > capacity or len(text) > text_bytes:
        raise OSError(errno.E2BIG, f"process {pid} has a table of {capacity} addresses")
    with open(PROC / str(pid) / "mem", "r+b", buffering=0) as memory:
        for place, new in (
            (rows_at, b"".join(known + now for known, now in rows)),
            (text_at, text),
            (at + _COUNT_AT, struct.pack("=Q", len(rows))),
        ):
            os.pwrite(memory.fileno(), new, place)


def _read(pid: int, at: int, size: int) -> bytes:
    with open(PROC / str(pid) / "mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, at)
