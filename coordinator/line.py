"""Call a task by its line (native/intercept/line.h): a connection is handed into the task.

Nothing that a program may have taken away from itself is needed for it: no path, environment, root
folder, user, or right to make sockets. The caller needs what CRIU needs, the right to trace.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

from flowgpu import wire
from flowgpu.host.probes import libc
from flowgpu.host.proctree import fd_targets
from flowgpu.host.sockets import NOWHERE, PEEK_BEGINS

SYS_PIDFD_GETFD = 438  # asm/unistd_64.h


def call(pid: int) -> socket.socket | None:
    """Our end of a new connection, on which the task says HELLO; None where no line is found."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        for end, card in _far_ends(pid):
            with contextlib.suppress(OSError):  # nobody takes the calls that came before
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                # The card has the task's own version. HELLO then says which that is.
                socket.send_fds(end, [card], [theirs.fileno()], flags)
                return ours
    ours.close()
    return None


def _far_ends(pid: int) -> Iterator[tuple[socket.socket, bytes]]:
    """Sockets of a process in which a card waits, with the card."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for fd, target in fd_targets(pid):
            if not target.startswith("socket:"):
                continue
            copy = libc().syscall(SYS_PIDFD_GETFD, process, fd, 0)
            if copy < 0:
                continue  # closed by now, or not ours to take
            try:
                found = socket.socket(fileno=copy)
            except OSError:  # of a kind that Python does not know
                os.close(copy)
                continue
            with found:
                if card := _card(found):
                    yield found, card
    finally:
        os.close(process)


def _card(found: socket.socket) -> bytes:
    """Looks without taking anything: most sockets are the program's."""
    if (found.family, found.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        return b""
    try:
        if found.getsockopt(*PEEK_BEGINS, len(NOWHERE)) != NOWHERE:
            return b""  # the program's, and a look would move it
        peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
        card, _, flags, _ = found.recvmsg(wire.Header.SIZE, 0, peek)
        header = wire.Header.unpack(card)
    except (OSError, ValueError, struct.error):
        return b""
    fits = (header.magic, header.kind) == (wire.MAGIC, wire.Message.CALL)
    is_call = flags & socket.MSG_CTRUNC  # it brings a connection: it waits in the near end
    return card if fits and header.size == len(card) and not is_call else b""
