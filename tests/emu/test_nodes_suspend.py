"""Suspensions of jobs of several nodes: all of them, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.jobs import RUNNING, SUSPENDED
from tests.emu import node_jobs, test_nodes_nccl
from tests.emu.node_jobs import NAME, Node, Nodes, failed
from tests.emu.test_nodes_nccl import ENGINES, check_end, run
from tests.unit.coordinator_job import wait_for

machines, hosts, nodes = node_jobs.machines, node_jobs.hosts, node_jobs.nodes
undisturbed_lines, expected = test_nodes_nccl.undisturbed_lines, test_nodes_nccl.expected
ranks = test_nodes_nccl.ranks


def suspended(nodes: Nodes, *options: object, at: int = 0) -> dict[str, Any]:
    done = nodes[at].flowgpu("suspend", NAME, "--json", *options)
    assert done.returncode == 0, done.stderr
    assert states(nodes) == [SUSPENDED] * 2
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def resumed(nodes: Nodes, at: int = 0) -> dict[str, Any]:
    done = nodes[at].flowgpu("resume", NAME, "--json")
    assert done.returncode == 0, done.stderr
    assert states(nodes) == [RUNNING] * 2
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def states(nodes: Nodes) -> list[str]:
    return [node.record.state for node in nodes]


def go_on(nodes: Nodes) -> None:
    for node in nodes:
        node.wait_more()


def faulty(node: Node, fault: str, verb: str, at: Node) -> None:
    node.fault.write_text(f"{fault}:1")
    failed(at.flowgpu(verb, NAME), errors.NodeFailed)
    node.fault.write_text("")


@pytest.mark.parametrize("at", [0, 1])
def test_all_nodes_are_suspended_and_resumed_as_one(nodes: Nodes, at: int) -> None:
    nodes.run()
    for _ in range(2):
        report = suspended(nodes, at=at)
        assert sorted(report["nodes"]) == ["0", "1"]
        assert report["host_bytes"] == sum(one["host_bytes"] for one in report["nodes"].values())
        failed(nodes[at].flowgpu("suspend", NAME), errors.NodeFailed)
        done = nodes.ask("pause-and-dump", nodes[0].folder / "image", at=at)
        failed(done, errors.NodeFailed)
        assert "several nodes, for a dump of what is suspended" in done.stderr
        assert resumed(nodes, at=1 - at)["gpu_bytes_stored"] > 0
        go_on(nodes)
        failed(nodes[at].flowgpu("resume", NAME), errors.NotSuspended)
    nodes.check_end()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_across_nodes_keep_their_communicators(
    engine: str, ranks: Nodes, expected: Any
) -> None:
    run(ranks, engine)
    for options in ((), ("--keep-context",), ()):
        report = suspended(ranks, *options)
        assert all("cut" in report["nodes"][node]["phases"] for node in ("0", "1"))
        resumed(ranks, at=1)
    check_end(ranks, expected)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_where_one_node_fails_all_run_on_or_all_stay_suspended(who: int, nodes: Nodes) -> None:
    nodes.run()
    for fault in ("prepare", "gate", "handover", "strip", "copy_wait"):
        faulty(nodes[who], fault, "suspend", nodes[1 - who])
        assert states(nodes) == [RUNNING] * 2, fault
        go_on(nodes)
    suspended(nodes)
    for fault in ("fill", "rebuild"):
        faulty(nodes[who], fault, "resume", nodes[1 - who])
        assert states(nodes) == [SUSPENDED] * 2, fault
    resumed(nodes)
    nodes.check_end()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_a_coordinator_may_be_killed_while_all_are_suspended(who: int, nodes: Nodes) -> None:
    nodes.run()
    suspended(nodes)
    nodes[who].kill_coordinator()
    wait_for(lambda: states(nodes) == [SUSPENDED] * 2, "the next coordinator")
    resumed(nodes, at=1 - who)
    nodes.check_end()
