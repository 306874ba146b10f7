"""Which TCP connections stay within a tree of processes."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from flowgpu.host import criu_images, criu_sockets, tcp
from flowgpu.host.criu_sockets import Listener, TcpEnds, TcpStream

ADDRESSES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
US = os.getpid()


EVERY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}


@pytest.fixture(params=ADDRESSES, ids=["IPv4", "IPv6"])
def server(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family, host = request.param
    with socket.create_server((host, 0), family=family) as made:
        yield made


def connected(server: socket.socket) -> socket.socket:
    return socket.create_connection(server.getsockname()[:2])


def inode(end: socket.socket) -> int:
    return os.fstat(end.fileno()).st_ino


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the end that `hand_over` gives it."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        program = "import socket; s = socket.socket(fileno=0); kept = socket.recv_fds(s, 1, 9)\n"
        child = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", program + "s.send(b'x'); input()"],
                stdin=theirs,
                start_new_session=True,
            )
        )
        theirs.close()
        child.ours = ours  # type: ignore[attr-defined]
        yield child
        child.kill()


def hand_over(holder: subprocess.Popen[bytes], *ends: socket.socket) -> None:
    ours: socket.socket = holder.ours  # type: ignore[attr-defined]
    socket.send_fds(ours, [b"x"], [end.fileno() for end in ends])
    assert ours.recv(1) == b"x"
    for end in ends:
        end.close()


def test_both_ends_of_a_connection_within_are_a_pair(server: socket.socket) -> None:
    with connected(server) as client, server.accept()[0] as accepted:
        found = tcp.look([US])
        assert found.pairs[inode(client)] == inode(accepted)
        assert found.pairs[inode(accepted)] == inode(client)
        assert (found.outside, found.waiting, found.leaving) == ([], [], [])


def test_a_process_without_tcp_sockets_has_none_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(pid: int) -> list[list[str]]:
        raise AssertionError(f"the table of process {pid} is read, which takes milliseconds")

    monkeypatch.setattr(tcp, "_lines", table)
    command = [
        sys.executable,
        "-c",
        "import socket; pair = socket.socketpair(); print(flush=True); input()",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout and process.stdout.readline()
        assert tcp.look([process.pid]).ends == []
        process.communicate(b"\n")


def test_a_client_by_ipv4_of_a_server_by_ipv6_is_one_too() -> None:
    listen = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with (
        socket.create_server(("::", 0), **listen) as server,  # type: ignore[arg-type]
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client,
        server.accept()[0] as accepted,
    ):
        assert tcp.look([US]).pairs[inode(client)] == inode(accepted)


def test_one_whose_other_end_another_process_has_is_outside(
    server: socket.socket, holder: subprocess.Popen[bytes]
) -> None:
    client, (accepted, _) = connected(server), server.accept()
    ours = inode(client)
    hand_over(holder, accepted)
    (end,) = tcp.look([US]).outside
    assert (end.pid, end.fd, end.row.inode) == (US, client.fileno(), ours)
    assert str(end) == f"as fd {client.fileno()} (process {US})"
    assert tcp.look([US, holder.pid]).outside == []
    client.close()


def test_one_that_nobody_has_accepted_is_told_by_its_server(
    server: socket.socket, holder: subprocess.Popen[bytes]
) -> None:
    with connected(server) as client:
        assert [end.row.inode for end in tcp.look([US]).waiting] == [inode(client)]
        hand_over(holder, server)  # it is the server of another process now
        found = tcp.look([US])
        assert [end.row.inode for end in found.outside] == [inode(client)]
        assert found.waiting == []


def test_two_trees_tell_each_other_what_is_between_them(
    server: socket.socket, holder: subprocess.Popen[bytes]
) -> None:
    client, (accepted, _) = connected(server), server.accept()
    hand_over(holder, accepted)
    (known,), theirs = tcp.look([US]).outside, tcp.look([holder.pid])
    unknown = known._replace(row=known.row._replace(local="0100007F:0001", inode=7))
    there = tcp.Elsewhere([json.loads(json.dumps(tcp.tell(theirs)))], None)
    assert [there.has(end) for end in (known, unknown)] == [True, False]
    assert [there.may_have(end) for end in (known, unknown)] == [True, False]
    # One that has come since they told it may be theirs.
    since = tcp.Elsewhere([tcp.tell(theirs)], {known.row.inode})
    assert [since.has(end) for end in (known, unknown)] == [True, False]
    assert since.may_have(unknown)
    client.close()


def test_one_that_another_tree_has_not_accepted_yet_is_told_by_it(
    server: socket.socket, holder: subprocess.Popen[bytes]
) -> None:
    with connected(server):
        hand_over(holder, server)
        (end,) = tcp.look([US]).outside
        there = tcp.Elsewhere([tcp.tell(tcp.look([holder.pid]))], None)
        assert there.waits(end)
        assert there.may_have(end)
        assert not there.has(end)


def test_what_was_on_its_way_between_two_images_is_lost() -> None:
    ends, back = ("A:1", "B:2"), ("B:2", "A:1")

    def lost(written: int, queued: int, received: int) -> bool:
        ours = [(ends, TcpStream(0, queued, written))]
        theirs = [(back, TcpStream(received, 0, 0))]
        return tcp.lost_between(ours, [[], json.loads(json.dumps(theirs))])

    assert not lost(written=500, queued=0, received=500)
    assert not lost(written=500, queued=100, received=400)
    assert lost(written=500, queued=100, received=398)
    assert not lost(written=20, queued=40, received=(1 << 32) - 20)


def test_one_whose_other_end_is_closed_stays_within(server: socket.socket) -> None:
    client, (accepted, _) = connected(server), server.accept()
    client.send(b"last")
    client.close()
    found = tcp.look([US])
    assert (found.pairs, found.outside, found.leaving) == ({}, [], [])
    assert accepted.recv(9) == b"last"
    accepted.close()


def test_data_of_a_closed_end_that_has_not_arrived_is_told(server: socket.socket) -> None:
    client, (accepted, _) = connected(server), server.accept()
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            client.send(bytes(1 << 20))
    client.close()
    assert [end.row.inode for end in tcp.look([US]).leaving] == [inode(accepted)]
    while accepted.recv(1 << 20):
        pass
    assert tcp.look([US]).leaving == []
    accepted.close()


def stream(folder: Path, inode: int, received: int, queued: int, written: int) -> None:
    numbers = bytes([1 << 3, 0])
    for key, value in ((2, received), (3, queued), (4, written)):
        numbers += bytes([key << 3]) + criu_images.as_varint(value)
    head = bytes(criu_images.MAGIC_BYTES) + struct.pack("<I", len(numbers))
    (folder / f"tcp-stream-{inode:x}.img").write_bytes(head + numbers + bytes(queued))


@pytest.mark.parametrize(
    ("received", "lost"),
    [
        (1000, False),  # all that was sent
        (900, False),  # what is in the queue comes again
        (899, False),  # and the end
        (898, True),
        (1001, True),  # it came after the sender's dump
    ],
)
def test_what_was_under_way_between_two_dumps_is_found(
    received: int, lost: bool, tmp_path: Path
) -> None:
    around = (1 << 32) - 500  # numbers begin again
    numbers = [(value + around) % (1 << 32) for value in (received, 1000, 50)]
    stream(tmp_path, 0xA1, numbers[2], 100, numbers[1])
    stream(tmp_path, 0xA2, numbers[0], 0, numbers[2])
    assert criu_sockets.tcp_streams(tmp_path)[0xA1] == TcpStream(numbers[2], 100, numbers[1])
    assert tcp.lost(tmp_path, {0xA1: 0xA2, 0xA2: 0xA1}) == lost


def ends_of(end: socket.socket) -> tuple[str, str]:
    (row,) = [row for row in tcp._table("self") if row.inode == inode(end)]
    return row.local, row.remote


def test_ends_that_a_process_has_are_named_and_those_of_nobody_become_free(
    server: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (accepted, _) = connected(server), server.accept()
    host = client.getsockname()[0]
    wanted = {ends_of(end): TcpEnds(host, "here to there") for end in (client, accepted)}
    monkeypatch.setattr(criu_sockets, "tcp_ends", lambda folder: wanted)
    monkeypatch.setattr(criu_sockets, "listeners", lambda folder: [])
    assert tcp.hindered(tmp_path, 0) == "its TCP connection from here to there is another's"
    client.close()
    accepted.close()
    left = [row for row in tcp._table("self") if row[:2] in wanted]
    assert [row.state for row in left] == [tcp.TIME_WAIT]
    assert tcp.hindered(tmp_path, 10) == ""


def test_a_port_that_a_closed_connection_keeps_becomes_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket listened without SO_REUSEADDR: the kernel gives nobody its port then."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = listener.getsockname()
        client, (accepted, _) = socket.create_connection(address), listener.accept()
        accepted.close()  # first: so this end is what is left
        client.close()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            again.bind(address)
        monkeypatch.setattr(criu_sockets, "tcp_ends", lambda folder: {})
        monkeypatch.setattr(criu_sockets, "listeners", lambda folder: [Listener(*address)])
        assert tcp.hindered(tmp_path, 65) == ""
        again.bind(address)


def test_a_port_at_which_another_program_listens_is_named_at_once(
    server: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.getsockname()[1]
    monkeypatch.setattr(criu_sockets, "tcp_ends", lambda folder: {})
    monkeypatch.setattr(
        criu_sockets, "listeners", lambda folder: [Listener(EVERY[server.family], port)]
    )
    said = f"its TCP port {port} is another's (process {os.getpid()})"
    assert tcp.hindered(tmp_path, 60) == said


def test_a_port_from_which_another_program_has_connected_is_waited_for(
    server: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes any port that is free for a connection, those of jobs on disk too."""
    client, (accepted, _) = connected(server), server.accept()
    port = client.getsockname()[1]
    listeners = [Listener(EVERY[server.family], port)]
    monkeypatch.setattr(criu_sockets, "tcp_ends", lambda folder: {})
    monkeypatch.setattr(criu_sockets, "listeners", lambda folder: listeners)
    said = f"its TCP port {port} is another's (process {os.getpid()})"
    with accepted, client:
        assert tcp.hindered(tmp_path, 0) == said
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(tcp.hindered, tmp_path, 60)
            time.sleep(0.2)
            assert not waiting.done()
            accepted.close()
            client.close()
            assert waiting.result() == ""
    with socket.socket(server.family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(listeners[0][:2])


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7"])  # of documentation's networks
def test_an_address_that_this_machine_has_not_is_named(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = TcpEnds(host, f"{host} port 1 to {host} port 2")
    monkeypatch.setattr(criu_sockets, "tcp_ends", lambda folder: {("a", "b"): ends})
    monkeypatch.setattr(criu_sockets, "listeners", lambda folder: [])
    said = f"this machine has not the address of its TCP connection from {ends.words}"
    assert tcp.hindered(tmp_path, 0) == said


def test_a_socket_of_a_dump_is_let_go_as_it_was(server: socket.socket, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    client, (accepted, _) = connected(server), server.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tcp.note(tcp.look([US]).ends, notes)
    for end in (client, accepted):
        end.setsockopt(socket.IPPROTO_TCP, tcp.TCP_REPAIR, 1)
    client.setblocking(False)
    with pytest.raises(PermissionError):
        client.recv(1)
    tcp.let_go(notes, but={inode(accepted)})
    assert client.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
    with pytest.raises(BlockingIOError):
        client.recv(1)
    assert accepted.getsockopt(socket.IPPROTO_TCP, tcp.TCP_REPAIR) == 1
    assert not notes.exists()
    ends = ends_of(accepted)
    accepted.close()
    assert not any(row[:2] == ends for row in tcp._table("self"))  # nothing is left of it
    client.close()


def test_an_end_that_another_tree_has_closed_is_told_by_it() -> None:
    """The tables of two nodes are made up of what each would have."""
    ours = tcp.Row("0100000A:0001", "0200000A:0002", 8, 0, 0.0, 7)
    end = tcp.Connection(1, 3, ours)
    for state, unsent, leaves in ((5, 0, False), (4, 1, False), (4, 9, True)):
        theirs = tcp.Row("0200000A:0002", "0100000A:0001", state, unsent, 0.0, 0)
        told = tcp.tell(tcp.Found([], {}, [], [], []), [theirs])
        there = tcp.Elsewhere([json.loads(json.dumps(told))], None)
        assert there.has(end) and there.may_have(end)
        assert there.leaves(end) == leaves
