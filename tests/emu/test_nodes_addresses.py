"""Jobs of two nodes that are restored on hosts with other addresses.

Each host is a network namespace, and each pair of them a network of its own.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from tests.emu import node_jobs, test_nodes_nccl
from tests.emu.node_jobs import Nodes, connected_hosts
from tests.emu.test_checkpoint import SECONDS
from tests.emu.test_nodes_nccl import check_end, let_ranks_run, lines_of_two, without_graphs
from tests.unit.coordinator_job import wait_for

machines, nodes = node_jobs.machines, node_jobs.nodes
undisturbed_lines = test_nodes_nccl.undisturbed_lines

FIRST, SECOND = ("10.77.33.1", "10.77.33.2"), ("10.88.0.7", "10.88.0.6")


@pytest.fixture
def networks() -> Iterator[list[dict[str, str]]]:
    """The pairs of hosts: the other one's interfaces have other names."""
    with contextlib.ExitStack() as stack:
        yield [
            connected_hosts(stack, addresses, interface)
            for addresses, interface in ((FIRST, "fgveth"), (SECOND, "ens"))
        ]


def move(nodes: Nodes, hosts: dict[str, str], order: Sequence[int] = (0, 1)) -> None:
    """Let the nodes be on these hosts, in this order."""
    names, addresses = [*hosts], [*hosts.values()]
    for node, number in zip(nodes, order, strict=True):
        node.be_on(names[number], addresses[order[0]])


def dump_and_restore(
    nodes: Nodes,
    image: Path,
    hosts: dict[str, str],
    order: Sequence[int] = (0, 1),
    options: Sequence[str] = (),
) -> None:
    for node in nodes:
        node.wait_more()
    nodes.dump(image, *options)
    move(nodes, hosts, order)
    nodes.restore(image, "--leader", nodes[0].leader)


