"""Sockets to processes outside a job: found again, closed where that is asked for, or named."""

from __future__ import annotations

import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.errors import MissingCapability, RestoreFailed
from tests.emu.gpu_job import GPU, said_across_a_restore, said_with_a_checkpoint_between
from tests.emu.test_checkpoint import SECONDS, flowgpu, runtime_dir

__all__ = ["runtime_dir"]

SENDER = (
    GPU
    + """
import socket
client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect(sys.argv[2])
went()
print("sent", client.send(b"line"), "gpu", gpu())
"""
)


def test_a_sender_to_a_server_outside_finds_it_again_or_its_restore_names_it(
    tmp_path: Path, runtime_dir: Path
) -> None:
    server = runtime_dir / "log"  # short, as a path of a socket has to be

    def listening() -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.bind(str(server))
        made.settimeout(SECONDS)
        return made

    with listening() as first:
        said = said_across_a_restore("state-sender", SENDER, tmp_path, str(server))
        assert said == ["ready", "sent 4 gpu True"]
        assert first.recv(9) == b"line"
    server.unlink()
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == RestoreFailed.exit_code
    assert f"it sends to the socket {server} of a process outside" in restored.stderr
    with listening() as second:
        restored = flowgpu("restore", tmp_path / "image")
        assert restored.stdout == "sent 4 gpu True\n", restored.stderr
        assert second.recv(9) == b"line"


# Connected to a server outside and to itself, it asks both again after the restore, and connects
# anew where it cannot.
CONNECTED = (
    GPU
    + """
import errno, socket
def connect(): return socket.create_connection(("127.0.0.1", int(sys.argv[2])))
def ask(s):
    try:
        s.sendall(b"asked ")
        return s.recv(100).decode()
    except OSError as error:
        return errno.errorcode[error.errno]
outside, server = connect(), socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
accepted = server.accept()[0]
accepted.sendall(b"kept")
print(ask(outside))
went()
print("outside", ask(outside), "inside", ask(inside))
print("again", ask(connect()))
inside = socket.create_connection(server.getsockname())
print("listens", server.accept()[0].send(b"x"), inside.recv(1))
print("gpu", gpu())
"""
)


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(100):
            self.request.sendall(data)


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server of this process."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_connections_outside_are_closed_in_an_image_where_that_is_asked_for(
    engine: str, echo: int, tmp_path: Path
) -> None:
    """Not in the job itself, which goes on with them."""
    done, said = said_with_a_checkpoint_between(
        "connected", engine, CONNECTED, tmp_path, echo, "--leave-running", "--tcp", "close"
    )
    assert done.returncode == 0, done.stderr
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    ends = ["again asked ", "listens 1 b'x'", "gpu True"]
    before = ["asked ", "ready"]
    assert said == [*before, "outside asked  inside kept", *ends]
    assert restored.stdout.splitlines() == ["outside EPIPE inside kept", *ends]


@pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv here")
def test_the_right_that_connections_need_is_named(echo: int, tmp_path: Path) -> None:
    rights = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]
    done, said = said_with_a_checkpoint_between(
        "no-right", "auto", CONNECTED, tmp_path, echo, "--leave-running", before=rights
    )
    assert done.returncode == MissingCapability.exit_code
    assert "CAP_NET_ADMIN" in done.stderr
    assert said[-1] == "gpu True"
