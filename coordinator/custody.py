"""Descriptors of device memory that outlive the coordinator.

From HANDOVER or STRIP to MAPBACK a task does not have its memory, and who has descriptors of its
blocks has that. The coordinator's (blocks.py) end with it, so copies lie in a socket pair of which
the keeper has both ends too: sent and not received, the kernel keeps them open. The keeper does
nothing about them; the next coordinator finds them there (takeover.py). While a job is suspended,
the descriptors of its host copy (host_copy.py) lie there in their place, with that which shuts its
entrance.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence

from coordinator.blocks import BATCH, PACKET_BYTES, Block, BlockTable
from flowgpu import wire

log = logging.getLogger(__name__)

HEAD = struct.Struct("=II")
"""Process id, and how many blocks it has in all. A host copy has no process id."""
HOST = 0
QUEUE_BYTES = 64 << 20
SO_SNDBUFFORCE, SO_PEEK_OFF = 32, 42
"""socket(7); Python has no names for them."""


class Custody:
    """What one checkpoint has put there; empty outside of checkpoints."""

    def __init__(self, ends: tuple[int, int]) -> None:
        """`ends`: the pair's descriptors, which are this object's from here on."""
        self._into, self._out = (socket.socket(fileno=end) for end in ends)
        self._lock = threading.Lock()
        for end in (self._into, self._out):
            end.setblocking(False)
        self._into.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE_BYTES)
        with contextlib.suppress(PermissionError):
            self._into.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, QUEUE_BYTES)

    def put(self, pid: int, blocks: Sequence[Block]) -> None:
        """Keep all blocks of a task. Where the system does not take so many, a part is of no use,
        and the job's memory depends on this process alone."""
        head = HEAD.pack(pid, len(blocks))
        try:
            with self._lock:
                for at in range(0, len(blocks), BATCH) or [0]:
                    batch = blocks[at : at + BATCH]
                    rows = [block.row.pack() for block in batch]
                    socket.send_fds(self._into, [head, *rows], [block.fd for block in batch])
        except OSError as error:
            log.warning("%d blocks of task %d are kept by nobody else: %s", len(blocks), pid, error)

    def copy(self) -> tuple[BlockTable, set[int]]:
        """The blocks that are here, with descriptors of their own, and of which tasks those are
        all. Nothing is taken out: whoever does this may be killed as well."""
        table, whole = BlockTable(), {}
        for pid, count, data, fds in self._packets():
            if pid == HOST:
                _close(fds)
                continue
            whole[pid] = count
            body = data[HEAD.size :]
            rows = range(0, len(body), wire.Block.SIZE)
            table.add(pid, [wire.Block.unpack(body[at : at + wire.Block.SIZE]) for at in rows], fds)
        return table, {pid for pid, count in whole.items() if len(table.of(pid)) == count}

    def leave_host(self, fds: Sequence[int], lock: int) -> None:
        """Keep a host copy and the entrance's lock in the place of all that is here. Raises
        OSError."""
        count = 0
        for _, _, _, found in self._packets():
            count += 1
            _close(found)
        with self._lock:
            socket.send_fds(self._into, [HEAD.pack(HOST, len(fds))], [*fds, lock])
            for _ in range(count):
                self._out.recv(1)

    def host(self) -> tuple[list[int], int] | None:
        """Descriptors of the host copy that is here, and the lock, all of them the caller's to
        close; None: there is none."""
        found: list[int] = []
        for pid, _, _, fds in self._packets():
            if pid == HOST:
                found, fds = fds, found
            _close(fds)
        return (found[:-1], found[-1]) if found else None

    def _packets(self) -> Iterator[tuple[int, int, bytes, list[int]]]:
        self._out.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
        room = socket.CMSG_SPACE(array.array("i").itemsize * BATCH)
        with contextlib.suppress(BlockingIOError):
            while True:  # not socket.recv_fds, which forgets the flags
                data, extra, _, _ = self._out.recvmsg(PACKET_BYTES, room, socket.MSG_PEEK)
                fds = [fd for _, _, found in extra for fd in array.array("i", found)]
                yield (*HEAD.unpack_from(data), data, fds)
        self._out.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, -1)

    def clear(self) -> None:
        """Let go of everything; the kernel closes what is received without room for it."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._out.recv(1)

    def close(self) -> None:
        """Close this process's ends; what is there stays."""
        self._into.close()
        self._out.close()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