def test_connections_between_nodes_go_on_at_other_addresses(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    """There, with the hosts exchanged, both on one of them, and on the first ones again."""
    first, second = networks
    move(nodes, first)
    for node in nodes:
        node.talk = [FIRST[0], node_jobs.free_port()]
    nodes[1].talk = nodes[0].talk
    nodes.run()
    dump_and_restore(nodes, tmp_path / "image", second)
    dump_and_restore(nodes, tmp_path / "second", second, (1, 0))
    dump_and_restore(nodes, tmp_path / "third", second, (1, 1))
    dump_and_restore(nodes, tmp_path / "fourth", first)
    nodes.check_end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize("communicators", ["keep", "rebuild"])
def test_ranks_of_nccl_go_on_at_other_addresses(
    engine: str,
    communicators: str,
    nodes: Nodes,
    networks: list[dict[str, str]],
    undisturbed_lines: Any,
    tmp_path: Path,
) -> None:
    """NCCL looks for its interface once: that has another name where the ranks go on."""
    first, second = networks
    move(nodes, first)
    let_ranks_run(nodes, tmp_path)
    if communicators == "rebuild":
        without_graphs(nodes)
    for node in nodes:
        node.run("--engine", engine)
    how = ("--communicators", communicators)
    dump_and_restore(nodes, tmp_path / "image", second, options=how)
    dump_and_restore(nodes, tmp_path / "second", first, options=how)
    check_end(nodes, lines_of_two(undisturbed_lines))


# Ranks that meet anew in each step, as those of gloo do: each listens at the address by which it
# reaches the store, and tells the store. They keep the store's address, and that alone.
MEETING = """
import os, socket, socketserver, struct, sys, threading, time
folder, rank, place = sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4]))
told, changed = {}, threading.Condition()
class Store(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            key, _, value = line.decode().strip().partition(" ")
            with changed:
                if value:
                    told[key] = value
                    changed.notify_all()
                changed.wait_for(lambda: key in told)
            self.wfile.write(told[key].encode() + b"\\n")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True
if rank == 0:
    threading.Thread(target=Server(("", place[1]), Store).serve_forever, daemon=True).start()
def ask(text):
    while True:
        try:
            with socket.create_connection(place) as store:
                store.sendall(text.encode() + b"\\n")
                return store.makefile().readline().strip()
        except ConnectionRefusedError:
            time.sleep(0.01)
step = last = 0
while not (last and step > last):
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        own = probe.getsockname()[0]
    with socket.create_server((own, 0)) as listener:
        host, port = listener.getsockname()
        ask(f"{step}/{rank} {host}:{port}")
        host, port = ask(f"{step}/{1 - rank}").split(":")
        near = socket.create_connection((host, int(port)))
        far, seen = listener.accept()
    with near, far:
        ends = os.path.exists(os.path.join(folder, "hurry"))
        near.sendall(struct.pack("=II?", rank, step, ends))
        other, number, theirs = struct.unpack("=II?", far.makefile("rb").read(9))
        assert (other, number) == (1 - rank, step), (other, number, step)
        print(step, own, host, seen[0], flush=True)
    last = last or (step if ends or theirs else 0)
    step += 1
    time.sleep(0.05)
print("done", flush=True)
"""


def test_ranks_that_meet_anew_find_each_other_by_the_addresses_that_they_know(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    first, second = networks
    move(nodes, first)
    port = node_jobs.free_port()
    for node in nodes:
        node.program = [sys.executable, "-c", MEETING, tmp_path, node.number, FIRST[0], port]
        node.run()
    dump_and_restore(nodes, tmp_path / "image", second)
    dump_and_restore(nodes, tmp_path / "second", second, (1, 0))
    dump_and_restore(nodes, tmp_path / "third", first)
    for node in nodes:
        node.wait_more()
    nodes.hurry()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    for node in nodes:
        own, other = FIRST[node.number], FIRST[1 - node.number]
        *steps, done = node.lines
        assert steps == [f"{step} {own} {other} {other}" for step in range(len(steps))]
        assert done == "done"


# A server at the one address of IPv6 that its host has.
SERVER = """
import socket, sys, time
with socket.create_server(("fd00:77::1", 0), family=socket.AF_INET6):
    while True:
        print("listens", flush=True)
        time.sleep(0.1)
"""


def test_an_address_for_which_a_node_has_none_is_refused_by_name_on_all(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    first, second = networks
    move(nodes, first)
    words = ["addr", "add", "fd00:77::1/64", "dev", "fgveth1", "nodad"]
    subprocess.run(["ip", "-n", [*first][1], *words], check=True)
    nodes[0].run()
    nodes[1].program = [sys.executable, "-c", SERVER]
    nodes[1].run()
    for node in nodes:
        wait_for(lambda node=node: node.lines, f"lines of node {node.number}", SECONDS)
    nodes.dump(tmp_path / "image")
    move(nodes, second)
    nodes.restore(tmp_path / "image", "--leader", nodes[0].leader)
    codes = [errors.NodeFailed.exit_code, errors.RestoreFailed.exit_code]
    assert [node.wait() for node in nodes] == codes
    assert "the address fd00:77::1, and this machine none for it" in nodes[1].said
    assert "Node 1" in nodes[0].said
    move(nodes, first)
    nodes.restore(tmp_path / "image", "--leader", nodes[0].leader)
    nodes[1].wait_more()


def test_connections_of_nodes_that_had_one_address_are_refused_by_name_on_two_hosts(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    first, _ = networks
    move(nodes, first, (0, 0))
    for node in nodes:
        node.talk = [FIRST[0], 7001]
    nodes.run()
    nodes.dump(tmp_path / "image")
    move(nodes, first)
    nodes.restore(tmp_path / "image")
    codes = {node.wait() for node in nodes}
    assert codes <= {errors.NodeFailed.exit_code, errors.RestoreFailed.exit_code}
    assert any("leads to a node that had an address of this one" in node.said for node in nodes)
    move(nodes, first, (0, 0))
    nodes.restore(tmp_path / "image")
    nodes.check_end()


# Rank 0 has closed its end, and the other one has not read all yet.
CLOSED = """
import os, socket, sys, time
folder, rank, place = sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4]))
if rank == 0:
    with socket.create_server(place) as listener:
        with listener.accept()[0] as far:
            far.sendall(b"the rest")
else:
    while True:
        try:
            near = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    while near.recv(9, socket.MSG_PEEK) != b"the rest":
        time.sleep(0.01)
print("ready", flush=True)
while not os.path.exists(os.path.join(folder, "hurry")):
    time.sleep(0.01)
if rank == 1:
    print(near.recv(9), near.recv(9), flush=True)
"""


def test_a_connection_that_another_node_has_closed_is_kept_with_what_it_had_sent(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    first, second = networks
    move(nodes, first)
    # The kernel keeps a closed end for a minute, and this machine may be slow.
    patience = "echo 600 > /proc/sys/net/ipv4/tcp_fin_timeout"
    subprocess.run([*nodes[0].host, "sh", "-c", patience], check=True)
    for node in nodes:
        node.program = [sys.executable, "-c", CLOSED, tmp_path, node.number, FIRST[0], 7001]
        node.run()
    for node in nodes:
        wait_for(lambda node=node: node.lines, "ready", SECONDS)
    nodes.dump(tmp_path / "image")
    move(nodes, second)
    nodes.restore(tmp_path / "image", "--leader", nodes[0].leader)
    nodes.hurry()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert nodes[1].lines == ["ready", "b'the rest' b''"]
