"""Sockets to processes outside a job: found again, closed where that is asked for, or named."""

from __future__ import annotations

import os
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


LISTENER = (
    GPU
    + """
import socket
server = socket.create_server(("127.0.0.1", int(sys.argv[2])))
went()
socket.create_connection(server.getsockname()).send(b"asked")
print(server.accept()[0].recv(9).decode(), "gpu", gpu())
"""
)


def test_a_port_that_another_program_has_meanwhile_is_waited_for_or_named(
    echo: int, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    connection = socket.socket()
    ending = threading.Timer(2.0, connection.close)

    def connects() -> None:
        connection.bind(("127.0.0.1", port))
        connection.connect(("127.0.0.1", echo))
        ending.start()

    said = said_across_a_restore("state-port", LISTENER, tmp_path, str(port), between=connects)
    assert said == ["ready", "asked gpu True"]
    ending.join()
    with socket.create_server(("127.0.0.1", port)):
        restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == RestoreFailed.exit_code
    assert f"its TCP port {port} is another's (process {os.getpid()})" in restored.stderr


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


# Both ends of each connection are its own. One side of the first has closed when all was received,
# and of the next two when the other end took no more; of the last both have.
FULL = (
    GPU
    + """
import socket
def fill(end, number):
    end.setblocking(False)
    count = 0
    for _ in range(50):
        try:
            count += end.send(bytes([number]) * 10000)
        except BlockingIOError:
            time.sleep(0.01)
    end.setblocking(True)
    return count
def drained(end, number):
    count = 0
    while data := end.recv(1 << 20):
        assert data == bytes([number]) * len(data)
        count += len(data)
    return count
family, host, size = getattr(socket, sys.argv[2]), sys.argv[3], int(sys.argv[4])
server = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
near, far = [], []
for _ in range(4):
    end = socket.socket(socket.AF_INET if host == "::" else family)
    for one in (end, server):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    end.connect(("127.0.0.1" if host == "::" else host, server.getsockname()[1]))
    near.append(end)
    far.append(server.accept()[0])
sent = [near[0].send(bytes(10)), *(fill(end, 1) for end in near[1:])]
back = [0, 0, fill(far[2], 2), fill(far[3], 2)]
for end in (near[0], near[2], near[3], far[3]):
    end.shutdown(socket.SHUT_WR)
went()
back[0] = far[0].send(bytes(20))
near[1].shutdown(socket.SHUT_WR)
for end in far[:3]:
    end.shutdown(socket.SHUT_WR)
print([drained(end, k > 0) for k, end in enumerate(far)] == sent, min(sent[1:]) > size)
print([drained(end, 2 * (k > 0)) for k, end in enumerate(near)] == back, min(back[2:]) > size)
print("gpu", gpu())
"""
)


@pytest.mark.parametrize("size", [4096, 300000])
@pytest.mark.parametrize("place", ["AF_INET 127.0.0.1", "AF_INET6 ::1", "AF_INET6 ::"])
def test_connections_that_are_full_and_closed_on_one_side_are_kept(
    tmp_path: Path, runtime_dir: Path, place: str, size: int
) -> None:
    words = (*place.split(), str(size))
    said = said_across_a_restore("state-full", FULL, tmp_path, *words)
    assert said == ["ready", "True True", "True True", "gpu True"]
