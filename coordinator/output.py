"""The job's output: two pipes, moved into output.log as it comes, and handed to any number of
clients.

A client reads the log at its own pace, so a slow one costs nothing. The kernel moves the bytes from
pipe to log (splice): a coordinator that is killed has moved each of them or has not, and the next
one goes on at the end of the log.

The log is bounded (flowgpu/output_log.py). Where it cannot be written to, as on a full disk, it
gives up its older half. When there is nothing left to give up, output is lost, since a job never
waits for its log: a line in the log says how much, and the job's record that it is so.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import logging
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from flowgpu import output_log
from flowgpu.jobs import JobDir
from flowgpu.output_log import (
    HOLE_BYTES,
    OFFSET_BYTES,
    READ_BYTES,
    Piece,
    kept_from,
    read_at,
    read_turns,
)
from flowgpu.render import size as readable

log = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20
PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE."""
TELL_SECONDS = 1.0
"""How often the record is told how much is lost."""


class Output:
    """Pump and log of one job's output."""

    def __init__(
        self,
        directory: JobDir,
        readers: Sequence[int],
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`readers`: the pipes of stdout and stderr, this object's to close. `begin` starts it.

        `on_trouble` is told, in the thread that reads, what of the output is lost.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._path = directory.output_log
        self._log = os.open(self._path, flags, 0o600)
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._end = os.fstat(self._log).st_size
        self._kept = kept_from(self._log, 0)
        self._streams = os.open(directory.output_streams, flags | os.O_APPEND, 0o600)
        self._turns, self._before = read_turns(directory.output_streams)
        if not self._turns:
            self._turn()
        self.start = self._turns[0]
        self._on_trouble = on_trouble
        self._untold = self._lost = 0  # bytes: without a line in the log, and all
        self._reason = ""
        self._told = 0.0
        self._readers = list(readers)
        for reader in readers:
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # an unprivileged user may have used up the limit
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._ended = False
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name="output")

    def begin(self) -> None:
        """Start to read."""
        self._thread.start()

    @property
    def end(self) -> int:
        """Length of the log."""
        return self._end

    @property
    def kept(self) -> int:
        """Where what the log still has begins."""
        return self._kept

    def drain(self) -> None:
        """Read what the pipes hold now: then the log has all that stopped writers have written."""
        with self._reading:
            for stream, reader in enumerate(self._readers):
                while self._read(stream, reader):
                    pass

    def finish(self, grace: float) -> None:
        """The job has ended.

        Read to the end of the pipes, or what is there after `grace` seconds.
        """
        if self._thread.is_alive():
            self._thread.join(grace)
        os.close(self._stopped)
        if self._thread.is_alive():
            self._thread.join()
        self.drain()
        if self._untold:
            with contextlib.suppress(OSError):
                self._tell_lost()
            self._on_trouble(f"{readable(self._lost)} of output lost: {self._reason}")
        for fd in (self._stop, *self._readers):
            os.close(fd)
        self._readers.clear()
        os.close(self._log)
        os.close(self._streams)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def read(self, position: int, seconds: float) -> Piece | None:
        """Output at `position`, waited for up to `seconds`.

        Without bytes in time out, None at the end.
        """
        with self._changed:
            if position >= self._end and not self._ended:
                self._changed.wait(seconds)
            if position >= self._end:
                return None if self._ended else Piece("stdout", b"", position)
            end, turns = self._end, self._turns
        return read_at(self._path, turns, position, end)

    def _read(self, stream: int, reader: int) -> bool:
        if not _events(reader) & select.POLLIN:
            return False
        while True:
            try:
                if self._untold:
                    self._tell_lost()
                self._turn_to(stream)
                flags = os.SPLICE_F_NONBLOCK
                count = os.splice(reader, self._log, READ_BYTES, offset_dst=self._end, flags=flags)
            except BlockingIOError:
                return False
            except OSError as error:
                if self._give_up(self._kept + (self._end - self._kept) // 2):
                    continue
                self._lose(len(os.read(reader, READ_BYTES)), error)
                return True
            self._grow(count)
            return True

    def _grow(self, count: int) -> None:
        with self._changed:
            self._end += count
            self._changed.notify_all()
        if self._end - self._kept >= output_log.KEEP_BYTES * 17 // 16:
            self._give_up(self._end - output_log.KEEP_BYTES)
        if len(self._turns) >= output_log.KEEP_TURNS * 17 // 16:
            self._give_up(self._turns[-output_log.KEEP_TURNS])

    def _give_up(self, before: int) -> bool:
        """Give up what is before a place, as far as whole holes go; False if that is nothing."""
        before = before // HOLE_BYTES * HOLE_BYTES
        if before <= self._kept or not _punch(self._log, 0, before):
            return False
        self._kept = before
        turn = bisect.bisect_right(self._turns, before) - 1
        rows = HOLE_BYTES // OFFSET_BYTES
        more = (self._before + max(turn, 0)) // rows * rows - self._before
        if more > 0 and _punch(self._streams, 0, (self._before + more) * OFFSET_BYTES):
            with self._changed:
                self._turns = self._turns[more:]  # others are reading the old ones
                self._before += more
        return True

    def _lose(self, count: int, error: OSError) -> None:
        if not self._lost or self._reason != error.strerror:
            log.error("output is lost: %s", error)
        self._untold += count
        self._lost += count
        self._reason = f"{error.strerror}, in {self._path.parent}"
        if time.monotonic() >= self._told + TELL_SECONDS:
            self._told = time.monotonic()
            self._on_trouble(f"{readable(self._lost)} of output lost: {self._reason}")

    def _tell_lost(self) -> None:
        """Say in the log what is missing there. Raises OSError."""
        self._turn_to(1)
        text = f"flowgpu: {readable(self._untold)} of output are lost here: {self._reason}\n"
        count = os.pwrite(self._log, text.encode(), self._end)
        self._untold = 0
        self._on_trouble(f"{readable(self._lost)} of output lost: {self._reason}")
        self._grow(count)

    def _turn_to(self, stream: int) -> None:
        if (len(self._turns) - 1) % 2 != stream:
            self._turn()  # before the bytes: a turn without any does no harm

    def _turn(self) -> None:
        with self._changed:
            os.write(self._streams, self._end.to_bytes(OFFSET_BYTES, "little"))
            self._turns.append(self._end)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for stream, reader in enumerate(self._readers):
                selector.register(reader, selectors.EVENT_READ, stream)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.fd == self._stop:
                        return
                    with self._reading:
                        got = self._read(key.data, key.fd)
                    if not got and _at_end(key.fd):
                        selector.unregister(key.fd)


def _events(reader: int) -> int:
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    return dict(poller.poll(0)).get(reader, 0)


def _at_end(reader: int) -> bool:
    """True if the pipe is empty and no writer is left."""
    events = _events(reader)
    return bool(events & select.POLLHUP) and not events & select.POLLIN


def _punch(fd: int, start: int, end: int) -> bool:
    """Give the space of a range of a file back; False where the file system cannot."""
    libc = ctypes.CDLL(None)
    offset, size = ctypes.c_long(start), ctypes.c_long(end - start)
    return bool(libc.fallocate(fd, PUNCH_HOLE, offset, size) == 0)


def chunks(output: Output, position: int) -> Iterator[Piece]:
    """Output from `position` until its end; no bytes once a second while nothing comes."""
    while True:
        found = output.read(position, 1.0)
        if found is None:
            return
        position = found.end
        yield found
