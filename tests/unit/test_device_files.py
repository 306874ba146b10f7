"""Device files that are held while tasks end CUDA: the last close is the coordinator's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator import device_files
from coordinator.device_files import DeviceFiles
from coordinator.polling import readable
from flowgpu.host.proctree import fd_targets
from flowgpu.timeline import Recorder, of_task
from tests.unit.coordinator_job import SECONDS

PROGRAM = """
import socket, sys
ends = []
for path in sys.argv[1:]:
    ends.append(socket.socket(socket.AF_UNIX))
    ends[-1].connect(path)
print("ready", flush=True)
sys.stdin.readline()
"""


class Client:
    """A process with a connection to the emulated device, as it seems, and one to another."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.peers, paths = [], [folder / "flowgpu-emu.sock", folder / "other.sock"]
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for listener, path in zip(listeners, paths, strict=True):
            listener.bind(os.fspath(path))
            listener.listen()
        words = [sys.executable, "-c", PROGRAM, *map(os.fspath, paths)]
        self.process = stack.enter_context(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        for listener in listeners:
            peer, _ = listener.accept()
            peer.settimeout(SECONDS)
            self.peers.append(stack.enter_context(peer))

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        self.process.wait(SECONDS)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with ExitStack() as stack:
        yield Client(tmp_path, stack)


def is_open(peer: socket.socket) -> bool:
    """Somebody has the other end, who never sends anything."""
    return not readable(peer, seconds=0)


def test_what_is_held_is_closed_by_us_alone(client: Client) -> None:
    device, other = client.peers
    timeline = Recorder()
    files = DeviceFiles(True, timeline)
    before = len(list(fd_targets(os.getpid())))
    files.hold(client.process.pid)
    assert len(list(fd_targets(os.getpid()))) == before + 1
    client.end()
    assert other.recv(1) == b""  # it has ended, and its other connection with it
    files.wait_freed()  # nothing was let go
    assert is_open(device)
    files.let_go()
    files.wait_freed()
    assert not is_open(device)
    assert len(list(fd_targets(os.getpid()))) == before
    track, name = of_task(client.process.pid), "free memory"
    assert [span[:2] for span in timeline.to_json()["spans"]] == [[track, name]]


def test_who_needs_the_memory_waits_for_the_close(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    closes, may_close = threading.Event(), threading.Event()
    real = device_files.close

    def close(fd: int) -> None:
        closes.set()
        assert may_close.wait(SECONDS)
        real(fd)

    monkeypatch.setattr(device_files, "close", close)
    files = DeviceFiles(True, Recorder())
    files.hold(client.process.pid)
    client.end()
    files.let_go()
    assert closes.wait(SECONDS)  # and let_go() did not wait for it
    seen: list[bool] = []

    def wait() -> None:
        files.wait_freed()
        seen.append(is_open(client.peers[0]))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    may_close.set()
    waiter.join(SECONDS)
    assert seen == [False]


def test_nothing_is_held_of_a_process_that_has_ended_or_uses_another_device(
    client: Client,
) -> None:
    before = len(list(fd_targets(os.getpid())))
    files = DeviceFiles(False, Recorder())
    files.hold(client.process.pid)
    client.end()
    others = DeviceFiles(True, Recorder())
    others.hold(client.process.pid)
    assert len(list(fd_targets(os.getpid()))) == before
    assert not is_open(client.peers[0])


def test_what_cannot_be_held_is_left_to_the_process(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(pid: int, fd: int) -> int:
        raise PermissionError

    monkeypatch.setattr(device_files, "socket_of", forbidden)
    files = DeviceFiles(True, Recorder())
    files.hold(client.process.pid)
    client.end()
    assert client.peers[0].recv(1) == b""
    files.let_go()
    files.wait_freed()
