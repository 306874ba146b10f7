"""Two nodes on one machine: each has a runtime folder, a coordinator and a tree of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.host.proctree import task_states
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
