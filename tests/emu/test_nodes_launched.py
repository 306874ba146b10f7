"""Jobs of two nodes that one line starts again and again, or a launcher with a command a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.image.store import Store
from tests.emu.node_jobs import NAME, PROGRAM, STEPS, Nodes, machines, nodes
from tests.emu.node_program import expected
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS
from tests.unit.coordinator_job import wait_for

__all__ = ["machines", "nodes"]


class Lines(Nodes):
    """One command line a node, started again and again, with a store that they share."""

    def begin(self, store: Path, *options: object) -> None:
        store.mkdir(exist_ok=True)
        own = ("--store", store, "--resume", *AT_SIGNALS, *options)
        for node in self:
            node.run(*own)
        for node in self:
            node.wait_more()

    def told(self, at: int) -> None:
        """A signal comes to one node."""
        process = self[at].process
        assert process is not None
        process.send_signal(signal.SIGUSR1)
        assert [node.wait() for node in self] == [errors.DUMPED_EXIT] * 2, self[at].said


AT_SIGNALS = ("--on-signal", "USR1=dump", "--on-signal", "TERM=dump")


def test_the_same_lines_start_a_job_of_two_nodes_or_go_on_with_it(
    nodes: Nodes, tmp_path: Path
) -> None:
    lines, store = Lines(nodes), tmp_path / "store"
    lines.begin(store)
    for at in range(2):
        lines.told(at)
        lines.begin(store)
        assert all("goes on from" in node.said for node in lines)
    assert len(Store(store / NAME).names()) == 2
    lines.check_end()
    # An orchestrator may start them once more.
    for node in nodes:
        node.run("--store", store, "--resume")
    assert [node.wait() for node in nodes] == [0, 0]
    assert all("has ended well before" in node.said for node in nodes)


def test_nodes_go_on_from_the_newest_image_that_is_whole_on_all(
    nodes: Nodes, tmp_path: Path
) -> None:
    lines, store = Lines(nodes), Store(tmp_path / "store" / NAME)
    lines.begin(store.path.parent, "--every", 0.5)
    wait_for(lambda: len(store.names()) >= 2, "two images", SECONDS)
    for node in nodes:
        node.clear()  # as machines that go down
    unfinished = store.path / "999999-20261128T000000Z"
    (unfinished / "node-0").mkdir(parents=True)
    names = store.names()
    damaged = store.path / names[-1] / "node-1" / "criu" / "inventory.img"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    said = store.path / names[-2]
    for node in nodes:
        node.out.write_text((said / f"node-{node.number}" / "output.log").read_text())
    lines.begin(store.path.parent)
    assert store.damaged() == [f"{names[-1]}.damaged"]
    assert not unfinished.exists()
    assert all(f"goes on from {said}" in node.said for node in nodes)
    lines.check_end()


class Launched:
    """Two commands on each node, as srun would start them."""

    def __init__(self, nodes: Nodes, step: str, folder: Path) -> None:
        self._nodes, self._step, self._folder = nodes, step, folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object) -> None:
        host = self._nodes[0].leader.partition(":")[0]
        for rank in range(4):
            node = self._nodes[rank // 2]
            place = {
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_STEP_ID": self._step,
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_STEP_NODELIST": host,
                "SLURM_NODEID": str(rank // 2),
                "SLURM_LOCALID": str(rank % 2),
                "SLURM_PROCID": str(rank),
            }
            with open(self.out(rank), "ab") as out, open(self._folder / f"e{rank}", "wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        [*FLOWGPU, *map(str, words)],
                        stdout=out,
                        stderr=err,
                        cwd=ROOT,
                        env={**node.env, **place},
                    )
                )

    def out(self, rank: int) -> Path:
        return self._folder / f"o{rank}"

    def wait(self) -> list[int]:
        return [process.wait(SECONDS) for process in self.processes]

    def said(self) -> list[str]:
        return [(self._folder / f"e{rank}").read_text() for rank in range(4)]


@pytest.fixture
def launch(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[[], Launched]]:
    made: list[Launched] = []

    def make() -> Launched:
        made.append(Launched(nodes, str(len(made)), tmp_path))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes:
            process.kill()
            process.wait()


RANK = 'exec "$0" "$1" "$2" $SLURM_PROCID 4 "$3"'


def test_ranks_that_srun_starts_are_one_tree_a_node(
    nodes: Nodes, launch: Callable[[], Launched], tmp_path: Path
) -> None:
    first, image = launch(), tmp_path / "image"
    program = ("bash", "-c", RANK, sys.executable, PROGRAM, tmp_path, STEPS)
    first.start("run", "--gpu", "emulated", "--join", NAME, "--", *program)
    for rank in (0, 2):
        wait_for(first.out(rank).read_text, "lines", SECONDS)
    done = nodes.ask("pause-and-dump", image)
    assert done.returncode == 0, done.stderr
    assert first.wait() == [errors.DUMPED_EXIT] * 4, first.said()
    again = launch()
    again.start("restore", image)
    nodes.hurry()
    assert again.wait() == [0] * 4, again.said()
    lines = expected(4, STEPS)
    for rank in (0, 2):
        found = first.out(rank).read_text().splitlines()
        assert sorted(found) == sorted([*lines[rank], *lines[rank + 1], "done", "done"])
        assert first.out(rank + 1).read_text() == ""


def test_ranks_that_srun_starts_again_go_on_from_their_store(
    nodes: Nodes, launch: Callable[[], Launched], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    program = ("bash", "-c", RANK, sys.executable, PROGRAM, tmp_path, STEPS)
    own = ("--store", store, "--resume", *AT_SIGNALS, "--dumped-exit", 85)
    line = ("run", "--gpu", "emulated", "--join", NAME, *own, "--", *program)
    turns = [launch() for _ in range(3)]
    turns[0].start(*line)
    for rank in (0, 2):
        wait_for(turns[0].out(rank).read_text, "lines", SECONDS)
    for process in turns[0].processes:  # as a scheduler tells all
        process.send_signal(signal.SIGUSR1)
    assert turns[0].wait() == [85] * 4, turns[0].said()
    nodes.hurry()
    for turn in turns[1:]:
        turn.start(*line)
        assert turn.wait() == [0] * 4, turn.said()
    lines = expected(4, STEPS)
    for rank in (0, 2):
        found = turns[0].out(rank).read_text().splitlines()
        assert sorted(found) == sorted([*lines[rank], *lines[rank + 1], "done", "done"])


def test_each_command_of_a_launcher_has_its_ranks_exit_code(launch: Callable[[], Launched]) -> None:
    one = launch()
    one.start("run", "--gpu", "emulated", "--join", NAME, "--", "bash", "-c", "exit $SLURM_PROCID")
    assert one.wait()[1::2] == [1, 3], one.said()
