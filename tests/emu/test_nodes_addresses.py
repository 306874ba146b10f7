"""Jobs of two nodes that are restored on hosts with other addresses.

Each host is a network namespace, and each pair of them a network of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowgpu import errors
from tests.emu import test_nodes
from tests.emu.test_nodes import Nodes, connected_hosts

machines, nodes = test_nodes.machines, test_nodes.nodes

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


def dump_and_restore(nodes: Nodes, image: Path, hosts: dict[str, str], *order: int) -> None:
    for node in nodes:
        node.wait_more()
    done = nodes.ask("pause-and-dump", image)
    assert done.returncode == 0, done.stderr
    assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
    move(nodes, hosts, order or (0, 1))
    nodes.restore(image, "--leader", nodes[0].leader)


def test_connections_between_nodes_go_on_at_other_addresses(
    nodes: Nodes, networks: list[dict[str, str]], tmp_path: Path
) -> None:
    """There, with the hosts exchanged, and on the first ones again."""
    first, second = networks
    move(nodes, first)
    for node in nodes:
        node.talk = [FIRST[0], test_nodes.free_port()]
    nodes[1].talk = nodes[0].talk
    nodes.run()
    dump_and_restore(nodes, tmp_path / "image", second)
    dump_and_restore(nodes, tmp_path / "second", second, 1, 0)
    dump_and_restore(nodes, tmp_path / "third", first)
    nodes.check_end()
