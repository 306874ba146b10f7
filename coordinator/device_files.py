"""The device files of tasks that are about to end CUDA, held open meanwhile.

The driver frees all that a process has of a GPU when the last copy of its descriptors is closed,
one process after the other. That takes 0.07 s of a process with 16 GiB (H200, 2026-11-29). While
copies are here, STRIP does not wait for it, and CRIU works beside it. Who needs the GPU's memory
free waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from os import close

from flowgpu.host.proctree import fd_targets
from flowgpu.host.sockets import duplicate, socket_of
from flowgpu.timeline import Recorder, of_task

log = logging.getLogger(__name__)

EMULATED_MARK = b"flowgpu-emu"
"""In the name of the emulated device's socket (native/emu/driver/wire.h)."""
FREE_SECONDS = 10.0
"""A driver that takes longer is in trouble, which those who need the memory find out."""


class DeviceFiles:
    """Those of one checkpoint's tasks. Nothing here fails: a process closes by itself what is not
    held."""

    def __init__(self, emulated: bool, timeline: Recorder) -> None:
        self._emulated = emulated
        self._timeline = timeline
        self._held: dict[int, list[int]] = {}  # by process id
        self._closing: list[threading.Thread] = []

    def hold(self, pid: int) -> None:
        """Hold those of a process."""
        self._held[pid] = list(self._copies(pid))

    def _copies(self, pid: int) -> Iterator[int]:
        for fd, target in fd_targets(pid):
            with contextlib.suppress(OSError):  # not ours to take, or too many
                if self._emulated and target.startswith("socket:"):
                    with socket_of(pid, fd) as found:
                        if _is_emulated(found):
                            yield found.detach()
                elif target.startswith("/dev/nvidia"):
                    yield duplicate(pid, fd)

    def let_go(self) -> None:
        """Close them, without waiting for that."""
        held, self._held = self._held, {}
        for pid, fds in held.items():
            thread = threading.Thread(target=self._close, args=(pid, fds), daemon=True)
            self._closing.append(thread)
            thread.start()

    def _close(self, pid: int, fds: Sequence[int]) -> None:
        with self._timeline.span(of_task(pid), "free memory"):
            for fd in fds:
                close(fd)

    def wait_freed(self) -> None:
        """Wait until all that was let go is closed."""
        deadline = time.monotonic() + FREE_SECONDS
        for thread in self._closing:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        if self._closing:
            log.warning("the driver takes long to free what %d tasks had", len(self._closing))


def _is_emulated(found: socket.socket) -> bool:
    """True if it is a connection to the emulated device."""
    if found.family != socket.AF_UNIX:
        return False
    name = found.getpeername()
    return EMULATED_MARK in (name if isinstance(name, bytes) else os.fsencode(name))
