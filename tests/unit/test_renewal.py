"""The steps by which communicators are ended and made anew: who is asked what, and when."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import renewal
from coordinator.communicators import HELD_AT, Communicators
from coordinator.reunion import Reunion
from flowgpu import nccl
from flowgpu.wire import Header, Renewal

Asked = list[tuple[Renewal, int]]


class FakeTask:
    """A rank of communicators, which are in one state; `ranks` has its rank in each."""

    def __init__(self, pid: int, state: int, ranks: dict[int, int], asked: Asked) -> None:
        self.pid, self.asked, self.ranks = pid, asked, ranks
        self.fd = os.memfd_create("page")
        os.ftruncate(self.fd, nccl.BYTES)
        head = [nccl.MAGIC, nccl.VERSION, 0, 0, 0, 0, 0, len(ranks), len(ranks), 0, state]
        os.pwrite(self.fd, nccl.Header.FORMAT.pack(*head, 0, 0, 0, 0), 0)
        for number, (communicator, rank) in enumerate(ranks.items()):
            row = communicator, 0, 0, 2, rank, nccl.NO_RANK, nccl.NO_RANK, 1, 0, 0, 0
            os.pwrite(self.fd, nccl.Row.FORMAT.pack(*row), nccl.ROWS_AT + number * nccl.Row.SIZE)
        self.nccl = Communicators(os.dup(self.fd))

    def id_of(self, number: int) -> bytes:
        return os.pread(self.fd, nccl.ID_BYTES, nccl.IDS_AT + number * nccl.ID_BYTES)

    def request(self, kind: Any, deadline: float, packet: bytes) -> None:
        step = Renewal(Header.unpack(packet[: Header.SIZE]).count)
        self.asked.append((step, self.pid))
        if step is Renewal.END:
            os.pwrite(self.fd, struct.pack("=I", nccl.ENDED), HELD_AT)
        if step is Renewal.IDS:
            for number, (communicator, rank) in enumerate(self.ranks.items()):
                if rank == 0:
                    new = bytes([communicator]) * nccl.ID_BYTES
                    os.pwrite(self.fd, new, nccl.IDS_AT + number * nccl.ID_BYTES)


def each(name: str, action: Callable[[Any], None], tasks: Sequence[Any]) -> None:
    for task in tasks:
        action(task)


@pytest.fixture
def asked() -> Asked:
    return []


def steps(asked: Asked) -> list[Renewal]:
    return [step for step, _ in asked]


def test_every_rank_gets_the_id_of_its_first_rank(asked: Asked) -> None:
    tasks: list[Any] = [
        FakeTask(1, nccl.ENDED, {5: 0, 6: 1}, asked),
        FakeTask(2, nccl.ENDED, {6: 0, 5: 1}, asked),
    ]
    renewal.bring_back(tasks, each, 0.0)
    assert steps(asked) == [Renewal.IDS] * 2 + [Renewal.MAKE] * 2
    for task in tasks:
        for number, communicator in enumerate(task.ranks):
            assert task.id_of(number) == bytes([communicator]) * nccl.ID_BYTES


def test_who_was_not_asked_to_end_ends_before_any_makes(asked: Asked) -> None:
    late = FakeTask(2, nccl.HELD, {5: 1}, asked)
    tasks: list[Any] = [FakeTask(1, nccl.ENDED, {5: 0}, asked), late]
    renewal.bring_back(tasks, each, 0.0)
    assert asked[:2] == [(Renewal.HOLD, 2), (Renewal.END, 2)]
    assert steps(asked[2:]) == [Renewal.IDS] * 2 + [Renewal.MAKE] * 2


def test_a_communicator_that_has_lost_a_rank_gets_no_id(asked: Asked) -> None:
    task: Any = FakeTask(1, nccl.ENDED, {5: 0, 6: 0}, asked)
    other: Any = FakeTask(2, nccl.ENDED, {5: 1}, asked)
    renewal.bring_back([task, other], each, 0.0)
    assert task.id_of(0) == other.id_of(0) == bytes([5]) * nccl.ID_BYTES
    assert task.id_of(1) == bytes(nccl.ID_BYTES)


def test_where_nothing_was_ended_nobody_is_asked(asked: Asked) -> None:
    tasks: list[Any] = [
        FakeTask(1, nccl.HELD, {5: 0}, asked),
        FakeTask(2, nccl.ENDED, {}, asked),
        SimpleNamespace(pid=3, nccl=None),
    ]
    renewal.bring_back(tasks, each, 0.0)
    assert not asked


def test_all_are_held_before_one_is_ended(asked: Asked) -> None:
    tasks: list[Any] = [FakeTask(pid, nccl.FREE, {5: pid}, asked) for pid in range(3)]
    renewal.hold(tasks, each, 0.0)
    renewal.end(tasks, each, 0.0)
    assert steps(asked) == [Renewal.HOLD] * 3 + [Renewal.END] * 3


def test_a_communicator_with_ranks_on_other_nodes_gets_the_id_that_comes_from_there(
    asked: Asked,
) -> None:
    first: Any = FakeTask(1, nccl.ENDED, {5: 0, 6: 0}, asked)
    second: Any = FakeTask(2, nccl.ENDED, {5: 1, 7: 1, 8: 0}, asked)
    said: list[Any] = []

    def elsewhere(ranks: Any, ids: Any, seconds: float) -> dict[int, bytes]:
        said.append((dict(ranks), dict(ids)))
        return {6: ids[6], 7: b"7" * nccl.ID_BYTES}  # nobody has come for 8

    renewal.bring_back([first, second], each, 0.0, elsewhere)
    own = {one: bytes([one]) * nccl.ID_BYTES for one in (6, 8)}
    assert said == [({6: (2, [0]), 7: (2, [1]), 8: (2, [0])}, own)]
    assert first.id_of(0) == second.id_of(0) == bytes([5]) * nccl.ID_BYTES
    assert first.id_of(1) == own[6]
    assert second.id_of(1) == b"7" * nccl.ID_BYTES
    assert second.id_of(2) == bytes(nccl.ID_BYTES)


def test_nodes_are_told_an_id_once_all_ranks_are_ready_whatever_was_before() -> None:
    reunion = Reunion()
    assert reunion.come(0, "a", [(5, 3, [0], "id"), (6, 2, [0], "")]) == {}
    assert reunion.come(1, "b", [(5, 3, [1], "")]) == {}
    told = reunion.come(2, "c", [(5, 3, [2], "")])
    whole = {0: [("a", 5, "id")], 1: [("b", 5, "id")], 2: [("c", 5, "id")]}
    assert told == whole
    assert reunion.come(1, "b", [(5, 3, [1], "")]) == whole  # it has missed the word
    # The next time, and one that has given up meanwhile.
    assert reunion.come(0, "d", [(5, 3, [0], "new")]) == {}
    assert reunion.come(1, "e", [(5, 3, [1], "")]) == {}
    reunion.leave(1, "b")  # too late: of the time before
    reunion.leave(1, "e")
    assert reunion.come(2, "f", [(5, 3, [2], "")]) == {}
    reunion.leave(0)  # its coordinator is another one
    assert reunion.come(1, "g", [(5, 3, [1], "")]) == {}
    assert reunion.come(0, "h", [(5, 3, [0], "newer")]) == {
        0: [("h", 5, "newer")],
        1: [("g", 5, "newer")],
        2: [("f", 5, "newer")],
    }
