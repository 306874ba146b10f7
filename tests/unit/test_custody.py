"""coordinator/custody.py: descriptors of blocks lie in a socket pair."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from coordinator.blocks import BATCH, Block
from coordinator.custody import Custody
from flowgpu import wire

Ends = tuple[int, int]


@pytest.fixture
def ends() -> Iterator[Ends]:
    into, out = (s.detach() for s in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield into, out
    os.close(into)
    os.close(out)


@contextmanager
def of(ends: Ends) -> Iterator[Custody]:
    """Custody as a coordinator has it that the keeper has forked."""
    with closing(Custody((os.dup(ends[0]), os.dup(ends[1])))) as custody:
        yield custody


def blocks(pid: int, count: int) -> tuple[list[Block], int]:
    """Blocks that are all one file, and an end that reads EOF once nobody has that."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    made = [
        Block(n, pid, wire.Block(n, n << 21, 1 << 21, 0, 0, 0, 0), os.dup(write))
        for n in range(count)
    ]
    os.close(write)
    return made, read


def is_gone(read: int) -> bool:
    try:
        return os.read(read, 1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize("count", [0, 1, BATCH, 1000])
def test_blocks_outlive_who_has_put_them_there(ends: Ends, count: int) -> None:
    mine, read = blocks(7, count)
    other, read_other = blocks(8, 2)
    with of(ends) as custody:
        custody.put(7, mine)
        custody.put(8, other)
    for block in (*mine, *other):
        os.close(block.fd)
    for _ in range(2):  # the second coordinator may be killed as well
        with of(ends) as custody:
            table, whole = custody.copy()
        assert whole == {7, 8}
        assert [block.row for block in table.of(7)] == [block.row for block in mine]
        assert {os.fstat(block.fd).st_ino for block in table.of(7)} <= {os.fstat(read).st_ino}
        table.close()
        assert (is_gone(read), is_gone(read_other)) == (count == 0, False)
    with of(ends) as custody:
        custody.clear()
        assert is_gone(read) and is_gone(read_other)
        assert custody.copy()[1] == set()
    os.close(read)
    os.close(read_other)


def test_a_part_of_the_blocks_of_a_task_is_none(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, send = iter([False, True]), socket.send_fds

    def some(*arguments: Any) -> int:
        if next(full):
            raise BlockingIOError("it is full")
        return send(*arguments)

    monkeypatch.setattr(socket, "send_fds", some)
    mine, read = blocks(7, BATCH + 1)
    with of(ends) as custody:
        custody.put(7, mine)
        assert caplog.messages == [
            f"{BATCH + 1} blocks of task 7 are kept by nobody else: it is full"
        ]
        table, whole = custody.copy()
        assert (whole, len(table.of(7))) == (set(), BATCH)
        table.close()
        custody.clear()
    for block in mine:
        os.close(block.fd)
    assert is_gone(read)
    os.close(read)


def test_a_host_copy_takes_the_place_of_blocks_and_of_an_earlier_one(ends: Ends) -> None:
    mine, read = blocks(7, BATCH + 1)
    files = [os.memfd_create(name) for name in ("lock", "first", "second")]
    inodes = [os.fstat(fd).st_ino for fd in files]
    with of(ends) as custody:
        assert custody.host() is None
        custody.put(7, mine)
        custody.leave_host(files[1:], files[0])
        custody.put(8, mine[:1])  # of a resume that was not over
        custody.leave_host(files[1:2], files[0])
    for fd in (*files, *(block.fd for block in mine)):
        os.close(fd)
    assert is_gone(read)
    os.close(read)
    with of(ends) as custody:
        found = custody.host()
        assert found is not None
        fds, lock = found
        assert [os.fstat(fd).st_ino for fd in (lock, *fds)] == inodes[:2]
        table, whole = custody.copy()
        assert whole == set() and not table.total_bytes()
        for fd in (lock, *fds):
            os.close(fd)
        custody.clear()
        assert custody.host() is None
