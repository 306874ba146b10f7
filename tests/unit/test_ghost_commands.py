"""Commands of a ghost and their answers, over the lines that carry them."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import typing
from typing import Any

import pytest

from coordinator import ghost_commands as commands
from coordinator.device import Gpu
from coordinator.ghost import GhostProgram
from coordinator.ghost_lines import read_lines, send_line
from coordinator.move_plan import Plan
from flowgpu import codec
from tests.fakes.ghost import FakeDriver, FakeMover

PLAN = Plan("ring", 2, 2, 32 << 20, 128 << 20, direct=True)
GPU = Gpu(0, "GPU-0", "model", 1 << 30, "9.0", ({}, {"access": 1, "atomics": 0, "rank": 2}), "0000")
TARGET = commands.Target(
    PLAN,
    {0: commands.DumpFiles("a", "b", 0), 12: commands.DumpFiles("c", "d", 1)},
    None,
    2,
    ("zero",),
)
EXTENTS = (commands.Extent("a", "b", 7, None), commands.Extent("c", "d", 8, (3, 4)))
MESSAGES: list[Any] = [
    commands.Hello(),
    commands.Room((0, 1)),
    commands.Expect(TARGET, None),
    commands.CopyBefore(PLAN, None, "links", (), 0, 1.5),
    commands.PrepareFill(PLAN, {3: commands.FillFiles(None, 0, 1 << 21, EXTENTS)}),
    commands.Fill(3, poison=True),
    commands.Reach(),
    commands.Rebuild((4, 5), {"old": "new"}),
    commands.Machine(13000, True, (GPU,), (0,)),
    commands.SizeIfRoom(None),
    commands.Held(0.25),
    commands.Copies({1: commands.Planned((9, 8), commands.Reduced(("dedup",), 4, 3, 2, 1))}),
]


def over_a_line(message: Any) -> Any:
    ours, theirs = socket.socketpair()
    fields, fds = commands.parts_of(message)
    with ours, theirs:
        send_line(ours, fields, fds)
        ours.shutdown(socket.SHUT_WR)
        ((received, own),) = read_lines(theirs)
    if own:
        received["fds"] = own
    return codec.decode(type(message), received, "message")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_the_same_behind_a_line(message: Any) -> None:
    received = over_a_line(message)
    assert type(received) is type(message)
    assert dataclasses.asdict(received) == dataclasses.asdict(message)


def test_descriptors_go_beside_the_line() -> None:
    with open(os.devnull) as null:
        sent = commands.Import((1, 2), (3, 4), (0, 0), (null.fileno(), null.fileno()))
        received = over_a_line(sent)
        assert (received.keys, received.sizes) == ((1, 2), (3, 4))
        assert len({*received.fds, null.fileno()}) == 3
        for fd in received.fds:
            assert os.fstat(fd).st_rdev == os.fstat(null.fileno()).st_rdev
            os.close(fd)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (commands.Room, {}),
        (commands.Room, {"ordinals": [0], "more": 1}),
        (commands.Room, {"ordinals": ["0"]}),
        (commands.Room, {"ordinals": [-1]}),
        (commands.Rebuild, {"pids": [1], "gpus": {"old": 1}}),
        (commands.SizeIfRoom, {"bytes": "many"}),
        (commands.Copies, {"gpus": {"first": {}}}),
    ],
)
def test_another_message_is_refused(kind: type[Any], fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, codec.UnknownField)):
        codec.decode(kind, json.loads(json.dumps(fields)), "message")


def test_a_ghost_knows_each_command_but_the_one_to_end() -> None:
    program = GhostProgram(FakeDriver, lambda library: FakeMover())
    assert program._handlers.keys() == set(commands.Command.named.values()) - {commands.Quit}
    for kind in commands.Command.named.values():
        typing.get_type_hints(kind)
        assert kind.answer is not None and kind.__doc__
