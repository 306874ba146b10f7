"""What the tests of the intercept library share: its environment, a coordinator, a ghost, programs.

The coordinator and the ghost here speak wire.h themselves, so a test can send what the real ones
never would.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coordinator.communicators import Communicators
from coordinator.live_set import LiveSet
from flowgpu import wire
from flowgpu.launch import emulated_driver, emulator_daemon, preloaded
from flowgpu.wire import Message, Status
from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "emu" / "programs"
WINDOW = 0x2000_0000_0000
WINDOW_BYTES = 1 << 44
ROOM_BYTES = 16 << 20  # what a task keeps free on a device of 8 GiB (native/vmm/room.cpp)


def bare_environment(folder: Path, **device: str) -> dict[str, str]:
    """A device of its own, no intercept library; `device` configures it, without FLOWGPU_EMU_."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLOWGPU_EMU_")}
    environment["FLOWGPU_EMUD"] = str(emulator_daemon())
    environment["FLOWGPU_EMU_SOCKET"] = str(folder / "flowgpu-emu.sock")
    environment["FLOWGPU_EMU_LOG"] = str(folder / "device.log")
    environment["FLOWGPU_EMU_WRITE_LOG"] = str(folder / "writes.jsonl")
    environment["FLOWGPU_EMU_IDLE"] = "2"
    environment["LD_LIBRARY_PATH"] = str(emulated_driver().parent)
    return environment | {f"FLOWGPU_EMU_{key}": value for key, value in device.items()}


def intercepted(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment as a task of a job sees it."""
    result = dict(environment)
    result.pop("LD_LIBRARY_PATH", None)
    result["LD_PRELOAD"] = preloaded()
    result["FLOWGPU_REAL_LIBCUDA"] = str(emulated_driver())
    result["FLOWGPU_SOCKET"] = str(folder / "task.sock")
    return result


def wait_until(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.002)


def cuda_include() -> str:
    found = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "find_cuda.py")],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return found.stdout.strip()


def compile_program(source: str, output: Path, *options: str) -> Path:
    """Compile a file of tests/emu/programs."""
    subprocess.run(
        ["cc", "-Wall", "-Wextra", "-Werror", "-O2", "-D_GNU_SOURCE", "-isystem", cuda_include(),
         str(PROGRAMS / source), "-o", str(output), "-ldl", "-lpthread", *options],
        check=True,
    )  # fmt: skip
    return output


class Program:
    """A Python process that runs lines it is sent; see tests/emu/intercept_task.py."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.emu.intercept_task"],
            env=dict(environment),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, source: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def answers_within(self, seconds: float) -> bool:
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def receive(self) -> Any:
        assert self.process.stdout
        assert self.answers_within(SECONDS), "the program does not answer"
        answer = json.loads(self.process.stdout.readline() or '{"error": "the program ended"}')
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def do(self, source: str) -> Any:
        """Run statements; the value of the last line, if it is an expression."""
        self.send(source)
        return self.receive()

    def end(self) -> int:
        """End of input, and the exit code."""
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(SECONDS)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(OSError):
                stream.close()


