"""The output pump and the handover of blocks, piece by piece."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.blocks import BlockTable, Handover, send_blocks
from coordinator.output import Output, chunks
from coordinator.staging import Staging
from coordinator.tasks import TaskChannel, TaskError
from flowgpu import wire
from flowgpu.jobs import JobDir
from flowgpu.output_log import rest


def start(folder: Path) -> tuple[Output, int, int]:
    """An output that reads, and the ends to write to."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    output = Output(JobDir(folder), (out, err))
    output.begin()
    return output, to_out, to_err


def test_streams_stay_apart_in_order(tmp_path: Path) -> None:
    output, out, err = start(tmp_path)
    for n in range(50):
        os.write(err if n % 3 else out, f"{n};".encode())
        output.drain()
    os.close(out)
    os.close(err)
    output.finish(5.0)
    got = {"stdout": b"", "stderr": b""}
    for stream, data in chunks(output, output.start):
        got[stream] += data
    assert got["stdout"] == b"".join(b"%d;" % n for n in range(0, 50, 3))
    assert got["stderr"] == b"".join(b"%d;" % n for n in range(50) if n % 3)
    assert (tmp_path / "output.log").read_bytes() == b"".join(b"%d;" % n for n in range(50))


def test_output_before_this_coordinator_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(b"before\n")
    output, out, err = start(tmp_path)
    os.write(out, b"after\n")
    os.close(out)
    os.close(err)
    output.finish(5.0)
    assert b"".join(data for _, data in chunks(output, output.start)) == b"after\n"
    assert (tmp_path / "output.log").read_bytes() == b"before\nafter\n"


def test_a_writer_that_stays_does_not_keep_the_end_away(tmp_path: Path) -> None:
    output, out, err = start(tmp_path)
    os.write(out, b"last words")
    output.finish(0.05)
    assert b"".join(data for _, data in chunks(output, output.start)) == b"last words"
    os.close(out)
    os.close(err)


