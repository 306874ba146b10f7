"""Jobs of two nodes on one machine: each has a runtime folder, a coordinator and a tree of its own.

Their ranks compute each step from what both have said of the step before (node_program.py), so a
checkpoint that is not of one moment shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.host.proctree import task_states
from flowgpu.image.job_file import JOB_FILE, JobFile
from flowgpu.image.layout import MANIFEST
from flowgpu.image.store import Store
from flowgpu.jobs import LIVE_STATES, Job, Registry
from flowgpu.launch import GpuKind, emulator_socket
from flowgpu.start import kill_coordinator, kill_lost
from tests.emu.node_program import expected
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, end_emulator
from tests.unit.coordinator_job import wait_for

NAME, STEPS = "train", 1000
PROGRAM = ROOT / "tests" / "emu" / "node_program.py"
SECRET = "what the nodes of these tests know"
Result = subprocess.CompletedProcess


def free_port() -> int:
    """One that no program gets by asking for any, before it is listened at."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Path]]:
    """Runtime folders of two nodes."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            base = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="flowgpu-", ignore_cleanup_errors=True)
            )
            stack.callback(end_emulator, emulator_socket(Path(base)))
            made.append(Path(base))
        yield made


class Node:
    """One node's part of a job, and what it has said."""

    gpu: GpuKind = "emulated"

    def __init__(self, number: int, base: Path, folder: Path, leader: str) -> None:
        self.number, self.base, self.folder, self.leader = number, base, folder, leader
        self.registry = Registry(base)
        self.fault = folder / f"fault{number}"
        self.fault.touch()
        self.out, self.err = folder / f"out{number}", folder / f"err{number}"
        self.env = {
            **os.environ,
            "FLOWGPU_RUNTIME_DIR": str(base),
            "FLOWGPU_JOIN": SECRET,
            "FLOWGPU_FAULT": f"@{self.fault}",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.host: list[str] = []
        """What a command runs under to be on another host."""
        self.talk: list[object] = []
        """Where ranks talk by TCP; empty: by files."""
        self.program: list[object] = []
        """Another one than node_program.py."""

    def be_on(self, name: str, leader: str) -> None:
        """Be on this host from now on, with node 0 on that one."""
        self.leader = f"{leader}:7000"
        self.host = ["nsenter", f"--net=/run/netns/{name}"]

    def start(self, *words: object, **env: str) -> None:
        with open(self.out, "ab") as out, open(self.err, "wb") as err:
            self.process = subprocess.Popen(
                [*self.host, *FLOWGPU, *map(str, words)],
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**self.env, **env},
            )

    def run(self, *options: object, steps: int = STEPS, **env: str) -> None:
        place = ("--nodes", 2, "--node", self.number, "--leader", self.leader)
        words = [sys.executable, PROGRAM, self.folder, self.number, 2, steps, *self.talk]
        words = self.program or words
        gpu = ("--gpu", self.gpu)
        self.start("run", *gpu, "--job", NAME, *place, *options, "--", *words, **env)

    def flowgpu(self, *words: object) -> Result[str]:
        return subprocess.run(
            [*self.host, *FLOWGPU, *map(str, words)],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=ROOT,
            env=self.env,
        )

    @property
    def record(self) -> Job:
        return self.registry.find(NAME)

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    @property
    def said(self) -> str:
        return self.err.read_text()

    @property
    def log(self) -> str:
        path = self.registry.dir(self.record.id).coordinator_log
        return path.read_text() if path.exists() else ""  # a restore makes it anew

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait(SECONDS)

    def wait_more(self, count: int = 5) -> None:
        wanted = len(self.lines) + count
        process = self.process
        assert process is not None
        wait_for(
            lambda: len(self.lines) >= wanted or process.poll() is not None,
            f"{count} lines more of node {self.number}",
            SECONDS,
        )
        assert process.poll() is None, self.said

    def coordinator(self) -> int:
        return self.record.coordinator_pid

    def halts_at(self, nth: int) -> None:
        """Let the coordinator stop itself where its nth phase begins."""
        self.fault.write_text(f"phase_coordinator:{nth}")

    def is_halted(self) -> bool:
        pid = self.coordinator()
        return bool(pid) and set(task_states(pid).values()) == {"T"}

    def kill_coordinator(self) -> None:
        """Its keeper brings another one."""
        pid = self.coordinator()
        self.fault.write_text("")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.coordinator() != pid, "another coordinator", SECONDS)

    def go_on(self) -> None:
        self.fault.write_text("")
        os.kill(self.coordinator(), signal.SIGCONT)

    def clear(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        for job in self.registry.all():
            if job.state in LIVE_STATES:
                kill_coordinator(self.registry.dir(job.id))
                kill_lost(self.registry.dir(job.id), signal.SIGKILL)


class Nodes(list[Node]):
    """Both."""

    def run(self) -> None:
        for node in self:
            node.run()
        for node in self:
            node.wait_more()

    def ask(self, verb: str, image: Path, *options: object, at: int = 0) -> Result[str]:
        return self[at].flowgpu(verb, NAME, "--output", image, *options)

    def dump(self, image: Path, *options: object) -> None:
        done = self.ask("pause-and-dump", image, *options)
        assert done.returncode == 0, done.stderr
        assert [node.wait() for node in self] == [errors.DUMPED_EXIT] * 2

    def restore(self, image: Path, *options: object) -> None:
        for node in self:
            node.start("restore", image, "--node", node.number, *options)

    def hurry(self) -> None:
        (self[0].folder / "hurry").touch()

    def check_end(self) -> None:
        """All is as undisturbed."""
        self.hurry()
        assert [node.wait() for node in self] == [0, 0], [node.said for node in self]
        assert [node.lines for node in self] == [[*lines, "done"] for lines in expected(2, STEPS)]


@pytest.fixture
def nodes(machines: list[Path], tmp_path: Path) -> Iterator[Nodes]:
    leader = f"127.0.0.1:{free_port()}"
    made = Nodes(Node(k, base, tmp_path, leader) for k, base in enumerate(machines))
    yield made
    for node in made:
        node.clear()
        node.registry.prune()


class Asked:
    """A command for a checkpoint under way."""

    def __init__(self, nodes: Nodes, verb: str, image: Path, *options: object, at: int = 0) -> None:
        self._found: list[Result[str]] = []
        self._thread = threading.Thread(
            target=lambda: self._found.append(nodes.ask(verb, image, *options, at=at))
        )
        self._thread.start()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def wait_halted(self, node: Node) -> None:
        """For the coordinator of a node to stop itself."""
        wait_for(lambda: node.is_halted() or self._found, "it to stop itself", SECONDS)
        assert node.is_halted(), self._found

    def result(self) -> Result[str]:
        self._thread.join()
        return self._found[0]


def failed(result: Result[str], error: type[errors.FlowError]) -> None:
    assert result.returncode == error.exit_code, (result.stdout, result.stderr)


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


def connected_hosts(
    stack: contextlib.ExitStack, addresses: Sequence[str], interface: str = "fgveth"
) -> dict[str, str]:
    """Two network namespaces that are connected: their addresses by their names."""
    if not shutil.which("ip"):
        pytest.skip("there is no program ip here")
    names = [f"flowgpu-{os.getpid()}-{address}" for address in addresses]
    ends = [f"{interface}{number}" for number in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
    ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1],
       "netns", names[1])  # fmt: skip
    for name, end, address in zip(names, ends, addresses, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        for link in (end, "lo"):
            ip("-n", name, "link", "set", link, "up")
    return dict(zip(names, addresses, strict=True))


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two hosts, as `connected_hosts` makes them."""
    with contextlib.ExitStack() as stack:
        yield connected_hosts(stack, ("10.77.33.1", "10.77.33.2"))


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
