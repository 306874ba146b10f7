"""Blocks of device memory on their way between tasks and the ghost.

The coordinator stands between them and keeps every descriptor until the session ends: an exported
block outlives the ghost as long as one descriptor of it is open, so a ghost that dies costs no
byte. It never touches CUDA.

Ownership: a BlockTable owns the descriptors of its blocks; what is sent on is duplicated by the
kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from coordinator.polling import readable
from flowgpu import wire

if TYPE_CHECKING:
    from coordinator.active import Rows, Words

Token = tuple[int, int]
"""A task's 128 bits, the upper half first (wire.h)."""
PACKET_BYTES = 1 << 16
# The kernel takes 253 descriptors in a message; a batch goes on to the ghost as it came.
BATCH = wire.ROWS_PER_MESSAGE


@dataclass
class Block:
    """One block of a task.

    `key` is unique in the session, `gpu` and `offset` say where the image has it.
    """

    key: int
    pid: int
    row: wire.Block
    fd: int
    gpu: int = -1
    offset: int = -1
    of: Block | None = None
    """An import has the block that is saved with the bytes; itself where its owner has let go."""

    @property
    def owner(self) -> Token:
        """The token of the task that an import's block belongs to; zeros for other blocks."""
        return self.row.owner_high, self.row.owner_low

    @property
    def imported(self) -> bool:
        """True if the task has the block from another task."""
        return any(self.owner)

    @property
    def saved(self) -> bool:
        """True if the block is saved with its own task."""
        return not self.imported or self.of is self


class BlockTable:
    """Every block of a session, and imports of such blocks: a task gets both back by descriptors,
    but the bytes of a block are saved once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, Block] = {}
        self._next_key = 0

    def add(self, pid: int, rows: Sequence[wire.Block], fds: Sequence[int]) -> list[Block]:
        """Take blocks over with their descriptors."""
        with self._lock:
            added = []
            for row, fd in zip(rows, fds, strict=True):
                added.append(Block(self._next_key, pid, row, fd))
                self._blocks[self._next_key] = added[-1]
                self._next_key += 1
            return added

    def rename(self, pids: Mapping[int, int]) -> None:
        """The tasks have other process ids from now on."""
        with self._lock:
            for block in self._blocks.values():
                block.pid = pids[block.pid]

    def keep_live(self, pid: int, live: Iterable[int]) -> list[Block]:
        """Forget blocks of `pid` whose id is not in `live` and give them.

        KeyError if a live one is unknown.
        """
        wanted = set(live)
        with self._lock:
            own = [block for block in self._blocks.values() if block.pid == pid]
            unknown = wanted - {block.row.id for block in own}
            if unknown:
                raise KeyError(f"task {pid} kept {len(unknown)} blocks that it did not send")
            gone = [block for block in own if block.row.id not in wanted]
            for block in gone:
                os.close(self._blocks.pop(block.key).fd)
            return gone

    def __getitem__(self, key: int) -> Block:
        return self._blocks[key]

    def of(self, pid: int) -> list[Block]:
        """Blocks of one task, in the order in which they came."""
        with self._lock:
            return [block for block in self._blocks.values() if block.pid == pid]

    def rows(self, pid: int) -> Words:
        """Key, address and bytes of those that are saved: shape (n, 3)."""
        import numpy as np

        own = (block for block in self.of(pid) if block.saved)
        found = ((block.key, block.row.address, block.row.size) for block in own)
        return np.fromiter(chain.from_iterable(found), np.uint64).reshape(-1, 3)

    def saved(self) -> list[Block]:
        """Every block whose bytes are saved, in the order in which they came."""
        with self._lock:
            return [block for block in self._blocks.values() if block.saved]

    def imports(self) -> list[Block]:
        """The others; each is `of` one that is saved, once `join_imports` has found that."""
        with self._lock:
            return [block for block in self._blocks.values() if not block.saved]

    def join_imports(self, pids: Mapping[Token, int]) -> list[Block]:
        """Find the block of each import. One whose owner has let go of it is saved as that of the
        first importer; gives these. `pids`: the tasks by their tokens."""
        own = {(block.pid, block.row.id): block for block in self.saved()}
        left: dict[tuple[Token, int], Block] = {}
        for block in sorted(self.imports(), key=lambda block: (block.pid, block.key)):
            origin = block.owner, block.row.owner_id
            found = own.get((pids.get(block.owner, 0), block.row.owner_id))
            block.of = found or left.setdefault(origin, block)
        return list(left.values())

    def total_bytes(self) -> int:
        """Bytes of all that are saved."""
        return sum(block.row.size for block in self.saved())

    def close(self) -> None:
        """Close every descriptor and forget the blocks."""
        with self._lock:
            for block in self._blocks.values():
                os.close(block.fd)
            self._blocks.clear()


class Handover:
    """Receives the blocks of one task from its handover channel, in a thread of its own.

    `forward` is called with each batch, in the order of arrival. `confirm` is called with the ids
    of the blocks that live when all have come; after it the task is told that it may let go.
    """

    def __init__(
        self,
        pid: int,
        channel: socket.socket,
        table: BlockTable,
        forward: Callable[[list[Block]], None],
        confirm: Callable[[list[int]], None],
    ) -> None:
        self.pid = pid
        self._channel = channel
        self._table = table
        self._forward = forward
        self._confirm = confirm
        self._changed = threading.Condition()
        self._busy = False
        self._live: list[int] = []
        self._allocations: list[bytes] = []
        self.askers: dict[Token, int] = {}
        """Processes that have asked for blocks of the task: tokens and process ids."""
        self._host: list[bytes] = []
        self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"handover-{pid}")
        self._thread.start()

    def wait_idle(self, deadline: float) -> None:
        """Wait until all that the task has sent is taken in. Raises what went wrong."""
        self._wait(lambda: not self._busy and not readable(self._channel, seconds=0), deadline)

    def wait_end(self, deadline: float) -> None:
        """Wait until the handover is confirmed. Raises what went wrong."""
        self._wait(lambda: self._ended, deadline)

    def allocations(self) -> Rows:
        """What the program has allocated, as FLOWGPU_ALLOCATIONS said, once `confirm` is called."""
        import numpy as np

        return np.frombuffer(b"".join(self._allocations), np.uint64).reshape(-1, 3)

    def host_memory(self) -> list[tuple[int, int]]:
        """Start and end of the task's own memory that a device may have written to."""
        rows = [wire.Host.unpack(row) for row in self._host]
        return [(row.address, row.address + row.size) for row in rows]

    def failure(self) -> Exception | None:
        """What went wrong on this side, if anything did."""
        return self._failure

    def close(self) -> None:
        """End the thread and close the channel. A second call does nothing."""
        # shutdown wakes the thread, which may wait in recvmsg; close alone would not.
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._channel.close()

    def _wait(self, reached: Callable[[], bool], deadline: float) -> None:
        with self._changed:
            while not reached():
                if self._failure is not None:
                    raise self._failure
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"task {self.pid} did not hand over its blocks in time")
                self._changed.wait(left)

    def _run(self) -> None:
        try:
            while not self._ended:
                # What is readable and what is being worked on is looked at together (wait_idle).
                readable(self._channel)
                with self._changed:
                    self._busy = True
                self._receive()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        except Exception as error:  # passed on to the thread that waits
            # The task waits for an answer: without one it keeps its memory.
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, BATCH)
        if not data:
            raise ConnectionResetError(f"task {self.pid} closed its handover channel")
        try:
            kind, rows = _read(data, len(fds))
        except wire.WireError:
            for fd in fds:
                os.close(fd)
            raise
        if kind is wire.Message.BLOCKS:
            self._forward(self._table.add(self.pid, [wire.Block.unpack(row) for row in rows], fds))
        elif kind is wire.Message.ALLOCATIONS:
            self._allocations += rows
        elif kind is wire.Message.ASKERS:
            for asker in map(wire.Asker.unpack, rows):
                self.askers[asker.token_high, asker.token_low] = asker.pid
        elif kind is wire.Message.HOST:
            self._host += rows
        elif kind is wire.Message.LIVE:
            self._live += [struct.unpack("=Q", row)[0] for row in rows]
        else:
            self._confirm(self._live)
            self._channel.send(wire.packet(wire.Message.END))
            self._ended = True


