"""podman's own checkpoints of containers whose processes use a GPU, with `flowgpu container` before
them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.container import FOLDER
from flowgpu.container import job_id
from flowgpu.image import layout
from flowgpu.jobs import DUMPED, EXITED, RUNNING, JobDir, Registry
from tests.emu.test_checkpoint import SECONDS, command, emulated_machine, flowgpu, undisturbed
from tests.podman.machine import IMAGE, Podman, missing
from tests.unit.coordinator_job import wait_for

absent = missing()
pytestmark = [
    pytest.mark.skipif(bool(absent), reason=f"podman cannot run here: no {', '.join(absent)}"),
    pytest.mark.timeout(6 * SECONDS),
]


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[Path]:
    with emulated_machine() as base:
        yield base


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        found = Podman(Path(folder))
        try:
            yield found
        finally:
            found.close()


class Container:
    """A workload in a container that podman dumps and restores."""

    def __init__(self, podman: Podman, folder: Path) -> None:
        self.podman, self.folder, self.name = podman, folder, podman.name()
        self.archive = folder / "checkpoint.tar"
        self.shared = folder / "shared"
        self.shared.mkdir()

    @property
    def job(self) -> JobDir:
        return Registry().dir(job_id(self.name))

    def begin(self, **env: str) -> list[str]:
        """Start the coordinator; gives the options for podman."""
        done = flowgpu("container", self.name, "--gpu", "emulated", env=env)
        assert done.returncode == 0, done.stderr
        # Not every machine has a packet filter, and these containers have no network.
        with open(self.job.path / "criu.conf", "a") as file:
            file.write("network-lock skip\n")
        return done.stdout.splitlines()

    def start(self, *words: str) -> None:
        self.podman.ask(
            *("run", "--detach", "--name", self.name, *self.begin()),
            *self.podman.volumes(),
            f"--volume={self.shared}:{self.shared}",
            f"--env=WORKLOAD_HURRY={self.shared}/hurry",
            *(IMAGE, *words),
        )

    def checkpoint(self, *options: str) -> subprocess.CompletedProcess[str]:
        words = ("--export", self.archive, "--compress", "none", *options)
        return self.podman.run("container", "checkpoint", *words, self.name)

    def dump(self, *options: str) -> None:
        done = self.checkpoint(*options)
        assert done.returncode == 0, f"{done.stderr}{self.podman.criu_said}{self.said}"

    def restore(self) -> subprocess.CompletedProcess[str]:
        words = ("restore", "--import", self.archive, "--name", self.name)
        return self.podman.run("container", *words)

    def remove(self) -> None:
        self.podman.run("rm", "--force", "--time", "0", self.name)

    def come_back(self) -> None:
        """In the place of the container that was dumped."""
        self.remove()
        self.wait_state(DUMPED, EXITED)
        self.begin()
        done = self.restore()
        assert done.returncode == 0, f"{done.stderr}{self.said}"

    def wait_state(self, *states: str) -> None:
        wait_for(lambda: self.job.read().state in states, f"one of {states}", SECONDS)

    def ends_as(self, lines: list[str]) -> None:
        (self.shared / "hurry").touch()
        assert self.podman.ask("wait", self.name).strip() == "0", self.said
        assert self.podman.lines(self.name) == lines
        (self.shared / "hurry").unlink()

    @property
    def said(self) -> str:
        return self.job.coordinator_log.read_text()

    def clear(self) -> None:
        self.remove()
        flowgpu("kill", self.name)


@pytest.fixture
def container(podman: Podman, tmp_path: Path) -> Iterator[Container]:
    made = Container(podman, tmp_path)
    try:
        yield made
    finally:
        made.clear()


@pytest.mark.parametrize("workload", ["digits_mlp", "processes", "sharing"])
def test_podman_dumps_a_container_with_its_gpu_and_restores_it(
    container: Container, workload: str
) -> None:
    container.start(*command(workload))
    container.podman.wait_lines(container.name, 4)
    container.dump()
    with tarfile.open(container.archive) as archive:
        assert f"checkpoint/{FOLDER}/{layout.gpu_data(0)}" in archive.getnames()
    for _ in range(2):
        container.come_back()
        assert len(container.podman.lines(container.name)) < len(undisturbed(workload))
        container.ends_as(undisturbed(workload))


def test_a_container_that_is_left_running_goes_on_and_so_does_its_copy(
    container: Container,
) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    container.dump("--leave-running")
    container.dump("--leave-running")
    container.ends_as(undisturbed("digits_mlp"))
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


def test_a_container_without_a_gpu_is_dumped_as_any(container: Container) -> None:
    go = container.shared / "hurry"
    container.start("/bin/sh", "-c", f"echo one; until [ -e {go} ]; do sleep 0.1; done; echo two")
    container.podman.wait_lines(container.name, 1)
    container.dump()
    container.come_back()
    container.ends_as(["one", "two"])


def test_a_container_whose_job_cannot_be_dumped_runs_on(container: Container) -> None:
    """A process that is stopped could not have its memory back."""
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    pid = container.podman.ask("inspect", "--format", "{{.State.Pid}}", container.name).strip()
    subprocess.run(["kill", "-STOP", pid], check=True)
    assert container.checkpoint().returncode != 0
    assert "is stopped" in container.said
    subprocess.run(["kill", "-CONT", pid], check=True)
    assert container.job.read().state == RUNNING
    container.dump()
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


def test_without_its_coordinator_a_container_is_neither_dumped_nor_restored(
    container: Container,
) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    container.dump()
    container.remove()
    container.wait_state(DUMPED)
    assert container.restore().returncode != 0
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


def damaged_data(folder: Path) -> None:
    with open(folder / layout.gpu_data(0), "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))


def damaged_table(folder: Path) -> None:
    with open(folder / layout.gpu_chunks(0), "ab") as file:
        file.write(b"x")


def missing_data(folder: Path) -> None:
    (folder / layout.gpu_data(0)).unlink()


@pytest.mark.parametrize("damage", [damaged_data, damaged_table, missing_data])
def test_nothing_of_a_container_runs_whose_gpu_memory_is_damaged(
    container: Container, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    container.dump()
    container.remove()
    whole, tree = container.archive, tmp_path / "tree"
    with tarfile.open(whole) as archive:
        archive.extractall(tree)
    damage(tree / "checkpoint" / FOLDER)
    container.archive = tmp_path / "damaged.tar"
    subprocess.run(["tar", "-C", tree, "-cf", container.archive, "."], check=True)
    container.wait_state(DUMPED)
    container.begin()
    before = container.said
    assert container.restore().returncode != 0
    assert "is damaged" in container.said[len(before) :]
    container.remove()
    flowgpu("kill", container.name)
    container.wait_state(EXITED)
    container.archive = whole
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


def test_a_container_outlives_its_coordinator_in_a_checkpoint(container: Container) -> None:
    """The next one gives the processes what they had handed over, whatever becomes of the dump."""
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    first = container.job.read().coordinator_pid
    with subprocess.Popen(
        ["podman", "container", "checkpoint", "--leave-running", container.name],
        env=container.podman.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for(lambda: "checkpoint: park" in container.said, "the hand-over", SECONDS)
        os.kill(first, signal.SIGKILL)
        process.wait(SECONDS)
    wait_for(lambda: container.job.read().coordinator_pid != first, "another one", SECONDS)
    container.dump()
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


ASKS = """
import json, socket, sys
asked = socket.socket(socket.AF_UNIX)
asked.connect(sys.argv[1])
asked.sendall(json.dumps({"verb": "hand-over", "pid": 1, "images": "/"}).encode() + b"\\n")
print(asked.makefile().readline())
"""


def test_a_process_of_the_container_may_not_ask_for_files_on_the_host(
    container: Container,
) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 1)
    control = container.job.control_socket
    done = container.podman.exec(container.name, sys.executable, "-c", ASKS, control)
    answer = json.loads(done.stdout)
    assert answer["event"] == "error"
    assert "a process of the container asks for" in answer["message"]
    container.ends_as(undisturbed("digits_mlp"))


CONNECTS = """
import socket, subprocess, sys
outside = socket.socket(socket.AF_UNIX)
outside.connect(sys.argv[1])
sys.exit(subprocess.call(sys.argv[2:]))
"""


def test_a_container_goes_on_with_its_gpu_where_criu_fails(container: Container) -> None:
    """One of its processes has a connection to a process outside, which its CRIU refuses."""
    path = container.shared / "outside"
    with socket.create_server(str(path), family=socket.AF_UNIX):
        words = command("digits_mlp")
        container.start(sys.executable, "-c", CONNECTS, str(path), *words)
        container.podman.wait_lines(container.name, 4)
        done = container.checkpoint()
        assert done.returncode != 0
        assert "checkpoint: park" in container.said  # by then the GPU was handed over
        assert "Dumping FAILED" in container.podman.criu_said
        container.ends_as(undisturbed("digits_mlp"))


def test_a_restored_container_that_cannot_have_its_gpu_is_ended(container: Container) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    container.dump()
    container.remove()
    container.wait_state(DUMPED)
    container.begin(FLOWGPU_FAULT="rebuild:1")
    container.restore()
    container.wait_state(EXITED)
    assert container.podman.ask("wait", container.name).strip() == str(128 + signal.SIGKILL)
    assert "The restore of job" in container.said
    container.come_back()
    container.ends_as(undisturbed("digits_mlp"))


def test_no_container_waits_for_a_coordinator_that_was_killed_in_its_restore(
    container: Container,
) -> None:
    container.start(*command("digits_mlp"))
    container.podman.wait_lines(container.name, 4)
    container.dump()
    container.remove()
    container.wait_state(DUMPED)
    container.begin()
    coordinator = container.job.read().coordinator_pid
    with ThreadPoolExecutor(max_workers=1) as pool:
        restored = pool.submit(container.restore)
        wait_for(lambda: "resume: fill" in container.said, "the restore", SECONDS)
        os.kill(coordinator, signal.SIGKILL)
        code = restored.result().returncode
    if code == 0:
        assert container.podman.ask("wait", container.name).strip() == str(128 + signal.SIGKILL)
    container.remove()
    wait_for(lambda: container.job.read().coordinator_pid != coordinator, "another one", SECONDS)
    done = container.restore()
    assert done.returncode == 0, f"{done.stderr}{container.said}"
    container.ends_as(undisturbed("digits_mlp"))
