"""Jobs of two nodes on one machine: each has a runtime folder, a coordinator and a tree of its own.

Their ranks compute each step from what both have said of the step before (node_program.py), so a
checkpoint that is not of one moment shows.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.image.job_file import JOB_FILE, JobFile
from flowgpu.image.layout import MANIFEST
from flowgpu.image.store import Store
from tests.emu.node_jobs import (
    NAME,
    PROGRAM,
    SECRET,
    STEPS,
    Asked,
    Nodes,
    failed,
    free_port,
    machines,
    nodes,
)
from tests.emu.test_checkpoint import SECONDS
from tests.unit.coordinator_job import wait_for

__all__ = ["machines", "nodes"]


@pytest.mark.parametrize("at", [0, 1])
def test_a_job_of_two_nodes_is_dumped_and_restored_again_and_again(
    nodes: Nodes, tmp_path: Path, at: int
) -> None:
    nodes.run()
    for number in range(2):
        image = tmp_path / f"image{number}"
        done = nodes.ask("pause-and-dump", image, "--json", at=at)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["image"] == str(image)
        assert sorted(report["nodes"]) == ["0", "1"]
        assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
        assert sorted(path.name for path in image.iterdir()) == [JOB_FILE, "node-0", "node-1"]
        nodes.restore(image)
        for node in nodes:
            node.wait_more()
    nodes.check_end()


def test_a_job_that_is_left_running_loses_nothing_and_its_image_restores(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.run()
    done = nodes.ask("checkpoint", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    for node in nodes:
        node.wait_more()
    for node in nodes:
        node.flowgpu("kill", NAME)
    assert [node.wait() for node in nodes] == [137, 137]
    for node in nodes:
        said = (tmp_path / "image" / f"node-{node.number}" / "output.log").read_text()
        node.out.write_text(said)
    nodes.restore(tmp_path / "image")
    nodes.check_end()


def test_ps_says_which_node_it_is(nodes: Nodes) -> None:
    nodes.run()
    for node in nodes:
        (found,) = json.loads(node.flowgpu("ps", "--json").stdout)
        assert (found["node"], found["nodes"]) == (node.number, 2)
        assert f"{node.number} of 2" in node.flowgpu("ps").stdout


def test_a_node_that_refuses_its_part_costs_nobody_a_pause(nodes: Nodes, tmp_path: Path) -> None:
    nodes[0].run()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-c", CONNECTED, str(listener.getsockname()[1]), *sys_words(nodes)]
        place = ("--nodes", 2, "--node", 1, "--leader", nodes[1].leader)
        nodes[1].start("run", "--gpu", "emulated", "--job", NAME, *place, "--", *words)
        for node in nodes:
            node.wait_more()
        result = nodes.ask("pause-and-dump", tmp_path / "image")
        failed(result, errors.NodeFailed)
        assert "Node 1" in result.stderr and "TCP connection" in result.stderr
        assert not (tmp_path / "image").exists()
        assert "checkpoint: gate" not in nodes[0].log
        for node in nodes:
            node.wait_more()
        nodes.check_end()


CONNECTED = """
import runpy, socket, sys
held = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def sys_words(nodes: Nodes) -> list[str]:
    return [str(PROGRAM), str(nodes[1].folder), "1", "2", str(STEPS)]


FORWARD = ("prepare", "gate", "handover", "strip", "capture", "commit")


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_a_coordinator_that_is_killed_in_any_phase_leaves_all_nodes_running(
    nodes: Nodes, tmp_path: Path, who: int
) -> None:
    nodes.run()
    (tmp_path / "images").mkdir()
    for nth, phase in enumerate(FORWARD, 1):
        image = tmp_path / "images" / phase
        nodes[who].halts_at(nth)
        with Asked(nodes, "pause-and-dump", image, at=1 - who) as asked:
            asked.wait_halted(nodes[who])
            if phase == "commit":
                wait_for(
                    lambda: ": voted" in nodes[1 - who].log,
                    "the other node to vote",
                    SECONDS,
                )
            nodes[who].kill_coordinator()
            assert asked.result().returncode in (
                errors.NodeFailed.exit_code,
                errors.LeaderGone.exit_code,
            ), (phase, asked.result())
        for node in nodes:
            node.wait_more()
        wait_for(lambda: not os.listdir(tmp_path / "images"), f"nothing of {phase}", SECONDS)
    image = tmp_path / "image"
    done = nodes.ask("pause-and-dump", image, at=who)
    assert done.returncode == 0, done.stderr
    assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
    nodes.restore(image)
    nodes.check_end()


@pytest.mark.parametrize("who", [0, 1], ids=["leader", "agent"])
def test_a_coordinator_that_is_killed_after_the_commit_leaves_an_image_of_all_nodes(
    nodes: Nodes, tmp_path: Path, who: int
) -> None:
    nodes.run()
    image = tmp_path / "image"
    nodes[who].halts_at(len(FORWARD) + 1)
    with Asked(nodes, "pause-and-dump", image, at=1) as asked:
        asked.wait_halted(nodes[who])
        assert (image / JOB_FILE).exists()
        nodes[who].kill_coordinator()
        assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
        if who == 0:  # who has asked the other one hears that the image is whole
            assert asked.result().returncode == 0, asked.result().stderr
    nodes.restore(image)
    nodes.check_end()