ROW_BYTES = {
    wire.Message.BLOCKS: wire.Block.SIZE,
    wire.Message.ALLOCATIONS: wire.Allocation.SIZE,
    wire.Message.ASKERS: wire.Asker.SIZE,
    wire.Message.HOST: wire.Host.SIZE,
    wire.Message.LIVE: 8,
    wire.Message.END: 0,
}


def _read(data: bytes, fd_count: int) -> tuple[wire.Message, list[bytes]]:
    kind, count, body = wire.split(data)
    if kind not in ROW_BYTES:
        raise wire.WireError(f"message {kind.name} on a handover channel")
    size = ROW_BYTES[kind]
    if len(body) != count * size:
        raise wire.WireError(f"{kind.name} of {count} rows has {len(body)} bytes")
    if fd_count != (count if kind is wire.Message.BLOCKS else 0):
        raise wire.WireError(f"{kind.name} of {count} rows came with {fd_count} descriptors")
    return kind, [body[at : at + size] for at in range(0, len(body), size or 1)]


def send_blocks(channel: socket.socket, blocks: Sequence[Block], deadline: float) -> None:
    """Send blocks with their descriptors, then END: the coordinator's part of MAPBACK."""
    channel.settimeout(max(deadline - time.monotonic(), 0.001))
    for at in range(0, len(blocks), BATCH):
        batch = blocks[at : at + BATCH]
        body = b"".join(block.row.pack() for block in batch)
        message = wire.packet(wire.Message.BLOCKS, body, len(batch))
        socket.send_fds(channel, [message], [block.fd for block in batch])
    channel.send(wire.packet(wire.Message.END))