class Connection:
    """The coordinator's end of one task's connection, after its HELLO."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        peer.settimeout(SECONDS)
        data, fds, _, _ = socket.recv_fds(peer, 1 << 16, 4)
        self.hello = wire.Hello.unpack(data)
        assert len(fds) in (1, 3)
        self.nccl = Communicators(fds.pop()) if len(fds) == 3 else None
        self.live = LiveSet(fds.pop()) if len(fds) == 2 else None
        self.mapping = mmap.mmap(fds[0], mmap.PAGESIZE, prot=mmap.PROT_READ)
        os.close(fds[0])

    @property
    def page(self) -> wire.ControlPage:
        return wire.ControlPage.unpack(self.mapping[: wire.ControlPage.SIZE])

    def send(self, kind: Message, packet: bytes | None = None, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.peer, [packet or wire.packet(kind)], list(fds))

    def receive(self, kind: int) -> wire.Reply:
        reply = wire.Reply.unpack(self.peer.recv(1 << 16))
        assert reply.request == kind
        return reply

    def ask(
        self, kind: Message, packet: bytes | None = None, fds: tuple[int, ...] = ()
    ) -> wire.Reply:
        self.send(kind, packet, fds)
        return self.receive(kind)

    def ok(self, kind: Message, packet: bytes | None = None, fds: tuple[int, ...] = ()) -> Any:
        reply = self.ask(kind, packet, fds)
        assert reply.status == Status.OK, (kind.name, Status(reply.status).name, reply.detail)
        return reply

    def gate(
        self,
        timeout_ms: int = 5000,
        wait_ms: int = 0,
        live_bytes: int = 0,
        engine: wire.Engine = wire.Engine.NATIVE,
    ) -> wire.Reply:
        return self.ask(Message.GATE, wire.Gate(timeout_ms, wait_ms, live_bytes, engine).pack())

    def close_gate(self) -> None:
        assert self.gate(60_000).status == Status.OK

    def close(self) -> None:
        for one in (self.live, self.nccl):
            if one:
                one.close()
        self.mapping.close()
        self.peer.close()


class Coordinator:
    """Listens where tasks look for one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(16)
        self.listener.settimeout(SECONDS)
        self.connections: list[Connection] = []

    def accept(self) -> Connection:
        connection = Connection(self.listener.accept()[0])
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listener.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ghost:
    """Holds what a task hands over. `confirm` false: it goes away before it says so."""

    def __init__(self, confirm: bool = True) -> None:
        self.confirm = confirm
        self.rows: dict[int, wire.Block] = {}
        self.fds: dict[int, int] = {}
        self.live: list[int] = []
        self.allocations: list[wire.Allocation] = []
        self.askers: dict[int, int] = {}  # process ids by the lower halves of their tokens
        self.host: list[wire.Host] = []
        self.ended = threading.Event()
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        with self.ours:
            while True:
                data, fds, _, _ = socket.recv_fds(self.ours, 1 << 16, wire.ROWS_PER_MESSAGE)
                if not data:
                    return
                kind, count, body = wire.split(data)
                if kind is Message.BLOCKS:
                    assert len(fds) == count
                    for i, fd in enumerate(fds):
                        row = wire.Block.unpack(body[i * wire.Block.SIZE :][: wire.Block.SIZE])
                        assert row.id not in self.rows, "a block came twice"
                        self.rows[row.id], self.fds[row.id] = row, fd
                elif kind is Message.ALLOCATIONS:
                    assert not self.live
                    size = wire.Allocation.SIZE
                    rows = [body[i * size : (i + 1) * size] for i in range(count)]
                    self.allocations += [wire.Allocation.unpack(row) for row in rows]
                elif kind is Message.ASKERS:
                    size = wire.Asker.SIZE
                    askers = [body[i * size : (i + 1) * size] for i in range(count)]
                    self.askers |= {a.token_low: a.pid for a in map(wire.Asker.unpack, askers)}
                elif kind is Message.HOST:
                    size = wire.Host.SIZE
                    rows = [body[i * size : (i + 1) * size] for i in range(count)]
                    self.host += [wire.Host.unpack(row) for row in rows]
                elif kind is Message.LIVE:
                    self.live += [
                        int.from_bytes(body[i * 8 : i * 8 + 8], sys.byteorder) for i in range(count)
                    ]
                else:
                    assert kind is Message.END
                    self.ended.set()
                    if not self.confirm:
                        return
                    self.ours.send(wire.packet(Message.END))

    def give_back(self, channel: socket.socket, only: Callable[[int], bool] = bool) -> None:
        """Every live block that `only` picks, then END."""
        ids = [block for block in self.live if only(block)]
        for at in range(0, len(ids), wire.ROWS_PER_MESSAGE):
            batch = ids[at : at + wire.ROWS_PER_MESSAGE]
            rows = b"".join(self.rows[block].pack() for block in batch)
            packet = wire.packet(Message.BLOCKS, rows, len(batch))
            socket.send_fds(channel, [packet], [self.fds[block] for block in batch])
        channel.send(wire.packet(Message.END))

    def close(self) -> None:
        if self.theirs.fileno() >= 0:
            self.theirs.close()
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()


def export(task: Connection, ghost: Ghost, notes: wire.ExportNotes = wire.ExportNotes.NONE) -> Any:
    with ghost.theirs:
        packet = wire.packet(Message.EXPORT, count=notes)
        return task.ok(Message.EXPORT, packet, fds=(ghost.theirs.fileno(),))


def hand_over(task: Connection, ghost: Ghost) -> None:
    """EXPORT, GATE, HANDOVER: afterwards the ghost alone has the memory."""
    export(task, ghost)
    task.close_gate()
    task.ok(Message.HANDOVER)
    assert set(ghost.live) <= set(ghost.rows)


def map_back(
    task: Connection,
    ghost: Ghost,
    only: Callable[[int], bool] = bool,
    their_bytes: wire.MapbackBytes = wire.MapbackBytes.THERE,
) -> wire.Reply:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            packet = wire.packet(Message.MAPBACK, count=their_bytes)
            task.send(Message.MAPBACK, packet, fds=(theirs.fileno(),))
        ghost.give_back(ours, only)
        return task.receive(Message.MAPBACK)


@contextlib.contextmanager
def job(
    folder: Path, replay: bool = False, libcuda: Path | None = None, **device: str
) -> Iterator[tuple[Coordinator, Program, Connection]]:
    """A coordinator and one program that has called cuInit and connected.

    `libcuda` is another driver than the emulated one.
    """
    environment = intercepted(bare_environment(folder, **device), folder)
    if libcuda:
        environment["FLOWGPU_REAL_LIBCUDA"] = str(libcuda)
    if replay:
        environment["FLOWGPU_REPLAY"] = "1"
    with (
        Coordinator(folder / "task.sock") as coordinator,
        Program(environment) as program,
    ):
        program.do("start()")
        yield coordinator, program, coordinator.accept()
