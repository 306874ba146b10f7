"""TCP connections between the nodes of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.host.criu import Criu
from flowgpu.host.proctree import is_stopped
from flowgpu.image.job_file import JobFile
from tests.emu import node_jobs
from tests.emu.node_jobs import Asked, Nodes, failed, free_port
from tests.emu.test_checkpoint import SECONDS
from tests.emu.test_nodes import FORWARD
from tests.unit.coordinator_job import wait_for

machines, nodes, hosts = node_jobs.machines, node_jobs.nodes, node_jobs.hosts


@pytest.fixture(params=["one host", "two hosts"])
def talking(request: pytest.FixtureRequest, nodes: Nodes) -> Nodes:
    """Nodes whose ranks talk by TCP."""
    address, port = "127.0.0.1", free_port()
    if request.param == "two hosts":
        hosts: dict[str, str] = request.getfixturevalue("hosts")
        address = next(iter(hosts.values()))
        for node, name in zip(nodes, hosts, strict=True):
            node.be_on(name, address)
    for node in nodes:
        node.talk = [address, port]
    return nodes


def test_tcp_connections_between_nodes_are_kept(talking: Nodes, tmp_path: Path) -> None:
    nodes = talking
    nodes.run()
    done = nodes.ask("checkpoint", tmp_path / "running")
    assert done.returncode == 0, done.stderr
    for number in range(2):
        for node in nodes:
            node.wait_more()
        image = tmp_path / f"image{number}"
        nodes.dump(image)
        assert [part.connections for part in JobFile.load(image).parts] == [2, 2]
        nodes.restore(image)
    nodes.check_end()


# CRIU of a node that is slower than the others.
LATE_CRIU = """\
#!/bin/sh
[ "$1" = restore ] && sleep 3
exec {criu} "$@"
"""


@pytest.fixture(params=[0, 1])
def with_a_late_node(request: pytest.FixtureRequest, talking: Nodes, tmp_path: Path) -> Nodes:
    """One of these makes its connections 3 s after the other."""
    late = tmp_path / "criu"
    late.write_text(LATE_CRIU.format(criu=Criu.locate().program))
    late.chmod(0o700)
    talking[request.param].env["FLOWGPU_CRIU"] = str(late)
    return talking


def test_a_node_may_make_its_connections_late(with_a_late_node: Nodes, tmp_path: Path) -> None:
    """The other one has data in them that were sent and not received."""
    nodes = with_a_late_node
    nodes.run()
    nodes.dump(tmp_path / "image")
    nodes.restore(tmp_path / "image")
    nodes.check_end()


# Rank 1 has closed its side of three connections, and rank 0 that of the last: the first when all
# was received, the others when the other end took no more.
HALVES = """
import hashlib, os, socket, sys, time
folder, rank, place = sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4]))
def connected():
    while True:
        try:
            return socket.create_connection(place)
        except ConnectionRefusedError:
            time.sleep(0.01)
def fill(end):
    end.settimeout(1.0)
    count = 0
    try:
        while True:
            count += end.send(bytes([rank + 1]) * 10000)
    except TimeoutError:
        end.settimeout(None)
        return count
if rank == 0:
    with socket.create_server(place) as listener:
        ends = [listener.accept()[0] for _ in range(3)]
    sent = [0, 0, fill(ends[2])]
    ends[2].shutdown(socket.SHUT_WR)
else:
    ends = [connected() for _ in range(3)]
    sent = [ends[0].send(bytes([2]) * 10), fill(ends[1]), fill(ends[2])]
    for end in ends:
        end.shutdown(socket.SHUT_WR)
print("ready", sent, flush=True)
while not os.path.exists(os.path.join(folder, "hurry")):
    time.sleep(0.01)
if rank == 0:
    print([ends[k].send(bytes([1]) * 20) for k in range(2)], flush=True)
    for end in ends[:2]:
        end.shutdown(socket.SHUT_WR)
received = [0, 0, 0]
for k, end in enumerate(ends):
    while data := end.recv(1 << 20):
        assert data == bytes([2 - rank]) * len(data)
        received[k] += len(data)
print(received, flush=True)
"""


def test_a_node_may_make_connections_late_of_which_one_side_is_closed(
    with_a_late_node: Nodes, tmp_path: Path
) -> None:
    nodes = with_a_late_node
    for node in nodes:
        node.program = [sys.executable, "-c", HALVES, tmp_path, node.number, *node.talk]
        node.run()
    for node in nodes:
        wait_for(lambda node=node: node.lines, "ready", SECONDS)
    nodes.dump(tmp_path / "image")
    nodes.restore(tmp_path / "image")
    nodes.hurry()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    sent = [json.loads(node.lines[0].removeprefix("ready ")) for node in nodes]
    assert nodes[0].lines[1:] == ["[20, 20]", str(sent[1])]
    assert nodes[1].lines[1:] == [str([20, 20, sent[0][2]])]


def test_a_checkpoint_that_is_given_up_leaves_connections_as_they_were(
    talking: Nodes, tmp_path: Path
) -> None:
    nodes = talking
    nodes.run()
    nodes[1].halts_at(FORWARD.index("commit") + 1)
    with Asked(nodes, "pause-and-dump", tmp_path / "image") as asked:
        asked.wait_halted(nodes[1])
        nodes[1].kill_coordinator()
        failed(asked.result(), errors.NodeFailed)
    for node in nodes:
        node.wait_more()
    nodes.check_end()


# Rank 1 connects to rank 0 when it is told to.
CONNECTS = """
import os, socket, sys, time
folder, rank, place = sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4]))
def told(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
if rank == 0:
    with socket.create_server(place) as listener:
        print("ready", flush=True)
        end = listener.accept()[0]
    told("hurry")
    print(end.recv(9), flush=True)
else:
    print("ready", flush=True)
    told("connect")
    end = socket.create_connection(place)
    open(os.path.join(folder, "connected"), "w").close()
    told("hurry")
    end.sendall(b"is there")
"""


def test_a_node_may_make_a_connection_to_one_that_is_stopped(
    talking: Nodes, tmp_path: Path
) -> None:
    """It is refused for the moment, as one that nobody has accepted, and kept by the next try."""
    nodes = talking
    for node in nodes:
        node.program = [sys.executable, "-c", CONNECTS, tmp_path, node.number, *node.talk]
        node.run()
        wait_for(lambda node=node: node.lines, "ready", SECONDS)
    root = nodes[0].record.root_pid
    nodes[1].halts_at(FORWARD.index("capture") + 1)
    with Asked(nodes, "pause-and-dump", tmp_path / "image") as asked:
        asked.wait_halted(nodes[1])
        wait_for(lambda: is_stopped(root), "the stop of rank 0", SECONDS)
        (tmp_path / "connect").touch()
        wait_for((tmp_path / "connected").exists, "the connection", SECONDS)
        nodes[1].go_on()
        done = asked.result()
    assert done.returncode == 0, done.stderr
    assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
    nodes.restore(tmp_path / "image")
    nodes.hurry()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert nodes[0].lines == ["ready", "b'is there'"]