def test_a_node_in_doubt_that_is_killed_hears_of_the_commit(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run()
    image = tmp_path / "image"
    nodes[0].halts_at(len(FORWARD))
    with Asked(nodes, "pause-and-dump", image) as asked:
        asked.wait_halted(nodes[0])
        wait_for(lambda: ": voted" in nodes[1].log, "the vote of node 1", SECONDS)
        nodes[1].kill_coordinator()
        nodes[0].go_on()
        assert asked.result().returncode == 0, asked.result().stderr
    assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
    nodes.restore(image)
    nodes.check_end()


@pytest.fixture
def image(nodes: Nodes, tmp_path: Path) -> Path:
    nodes.run()
    done = nodes.ask("pause-and-dump", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert [node.wait() for node in nodes] == [errors.DUMPED_EXIT] * 2
    return tmp_path / "image"


def test_no_node_goes_on_before_all_are_restored(nodes: Nodes, image: Path) -> None:
    before = len(nodes[0].lines)
    nodes[0].start("restore", image, "--node", 0)
    wait_for(lambda: "waits for all nodes" in nodes[0].log, "node 0 to wait", SECONDS)
    time.sleep(0.5)
    assert len(nodes[0].lines) == before
    nodes[1].start("restore", image, "--node", 1)
    nodes.check_end()


def test_a_damaged_image_of_one_node_is_restored_nowhere(nodes: Nodes, image: Path) -> None:
    damaged = image / "node-1" / "criu" / "inventory.img"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = [node.lines for node in nodes]
    nodes.restore(image)
    codes = [node.wait() for node in nodes]
    assert codes == [errors.NodeFailed.exit_code, errors.ImageDamaged.exit_code]
    failed(nodes[0].flowgpu("verify", image), errors.ImageDamaged)
    assert "Node 1" in nodes[0].said
    assert [node.lines for node in nodes] == before
    damaged.write_bytes(data)
    assert nodes[0].flowgpu("verify", image).returncode == 0
    found = json.loads(nodes[0].flowgpu("inspect", image, "--json").stdout)
    assert sorted(found["nodes"]) == ["node-0", "node-1"]
    assert "node-1:" in nodes[0].flowgpu("inspect", image).stdout
    for node in nodes:
        node.start("restore", image / f"node-{node.number}")
    nodes.check_end()


def test_a_part_of_another_checkpoint_is_refused_by_each_node(nodes: Nodes, image: Path) -> None:
    manifest = image / "node-0" / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text + "\n")
    nodes.restore(image)
    assert [node.wait() for node in nodes] == [errors.ImageDamaged.exit_code] * 2
    manifest.write_text(text)


def test_what_was_never_committed_is_no_image(nodes: Nodes, image: Path) -> None:
    (image / JOB_FILE).unlink()
    nodes.restore(image)
    assert [node.wait() for node in nodes] == [errors.ImageDamaged.exit_code] * 2


def test_nodes_with_disks_of_their_own_restore_their_own_parts(
    nodes: Nodes, image: Path, tmp_path: Path
) -> None:
    for node in nodes:
        own = tmp_path / f"disk{node.number}"
        own.mkdir()
        shutil.copy(image / JOB_FILE, own)
        (image / f"node-{node.number}").rename(own / f"node-{node.number}")
    leader = f"127.0.0.1:{free_port()}"
    for node in nodes:
        node.start("restore", tmp_path / f"disk{node.number}", "--leader", leader)
    nodes.check_end()


def test_a_checkpoint_needs_all_nodes(nodes: Nodes, tmp_path: Path) -> None:
    nodes[0].run()
    wait_for(lambda: nodes[0].lines, "its first step", SECONDS)
    result = nodes.ask("pause-and-dump", tmp_path / "image")
    failed(result, errors.NodesMissing)
    assert "reached: 1." in result.stderr
    nodes[1].run()
    for node in nodes:
        node.wait_more()
    nodes.check_end()


def test_another_secret_or_number_of_nodes_joins_nobody(nodes: Nodes, tmp_path: Path) -> None:
    nodes[0].run()
    nodes[1].run(FLOWGPU_JOIN="another secret of that length")
    for node in nodes:
        node.wait_more()
    result = nodes.ask("pause-and-dump", tmp_path / "image", at=1)
    failed(result, errors.LeaderGone)
    assert "FLOWGPU_JOIN" in result.stderr
    wait_for(lambda: "FLOWGPU_JOIN" in nodes[1].record.trouble, "`ps` to say it", SECONDS)
    failed(nodes.ask("pause-and-dump", tmp_path / "image"), errors.NodesMissing)
    assert not (tmp_path / "image").exists()
    nodes.check_end()


def test_the_secret_is_not_in_the_job_or_its_image(nodes: Nodes, image: Path) -> None:
    found = [
        path for path in image.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert found == []
    assert JobFile.load(image).key != SECRET
    assert (image / JOB_FILE).stat().st_mode & 0o77 == 0


def test_a_series_of_several_nodes_has_images_that_restore(nodes: Nodes, tmp_path: Path) -> None:
    nodes.run()
    store = Store(tmp_path / "store")
    series = ("--store", store.path, "--every", 0.3, "--count", 3, "--keep", 2)
    done = nodes[1].flowgpu("checkpoint", NAME, *series)
    assert done.returncode == 0, done.stderr
    assert len(store.names()) == 2
    assert nodes[0].flowgpu("store", "verify", store.path).returncode == 0
    listed = json.loads(nodes[0].flowgpu("store", "ls", store.path, "--json").stdout)
    assert [(row["job"], row["error"]) for row in listed] == [(NAME, None)] * 2
    for node in nodes:
        node.flowgpu("kill", NAME)
    assert [node.wait() for node in nodes] == [137, 137]
    newest = store.path / store.names()[-1]
    for node in nodes:
        node.out.write_text((newest / f"node-{node.number}" / "output.log").read_text())
    nodes.restore(newest)
    nodes.check_end()
