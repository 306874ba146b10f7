"""What the coordinator keeps of a task's memory: allocations of a hand-over, and its live set."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.blocks import BlockTable, Handover
from coordinator.plan import Plan
from coordinator.reach import obstacle
from coordinator.sampler import Sampler
from coordinator.session import Shared
from coordinator.task_group import TaskGroup
from coordinator.tasks import Task, TaskChannel, TaskError
from flowgpu import live, wire
from flowgpu.options import CheckpointOptions
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for


def allocations(first: int, count: int) -> bytes:
    rows = [wire.Allocation(4096 * i, i + 1, (1 << 60) + i) for i in range(first, first + count)]
    return wire.packet(wire.Message.ALLOCATIONS, b"".join(row.pack() for row in rows), count)


@contextlib.contextmanager
def handover() -> Iterator[tuple[socket.socket, Handover]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = Handover(7, ours, BlockTable(), lambda batch: None, lambda live: None)
    with theirs:
        yield theirs, made
        made.close()


def test_allocations_are_kept_in_the_order_in_which_they_come() -> None:
    with handover() as (task, made):
        task.send(allocations(0, wire.ALLOCATIONS_PER_MESSAGE))
        task.send(allocations(wire.ALLOCATIONS_PER_MESSAGE, 3))
        task.send(wire.packet(wire.Message.END))
        made.wait_end(time.monotonic() + SECONDS)
        rows = made.allocations()
    count = wire.ALLOCATIONS_PER_MESSAGE + 3
    assert rows.tolist() == [[4096 * i, i + 1, (1 << 60) + i] for i in range(count)]


def test_a_task_without_memory_sends_none() -> None:
    with handover() as (task, made):
        task.send(wire.packet(wire.Message.END))
        made.wait_end(time.monotonic() + SECONDS)
        assert made.allocations().shape == (0, 3)


def test_rows_of_another_size_are_refused() -> None:
    with handover() as (task, made):
        task.send(wire.packet(wire.Message.ALLOCATIONS, bytes(40), 2))
        with pytest.raises(wire.WireError, match="ALLOCATIONS of 2 rows"):
            made.wait_end(time.monotonic() + SECONDS)


def page(version: int = wire.VERSION) -> int:
    fd = os.memfd_create("page")
    values = wire.ControlPage(wire.MAGIC, version, 0, 1, *[0] * 9)
    os.write(fd, values.pack().ljust(4096, b"\0"))
    return fd


def live_set(total: int, magic: int = live.MAGIC) -> int:
    fd = os.memfd_create("live")
    os.ftruncate(fd, live.BYTES)
    sums = [total] + [0] * (live.DEVICES - 1)
    os.pwrite(fd, live.Header.FORMAT.pack(magic, live.VERSION, 0, 0, 0, 1, 1, 0, 0, 0, 0, *sums), 0)
    return fd


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[TaskChannel]:
    made = TaskChannel(tmp_path / "task.sock")
    made.listen()
    yield made
    made.stop_listening()
    made.forget()


def greet(folder: Path, *fds: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.fspath(folder / "task.sock"))
    socket.send_fds(connection, [wire.Hello(os.getpid(), 13000, 0, 1, 0, 0, 0).pack()], list(fds))
    for fd in fds:
        os.close(fd)
    return connection


def greeted(channel: TaskChannel) -> Task:
    deadline = time.monotonic() + SECONDS
    while not channel.tasks():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return channel.tasks()[0]


def test_a_task_with_a_stub_tells_its_live_bytes(channel: TaskChannel, tmp_path: Path) -> None:
    shared = live_set(4096)
    with greet(tmp_path, page(), os.dup(shared)):
        task = greeted(channel)
        assert task.live_bytes() == 4096
        os.pwrite(shared, (512).to_bytes(8, "little"), live.Header.FORMAT.size - 8)
        assert task.live_bytes() == 4096 + 512
        task.close()
        assert task.live_bytes() is None
    os.close(shared)


def test_a_connection_that_is_over_when_it_is_looked_at_takes_no_other_s_place(
    channel: TaskChannel, tmp_path: Path
) -> None:
    """A task that is called lets go of the connection that it has made by itself just before."""
    with greet(tmp_path, page()):
        task = greeted(channel)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            hello, fd = wire.Hello(os.getpid(), 13000, 0, 1, 0, 0, 0).pack(), page()
            socket.send_fds(theirs, [hello], [fd])
            os.close(fd)
        channel._welcome(ours)
        assert channel.tasks() == [task] and task.connected()


def test_a_task_without_a_stub_tells_none(channel: TaskChannel, tmp_path: Path) -> None:
    with greet(tmp_path, page()):
        task = greeted(channel)
        assert task.live is None
        assert task.live_bytes() is None


def test_pages_are_prepared_for_what_is_live_and_what_nobody_knows(
    channel: TaskChannel, tmp_path: Path
) -> None:
    """A framework's 10 GiB in use of 30, and 20 GiB that the program allocated itself."""
    gib, base = 1 << 30, 1 << 45
    shared = live_set(10 * gib)
    for granule in range(30):  # a bit in each of its allocations
        at = (base >> live.GRANULE_BITS) + (granule * gib >> live.GRANULE_BITS)
        os.pwrite(shared, b"\xff", live.SEEN_AT + at // 8)
    with greet(tmp_path, page(), os.dup(shared)):
        job = SimpleNamespace(gpu="emulated")
        shared_parts = Shared(job, None, plan=Plan(CheckpointOptions(tmp_path)))
        group = TaskGroup(shared_parts, lambda action: None)
        group.tasks = [greeted(channel)]
        blocks = [wire.Block(i, base + i * gib, gib, 0, 0, 0, 0) for i in range(50)]
        table = group._shared.table
        table.add(os.getpid(), blocks, [os.dup(shared) for _ in blocks])
        assert group.in_use() == 50 * gib  # nothing is known of its steps
        group.sampler = Sampler(group.tasks, 0.0)
        wait_for(lambda: group.sampler.at_minimum() is not None, "a sample")
        assert 30 * gib < group.in_use() < 31 * gib
        group.sampler.close()
        table.close()
    os.close(shared)


def test_a_live_set_of_another_version_makes_all_memory_active(
    channel: TaskChannel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with greet(tmp_path, page(), live_set(0, magic=7)):
        assert greeted(channel).live is None
    assert "counts as active: the live set has another magic or version" in caplog.text


def test_who_is_of_another_version_is_refused_once_in_the_log(
    channel: TaskChannel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pid = os.getpid()
    for _ in range(3):
        with greet(tmp_path, page(version=wire.VERSION + 1)) as connection:
            connection.settimeout(SECONDS)
            assert connection.recv(1) == b""
    assert channel.tasks() == []
    assert channel.refused([1, pid]) == (pid, "the control page has another magic or version")
    assert caplog.text.count("refused") == 1
    with pytest.raises(TaskError, match="control page"):
        channel.wait_resumed([pid], time.monotonic() + SECONDS)
    with greet(tmp_path, page()):
        greeted(channel)
        assert channel.refused([pid]) is None


def test_a_task_that_has_ended_is_not_called_unreachable(tmp_path: Path) -> None:
    """A worker ends in the moment in which it is looked at: its root folder goes first."""
    job = SimpleNamespace(name="job", gpu="emulated")
    shared = Shared(job, None, plan=Plan(CheckpointOptions(tmp_path)))
    group = TaskGroup(shared, lambda action: None)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert obstacle(process.pid, 0, managed=False) == "its root folder has no /proc"
        page = SimpleNamespace(blocks=0, managed_bytes=0)
        group.tasks = [SimpleNamespace(pid=process.pid, page=page, again=False)]
        group._refuse_unreachable([])
