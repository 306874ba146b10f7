"""The leader of several nodes, with agents that only say what nodes would say."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowgpu
from coordinator import leader as leading
from coordinator import node_stream
from coordinator.cut_of_nodes import Word
from coordinator.leader import Leader, together
from coordinator.node_stream import Message, NodeStream, StreamEnded, dial
from coordinator.others import WAYS, Barrier
from flowgpu import errors
from flowgpu.errors import Busy, FlowError
from flowgpu.image.job_file import JOB_FILE, JobFile
from flowgpu.nodes import Membership, address
from flowgpu.options import CheckpointOptions
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

JOB, SECRET = "train", "what the nodes know"
MANY = 125
MOST_SECONDS = 5.0
"""A leader and so many nodes take less of a processor; here 0.5."""


class Node:
    """An agent that goes through every barrier at once, but for what a test has it do."""

    def __init__(
        self, member: Membership, node: int, *, fails_at: Barrier | None = None, **hello: Any
    ) -> None:
        self.node, self.fails_at = node, fails_at
        self.heard: list[Message] = []
        self.sent: Counter[str] = Counter()
        self.changed = threading.Condition()
        self.over = False
        self.waits = threading.Event()  # at its first barrier
        self.goes = threading.Event()
        self.goes.set()
        self.stream: NodeStream = dial(address(member.leader), SECRET, SECONDS)
        said = {"version": flowgpu.__version__, "job": JOB, "id": f"id{node}", "node": node}
        said |= {"count": member.count, "epoch": member.epoch}
        self.say("hello", **{**said, **hello})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def say(self, kind: str, **fields: Any) -> None:
        self.sent[kind] += 1
        self.stream.send(kind, **fields)

    def _run(self) -> None:
        with contextlib.suppress(StreamEnded):
            while True:
                message = self.stream.receive()
                with self.changed:
                    self.heard.append(message)
                    self.changed.notify_all()
                if message["is"] == "begin":
                    threading.Thread(target=self._take_part, args=(message["epoch"],)).start()
        with self.changed:
            self.over = True
            self.changed.notify_all()

    def _take_part(self, epoch: str) -> None:
        for barrier in WAYS["checkpoint"]:
            if barrier is self.fails_at:
                error = Busy(job=JOB, action="its end").as_dict()
                self.say("failed", epoch=epoch, error=error, disturbed=False)
                break
            self.waits.set()
            self.goes.wait()
            said: Any = [f"digest{self.node}", 0] if barrier is Barrier.COMMIT else self.node
            with contextlib.suppress(StreamEnded):
                self.say("reached", epoch=epoch, barrier=barrier.value, said=said)
            try:
                if not self.wait(self._went_on(epoch, barrier)):
                    break
            except StreamEnded:
                return
        with contextlib.suppress(StreamEnded):
            self.say("done", epoch=epoch, result={"pause_seconds": float(self.node), "gpus": 1})

    def _went_on(self, epoch: str, barrier: Barrier) -> Callable[[Message], bool | None]:
        def found(message: Message) -> bool | None:
            if message.get("epoch") != epoch:
                return None
            if message["is"] == "abort":
                return False
            if message["is"] == "commit" or message.get("barrier") == barrier.value:
                return True
            return None

        return found

    def wait(self, found: Callable[[Message], Any]) -> Any:
        """The first that is not None of what it makes of the messages. Raises StreamEnded."""
        deadline = time.monotonic() + SECONDS
        with self.changed:
            while True:
                for message in self.heard:
                    if (one := found(message)) is not None:
                        return one
                if self.over:
                    raise StreamEnded("the leader has gone")
                left = deadline - time.monotonic()
                assert left > 0, self.heard
                self.changed.wait(left)

    def begin(self, image: Path, number: int = 0) -> None:
        options = CheckpointOptions(image).to_fields()
        self.say("ask", number=number, what="checkpoint", options=options)

    def ask(self, image: Path, number: int = 0) -> dict[str, Any] | FlowError:
        self.begin(image, number)
        answer = self.wait(lambda m: m if m["is"] == "answer" and m["number"] == number else None)
        if "error" in answer:
            return FlowError.from_dict(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result


Job = Callable[..., list[Node]]


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Membership:
    monkeypatch.setattr(node_stream, "SILENT_SECONDS", SECONDS)  # these nodes do not beat
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Membership(3, 0, f"127.0.0.1:{port}", SECRET)


@pytest.fixture
def lead() -> Iterator[Callable[[Membership], Leader]]:
    made: list[Leader] = []

    def make(member: Membership) -> Leader:
        made.append(Leader(JOB, member))
        return made[-1]

    yield make
    for one in made:
        one.finish(0.0)


@pytest.fixture
def job(member: Membership, lead: Callable[[Membership], Leader]) -> Iterator[Job]:
    """Start a leader and its nodes."""
    nodes: list[Node] = []

    def make(count: int = 3, *, without: int | None = None, **of_last: Any) -> list[Node]:
        of_job = Membership(count, 0, member.leader, SECRET)
        lead(of_job)
        for node in range(count):
            if node != without:
                nodes.append(Node(of_job, node, **(of_last if node == count - 1 else {})))
                nodes[-1].wait(lambda message: message["is"] == "welcome" or None)
        return nodes

    yield make
    for node in nodes:
        node.stream.close()
        node.thread.join()


def test_an_image_of_all_nodes_is_one_file(job: Job, tmp_path: Path) -> None:
    nodes, image = job(), tmp_path / "image"
    result = nodes[1].ask(image)
    assert isinstance(result, dict)
    assert (result["pause_seconds"], result["gpus"], result["image"]) == (2.0, 3, str(image))
    file = JobFile.load(image)
    assert [part.digest for part in file.parts] == ["digest0", "digest1", "digest2"]
    assert [path.name for path in image.iterdir()] == [JOB_FILE]


def test_each_hears_what_all_have_said(job: Job, tmp_path: Path) -> None:
    nodes = job()
    nodes[0].ask(tmp_path / "image")
    for node in nodes:
        said = node.wait(lambda m: m["said"] if m.get("barrier") == "stopped" else None)
        assert said == {"0": 0, "1": 1, "2": 2}


def test_what_is_exchanged_and_a_cut_and_new_ids_go_by_the_leader(job: Job, tmp_path: Path) -> None:
    nodes = job()
    for node in nodes:
        node.goes.clear()
    asking = threading.Thread(target=nodes[0].ask, args=(tmp_path / "image",))
    asking.start()
    epoch = nodes[0].wait(lambda m: m["epoch"] if m["is"] == "begin" else None)
    for node in nodes:
        node.say("exchange", epoch=epoch, barrier="exchange 1", said=node.node)
    for node in nodes:
        said = node.wait(lambda m: m["said"] if m.get("barrier") == "exchange 1" else None)
        assert said == {"0": 0, "1": 1, "2": 2}

    def say(node: int, order: int, issued: int) -> None:
        """A node's word, of one communicator that has a rank on nodes 0 and 1."""
        targets = ((1, -1, -1, issued),) if issued else ()
        ranks = ((1, (node,)),) if issued else ()
        word = Word(order, targets, ranks, True, False, False, node, ())
        nodes[node].say("word", epoch=epoch, cut=1, word=word.to_fields())

    say(0, 0, 5)
    say(1, 0, 3)
    order = nodes[1].wait(lambda m: m["order"] if m["is"] == "order" else None)
    assert order["targets"] == [[1, -1, -1, 5]]
    say(2, 0, 0)
    say(1, 1, 5)
    for node in nodes:
        node.wait(lambda m: True if m["is"] == "order" and m["order"]["made"] else None)
        node.goes.set()
    asking.join()
    for node in nodes[:2]:
        rows = [[1, 2, [node.node], "" if node.node else "1d"]]
        node.say("renewal", token=f"of {node.node}", rows=rows)
    for node in nodes[:2]:
        ids = node.wait(lambda m: m["ids"] if m["is"] == "renewed" else None)
        assert ids == [[f"of {node.node}", 1, "1d"]]


