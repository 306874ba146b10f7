"""The way back of tasks: each gets what it lacks once, whatever fails on the way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from threading import Timer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator import reach, tasks
from coordinator.bringup import BringUp
from coordinator.session import Session
from coordinator.task_state import TaskState
from coordinator.tasks import IS_CURRENT, TaskError
from flowgpu import wire
from flowgpu.host.proctree import is_stopped, send
from flowgpu.wire import MapbackBytes, Message, Status
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

FIRST, SECOND = 4194301, 4194302  # larger than any process id here
WAITS, RUNS = 1, 0  # as HELLO says it


class FakeTask:
    """A task that notes what it is asked, and fails where `fails` says."""

    def __init__(self, pid: int, asked: list[tuple[int, Message]], resumed: int = WAITS) -> None:
        self.pid, self.hello = pid, SimpleNamespace(resumed=resumed)
        self.asked, self.again, self.there = asked, False, True
        self.fails: list[Status | None] = []
        self.got: list[tuple[MapbackBytes, int]] = []
        """What each MAPBACK said of the bytes, and how many blocks it brought."""
        self.page = SimpleNamespace(managed_bytes=0)
        self.nccl = None

    def connected(self) -> bool:
        return self.there

    def request(
        self,
        kind: Message,
        deadline: float,
        packet: bytes | None = None,
        fds: Sequence[int] = (),
        **_: Any,
    ) -> wire.Reply:
        self.asked.append((self.pid, kind))
        for fd in fds:
            count = 0
            with socket.socket(fileno=os.dup(fd)) as blocks:
                while (found := wire.split(blocks.recv(1 << 16)))[0] is not Message.END:
                    count += found[1]
            self.got.append((MapbackBytes(wire.split(packet or b"")[1]), count))
        if self.fails:
            status = self.fails.pop(0)
            self.there = status is not None
            raise TaskError(self.pid, kind, status, "as the test says")
        return wire.Reply(kind, 0, 0, 0, 0, 0, 0, 0, "")


class Channel:
    """Knows the next connection of each task."""

    def __init__(self, *following: FakeTask) -> None:
        self.following = {task.pid: task for task in following}

    def wait_resumed(self, pids: list[int], deadline: float) -> list[FakeTask]:
        return [self.following[pid] for pid in pids if pid in self.following]

    def wait_again(self, lost: list[FakeTask], deadline: float) -> list[FakeTask]:
        return [self.following[task.pid] for task in lost]


@pytest.fixture
def asked() -> list[tuple[int, Message]]:
    return []


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The processes that have not ended."""
    found = {FIRST, SECOND}
    monkeypatch.setattr(tasks, "serves", found.__contains__)
    monkeypatch.setattr(tasks, "DYING_SECONDS", 0.0)
    return found


@pytest.fixture
def bring(living: set[int]) -> Callable[..., BringUp]:
    def made(channel: Channel, *there: FakeTask, again: float = 0.0) -> BringUp:
        job = SimpleNamespace(channel=channel, ids_elsewhere=None)
        session = Session(cast(Any, job), cast(Any, None), deadline=time.monotonic() + 10)
        found = BringUp(session, again)
        found.tasks = [cast(Any, task) for task in there]
        return found

    return made


def all_back(back: BringUp) -> None:
    back.rebuild()
    back.map_back()
    back.open()
    assert back.having(*TaskState) == back.having(TaskState.CONNECTED)


def test_each_task_gets_what_it_lacks(bring: Any, asked: Any) -> None:
    back = bring(Channel(), FakeTask(FIRST, asked), FakeTask(SECOND, asked))
    back.expect([FIRST], TaskState.STRIPPED)
    back.expect([SECOND], TaskState.LENT)
    all_back(back)
    steps = [Message.REBUILD, Message.MAPBACK, Message.OPEN]
    assert [kind for pid, kind in asked if pid == FIRST] == steps
    assert [kind for pid, kind in asked if pid == SECOND] == [Message.OPEN]


def test_processes_that_are_expected_are_waited_for(bring: Any, asked: Any) -> None:
    back = bring(Channel(FakeTask(FIRST, asked)))
    back.expect([FIRST], TaskState.AWAY)
    all_back(back)
    assert asked == [(FIRST, Message.MAPBACK), (FIRST, Message.OPEN)]


