"""The coordinator's side of the entrance: nobody begins to use the GPU during a checkpoint.

native/intercept/entrance.h says which locks a process has of the file in the job's folder. Those
here belong to this open file (F_OFD_SETLK), so they end with a coordinator that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from pathlib import Path

from flowgpu.host.proctree import fd_targets

PASSING, BEGINNING = 0, 1
"""Bytes of the file."""
LOOK_SECONDS = 0.002
LOCK = struct.Struct("@hhqqi4x")
"""struct flock: kind, whence, start, length, process id."""


class Entrance:
    """Open until `shut`, and again after `open`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def make(self) -> None:
        """Make the file: empty, as a process of a restored job knows it."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def shut(self, deadline: float) -> None:
        """Let nobody pass; wait until all who have passed are connected. Does nothing when it is
        shut. Raises TimeoutError."""
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        while not self._lock(fcntl.F_WRLCK) or self.beginners():
            if time.monotonic() >= deadline:
                who = next(iter(self.beginners()), None)
                named = "a process" if who is None else f"process {who}"
                raise TimeoutError(f"{named} begins to use the GPU and does not connect")
            time.sleep(LOOK_SECONDS)

    @property
    def lock(self) -> int:
        """The descriptor that keeps it shut, as any copy of it does; -1: it is open."""
        return self._fd

    def take_up(self, lock: int) -> None:
        """Be shut by a copy of another coordinator's descriptor, which is this object's now."""
        self.open()
        self._fd = lock

    def beginners(self) -> list[int]:
        """A process that has passed and is not connected yet, if there is one."""
        asked = LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, BEGINNING, 1, 0)
        kind, _, _, _, pid = LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))
        return [] if kind == fcntl.F_UNLCK else [pid]

    def is_in(self, pid: int) -> bool:
        """True if the process waits here, or has passed and is not connected yet."""
        path = os.path.realpath(self._path)
        return any(target == path for _, target in fd_targets(pid))

    def _lock(self, kind: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            wanted = LOCK.pack(kind, os.SEEK_SET, PASSING, 1, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
            return True
        return False

    def open(self) -> None:
        """Let all pass again. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
