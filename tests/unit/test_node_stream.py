"""Nobody without the secret says a word between nodes, or hears the leader act on it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from coordinator import node_stream
from coordinator.node_stream import MAC_BYTES, NONCE_BYTES, PROTOCOL, NodeStream, StreamEnded
from flowgpu.nodes import LEAST_SECRET, LauncherPlace, address, place_of, secret_of

SECRET = "a secret of the job"
Pair = Callable[..., tuple[NodeStream, NodeStream]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made: list[NodeStream] = []

    def make(
        ours: str = SECRET, theirs: str = SECRET, between: tuple[socket.socket, ...] = ()
    ) -> tuple[NodeStream, NodeStream]:
        a, b = between or _connected()
        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(NodeStream, b, theirs, dialled=False)
            dialled = NodeStream(a, ours, dialled=True)
            made.extend((dialled, listening.result()))
        return dialled, listening.result()

    yield make
    for stream in made:
        stream.close()


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def test_messages_come_whole_and_in_order(pair: Pair) -> None:
    a, b = pair()
    for number in range(50):
        a.send("hello", number=number, text="x" * number * 100)
    assert [b.receive()["number"] for _ in range(50)] == [*range(50)]
    b.send("go")
    assert a.receive() == {"is": "go"}


@pytest.mark.parametrize("secrets", [(SECRET, "another one"), ("another one", SECRET)])
def test_another_secret_ends_the_connection(pair: Pair, secrets: tuple[str, str]) -> None:
    a, b = pair(*secrets)
    a.send("ask")
    with pytest.raises(StreamEnded, match="secret"):
        b.receive()
    b.send("go")
    with pytest.raises(StreamEnded, match="secret"):
        a.receive()


class Relay:
    """Somebody between the two, who sees and changes what they send."""

    def __init__(self, pair: Pair, change: Callable[[list[bytes]], list[bytes]]) -> None:
        (a, to_a), (b, to_b) = _connected(), _connected()
        self._to_a, self._to_b, self._change = to_a, to_b, change
        thread = threading.Thread(target=self._shake)
        thread.start()
        self.a, self.b = pair(between=(a, b))
        thread.join()

    def _shake(self) -> None:
        count = len(PROTOCOL) + NONCE_BYTES
        for source, target in ((self._to_a, self._to_b), (self._to_b, self._to_a)):
            target.sendall(source.recv(count, socket.MSG_WAITALL))

    def close(self) -> None:
        self._to_a.close()
        self._to_b.close()

    def take(self) -> bytes:
        """A frame of `a`."""
        length = self._to_a.recv(4, socket.MSG_WAITALL)
        rest = int.from_bytes(length) + MAC_BYTES
        return length + self._to_a.recv(rest, socket.MSG_WAITALL)

    def give_back(self, frame: bytes) -> None:
        self._to_a.sendall(frame)

    def pass_on(self, count: int) -> None:
        """So many frames of `a`, as they are changed."""
        for frame in self._change([self.take() for _ in range(count)]):
            self._to_b.sendall(frame)


@pytest.mark.parametrize(
    ("change", "heard"),
    [
        (lambda f: [f[0][:-2] + b"1}", f[1]], 0),
        (lambda f: [f[0], f[0], f[1]], 1),
        (lambda f: [f[1], f[0]], 0),
        (lambda f: [f[1]], 0),
    ],
    ids=["changed", "repeated", "swapped", "left out"],
)
def test_a_frame_that_somebody_between_touches_ends_the_connection(
    pair: Pair, change: Callable[[list[bytes]], list[bytes]], heard: int
) -> None:
    with closing(Relay(pair, change)) as relay:
        relay.a.send("one", n=0)
        relay.a.send("two", n=2)
        relay.pass_on(2)
        for _ in range(heard):
            relay.b.receive()
        with pytest.raises(StreamEnded, match="secret"):
            relay.b.receive()


def test_a_frame_sent_back_to_its_sender_is_no_message(pair: Pair) -> None:
    with closing(Relay(pair, lambda frames: [])) as relay:
        relay.a.send("one")
        relay.give_back(relay.take())
        with pytest.raises(StreamEnded, match="secret"):
            relay.a.receive()


def test_a_stranger_cannot_have_much_memory_taken() -> None:
    a, b = _connected()
    with a, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(NodeStream, b, SECRET, dialled=False)
        a.sendall(PROTOCOL + bytes(NONCE_BYTES) + (1 << 31).to_bytes(4))
        stream = listening.result()
        with pytest.raises(StreamEnded, match="too long"):
            stream.receive()
        stream.close()


def test_what_speaks_another_protocol_is_told_apart() -> None:
    a, b = _connected()
    with a, ThreadPoolExecutor(1) as pool:
        listening = pool.submit(NodeStream, b, SECRET, dialled=False)
        a.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(StreamEnded, match="no node"):
            listening.result()


def test_an_end_that_is_silent_counts_as_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "SILENT_SECONDS", 0.05)
    a, b = pair()
    a.send("hello")
    b.receive()
    with pytest.raises(StreamEnded, match="silent"):
        b.receive()


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        address(text)


def test_addresses() -> None:
    assert address("gpu-1.cluster:7000") == ("gpu-1.cluster", 7000)
    assert address("[fe80::1]:7000") == ("fe80::1", 7000)


def test_a_short_secret_is_none() -> None:
    with pytest.raises(ValueError, match="FLOWGPU_JOIN"):
        secret_of({"FLOWGPU_JOIN": "x" * (LEAST_SECRET - 1)})
    assert secret_of({"FLOWGPU_JOIN": "x" * LEAST_SECRET})


def test_the_place_that_slurm_gives() -> None:
    env = {
        "SLURM_JOB_ID": "17",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NODELIST": "gpu[07-08,11],x",
    }
    place = place_of(env, "train")
    assert place is not None
    assert (place.nodes, place.node) == (3, 1)
    host, port = address(place.leader or "")
    assert host == "gpu07"
    assert 20000 <= port < 30000
    assert place_of({**env, "SLURM_NODEID": "2"}, "train") == LauncherPlace(
        3, 2, place.leader, launch="17."
    )


@pytest.mark.parametrize(
    ("tasks", "counts"),
    [("4(x2),1", [4, 4, 1]), ("2,3,1", [2, 3, 1]), ("8(x3)", [8, 8, 8]), ("", [1, 1, 1])],
)
def test_the_ranks_that_slurm_starts_on_each_node(tasks: str, counts: list[int]) -> None:
    env = {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_LOCALID": "0"}
    places = [place_of({**env, "SLURM_NODEID": str(node)}, "train") for node in range(3)]
    assert [place.local_count for place in places if place] == counts


@pytest.mark.parametrize(
    ("hosts", "first"), [("a,b", "a"), ("n-1", "n-1"), ("r[1-2]-eth,b", "r1-eth")]
)
def test_the_first_host_of_slurms_list(hosts: str, first: str) -> None:
    env = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": hosts}
    place = place_of(env, "train")
    assert place is not None and place.leader is not None
    assert address(place.leader)[0] == first


def test_the_place_that_open_mpi_gives() -> None:
    names = ("RANK", "SIZE", "LOCAL_SIZE")
    env = {f"OMPI_COMM_WORLD_{n}": v for n, v in zip(names, ("5", "8", "2"), strict=True)}
    assert place_of(env, "train") == LauncherPlace(4, 2, local_count=2)
    with pytest.raises(ValueError, match="as many"):
        place_of({**env, "OMPI_COMM_WORLD_SIZE": "7"}, "train")


def test_no_launcher_gives_none() -> None:
    assert place_of({}, "train") is None


def test_who_closes_a_connection_ends_it_for_who_receives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair()
    mac = b._mac

    def close_meanwhile(direction: int, number: int, text: bytes) -> bytes:
        b.close()
        return mac(direction, number, text)

    monkeypatch.setattr(b, "_mac", close_meanwhile)
    a.send("hello")
    with pytest.raises(StreamEnded):
        b.receive()
