"""What sockets and watches of stopped processes have and CRIU does not keep.

Options and multicast groups are put back. What had come and was not yet taken cannot be, and is
told in words. All is asked of duplicates of the descriptors (pidfd_getfd(2)).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import socket
import struct
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from flowgpu.host import probes
from flowgpu.host.proctree import PROC, fd_targets
from flowgpu.image.manifest import Setting

PIDFD_GETFD = 438  # asm/unistd_64.h
SOL_IP, SOL_IPV6, SOL_TCP, SOL_UDP, SOL_NETLINK = 0, 41, 6, 17, 270
PEEK_BEGINS = socket.SOL_SOCKET, 42  # SO_PEEK_OFF of asm-generic/socket.h
NOWHERE = struct.pack("=i", -1)
"""The value of PEEK_BEGINS of who has not set it."""
MOST_BYTES = 16
"""Size of the longest value of an option."""


def _numbers(text: str) -> tuple[int, ...]:
    """All numbers of a list of numbers and ranges."""
    spans = [[int(end) for end in part.split("-")] for part in text.split()]
    return tuple(number for span in spans for number in range(span[0], span[-1] + 1))


# Options that CRIU 4.2 was seen to forget (tests/emu/test_process_settings.py), by their level.
OPTIONS = {
    socket.SOL_SOCKET: _numbers("1 2 5 10 11 13 18 40-47 49 60 63 64 69 72 74-76 82 83"),
    SOL_IP: _numbers("6-8 10-13 15 18-21 23-26 32-34 49-51"),  # linux/in.h
    SOL_IPV6: _numbers("2-5 8 11 16-19 23 25 29-31 33 49 51 53 56 58 60 62 66 67 70 72-78"),
    SOL_TCP: _numbers("2 4-10 12 13 16-18 23 25 27 30 34 37 44-46"),
    SOL_UDP: _numbers("101-104"),
    SOL_NETLINK: _numbers("3-5 8 10-12"),
}
PROTOCOLS = {socket.IPPROTO_TCP: SOL_TCP, socket.IPPROTO_UDP: SOL_UDP}
INET = {socket.AF_INET: SOL_IP, socket.AF_INET6: SOL_IPV6}
KINDS = {"socket_option", "multicast"}
"""Kinds of settings that this module reads and puts back."""
MCAST_JOIN_GROUP, MCAST_MSFILTER, MCAST_EXCLUDE = 42, 48, 0  # linux/in.h
ADDRESS_BYTES = 128  # of a sockaddr_storage
MOST_SOURCES = 64
# group_req: interface and group; group_filter: both, mode, number of sources, and the sources
GROUP = struct.Struct(f"=I4x{ADDRESS_BYTES}s")
FILTER = struct.Struct(f"=I4x{ADDRESS_BYTES}sII")

Values = dict[tuple[int, int], bytes]  # by level and number


class Look:
    """At every socket and inotify of these processes, once."""

    def __init__(self, pids: Iterable[int]) -> None:
        self.settings: list[Setting] = []
        self.not_kept: list[str] = []
        """What is lost, in words with the process."""
        self._peeks: list[Setting] = []  # that may be CRIU's
        self._usual: dict[tuple[int, int, int], Values] = {}
        self._deleted: set[tuple[int, int]] = set()  # device and inode of files that are open
        held = [(pid, fd, target) for pid in pids for fd, target in fd_targets(pid)]
        for pid, fd, target in held:
            if target.startswith("/") and target.endswith(" (deleted)"):
                with suppress(OSError):
                    found = os.stat(PROC / str(pid) / "fd" / str(fd))
                    self._deleted.add((found.st_dev, found.st_ino))
        seen = set()
        for pid, fd, target in held:
            if target in seen:
                continue
            with suppress(OSError):  # it was killed
                if target.startswith("socket:"):
                    seen.add(target)
                    with socket_of(pid, fd) as found_socket:
                        self._look_at(found_socket, pid, fd)
                elif target == "anon_inode:inotify":
                    self._look_at_inotify(pid, fd)

    def settle(self) -> None:
        """Ask again where a peek begins: CRIU moves that while it reads what waits in a socket, and
        puts it back before it ends."""
        for seen in self._peeks:
            with suppress(OSError), socket_of(seen.threads[0], seen.values[0]) as found:
                if (value := found.getsockopt(*PEEK_BEGINS, MOST_BYTES)) != NOWHERE:
                    self.settings.append(replace(seen, text=value.hex()))

    def _look_at(self, it: socket.socket, pid: int, fd: int) -> None:
        where = f"the socket as fd {fd}"
        if it.family in INET and it.type == socket.SOCK_STREAM:
            if it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if _is_readable(it):
                    self._tell(pid, f"clients that {where} had not accepted")
            elif _is_connected(it):
                return  # a restored job finds it closed
        elif (it.family in INET or it.family == socket.AF_PACKET) and _is_readable(it):
            self._tell(pid, f"what had come to {where} and was not read")
        usual = self._usual_of(it)
        for option, value in _options(it):
            if value != usual.get(option, value):
                found = self._peeks if option == PEEK_BEGINS else self.settings
                found.append(Setting("socket_option", (fd, *option), value.hex(), (pid,)))
        if it.family in INET and it.type != socket.SOCK_STREAM:
            level = INET[socket.AddressFamily(it.family)]
            for name, group in _groups(it, level):
                text = f"{name} {group.hex()}"
                self.settings.append(Setting("multicast", (fd, level), text, (pid,)))

    def _usual_of(self, it: socket.socket) -> Values:
        """What a new socket of the same kind has."""
        kind = int(it.family), int(it.type), it.proto
        if kind not in self._usual:
            self._usual[kind] = {}
            with suppress(OSError), socket.socket(*kind) as fresh:
                self._usual[kind] = dict(_options(fresh))
        return self._usual[kind]

    def _look_at_inotify(self, pid: int, fd: int) -> None:
        info = (PROC / str(pid) / "fdinfo" / str(fd)).read_text()
        watches = re.compile(r"^inotify wd:(\w+) ino:(\w+) sdev:(\w+)", re.MULTILINE)
        for watch, inode, device in watches.findall(info):
            number = int(device, 16)  # as the kernel has it
            if (os.makedev(number >> 20, number & 0xFFFFF), int(inode, 16)) in self._deleted:
                what = f"the watch {int(watch, 16)} of inotify as fd {fd}, of a deleted file"
                self._tell(pid, what)
        copy, unread = duplicate(pid, fd), bytearray(4)
        try:
            fcntl.ioctl(copy, termios.FIONREAD, unread)
        finally:
            os.close(copy)
        if any(unread):
            self._tell(pid, f"events of inotify as fd {fd} that were not read")

    def _tell(self, pid: int, what: str) -> None:
        self.not_kept.append(f"process {pid}: {what}")


def put_back(settings: Iterable[Setting]) -> list[str]:
    """Set what sockets of stopped processes had; in words, what this machine does not take."""
    failed = []
    for setting in settings:
        pid, (fd, level, *option) = setting.threads[0], setting.values
        what = f"option {option[0]} of level {level}" if option else "a multicast group"
        try:
            with socket_of(pid, fd) as found:
                if option:
                    _set_option(found, level, option[0], bytes.fromhex(setting.text))
                else:
                    _join(found, level, setting.text)
        except OSError as error:
            reason = error.strerror or error
            failed.append(f"process {pid}: {what} of the socket as fd {fd} ({reason})")
    return failed


def _set_option(it: socket.socket, level: int, number: int, value: bytes) -> None:
    if _option(it, level, number) != value:
        it.setsockopt(level, number, value)


def _join(it: socket.socket, level: int, text: str) -> None:
    name, _, data = text.rpartition(" ")
    index, asked = socket.if_nametoindex(name), bytes.fromhex(data)
    _, group, mode, sources = FILTER.unpack_from(asked)
    it.setsockopt(level, MCAST_JOIN_GROUP, GROUP.pack(index, group))
    if mode != MCAST_EXCLUDE or sources:
        it.setsockopt(level, MCAST_MSFILTER, struct.pack("=I", index) + asked[4:])


@contextmanager
def socket_of(pid: int, fd: int) -> Iterator[socket.socket]:
    """A socket of another process. Raises OSError."""
    with socket.socket(fileno=duplicate(pid, fd)) as found:
        yield found


def duplicate(pid: int, fd: int) -> int:
    """The descriptor of another process, for who closes it. Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        copy = int(probes.libc().syscall(PIDFD_GETFD, process, fd, 0))
    finally:
        os.close(process)
    if copy < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return copy


