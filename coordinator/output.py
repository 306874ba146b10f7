"""The job's output: two pipes, read into output.log as it comes, and handed to any number of
clients.

A client reads the log at its own pace, so a slow one costs nothing. Which bytes came from which
stream is kept as the offsets where the stream changed.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import select
import selectors
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
STREAMS = ("stdout", "stderr")


class Output:
    """Pump and log of one job's output."""

    def __init__(self, path: Path) -> None:
        """Open the log; what it holds already is older than this coordinator."""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the job
        self._path = path
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        # changes[i] is where output turned to stream i % 2.
        self.start = self._end = self._file.tell()
        self._changes = array("Q", [self.start])
        self._readers: list[int] = []
        self._ended = False
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True, name="output")

    def open_pipes(self) -> tuple[int, int]:
        """Make the pipes and start to read.

        Gives the ends for stdout and stderr, the caller's to close.
        """
        ends = []
        for _ in STREAMS:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # an unprivileged user may have used up the limit
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._readers.append(reader)
            ends.append(writer)
        self._thread.start()
        return ends[0], ends[1]

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
        self._file.close()
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
            run = bisect.bisect_right(self._changes, position) - 1
            limit = self._changes[run + 1] if run + 1 < len(self._changes) else self._end
        with open(self._path, "rb") as log:
            log.seek(position)
            return STREAMS[run % 2], log.read(min(limit - position, READ_BYTES))

    def _read(self, stream: int, reader: int) -> bool:
        try:
            data = os.read(reader, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return False
        self._write_all(data)
        with self._changed:
            if (len(self._changes) - 1) % 2 != stream:
                self._changes.append(self._end)
            self._end += len(data)
            self._changed.notify_all()
        return True

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

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


def _at_end(reader: int) -> bool:
    """True if the pipe is empty and no writer is left."""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    events = dict(poller.poll(0)).get(reader, 0)
    return bool(events & select.POLLHUP) and not events & select.POLLIN


def chunks(output: Output, position: int) -> Iterator[tuple[str, bytes]]:
    """Output from `position` until its end; (stream, b"") once a second while nothing comes."""
    while True:
        found = output.read(position, 1.0)
        if found is None:
            return
        position += len(found[1])
        yield found
