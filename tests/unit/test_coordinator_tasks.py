"""A task's connection as the coordinator has it."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
import time

from coordinator import line
from coordinator.tasks import Task
from flowgpu import wire
from flowgpu.host.sockets import PEEK_BEGINS
from tests.patience import SECONDS


class SlowPage(mmap.mmap):
    """While it is read for the first time, somebody else closes the task."""

    other: threading.Thread | None = None

    def __getitem__(self, key: object) -> bytes:
        other, self.other = self.other, None
        if other is not None:
            other.start()
            other.join(0.2)
        return super().__getitem__(key)  # type: ignore[call-overload]


def test_a_task_is_closed_by_two_at_once() -> None:
    """Who asked it and got no answer closes it, and who welcomes it when it connects again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = SlowPage(-1, mmap.PAGESIZE)
    page.write(struct.pack("=I", wire.MAGIC))
    task = Task(1, ours, wire.Hello(1, 13000, 0, 1, 0, 0, 0), page)
    other = page.other = threading.Thread(target=task.close)
    task.close()
    other.join(SECONDS)
    assert page.closed and not task.connected() and task.page.magic == wire.MAGIC
    theirs.close()


def test_a_task_that_detaches_has_closed_its_end_when_that_is_told() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    task = Task(1, ours, wire.Hello(1, 13000, 0, 1, 0, 0, 0), mmap.mmap(-1, mmap.PAGESIZE))

    def answer() -> None:
        theirs.recv(1 << 16)
        reply = wire.Reply(wire.Message.DETACH, wire.Status.OK, 0, 0, 0, 0, 0, 0, "")
        theirs.send(reply.pack())
        time.sleep(0.2)  # as on a machine with much to do
        theirs.close()

    other = threading.Thread(target=answer)
    other.start()
    task.detach(time.monotonic() + SECONDS)
    assert theirs.fileno() < 0
    other.join(SECONDS)


def test_who_calls_while_another_call_waits_calls_by_the_same_end() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    card = wire.packet(wire.Message.CALL)
    near.send(card)
    calls = [line.call(os.getpid()) for _ in range(3)]
    for call in calls:
        assert call is not None
        data, fds, *_ = socket.recv_fds(near, len(card), 1)
        assert data == card
        with call, socket.socket(fileno=fds[0]) as theirs:
            call.send(b"it")
            assert theirs.recv(2) == b"it"
    assert far.recv(len(card)) == card
    assert not select.select([far], [], [], 0)[0]
    near.close()
    far.close()


def test_who_looks_for_a_card_moves_no_peek_of_the_program() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        far.setsockopt(*PEEK_BEGINS, 0)
        near.send(wire.packet(wire.Message.CALL))
        assert line.call(os.getpid()) is None
        assert far.getsockopt(*PEEK_BEGINS) == 0
