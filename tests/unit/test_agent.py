"""Agents of a job of several nodes, with their leader and with checkpoints that only go through."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator import agent as agents
from coordinator.agent import Agent, Round
from coordinator.leader import Leader
from coordinator.others import WAYS
from coordinator.session import RunningJob
from flowgpu.errors import FlowError, LeaderGone, NodeFailed
from flowgpu.image import layout
from flowgpu.image.job_file import JobFile
from flowgpu.nodes import Membership
from flowgpu.options import CheckpointOptions
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

JOB, SECRET, COUNT = "train", "what the nodes know", 2


class Node:
    """A node whose checkpoints go through at once; `goes` lets them end, `begins` begin."""

    def __init__(self, node: int, member: Membership) -> None:
        self.begins, self.goes = threading.Event(), threading.Event()
        self.begins.set()
        self.goes.set()
        job = SimpleNamespace(name=JOB, id=f"id{node}", path="", root_pid=os.getpid())
        self.agent = Agent(cast(RunningJob, job), member, self._take_part, lambda text: None)

    def _take_part(self, round: Round) -> None:
        result: dict[str, Any] | None = None
        try:
            self.begins.wait(SECONDS)
            for barrier in WAYS["checkpoint"][:-1]:
                round.reached(barrier, time.monotonic() + SECONDS)
            part = round.options.output
            part.mkdir(parents=True)
            (part / layout.MANIFEST).write_text("whole")
            round.vote(part, 0)
            self.goes.wait(SECONDS)
            result = {"pause_seconds": 1.0, "gpus": 1}
        except FlowError as error:
            round.failed(error, False)
        finally:
            round.done(result)


class Asked:
    """A request under way, by node 0."""

    def __init__(self, nodes: list[Node], image: Path) -> None:
        self._agent, self._options = nodes[0].agent, CheckpointOptions(image)
        self._found: dict[str, Any] | FlowError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            fields = self._options.to_fields()
            self._found = self._agent.ask("checkpoint", fields, lambda phase, done, total: None)
        except FlowError as error:
            self._found = error

    def result(self) -> dict[str, Any] | FlowError | None:
        self._thread.join(SECONDS)
        return self._found


@pytest.fixture
def leader() -> Iterator[Leader]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = Leader(JOB, Membership(COUNT, 0, f"127.0.0.1:{port}", SECRET))
    yield found
    found.finish(0.0)


@pytest.fixture
def nodes(leader: Leader) -> Iterator[list[Node]]:
    address = leader._member.leader
    found = [Node(node, Membership(COUNT, node, address, SECRET)) for node in range(COUNT)]
    for node in found:
        node.agent._wait_for_leader(SECONDS)
    yield found
    for node in found:
        node.begins.set()
        node.goes.set()
        node.agent.ended()
        if node.agent.stream is not None:
            node.agent.stream.close()


def is_over(node: Node) -> bool:
    return node.agent._round is not None and node.agent._round.over


def cut_off(leader: Leader, node: Node) -> None:
    """End the connection of node 0, and wait until it has another one."""
    before = node.agent.stream
    leader._streams[0].close()
    wait_for(lambda: node.agent.stream not in (None, before), "another connection")


def test_an_answer_comes_by_the_next_connection(
    nodes: list[Node], leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "LATE_SECONDS", SECONDS)
    nodes[1].goes.clear()
    asked = Asked(nodes, tmp_path / "image")
    wait_for(lambda: is_over(nodes[0]), "its own part")
    cut_off(leader, nodes[0])
    nodes[1].goes.set()
    result = asked.result()
    assert isinstance(result, dict), result
    assert result["gpus"] == COUNT


def test_an_image_is_reported_whose_answer_is_lost(
    nodes: list[Node], leader: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "LATE_SECONDS", 0.0)
    nodes[0].goes.clear()
    nodes[1].goes.clear()
    image = tmp_path / "image"
    asked = Asked(nodes, image)
    wait_for(lambda: list(image.glob("job.json")), "the image of all")
    cut_off(leader, nodes[0])
    nodes[0].goes.set()
    result = asked.result()
    assert isinstance(result, dict), result
    assert result["image"] == str(image) and JobFile.load(image)
    assert result["nodes"] == {0: {"pause_seconds": 1.0, "gpus": 1}, 1: None}


def test_a_request_whose_connection_ends_before_the_commit_has_failed(
    nodes: list[Node], leader: Leader, tmp_path: Path
) -> None:
    for node in nodes:
        node.begins.clear()
    image = tmp_path / "image"
    asked = Asked(nodes, image)
    wait_for(lambda: nodes[0].agent._round, "its part")
    cut_off(leader, nodes[0])
    for node in nodes:
        node.begins.set()
    assert isinstance(asked.result(), LeaderGone | NodeFailed)
    wait_for(lambda: not image.exists(), "nothing of it")


def test_a_node_says_what_became_of_its_part_before_it_ends(
    nodes: list[Node], tmp_path: Path
) -> None:
    nodes[1].goes.clear()
    asked = Asked(nodes, tmp_path / "image")
    wait_for(lambda: is_over(nodes[0]), "the part of node 0")
    ending = threading.Thread(target=nodes[1].agent.ended)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    nodes[1].goes.set()
    ending.join(SECONDS)
    assert is_over(nodes[1])
    result = asked.result()
    assert isinstance(result, dict), result
    assert None not in result["nodes"].values()