def test_the_next_coordinator_goes_on_where_the_log_ends(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_bytes(b"restored\n")
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    first = Output(JobDir(tmp_path), (os.dup(out), os.dup(err)))
    for stream, said in ((to_out, b"a"), (to_err, b"b"), (to_out, b"c")):
        os.write(stream, said)
        first.drain()
    os.write(to_err, b"in the pipe")  # nobody has read it when the first one is killed
    second = Output(JobDir(tmp_path), (out, err))
    second.begin()
    os.write(to_out, b"d")
    os.close(to_out)
    os.close(to_err)
    second.finish(5.0)
    assert second.start == first.start == len(b"restored\n")
    told = list(chunks(second, second.start))
    assert told == list(rest(tmp_path / "output.log", tmp_path / "output.streams", None))
    assert [data for stream, data in told if stream == "stderr"] == [b"b", b"in the pipe"]
    assert b"".join(data for stream, data in told if stream == "stdout") == b"acd"
    assert list(rest(tmp_path / "output.log", tmp_path / "output.streams", second.end)) == []


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    theirs.close()


def rows(*ids: int) -> list[wire.Block]:
    return [wire.Block(id=n, address=n << 21, size=1 << 21, device=0) for n in ids]


def send_rows(channel: socket.socket, found: list[wire.Block]) -> None:
    fds = [os.memfd_create(f"block{row.id}") for row in found]
    body = b"".join(row.pack() for row in found)
    packet = wire.packet(wire.Message.BLOCKS, body, len(found))
    socket.send_fds(channel, [packet], fds)
    for fd in fds:
        os.close(fd)


def send_end(channel: socket.socket, *live: int) -> None:
    body = struct.pack(f"={len(live)}Q", *live)
    channel.send(wire.packet(wire.Message.LIVE, body, len(live)))
    channel.send(wire.packet(wire.Message.END))


def test_a_handover_is_confirmed_after_all_is_safe(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    table, said = BlockTable(), []
    handover = Handover(
        7, ours, table, lambda blocks: said.append(len(blocks)), lambda live: said.append(live)
    )
    send_rows(theirs, rows(1, 2, 3))
    handover.wait_idle(time.monotonic() + 5)
    assert said == [3]
    send_end(theirs, 1, 3)
    assert wire.split(theirs.recv(100))[0] is wire.Message.END
    handover.wait_end(time.monotonic() + 5)
    assert said == [3, [1, 3]]
    assert [block.row.id for block in table.keep_live(7, [1, 3])] == [2]
    handover.close()
    table.close()


def test_a_handover_that_cannot_be_taken_is_not_confirmed(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair

    def refuse(live: list[int]) -> None:
        raise RuntimeError("no room")

    table = BlockTable()
    handover = Handover(7, ours, table, lambda blocks: None, refuse)
    send_end(theirs)
    assert theirs.recv(100) == b"", "the task must see that nobody holds its memory"
    with pytest.raises(RuntimeError, match="no room"):
        handover.wait_end(time.monotonic() + 5)
    handover.close()


@pytest.mark.parametrize(
    "packet",
    [
        wire.packet(wire.Message.OPEN),
        wire.packet(wire.Message.BLOCKS, bytes(wire.Block.SIZE), 1),  # without its descriptor
        wire.packet(wire.Message.LIVE, bytes(8), 2),
        b"noise",
    ],
)
def test_noise_on_a_handover_channel_ends_it(
    packet: bytes, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    handover = Handover(7, ours, BlockTable(), lambda blocks: None, lambda live: None)
    theirs.send(packet)
    with pytest.raises((wire.WireError, struct.error)):
        handover.wait_end(time.monotonic() + 5)
    handover.close()


def test_blocks_go_back_with_their_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    table = BlockTable()
    found = rows(*range(100))
    table.add(7, found, [os.memfd_create(f"block{row.id}") for row in found])
    sender = threading.Thread(target=send_blocks, args=(ours, table.of(7), time.monotonic() + 5))
    sender.start()
    got, names = [], []
    while True:
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 64)
        kind, count, body = wire.split(data)
        if kind is wire.Message.END:
            break
        assert count == len(fds)
        got += [wire.Block.unpack(body[at : at + 32]) for at in range(0, len(body), 32)]
        names += [os.readlink(f"/proc/self/fd/{fd}").split()[0] for fd in fds]
        for fd in fds:
            os.close(fd)
    sender.join()
    assert got == found
    assert names == [f"/memfd:block{row.id}" for row in found]
    table.close()
    ours.close()


class RecordingDriver:
    """Knows what is mapped; refuses what overlaps."""

    def __init__(self) -> None:
        self.mapped: dict[int, int] = {}
        self.released: list[int] = []
        self.allowed: list[tuple[int, int]] = []

    def granularity(self, ordinal: int) -> int:
        return 2 << 20

    def reserve(self, size: int) -> int:
        return 1 << 40

    def map(self, address: int, size: int, handle: int) -> None:
        assert not any(a < address + size and address < a + s for a, s in self.mapped.items())
        self.mapped[address] = size

    def allow(self, ordinal: int, address: int, size: int) -> None:
        self.allowed.append((address, size))

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size

    def release(self, handle: int) -> None:
        self.released.append(handle)


def test_staging_gives_neighbours_as_one_segment_and_leaves_holes_out() -> None:
    from coordinator.device import Gpu

    driver = RecordingDriver()
    staging = Staging(driver, Gpu(0, "GPU-0", "none", 1 << 30, "8.0"))  # type: ignore[arg-type]
    mib = 1 << 20
    staging.add([(0, 2 * mib, 100), (1, 4 * mib, 101)])
    staging.add([(2, 2 * mib, 102), (3, 2 * mib, 103)])
    base = 1 << 40
    assert staging.segments() == [(base, 10 * mib)]
    assert driver.allowed == [(base, 6 * mib), (base + 6 * mib, 4 * mib)]
    staging.drop({1})
    assert staging.segments() == [(base, 2 * mib), (base + 6 * mib, 4 * mib)]
    assert staging.keys() == [0, 2, 3]
    assert staging.size == 6 * mib
    staging.clear()
    assert driver.mapped == {}
    assert sorted(driver.released) == [100, 101, 102, 103]


def test_a_stranger_that_says_no_hello_is_sent_away(tmp_path: Path) -> None:
    channel = TaskChannel(tmp_path / "task.sock")
    channel.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(tmp_path / "task.sock"))
        stranger.send(wire.packet(wire.Message.END))
        assert stranger.recv(100) == b""
    assert channel.tasks() == []
    channel.stop_listening()
    assert not (tmp_path / "task.sock").exists()
    with pytest.raises(TaskError, match="HELLO"):
        channel.wait_resumed([os.getpid()], time.monotonic() + 0.01)