@pytest.mark.parametrize("barrier", WAYS["checkpoint"])
def test_a_failure_of_one_is_told_to_all_and_leaves_nothing(
    job: Job, tmp_path: Path, barrier: Barrier
) -> None:
    nodes, image = job(fails_at=barrier), tmp_path / "image"
    error = nodes[0].ask(image)
    assert isinstance(error, errors.NodeFailed)
    assert str(error).startswith("Node 2 of job 'train'")
    assert "busy" in str(error)
    assert not image.exists()
    for node in nodes:
        node.wait(lambda message: message["is"] == "abort" or None)
    nodes[2].fails_at = None
    assert isinstance(nodes[0].ask(image, 1), dict)


def test_a_node_that_is_lost_fails_it(job: Job, tmp_path: Path) -> None:
    nodes = job()
    nodes[2].goes.clear()
    thread = threading.Thread(target=nodes[2].waits.wait)
    thread.start()
    nodes[0].begin(tmp_path / "image")
    thread.join()
    nodes[2].stream.close()
    error = nodes[0].wait(lambda m: m["error"] if m["is"] == "answer" else None)
    assert error["error"] == "NodeFailed"
    nodes[2].goes.set()
    assert not (tmp_path / "image").exists()


def test_one_at_a_time(job: Job, tmp_path: Path) -> None:
    nodes = job()
    nodes[2].goes.clear()
    nodes[0].begin(tmp_path / "image")
    nodes[2].waits.wait()
    assert isinstance(nodes[1].ask(tmp_path / "other"), Busy)
    nodes[2].goes.set()
    assert nodes[0].wait(lambda m: m["result"] if m["is"] == "answer" else None)
    assert not (tmp_path / "other").exists()


