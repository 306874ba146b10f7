"""A job of two nodes on real GPUs, each node with one of its own where there are two.

FLOWGPU_TEST_GPU=emulated runs them on the emulated GPU.
"""

from __future__ import annotations

import pytest

from tests.emu import test_nodes, test_nodes_addresses
from tests.emu.test_nodes import Nodes
from tests.gpu.slots import VISIBLE, visible_gpus
from tests.gpu.test_checkpoint import KIND

machines, hosts, talking = test_nodes.machines, test_nodes.hosts, test_nodes.talking
networks = test_nodes_addresses.networks
both = test_nodes.nodes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def nodes(both: Nodes) -> Nodes:
    gpus = visible_gpus(KIND, None)
    for node in both:
        node.gpu = KIND
        node.env[VISIBLE] = gpus[node.number % len(gpus)]
    return both


test_dumped = test_nodes.test_a_job_of_two_nodes_is_dumped_and_restored_again_and_again
test_left_running = test_nodes.test_a_job_that_is_left_running_loses_nothing_and_its_image_restores
test_connections = test_nodes.test_tcp_connections_between_nodes_are_kept
test_elsewhere = test_nodes_addresses.test_connections_between_nodes_go_on_at_other_addresses
