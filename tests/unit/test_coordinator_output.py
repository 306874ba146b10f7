"""The output pump and the handover of blocks, piece by piece."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.blocks import BlockTable, Handover, send_blocks
from coordinator.output import Output, chunks
from coordinator.records import copy_log
from coordinator.staging import Staging
from coordinator.tasks import TaskChannel, TaskError
from flowgpu import jobs, output_log, wire
from flowgpu.jobs import JobDir
from flowgpu.output_log import Piece, rest
from tests.patience import SECONDS


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
    for stream, data, _ in chunks(output, output.start):
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
    assert b"".join(data for _, data, _ in chunks(output, output.start)) == b"after\n"
    assert (tmp_path / "output.log").read_bytes() == b"before\nafter\n"


def test_a_writer_that_stays_does_not_keep_the_end_away(tmp_path: Path) -> None:
    output, out, err = start(tmp_path)
    os.write(out, b"last words")
    output.finish(0.05)
    assert b"".join(data for _, data, _ in chunks(output, output.start)) == b"last words"
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
    told = [(stream, data) for stream, data, _ in chunks(second, second.start)]
    assert told == list(rest(tmp_path / "output.log", tmp_path / "output.streams", None))
    assert [data for stream, data in told if stream == "stderr"] == [b"b", b"in the pipe"]
    assert b"".join(data for stream, data in told if stream == "stdout") == b"acd"
    assert list(rest(tmp_path / "output.log", tmp_path / "output.streams", second.end)) == []


# What is kept of it

PAGE = 4096


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that logs keep in this test."""
    monkeypatch.setattr(output_log, "KEEP_BYTES", 64 << 10)
    return 64 << 10


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%7d\n" % n for n in range(first, last))


def say(output: Output, end: int, data: bytes) -> None:
    for at in range(0, len(data), PAGE):
        os.write(end, data[at : at + PAGE])
        output.drain()