def test_all_have_to_be_there(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "JOIN_SECONDS", 0.05)
    nodes = job(without=1)
    error = nodes[0].ask(tmp_path / "image")
    assert isinstance(error, errors.NodesMissing)
    assert str(error).endswith("reached: 1.")
    assert not (tmp_path / "image").exists()


def test_nothing_is_begun_for_who_was_cut_off_meanwhile(
    member: Membership, lead: Callable[[Membership], Leader], tmp_path: Path
) -> None:
    of_job = Membership(2, 0, member.leader, SECRET)
    leader, asker = lead(of_job), Node(of_job, 0)
    asker.begin(tmp_path / "image")
    wait_for(lambda: leader._asked, "the request")
    nodes = [Node(of_job, 0)]
    nodes[0].wait(lambda message: message["is"] == "welcome" or None)
    nodes.append(Node(of_job, 1))
    error = nodes[0].wait(lambda m: m["error"] if m["is"] == "answer" else None)
    assert error["error"] == "LeaderGone"
    assert not any(message["is"] == "begin" for node in nodes for message in node.heard)
    assert not (tmp_path / "image").exists()
    assert isinstance(nodes[1].ask(tmp_path / "image"), dict)
    for node in (asker, *nodes):
        node.stream.close()
        node.thread.join()


def test_a_folder_that_is_not_empty_is_no_place_for_an_image(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(job()[0].ask(tmp_path), errors.OutputNotEmpty)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"job": "another"}, "of job 'another'"),
        ({"count": 4}, "there are 3"),
        ({"version": "0"}, "FlowGPU 0"),
        ({"epoch": "older"}, "another checkpoint"),
        ({"id": "somebody's"}, "there already"),
    ],
)
def test_who_was_not_started_alike_is_refused(
    job: Job, member: Membership, hello: dict[str, Any], why: str
) -> None:
    job()
    node = Node(member, 1, **hello)
    error = node.wait(lambda m: m["error"] if m["is"] == "refused" else None)
    assert error["error"] == "NodesDisagree"
    assert why in error["message"]
    node.stream.close()
    node.thread.join()


