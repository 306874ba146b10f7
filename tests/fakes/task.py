"""A program that uses a GPU which does not exist: the task's side of wire.h, in Python.

Its blocks are memfds. The main thread is the program: it counts in all blocks at once and prints
`step N` for each count, or `torn` when the blocks do not agree. Usage: task.py BLOCKS [STEPS]
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator import faults
from flowgpu import live, wire
from flowgpu.wire import Fault

BLOCK_BYTES = int(os.environ.get("FAKE_TASK_BLOCK", 2 << 20))
CHUNK_BYTES = 32 << 10
PR_SET_NAME = 15  # linux/prctl.h
SERVICE_NAME = b"flowgpu"
LONELY_SECONDS = 120.0
WINDOW = 0x200000000000
BUSY_FIRST = int(os.environ.get("FAKE_TASK_BUSY", "0"))
REFUSE = os.environ.get("FAKE_TASK_REFUSE", "")
DIE_AT = os.environ.get("FAKE_TASK_DIE", "")
# If this file is there before it has greeted again.
DIE_WITH = os.environ.get("FAKE_TASK_DIE_WITH", "")
LAST_WORDS = os.environ.get("FAKE_TASK_LAST_WORDS", "").encode()
BECOME_AT = os.environ.get("FAKE_TASK_BECOME", "")  # another program
# MESSAGE:before:SECONDS or MESSAGE:after:SECONDS: what is asked is done late, or answered late.
SLOW = os.environ.get("FAKE_TASK_SLOW", "::0").split(":")
STOP_AT = os.environ.get("FAKE_TASK_STOP", "")  # once
NAME = os.environ.get("FAKE_TASK_NAME", "")  # before each line
GROWS = os.environ.get("FAKE_TASK_GROWS", "")  # a file, and each greeting comes once it has
GPUS = int(os.environ.get("FAKE_GPUS", "1"))
LIVE = "FAKE_TASK_LIVE" in os.environ
OTHER = os.environ.get("FAKE_TASK_OTHER", "")  # what is of another version: wire, page, live
ENDING = "FAKE_TASK_ENDING" in os.environ
FILL = os.environ.get("FAKE_TASK_FILL", "")
REPLAY = os.environ.get("FLOWGPU_REPLAY") == "1"
# It says that it can so much of the engine replay. 3 is a lie as to KEEP.
CAN = int(os.environ.get("FAKE_TASK_CAN", "1"))
UNPREPARED = "the job was started with --engine native"
# What replay cannot save: asked for it, or at the gate only.
UNREPLAYED = os.environ.get("FAKE_TASK_UNREPLAYED", "")
UNREPLAYED_AT_GATE = os.environ.get("FAKE_TASK_UNREPLAYED_AT_GATE", UNREPLAYED)
REBUILD_NEEDS_OTHERS = "FAKE_TASK_REBUILD_NEEDS_OTHERS" in os.environ
# Where it says that it has its blocks again, before their bytes are there.
MAPPED = os.environ.get("FAKE_TASK_MAPPED", "")
NAMESAKE = "FAKE_TASK_NAMESAKE" in os.environ  # another thread has the service's name
# MESSAGE:STATUS:TIMES: what is asked fails so often.
FAIL = os.environ.get("FAKE_TASK_FAIL", "::0").split(":")


def fires(point: Fault) -> bool:
    """True if the point fails now; a file tells the test."""
    if not faults.fires(point):
        return False
    (Path(os.environ["FAKE_STATES"]) / "fired").touch()
    return True


def die() -> None:
    os.write(1, LAST_WORDS)
    os._exit(3)


def live_set() -> int:
    """One that knows of all memory of the window, and of no block that is in use there."""
    fd = os.memfd_create("live", os.MFD_CLOEXEC)
    os.ftruncate(fd, live.BYTES)
    version = live.VERSION + (OTHER == "live")
    head = live.Header.FORMAT.pack(
        live.MAGIC, version, 0, 0, 0, 1, 1, 0, 0, 0, 0, *[0] * live.DEVICES
    )
    os.pwrite(fd, head, 0)
    os.pwrite(fd, b"\xff" * 4096, live.SEEN_AT + (WINDOW >> live.GRANULE_BITS) // 8)
    return fd


class Block:
    def __init__(self, row: wire.Block, fd: int) -> None:
        self.row, self.fd = row, fd
        self.memory = mmap.mmap(fd, row.size)

    def drop(self) -> None:
        self.memory.close()
        os.close(self.fd)


class Device:
    """The program's memory, and the gate before every use of it."""

    def __init__(self, blocks: int) -> None:
        self.gate = threading.Lock()
        self.gate_closed = False
        self.cuda = True
        self.ticked = threading.Condition()
        self.blocks: dict[int, Block] = {}
        self.next_id = 0
        self.page = mmap.mmap(-1, mmap.PAGESIZE)
        for _ in range(blocks):
            self.allocate()

    def allocate(self) -> None:
        device = self.next_id % GPUS
        fd = os.memfd_create(f"gpu{device}", os.MFD_CLOEXEC)
        os.ftruncate(fd, BLOCK_BYTES)
        address = WINDOW + self.next_id * BLOCK_BYTES
        row = wire.Block(self.next_id, address, BLOCK_BYTES, device, 0, 0, 0)
        self.blocks[self.next_id] = Block(row, fd)
        if FILL:
            self.fill(self.blocks[self.next_id])
        self.next_id += 1

    def fill(self, block: Block) -> None:
        """All chunks but the first hold something: of their own, or the same on every GPU."""
        number = block.row.id // GPUS if FILL == "same" else block.row.id
        for chunk in range(CHUNK_BYTES, BLOCK_BYTES, CHUNK_BYTES):
            value = struct.pack("=Q", number * BLOCK_BYTES + chunk)
            block.memory[chunk : chunk + CHUNK_BYTES] = value * (CHUNK_BYTES // 8)

    def change(self, chunk: int) -> None:
        """Let a chunk of the first block hold something else."""
        at = chunk * CHUNK_BYTES
        self.blocks[0].memory[at : at + CHUNK_BYTES] = (
            b"\xee" * (CHUNK_BYTES - 8) + bytes(7) + bytes([chunk])
        )

    def close_gate(self) -> None:
        self.gate.acquire()
        self.gate_closed = True

    def open_gate(self) -> None:
        if self.gate_closed:
            self.gate_closed = False
            self.gate.release()

    def tick(self) -> None:
        """Another thread of the program, which never waits at the gate."""
        if NAMESAKE:
            ctypes.CDLL(None).prctl(PR_SET_NAME, SERVICE_NAME, 0, 0, 0)
        while True:
            with self.ticked:
                self.ticked.notify_all()
            time.sleep(0.005)

    def wait_tick(self) -> None:
        with self.ticked:
            self.ticked.wait()

    def free_oldest(self) -> None:
        self.blocks.pop(min(self.blocks)).drop()

    def step(self) -> int | None:
        """Count in every block; None if they did not agree."""
        with self.gate:
            if not self.cuda:
                return None
            found = {struct.unpack_from("=Q", b.memory, 4096)[0] for b in self.blocks.values()}
            if len(found) > 1:
                return None
            count = found.pop() + 1 if found else 1
            for block in self.blocks.values():
                struct.pack_into("=Q", block.memory, 4096, count)
            return count


class Service(threading.Thread):
    """The service thread of the intercept library."""

    def __init__(self, device: Device) -> None:
        super().__init__(daemon=True)
        self.device = device
        self.handover: socket.socket | None = None
        self.sent: set[int] = set()
        self.away: set[int] = set()  # ids of blocks that were let go of
        self.lent = False  # its blocks end with CUDA
        self.to_come = False  # the bytes of those that it has again
        self.detached = False
        self.busy_left = BUSY_FIRST
        self.fails_left = int(FAIL[2])
        self.stop_at = STOP_AT
        self.packet = b""
        self.turns = 0
        self.connection = self.connect()

    def connect(self) -> socket.socket:
        deadline = time.monotonic() + LONELY_SECONDS
        while True:
            self.die_if_told()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(os.environ["FLOWGPU_SOCKET"])
                break
            except OSError:
                connection.close()
                if time.monotonic() > deadline:
                    os._exit(9)
                time.sleep(0.002)
        self.die_if_told()  # it may have been dumped after its last look
        if GROWS:
            before = os.stat(GROWS).st_size
            while os.stat(GROWS).st_size <= before:
                time.sleep(0.001)
        page = os.memfd_create("control-page", os.MFD_CLOEXEC)
        os.write(page, self.control_page().ljust(mmap.PAGESIZE, b"\0"))
        fds = [page, live_set()] if LIVE else [page]
        resumed = int(self.detached or bool(self.away) or not self.device.cuda)
        hello = wire.Hello(os.getpid(), 13000, resumed, GPUS, CAN * REPLAY, 0, os.getpid()).pack()
        if OTHER == "wire":
            hello = hello[:4] + struct.pack("=H", wire.VERSION + 1) + hello[6:]
        try:
            socket.send_fds(connection, [hello], fds)
        finally:  # the coordinator may be killed just now, and another one comes
            for fd in fds:
                os.close(fd)
        return connection

    def die_if_told(self) -> None:
        if DIE_WITH and os.path.exists(DIE_WITH):
            die()

    def lost(self) -> None:
        """The connection has ended: what the task still holds goes on."""
        self.connection.close()
        self.drop_channel()
        whole = self.device.cuda and not self.away
        if not self.detached and whole and self.device.gate_closed:
            self.device.open_gate()
        self.connection = self.connect()

    def control_page(self) -> bytes:
        blocks = len(self.device.blocks)
        size = blocks * BLOCK_BYTES
        version = wire.VERSION + (OTHER == "page")
        page = wire.ControlPage(
            wire.MAGIC, version, 0, 1, blocks, size, blocks, size, 0, 0, 1, 0, 0
        )
        return page.pack()

    def run(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, SERVICE_NAME, 0, 0, 0)
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.connection, 1 << 16, 4)
                self.packet = data
                if not data or not self.serve(wire.split(data)[0], fds):
                    self.lost()
            except OSError:
                self.lost()

    def serve(self, kind: wire.Message, fds: list[int]) -> bool:
        """Do what is asked and answer it; False: the connection is to be closed."""
        if kind.name == DIE_AT:
            die()
        if kind.name == self.stop_at:
            self.stop_at = ""
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind.name == BECOME_AT:
            os.execv("/bin/sleep", ["sleep", "600"])
        if fires(Fault.TASK_REQUEST):
            for fd in fds:
                os.close(fd)
            return False
        if SLOW[:2] == [kind.name, "before"]:
            time.sleep(float(SLOW[2]))
        if kind.name == REFUSE:
            reply = self.refused(kind, "an open graph")
        elif kind.name == FAIL[0] and self.fails_left:
            self.fails_left -= 1
            reply = self.answer(kind, status=wire.Status[FAIL[1]])
        else:
            reply = getattr(self, f"on_{kind.name.lower()}")(kind, fds)
        if SLOW[:2] == [kind.name, "after"]:
            time.sleep(float(SLOW[2]))
        if fires(Fault.TASK_REPLY):
            return False
        self.connection.send(reply.pack())
        if f"after_{kind.name}" == DIE_AT:
            die()
        return not (kind is wire.Message.DETACH and reply.status == wire.Status.OK)

    def answer(self, kind: wire.Message, blocks: int = 0, status: int = 0) -> wire.Reply:
        own = self.device.blocks
        size = len(own) * BLOCK_BYTES
        return wire.Reply(
            kind, status, 0, 0, blocks, blocks * BLOCK_BYTES, len(own), size - len(own) * 100, ""
        )

    def refused(self, kind: wire.Message, what: str) -> wire.Reply:
        return wire.Reply(kind, wire.Status.REFUSED, 0, 0, 0, 0, 0, 0, what)

    def on_ask(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        why = UNREPLAYED if REPLAY else UNPREPARED
        if wire.Ask.unpack(self.packet).engine == wire.Engine.REPLAY and why:
            return self.refused(kind, why)
        return self.answer(kind)

    def on_strip(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        may = REPLAY and self.device.gate_closed and self.device.cuda
        if not may or (self.device.blocks and not self.lent):
            return self.answer(kind, status=wire.Status.PROTOCOL)
        self.let_go()
        self.lent = self.device.cuda = False
        return self.answer(kind)

    def on_rebuild(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        if not (REPLAY and self.device.gate_closed):
            return self.answer(kind, status=wire.Status.PROTOCOL)
        if REBUILD_NEEDS_OTHERS:
            self.device.wait_tick()
        if len(self.packet) == wire.Rebuild.SIZE and "FAKE_TASK_TOLD" in os.environ:
            Path(os.environ["FAKE_TASK_TOLD"]).write_text(wire.Rebuild.unpack(self.packet).visible)
        self.device.cuda = True
        return self.answer(kind)

    def send_new(self) -> int:
        assert self.handover is not None
        new = [block for key, block in self.device.blocks.items() if key not in self.sent]
        for at in range(0, len(new), wire.ROWS_PER_MESSAGE):
            batch = new[at : at + wire.ROWS_PER_MESSAGE]
            rows = b"".join(block.row.pack() for block in batch)
            packet = wire.packet(wire.Message.BLOCKS, rows, len(batch))
            socket.send_fds(self.handover, [packet], [block.fd for block in batch])
        self.sent |= {block.row.id for block in new}
        return len(new)

    def on_export(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        self.handover = socket.socket(fileno=fds[0])
        self.sent = set()
        sent = self.send_new()
        if os.environ.get("FAKE_TASK_CHURN"):
            with self.device.gate:
                oldest = self.device.blocks[min(self.device.blocks)]
                count = struct.unpack_from("=Q", oldest.memory, 4096)
                self.device.free_oldest()
                self.device.allocate()
                newest = self.device.blocks[max(self.device.blocks)]
                struct.pack_into("=Q", newest.memory, 4096, *count)
        return self.answer(kind, sent)

    def on_gate(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        if self.busy_left:
            self.busy_left -= 1
            return self.answer(kind, status=wire.Status.BUSY)
        why = UNREPLAYED_AT_GATE if REPLAY else UNPREPARED
        if wire.Gate.unpack(self.packet).engine == wire.Engine.REPLAY and why:
            return self.refused(kind, why)
        self.device.close_gate()
        if FILL == "turn":
            self.turns += 1
            self.device.change(self.turns)
        return self.answer(kind)

    def on_lend(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        self.lent = True
        return self.on_handover(kind, fds)

    def on_handover(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        assert self.handover is not None
        sent = self.send_new()
        rows = [block.row for block in self.device.blocks.values()]
        for at in range(0, len(rows), wire.ALLOCATIONS_PER_MESSAGE):
            part = rows[at : at + wire.ALLOCATIONS_PER_MESSAGE]
            packed = [wire.Allocation(r.address, r.size - 100, r.address).pack() for r in part]
            message = wire.packet(wire.Message.ALLOCATIONS, b"".join(packed), len(part))
            self.handover.send(message)
        ids = list(self.device.blocks)
        body = struct.pack(f"={len(ids)}Q", *ids)
        self.handover.send(wire.packet(wire.Message.LIVE, body, len(ids)))
        self.handover.send(wire.packet(wire.Message.END))
        data = self.handover.recv(1 << 16)
        if not data:
            return self.answer(kind, status=wire.Status.SYSTEM)
        assert wire.split(data)[0] is wire.Message.END
        reply = self.answer(kind, sent)
        if not self.lent and not self.let_go():
            return self.answer(kind, status=wire.Status.DRIVER)
        self.drop_channel()
        return reply

    def let_go(self) -> bool:
        """Have no block any more. False: a fault is in the way."""
        for block in list(self.device.blocks.values()):
            if fires(Fault.TASK_RELEASE):
                return False
            self.away.add(block.row.id)
            self.device.blocks.pop(block.row.id).drop()
        return True

    def on_room(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        free = os.environ.get("FAKE_TASK_FREE", 1 << 40)
        if not self.device.blocks:
            free = os.environ.get("FAKE_TASK_FREE_AWAY", free)
        return wire.Reply(kind, wire.Status.OK, 0, 0, 0, int(free), 0, 0, "")

    def on_detach(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        self.detached = True
        return self.answer(kind)

    def on_mapback(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        self.to_come = wire.split(self.packet)[1] == wire.MapbackBytes.TO_COME
        with socket.socket(fileno=fds[0]) as channel:
            if not self.device.cuda or (self.to_come and CAN < 3):
                return self.answer(kind, status=wire.Status.PROTOCOL)
            while True:
                data, received, _, _ = socket.recv_fds(channel, 1 << 16, wire.ROWS_PER_MESSAGE)
                found, count, body = wire.split(data)
                if found is wire.Message.END:
                    break
                for i, fd in enumerate(received[:count]):
                    row = wire.Block.unpack(body[i * wire.Block.SIZE : (i + 1) * wire.Block.SIZE])
                    if row.id in self.away:
                        self.device.blocks[row.id] = Block(row, fd)
                        self.away.remove(row.id)
                        continue
                    os.close(fd)
                    if row.id not in self.device.blocks:  # as the intercept library
                        return self.answer(kind, status=wire.Status.DRIVER)
        if ENDING:
            self.device.blocks.clear()
        if self.to_come and MAPPED:
            Path(MAPPED, str(os.getpid())).touch()
        return self.answer(kind, len(self.device.blocks))

    def on_open(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        if self.away or self.to_come or not self.device.cuda:
            return self.answer(kind, status=wire.Status.PROTOCOL)
        if ENDING:
            threading.Timer(0.1, os._exit, (6,)).start()
        self.drop_channel()  # as the intercept library
        self.detached = self.lent = False
        self.device.open_gate()
        return self.answer(kind)

    def on_drop(self, kind: wire.Message, fds: list[int]) -> wire.Reply:
        self.drop_channel()
        return self.answer(kind)

    def drop_channel(self) -> None:
        if self.handover is not None:
            self.handover.close()
            self.handover = None


def main() -> None:
    # Real tasks have no descriptor of a block for long.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    device = Device(int(sys.argv[1]))
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 40
    if REBUILD_NEEDS_OTHERS or NAMESAKE:
        threading.Thread(target=device.tick, daemon=True).start()
    service = Service(device)
    service.start()
    for _ in range(steps):
        count = device.step()
        print(f"{NAME}torn" if count is None else f"{NAME}step {count}", flush=True)
        time.sleep(0.005)


if __name__ == "__main__":
    main()