def _options(it: socket.socket) -> Iterator[tuple[tuple[int, int], bytes]]:
    levels = [socket.SOL_SOCKET]
    if it.family == socket.AF_NETLINK:
        levels.append(SOL_NETLINK)
    elif it.family in INET:
        levels.append(INET[socket.AddressFamily(it.family)])
        levels += [PROTOCOLS[it.proto]] if it.proto in PROTOCOLS else []
    for level in levels:
        for number in OPTIONS[level]:
            if (value := _option(it, level, number)) is not None:
                yield (level, number), value


def _option(it: socket.socket, level: int, number: int) -> bytes | None:
    with suppress(OSError):
        return it.getsockopt(level, number, MOST_BYTES)
    return None


def _is_readable(it: socket.socket) -> bool:
    poll = select.poll()
    poll.register(it, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))


def _is_connected(it: socket.socket) -> bool:
    with suppress(OSError):
        it.getpeername()
        return True
    return False


def _groups(it: socket.socket, level: int) -> Iterator[tuple[str, bytes]]:
    """Multicast groups that a socket has joined: interface, and struct group_filter."""
    padding = bytes(2 if level == SOL_IP else 6)
    for name, found, address in _joined_here():
        if found == level:
            group = struct.pack("=H", it.family) + padding + address
            with suppress(OSError):  # it is another socket
                index = socket.if_nametoindex(name)
                yield name, _filter(it, level, FILTER.pack(index, group, 0, MOST_SOURCES))


def _filter(it: socket.socket, level: int, asked: bytes) -> bytes:
    """getsockopt(2) with a question, which Python has not. Raises OSError."""
    size = FILTER.size + MOST_SOURCES * ADDRESS_BYTES
    buffer, length = ctypes.create_string_buffer(asked, size), ctypes.c_uint32(size)
    where = it.fileno(), level, MCAST_MSFILTER
    if probes.libc().getsockopt(*where, buffer, ctypes.byref(length)) != 0:
        raise OSError(ctypes.get_errno(), "not a member")
    *_, sources = FILTER.unpack_from(buffer.raw)
    return buffer.raw[: FILTER.size + min(sources, MOST_SOURCES) * ADDRESS_BYTES]


def _joined_here() -> Iterator[tuple[str, int, bytes]]:
    """Groups that this network has joined: interface, level and address."""
    with suppress(OSError):
        name = ""
        for line in (PROC / "self/net/igmp").read_text().splitlines()[1:]:
            words = line.split()
            if line.startswith("\t"):
                yield name, SOL_IP, struct.pack("=I", int(words[0], 16))
            else:
                name = words[1]
    with suppress(OSError):
        for line in (PROC / "self/net/igmp6").read_text().splitlines():
            yield line.split()[1], SOL_IPV6, bytes.fromhex(line.split()[2])