def test_restores_go_on_together_and_fail_together(job: Job) -> None:
    nodes = job()
    nodes[0].say("ready", place="all", said="zero")
    nodes[1].say("ready", place="all", said="one")
    nodes[2].say("ready", place="files", said=None)
    nodes[2].say("ready", place="all", said="two")
    for node in nodes:
        place, said = node.wait(
            lambda m: (m["place"], m["said"]) if m["is"] == "all-ready" else None
        )
        assert (place, said) == ("all", {"0": "zero", "1": "one", "2": "two"})
    failed = errors.ImageDamaged(path="image", reason="a byte is wrong").as_dict()
    nodes[1].say("restore-failed", error=failed)
    for node in nodes:
        error = node.wait(lambda m: m["error"] if m["is"] == "restore-failed" else None)
        assert error["fields"]["node"] == 1
        assert "a byte is wrong" in error["message"]


def test_a_node_that_is_lost_while_others_wait_for_it_fails_the_restore(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.05)
    nodes = job()
    nodes[0].say("ready", place="all", said=None)
    nodes[1].say("ready", place="all", said=None)
    # It is answered after what was said before: a beat may end the connection sooner.
    nodes[1].say("doubt", image=str(tmp_path / "image"), epoch="none")
    nodes[1].wait(lambda message: message["is"] == "abort" or None)
    nodes[1].stream.close()
    error = nodes[0].wait(lambda m: m["error"] if m["is"] == "restore-failed" else None)
    assert (error["error"], error["fields"]["node"]) == ("NodeFailed", 1)


def test_a_node_in_doubt_hears_what_the_files_say(job: Job, tmp_path: Path) -> None:
    nodes, image = job(), tmp_path / "image"
    nodes[0].ask(image)
    nodes[0].say("doubt", image=str(image), epoch=JobFile.load(image).epoch)
    nodes[1].say("doubt", image=str(image), epoch="another")
    assert nodes[1].wait(lambda m: m["is"] if m.get("epoch") == "another" else None) == "abort"
    told = "commit", "commit"
    nodes[0].wait(
        lambda _: tuple(m["is"] for m in nodes[0].heard if m["is"] in told) == told or None
    )


def test_many_nodes_take_no_more_messages_each_than_few(job: Job, tmp_path: Path) -> None:
    nodes = job(MANY)
    began = time.process_time()
    assert isinstance(nodes[MANY - 1].ask(tmp_path / "image"), dict)
    used = time.process_time() - began
    assert {node.sent["reached"] for node in nodes} == {len(WAYS["checkpoint"])}
    assert all(len(node.heard) <= len(Barrier) + 10 for node in nodes)
    assert (tmp_path / "image" / JOB_FILE).stat().st_size < 2 << 20
    assert used < MOST_SECONDS


def test_a_leader_whose_disk_is_slow_does_not_seem_to_be_gone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, written = threading.Event(), threading.Event()

    def sync(path: Path) -> None:
        writes.set()
        written.wait(SECONDS)

    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leading.layout, "sync", sync)
    nodes = job()
    nodes[0].begin(tmp_path / "image")
    assert writes.wait(SECONDS)
    try:
        for node in nodes:
            heard = len(node.heard) + 2  # one may be under way
            node.wait(lambda message, node=node, heard=heard: len(node.heard) > heard or None)
    finally:
        written.set()
    assert nodes[0].wait(lambda m: m["result"] if m["is"] == "answer" else None)


def test_reports_are_one_with_the_longest_times_and_all_bytes() -> None:
    reports: list[dict[str, Any]] = [
        {"job": "a", "phases": {"gate": 1.0, "cut": 0.5}, "pause_seconds": 1.0, "bytes": 3},
        {"job": "a", "phases": {"gate": 2.0}, "pause_seconds": None, "bytes": 4},
    ]
    assert together(reports) == {
        "job": "a",
        "phases": {"gate": 2.0, "cut": 0.5},
        "pause_seconds": 1.0,
        "bytes": 7,
    }
