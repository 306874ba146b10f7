"""Jobs of two nodes whose ranks share communicators of NCCL, with one cut through all of them.

Each node is a network namespace with a GPU of its own. The program is skewed on purpose
(nccl_program.py); its lines must be those of a run that nobody disturbed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.jobs import RUNNING
from flowgpu.launch import emulated_driver
from tests.emu import node_jobs
from tests.emu.nccl_cuts import undisturbed
from tests.emu.node_jobs import Asked, Nodes, failed
from tests.emu.test_checkpoint import ROOT, SECONDS
from tests.emu.test_nccl_checkpoint import IDLE
from tests.unit.coordinator_job import wait_for

machines, nodes, hosts = node_jobs.machines, node_jobs.nodes, node_jobs.hosts

STEPS = 960
ENGINES = ("native", "replay")


@pytest.fixture(scope="module")
def undisturbed_lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Lines of a run that nobody disturbed, by the number of ranks."""
    known: dict[int, list[str]] = {}

    def lines(count: int) -> list[str]:
        if count not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[count] = [line.rstrip("\n") for line in undisturbed(count, STEPS, folder)]
        return known[count]

    yield lines


@pytest.fixture
def expected(undisturbed_lines: Any) -> list[list[str]]:
    return lines_of_two(undisturbed_lines)


def lines_of_two(undisturbed_lines: Any) -> list[list[str]]:
    """Lines of two ranks, one on each node."""
    steps = [[one for one in undisturbed_lines(2) if f"rank {rank} " in one] for rank in range(2)]
    return [
        [*sorted(of_rank, key=lambda line: int(line.split()[1])), f"done rank {rank}"]
        for rank, of_rank in enumerate(steps)
    ]


@pytest.fixture
def ranks(nodes: Nodes, hosts: dict[str, str], tmp_path: Path) -> Nodes:
    """Nodes of one rank each, on hosts of their own."""
    address = next(iter(hosts.values()))
    for node, name in zip(nodes, hosts, strict=True):
        node.be_on(name, address)
    let_ranks_run(nodes, tmp_path)
    return nodes


def let_ranks_run(nodes: Nodes, folder: Path) -> None:
    """One on each node."""
    for node in nodes:
        node.env |= {
            "LD_LIBRARY_PATH": str(emulated_driver().parent),
            "NCCL_HOSTID": f"host {node.number}",
            "NCCL_SOCKET_IFNAME": "fgveth",
            "PYTHONPATH": str(ROOT),
            "WORKLOAD_HURRY": str(folder / "hurry"),
        }
        words = [sys.executable, "-m", "tests.emu.nccl_program", 2, STEPS, folder, node.number]
        node.program = words


def run(nodes: Nodes, engine: str) -> None:
    for node in nodes:
        node.run("--engine", engine)
    for node in nodes:
        node.wait_more(2)


def restore(nodes: Nodes, image: Path) -> None:
    nodes.restore(image)
    for node in nodes:
        wait_for(lambda node=node: node.record.state == RUNNING, "the restore", SECONDS)


def without_graphs(nodes: Nodes) -> None:
    for node in nodes:
        node.env["NCCL_PROGRAM"] = "eager"


def check_end(nodes: Nodes, expected: list[list[str]]) -> None:
    nodes.hurry()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert [node.lines for node in nodes] == expected


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("communicators", ["keep", "rebuild"])
def test_ranks_of_two_nodes_end_as_undisturbed_ones(
    engine: str, communicators: str, ranks: Nodes, expected: Any, tmp_path: Path
) -> None:
    how = ("--communicators", communicators)
    if communicators == "rebuild":
        without_graphs(ranks)
    run(ranks, engine)
    for number in range(2):
        done = ranks.ask("checkpoint", tmp_path / f"running{number}", *how)
        assert done.returncode == 0, done.stderr
    for number in range(2):
        image = tmp_path / f"image{number}"
        done = ranks.ask("pause-and-dump", image, "--json", *how, at=number)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert all("cut" in report["nodes"][node]["phases"] for node in ("0", "1"))
        assert [node.wait() for node in ranks] == [errors.DUMPED_EXIT] * 2
        restore(ranks, image)
    check_end(ranks, expected)