def test_one_that_ends_before_it_connects_wants_nothing(bring: Any, asked: Any) -> None:
    back = bring(Channel(FakeTask(FIRST, asked)))
    back.expect([FIRST, SECOND], TaskState.AWAY)
    back.map_back()
    back.open()
    assert {pid for pid, _ in asked} == {FIRST}


def test_a_second_try_asks_only_those_that_have_not_got_it(bring: Any, asked: Any) -> None:
    first, second = FakeTask(FIRST, asked), FakeTask(SECOND, asked)
    second.fails = [Status.DRIVER]
    back = bring(Channel(), first, second, again=10.0)
    back.expect([FIRST, SECOND], TaskState.AWAY)
    back.map_back()
    assert sorted(asked) == sorted([(FIRST, Message.MAPBACK), *2 * [(SECOND, Message.MAPBACK)]])


def test_what_is_mapped_early_needs_no_blocks_when_the_bytes_are_there(
    bring: Any, asked: Any
) -> None:
    first, second = FakeTask(FIRST, asked), FakeTask(SECOND, asked)
    first.hello.replay, second.hello.replay = IS_CURRENT, IS_CURRENT - 1
    back = bring(Channel(), first, second)
    for pid in (FIRST, SECOND):
        ours, theirs = os.pipe()
        os.close(theirs)
        back._session.table.add(pid, [wire.Block(7, 1 << 21, 1 << 21, 0, 0, 0, 0)], [ours])
    back.expect([FIRST, SECOND], TaskState.AWAY)
    back.map_early()
    assert (first.got, second.got) == ([(MapbackBytes.TO_COME, 1)], [])
    back.map_back()
    assert first.got[1:] == [(MapbackBytes.THERE, 0)]
    assert second.got == [(MapbackBytes.THERE, 1)]
    back.open()
    assert back.having(*TaskState) == back.having(TaskState.CONNECTED)
    back._session.table.close()


def test_without_time_for_it_an_answer_that_says_no_is_not_asked_again(
    bring: Any, asked: Any
) -> None:
    task = FakeTask(FIRST, asked)
    task.fails = [Status.DRIVER]
    back = bring(Channel(), task)
    back.expect([FIRST], TaskState.AWAY)
    with pytest.raises(TaskError):
        back.map_back()
    assert asked == [(FIRST, Message.MAPBACK)]


def test_a_task_whose_connection_ends_is_asked_by_its_next_one(bring: Any, asked: Any) -> None:
    task = FakeTask(FIRST, asked)
    task.fails = [None]
    back = bring(Channel(FakeTask(FIRST, asked)), task)
    back.expect([FIRST], TaskState.STRIPPED)
    back.rebuild()
    assert asked == 2 * [(FIRST, Message.REBUILD)]
    assert back.having(TaskState.AWAY) == [FIRST]


def test_a_task_that_has_opened_its_gate_by_itself_is_asked_nothing(bring: Any, asked: Any) -> None:
    task = FakeTask(FIRST, asked)
    task.there = False
    back = bring(Channel(FakeTask(FIRST, asked, RUNS)), task)
    back.expect([FIRST], TaskState.GATED)
    back.open()
    assert asked == []
    assert back.having(TaskState.CONNECTED) == [FIRST]


def test_a_task_that_ends_on_the_way_is_no_failure(
    bring: Any, asked: Any, living: set[int]
) -> None:
    task = FakeTask(FIRST, asked)
    task.fails = [None]
    living.discard(FIRST)
    back = bring(Channel(), task)
    back.expect([FIRST], TaskState.GATED)
    back.open()
    assert asked == [(FIRST, Message.OPEN)]


def test_a_task_that_was_stopped_is_so_again_before_the_next_step_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine a stop takes its time, and a step would find a process that runs."""

    def late(number: int, pids: list[int]) -> None:
        Timer(0.2 if number == signal.SIGSTOP else 0.0, send, [number, pids]).start()

    monkeypatch.setattr(reach, "send", late)
    monkeypatch.setattr(reach, "MOMENT_SECONDS", SECONDS)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            wait_for(lambda: is_stopped(process.pid), "its stop")
            with reach.let_run([process.pid]):
                wait_for(lambda: not is_stopped(process.pid), "it to go on")
            assert is_stopped(process.pid)
        finally:
            process.kill()