def test_a_log_keeps_the_newest_and_a_slow_reader_is_told_what_it_missed(
    little: int, tmp_path: Path
) -> None:
    output, out, err = start(tmp_path)
    reader = chunks(output, output.start)
    seen = b""
    for n in range(0, 200_000, 500):
        say(output, out, lines(n, n + 500))
        while len(seen) < output.end:  # one that keeps up misses nothing
            seen += next(reader).data
    assert seen == lines(0, 200_000)
    os.close(out)
    os.close(err)
    output.finish(5.0)
    assert (tmp_path / "output.log").stat().st_blocks * 512 <= little * 5 // 4
    assert little <= output.end - output.kept <= little * 5 // 4
    (_, notice, end), *others = chunks(output, output.start)
    assert (notice, end) == (output_log.missed(output.kept), output.kept)
    newest = lines(output.kept // 8, 200_000)
    assert b"".join(data for _, data, _ in others) == newest
    told = list(rest(tmp_path / "output.log", tmp_path / "output.streams", None))
    assert b"".join(data for _, data in told) == notice + newest


def test_turns_between_streams_are_bounded_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(output_log, "KEEP_TURNS", 2048)
    output, out, err = start(tmp_path)
    for n in range(5000):
        for stream, end in (b"o", out), (b"e", err):
            os.write(end, stream * 4)
            output.drain()
        if n == 4000:
            seen = output.end
    os.close(out)
    os.close(err)
    output.finish(5.0)
    assert (tmp_path / "output.streams").stat().st_blocks * 512 <= (2048 + 512) * 2 * 8
    told = list(rest(tmp_path / "output.log", tmp_path / "output.streams", seen))
    assert b"".join(data for _, data in told) == b"ooooeeee" * 999
    assert {(stream, data[:1]) for stream, data in told} == {("stdout", b"o"), ("stderr", b"e")}


def test_the_next_coordinator_goes_on_in_a_log_with_holes(little: int, tmp_path: Path) -> None:
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    first = Output(JobDir(tmp_path), (os.dup(out), os.dup(err)))
    say(first, to_out, lines(0, 50_000))
    os.write(to_err, b"in the pipe")
    second = Output(JobDir(tmp_path), (out, err))
    assert (second.end, second.kept) == (first.end, first.kept) != (0, 0)
    os.close(to_out)
    os.close(to_err)
    second.begin()
    second.finish(5.0)
    told = list(chunks(second, second.kept))
    assert b"".join(d for s, d, _ in told if s == "stdout") == lines(second.kept // 8, 50_000)
    assert told[-1][:2] == ("stderr", b"in the pipe")


def test_an_image_gets_what_is_kept(little: int, tmp_path: Path) -> None:
    output, out, err = start(tmp_path)
    say(output, out, lines(0, 50_000))
    copy = tmp_path / "copy"
    copy_log(tmp_path / "output.log", copy, output.kept, output.end)
    assert copy.read_bytes() == output_log.missed(output.kept) + lines(output.kept // 8, 50_000)
    os.close(out)
    os.close(err)
    output.finish(5.0)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for 32 pages."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(PAGE))


def test_on_a_full_disk_the_older_half_makes_room(small: Path) -> None:
    output, out, err = start(small)
    say(output, out, lines(0, 50_000))
    assert output.kept > 0
    newest = b"".join(data for _, data, _ in read_all(output, output.kept))
    assert newest == lines(output.kept // 8, 50_000)
    assert len(newest) > 32 << 10
    os.close(out)
    os.close(err)
    output.finish(5.0)


def read_all(output: Output, position: int) -> Iterator[Piece]:
    while position < output.end:
        piece = output.read(position, 0.0)
        assert piece is not None
        position = piece.end
        yield piece


def test_a_log_without_any_room_loses_output_and_says_how_much(small: Path) -> None:
    troubles: list[str] = []
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    output = Output(JobDir(small), (out, err), troubles.append)
    fill(small / "fill")
    for n in range(0, 200_000, 500):  # many times what a pipe takes: the writer never waits
        say(output, to_out, lines(n, n + 500))
    assert troubles[0].endswith(f" of output lost: No space left on device, in {small}")
    assert output.end < PAGE
    (small / "fill").unlink()
    say(output, to_out, b"after\n")
    pieces = list(read_all(output, output.start))
    notice = f"flowgpu: 1.53 MiB of output are lost here: No space left on device, in {small}\n"
    assert [(stream, data) for stream, data, _ in pieces[-2:]] == [
        ("stderr", notice.encode()), ("stdout", b"after\n"),
    ]  # fmt: skip
    assert troubles[-1] == f"1.53 MiB of output lost: No space left on device, in {small}"
    os.close(to_out)
    os.close(to_err)
    output.begin()
    output.finish(5.0)


def test_the_record_is_written_on_a_full_disk(small: Path) -> None:
    directory = JobDir(small)
    job = jobs.Job(id="0" * 12, name="train", command=["true"], cwd="/", gpu="none")
    directory.write(job)
    fill(small / "fill")
    directory.update(state=jobs.CHECKPOINTING, trouble="output lost")
    directory.update(state=jobs.EXITED, exit_code=3)
    found = directory.read()
    assert (found.state, found.exit_code, found.trouble) == ("exited", 3, "output lost")
    assert [path.name for path in small.iterdir() if path.suffix != ".json"] == ["fill"]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ours, theirs
    theirs.close()


def rows(*ids: int) -> list[wire.Block]:
    return [wire.Block(n, n << 21, 1 << 21, 0, 0, 0, 0) for n in ids]


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
    handover.wait_idle(time.monotonic() + SECONDS)
    assert said == [3]
    send_end(theirs, 1, 3)
    assert wire.split(theirs.recv(100))[0] is wire.Message.END
    handover.wait_end(time.monotonic() + SECONDS)
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
        handover.wait_end(time.monotonic() + SECONDS)
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
        handover.wait_end(time.monotonic() + SECONDS)
    handover.close()


def test_blocks_go_back_with_their_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    table = BlockTable()
    found = rows(*range(100))
    table.add(7, found, [os.memfd_create(f"block{row.id}") for row in found])
    sender = threading.Thread(
        target=send_blocks, args=(ours, table.of(7), time.monotonic() + SECONDS)
    )
    sender.start()
    got, names, size = [], [], wire.Block.SIZE
    while True:
        data, fds, _, _ = socket.recv_fds(theirs, 1 << 16, 64)
        kind, count, body = wire.split(data)
        if kind is wire.Message.END:
            break
        assert count == len(fds)
        got += [wire.Block.unpack(body[at : at + size]) for at in range(0, len(body), size)]
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
    staging = Staging(driver, Gpu(0, "GPU-0", "none", 1 << 30, "8.0", []))  # type: ignore[arg-type]
    mib = 1 << 20
    staging.add([(0, 2 * mib, 100), (1, 4 * mib, 101)])
    staging.add([(2, 2 * mib, 102), (3, 2 * mib, 103)])
    base = 1 << 40
    assert staging.segments() == [(base, 10 * mib)]
    assert driver.allowed == [(base, 6 * mib), (base + 6 * mib, 4 * mib)]
    staging.drop({1})
    assert staging.segments() == [(base, 2 * mib), (base + 6 * mib, 4 * mib)]
    places = np.array([base + 9 * mib, base + 2 * mib - 1, base + 2 * mib], np.uint64)
    assert staging.segments(places) == [(base, 2 * mib), (base + 8 * mib, 2 * mib)]
    assert staging.segments(places[2:]) == staging.segments(places[:0]) == []
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
