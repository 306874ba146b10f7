"""A job of two nodes on real GPUs, each node with one of its own where there are two.

FLOWGPU_TEST_GPU=emulated runs them on the emulated GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import errors
from tests.emu import (
    node_jobs,
    test_nodes,
    test_nodes_addresses,
    test_nodes_connections,
    test_nodes_suspend,
)
from tests.emu.node_jobs import Node, Nodes
from tests.emu.test_nodes_nccl import restore
from tests.emu.test_nodes_suspend import resumed, suspended
from tests.gpu.catalogue import catalogue
from tests.gpu.slots import VISIBLE, visible_gpus
from tests.gpu.test_checkpoint import KIND
from tests.unit.coordinator_job import wait_for

machines, hosts = node_jobs.machines, node_jobs.hosts
talking = test_nodes_connections.talking
networks = test_nodes_addresses.networks
both = node_jobs.nodes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(both: Nodes) -> Nodes:
    gpus = visible_gpus(KIND, None)
    for node in both:
        node.gpu = KIND
        node.env[VISIBLE] = gpus[node.number % len(gpus)]
    return both


test_dumped = test_nodes.test_a_job_of_two_nodes_is_dumped_and_restored_again_and_again
test_suspended = test_nodes_suspend.test_all_nodes_are_suspended_and_resumed_as_one
test_left_running = test_nodes.test_a_job_that_is_left_running_loses_nothing_and_its_image_restores
test_connections = test_nodes_connections.test_tcp_connections_between_nodes_are_kept
test_elsewhere = test_nodes_addresses.test_connections_between_nodes_go_on_at_other_addresses


STEPS = 400
START_SECONDS, RUN_SECONDS = 120.0, 200.0
DDP = [sys.executable, "workloads/torch_ddp.py", "--steps", STEPS, "--step-delay", "0.05"]


@pytest.fixture
def ranks(nodes: Nodes, hosts: dict[str, str], tmp_path: Path) -> Nodes:
    """A rank of data-parallel training on each of two hosts: NCCL and its store talk by TCP."""
    if lacking := catalogue()["torch_ddp"].missing():
        pytest.skip(f"{lacking} is not here")
    address = next(iter(hosts.values()))
    for node, name in zip(nodes, hosts, strict=True):
        node.be_on(name, address)
        node.program = DDP
        node.env |= {
            "RANK": str(node.number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": address,
            "MASTER_PORT": "7100",
            "NCCL_HOSTID": f"host {node.number}",
            "NCCL_SOCKET_IFNAME": "fgveth",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "WORKLOAD_HURRY": str(tmp_path / "hurry"),
        }
    return nodes


def undisturbed(nodes: Nodes) -> list[str]:
    """What rank 0 prints without FlowGPU."""
    plain = [str(word) for word in DDP[:-2]]

    def started(node: Node) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*node.host, *plain],
            cwd=node_jobs.ROOT,
            env=node.env,
            stdout=subprocess.PIPE,
            text=True,
        )

    processes = [started(node) for node in nodes]
    try:
        said = [process.communicate(timeout=RUN_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return said[0].splitlines()


def wait_steps(node: Node, count: int = 3) -> None:
    wanted = len(node.lines) + count
    process = node.process
    assert process is not None
    wait_for(
        lambda: len(node.lines) >= wanted or process.poll() is not None, "steps", START_SECONDS
    )
    assert process.poll() is None, node.said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["replay", "native"])
@pytest.mark.parametrize("communicators", ["keep", "rebuild"])
def test_data_parallel_ranks_of_two_hosts_end_as_undisturbed_ones(
    engine: str, communicators: str, ranks: Nodes, tmp_path: Path
) -> None:
    wanted = undisturbed(ranks)
    for node in ranks:
        node.run("--engine", engine)
    how = ("--communicators", communicators)
    wait_steps(ranks[0])
    done = ranks.ask("checkpoint", tmp_path / "running", *how)
    assert done.returncode == 0, done.stderr
    for at in range(2):
        wait_steps(ranks[0])
        print(suspended(ranks, at=at), resumed(ranks, at=1 - at))
    for number in range(2):
        wait_steps(ranks[0])
        image = tmp_path / f"image{number}"
        done = ranks.ask("pause-and-dump", image, "--json", *how, at=number)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        assert [node.wait() for node in ranks] == [errors.DUMPED_EXIT] * 2
        restore(ranks, image)
    wait_steps(ranks[0])
    ranks.hurry()
    assert [node.wait() for node in ranks] == [0, 0], [node.said for node in ranks]
    assert ranks[0].lines == wanted