@pytest.mark.timeout(300)
def test_ranks_of_two_nodes_are_saved_by_replay_where_no_engine_was_asked_for(
    ranks: Nodes, expected: Any, tmp_path: Path
) -> None:
    for node in ranks:
        node.run()
    for node in ranks:
        node.wait_more(2)
    done = ranks.ask("checkpoint", tmp_path / "image", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [report["nodes"][node]["engine"] for node in ("0", "1")] == ["replay"] * 2
    check_end(ranks, expected)


# Ranks of one node that talk to each other over the GPU, and to the others by TCP.
TWO_A_NODE = """
import subprocess, sys
*words, node = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, *words, str(2 * int(node) + one)]) for one in range(2)]
raise SystemExit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("communicators", "engine"), [("keep", "replay"), ("rebuild", "native")])
def test_four_ranks_on_two_nodes_end_as_undisturbed_ones(
    communicators: str, engine: str, ranks: Nodes, undisturbed_lines: Any, tmp_path: Path
) -> None:
    without_graphs(ranks)
    for node in ranks:
        words = ["-m", "tests.emu.nccl_program", 4, STEPS, tmp_path, node.number]
        node.program = [sys.executable, "-c", TWO_A_NODE, *words]
    run(ranks, engine)
    for number in range(2):
        image = tmp_path / f"image{number}"
        done = ranks.ask("pause-and-dump", image, "--communicators", communicators, at=number)
        assert done.returncode == 0, done.stderr
        assert [node.wait() for node in ranks] == [errors.DUMPED_EXIT] * 2
        restore(ranks, image)
    ranks.hurry()
    assert [node.wait() for node in ranks] == [0, 0], [node.said for node in ranks]
    assert sorted(line for node in ranks for line in node.lines) == undisturbed_lines(4)


@pytest.fixture
def idle(ranks: Nodes, tmp_path: Path) -> Nodes:
    """Rank 0 has issued what rank 1 comes to later; its GPU waits."""
    (tmp_path / "program.py").write_text(IDLE)
    for node in ranks:
        node.program = [sys.executable, tmp_path / "program.py", tmp_path, node.number]
        node.run("--engine", "replay")
    for node in ranks:
        wait_for(lambda lines=node.out: lines.read_text(), "a rank", SECONDS)
    return ranks


def ends_well(nodes: Nodes, folder: Path) -> None:
    (folder / "go").touch()
    assert [node.wait() for node in nodes] == [0, 0], [node.said for node in nodes]
    assert [node.lines[1:] for node in nodes] == [[f"ended {[2] * 9}"]] * 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_does_not_come_is_named_with_its_node_and_all_run_on(
    idle: Nodes, tmp_path: Path, at: int
) -> None:
    result = idle.ask("pause-and-dump", tmp_path / "image", "--timeout", 6, at=at)
    failed(result, errors.PeerIsIdle)
    waiting, late = (node.lines[0].split()[1] for node in idle)
    assert f"Process {waiting} (node 0)" in result.stderr
    assert f"rank 1 (process {late}, node 1)" in result.stderr
    assert "operation 3 " in result.stderr
    assert not (tmp_path / "image").exists()
    ends_well(idle, tmp_path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_ranks_go_on_when_a_coordinator_is_killed_in_a_cut(
    idle: Nodes, tmp_path: Path, who: int
) -> None:
    with Asked(idle, "pause-and-dump", tmp_path / "image", at=1 - who) as asked:
        for node in idle:
            wait_for(lambda node=node: "checkpoint: gate" in node.log, "the cut", SECONDS)
        idle[who].kill_coordinator()
        assert asked.result().returncode in (
            errors.NodeFailed.exit_code,
            errors.LeaderGone.exit_code,
        ), asked.result()
    ends_well(idle, tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_a_failure_on_one_node_leaves_the_ranks_of_all_with_communicators(
    who: int, ranks: Nodes, expected: Any, tmp_path: Path
) -> None:
    without_graphs(ranks)
    run(ranks, "replay")
    for number, fault in enumerate(("gate", "handover", "strip", "commit"), 1):
        ranks[who].fault.write_text(f"{fault}:1")
        result = ranks.ask("pause-and-dump", tmp_path / "image", "--communicators", "rebuild")
        failed(result, errors.NodeFailed)
        assert not (tmp_path / "image").exists()
        ranks[who].fault.write_text("")
        for node in ranks:
            assert node.log.count("communicators across nodes have ids") == number, fault
    check_end(ranks, expected)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_ranks_get_communicators_from_the_next_coordinator_of_one_node(
    who: int, ranks: Nodes, expected: Any, tmp_path: Path
) -> None:
    without_graphs(ranks)
    run(ranks, "replay")
    ranks[who].halts_at(3)  # where HANDOVER begins
    how = ("--communicators", "rebuild")
    with Asked(ranks, "pause-and-dump", tmp_path / "image", *how, at=1 - who) as asked:
        asked.wait_halted(ranks[who])
        ranks[who].kill_coordinator()
        assert asked.result().returncode in (
            errors.NodeFailed.exit_code,
            errors.LeaderGone.exit_code,
        ), asked.result()
    check_end(ranks, expected)


# A communicator of its own that does not block cannot be made anew.
NOT_BLOCKING = IDLE.replace(
    "reduce()\nok(",
    """
if rank == 1:
    own, ident, config = ctypes.c_void_p(), UniqueId(), Config.made(blocking=0)
    nccl.GetUniqueId(ctypes.byref(ident))
    nccl.library.ncclCommInitRankConfig(ctypes.byref(own), 1, ident, 0, ctypes.byref(config))
    state = ctypes.c_int(IN_PROGRESS)
    while state.value == IN_PROGRESS:
        nccl.CommGetAsyncError(own, ctypes.byref(state))
reduce()
ok(""",
    1,
).replace("if rank == 1:\n    wait_for", "if True:\n    wait_for")


@pytest.mark.timeout(300)
def test_where_one_node_cannot_hold_its_communicators_none_is_ended(
    ranks: Nodes, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(NOT_BLOCKING)
    for node in ranks:
        node.program = [sys.executable, tmp_path / "program.py", tmp_path, node.number]
        node.run("--engine", "replay")
    for node in ranks:
        wait_for(lambda lines=node.out: lines.read_text(), "a rank", SECONDS)
    result = ranks.ask("pause-and-dump", tmp_path / "image", "--communicators", "rebuild")
    failed(result, errors.NodeFailed)
    assert "Node 1" in result.stderr and "does not block" in result.stderr
    assert not any("communicators across nodes have ids" in node.log for node in ranks)
    ends_well(ranks, tmp_path)
