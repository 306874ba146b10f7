"""The job's output: two pipes, moved into output.log as it comes, and handed to any number of
clients.

A client reads the log at its own pace, so a slow one costs nothing. The kernel moves the bytes from
pipe to log (splice): a coordinator that is killed has moved each of them or has not, and the next
one goes on at the end of the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import threading
from array import array
from collections.abc import Iterator, Sequence

from flowgpu.jobs import JobDir
from flowgpu.output_log import READ_BYTES, read_at

PIPE_BYTES = 1 << 20


class Output:
    """Pump and log of one job's output."""

    def __init__(self, directory: JobDir, readers: Sequence[int]) -> None:
        """`readers`: the pipes of stdout and stderr, this object's to close. `begin` starts it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._path = directory.output_log
        self._log = os.open(self._path, flags, 0o600)
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._end = os.fstat(self._log).st_size
        self._streams = os.open(directory.output_streams, flags | os.O_APPEND, 0o600)
        self._turns = array("Q", directory.output_streams.read_bytes())
        if not self._turns:
            self._turn()
        self.start = self._turns[0]
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
        for fd in (self._stop, *self._readers):
            os.close(fd)
        self._readers.clear()
        os.close(self._log)
        os.close(self._streams)
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def read(self, position: int, seconds: float) -> tuple[str, bytes] | None:
        """Output at `position`.

        (stream, bytes), waited for up to `seconds`. b"" in time out, None at the end.
        """
        with self._changed:
            if position >= self._end and not self._ended:
                self._changed.wait(seconds)
            if position >= self._end:
                return None if self._ended else ("stdout", b"")
            end = self._end
        return read_at(self._path, self._turns, position, end)

    def _read(self, stream: int, reader: int) -> bool:
        if not _events(reader) & select.POLLIN:
            return False
        if (len(self._turns) - 1) % 2 != stream:
            self._turn()  # before the bytes: a turn without any does no harm
        count = os.splice(
            reader, self._log, READ_BYTES, offset_dst=self._end, flags=os.SPLICE_F_NONBLOCK
        )
        with self._changed:
            self._end += count
            self._changed.notify_all()
        return True

    def _turn(self) -> None:
        with self._changed:
            self._turns.append(self._end)
            os.write(self._streams, self._turns[-1:].tobytes())

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


def chunks(output: Output, position: int) -> Iterator[tuple[str, bytes]]:
    """Output from `position` until its end; (stream, b"") once a second while nothing comes."""
    while True:
        found = output.read(position, 1.0)
        if found is None:
            return
        position += len(found[1])
        yield found
