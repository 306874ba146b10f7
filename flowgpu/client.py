"""Client of a job's coordinator: JSON lines over `control.sock`.

A connection carries one request and the events that answer it. Requests are `{"verb": ...}`:

=================  =======================================  ==============================
verb               fields                                   ends with
=================  =======================================  ==============================
`attach`           `from`: `start`, `now` or a place        `exit` {code}
`status`           -                                        `result`
`pause-and-dump`   those of CheckpointOptions               `result`
`checkpoint`       the same, of a process of the job        `result` {ticket}
`suspend`          those of SuspendOptions                  `result`
`resume`           `drop`                                   `result`
`signal`           `signum`                                 `result`
`kill`             -                                        `result`
`wait-restored`    -                                        `result`
`hand-over`        `images`, `pid`, of CRIU's plugin        `result`
`take-back`        `images`, and then a line with `pid`     `result`, twice
=================  =======================================  ==============================

Before its end an answer may have `output` {stream, data: base64, end: place in output.log} and
`progress` {phase, done, total: bytes, rate: bytes/s} events; `error` {FlowError.as_dict()} ends any
of them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from flowgpu.errors import CoordinatorGone, CoordinatorReplaced, FlowError, OtherUser
from flowgpu.jobs import DUMPED, EXITED, Job, JobDir, is_process
from flowgpu.output_log import rest

Event = dict[str, Any]

REQUEST_SECONDS = 30.0
TAKEOVER_SECONDS = 15.0
ENDING_SECONDS = 1.0
READ_BYTES = 1 << 18
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Connection:
    """One request to the coordinator of `job` (a name for messages) and its answer."""

    def __init__(self, path: Path, job: str) -> None:
        """Connect. Raises CoordinatorGone, OtherUser."""
        self.path = path
        self.job = job
        self._buffer = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            if isinstance(error, PermissionError):
                raise OtherUser(job=job, user=os.geteuid()) from error
            raise CoordinatorGone(job=job) from error
        self.record = _record(path)  # it names the coordinator before that listens

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_patience(self, seconds: float) -> None:
        """A coordinator that is silent for so long counts as gone."""
        self._socket.settimeout(seconds)

    def send(self, verb: str, **fields: Any) -> None:
        """Ask for `verb`. Raises CoordinatorGone."""
        try:
            self._socket.sendall(json.dumps({"verb": verb, **fields}).encode() + b"\n")
        except OSError as error:
            raise CoordinatorGone(job=self.job) from error

    def receive(self) -> list[Event]:
        """The events that one read gives, none if it ended within a line.

        Raises CoordinatorGone at the end of the stream and the error of an `error` event.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError as error:
            raise CoordinatorGone(job=self.job) from error
        if not data:
            raise CoordinatorGone(job=self.job)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        events: list[Event] = []
        for line in lines:
            event = json.loads(line)
            if event["event"] == "error":
                raise FlowError.from_dict(event)
            events.append(event)
        return events

    def events(self) -> Iterator[Event]:
        """Events as they come; see `receive` for errors."""
        while True:
            yield from self.receive()

    def result(self, progress: Callable[[Event], None] | None = None) -> Event:
        """Wait for the `result` event and give its fields; `progress` sees the events before it."""
        for event in self.events():
            if event["event"] == "result":
                return {key: value for key, value in event.items() if key != "event"}
            if event["event"] == "progress" and progress:
                progress(event)
        raise AssertionError("events() ends by an exception only")


def reach(path: Path, job: str, keeper: int = 0, killed: int = 0) -> Connection:
    """Connect to the coordinator at `path`, or to the one that comes when it was killed.

    `keeper`: only to one of this keeper, of another is a job that was restored since. `killed`:
    the process id of one that will not do; its socket ends some time after it.
    Raises CoordinatorGone.
    """
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while True:
        with contextlib.suppress(CoordinatorGone):
            connection = Connection(path, job)
            if not killed or (connection.record and connection.record.coordinator_pid != killed):
                return connection
            connection.close()
        record = _record(path)
        comes = record is not None and record.live and record.kept
        same = record is not None and keeper in (0, record.keeper_pid)
        if not comes or not same or time.monotonic() >= deadline:
            raise CoordinatorGone(job=job)
        time.sleep(0.005)


def next_of(gone: Connection) -> Connection:
    """Connect to the coordinator that comes in the place of one that was killed.

    Raises CoordinatorGone.
    """
    record = gone.record
    if record is None or not record.keeper_pid or not _has_ended(record):
        raise CoordinatorGone(job=gone.job)
    return reach(gone.path, gone.job, record.keeper_pid, record.coordinator_pid)


def what_became(gone: Connection) -> FlowError:
    """The outcome of a checkpoint whose coordinator was killed; waits for the next coordinator."""
    try:
        with next_of(gone) as connection:
            try:
                connection.send("wait-restored")
                connection.result()
            except CoordinatorGone:  # the next one was killed as well, or says that the job ended
                return what_became(connection)
    except FlowError as error:
        return error
    return CoordinatorReplaced(job=gone.job)


def _record(path: Path) -> Job | None:
    """The record of the job whose coordinator listens at `path`."""
    with contextlib.suppress(OSError, ValueError):
        return JobDir(path.parent).read()
    return None


def _has_ended(record: Job) -> bool:
    """True once the coordinator has ended, which it does shortly after its connections."""
    deadline = time.monotonic() + ENDING_SECONDS
    while is_process(record.coordinator_pid, record.coordinator_start):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def request(path: Path, job: str, verb: str, **fields: Any) -> Event:
    """Ask the coordinator at `path` for `verb`, which takes no time, and give its result."""
    with reach(path, job) as connection:
        connection.set_patience(REQUEST_SECONDS)
        connection.send(verb, **fields)
        return connection.result()


class SignalForwarder:
    """While entered, signals to this process go to the job; `deliver_to` sends the early ones.

    Ctrl-Z stops the job and this process, and both go on together. Signals of `but` are not the
    job's.
    """

    def __init__(self, job: str, but: Collection[int] = ()) -> None:
        self._job = job
        self._but = but
        self._path: Path | None = None
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        for signum in FORWARDED:
            if signum in self._but:
                continue
            # nohup and the like: what is ignored here stays ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._on_signal)
        # A shell without job control ignores it; there the job is not to stop for ever either.
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._previous[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def deliver_to(self, path: Path) -> None:
        """The job's coordinator listens at `path` from now on."""
        self._path = path
        while self._pending:
            self.send(self._pending.pop(0))

    def send(self, signum: int) -> None:
        """Send `signum` to the job. That a job has ended shows on the attached connection."""
        if self._path is None:
            if signum in self._pending:  # asked twice, and no job takes it: give up starting one
                raise KeyboardInterrupt
            self._pending.append(signum)
            return
        with contextlib.suppress(FlowError):
            request(self._path, self._job, "signal", signum=signum)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        # Runs between two bytecodes of the main thread, also while it waits at a full pipe.
        self.send(signum)

    def _on_stop(self, _signum: int, _frame: FrameType | None) -> None:
        # Not SIGTSTP, which does nothing by default in a session without a terminal.
        started = self._path is not None
        if started:
            self.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if started:
            self.send(signal.SIGCONT)


class OutputWriter:
    """Writes the job's streams to the same streams of this process, byte for byte."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        """`on_closed` is called once when the reader of a stream has gone away."""
        self._on_closed = on_closed
        self._closed: set[str] = set()

    def write(self, stream: str, data: bytes) -> None:
        if stream in self._closed:
            return
        try:
            write_all(2 if stream == "stderr" else 1, data)
        except BrokenPipeError:
            self._closed.add(stream)
            self._on_closed()


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to `fd`, also to a pipe that someone made non-blocking."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_WRITE)
                selector.select()


def follow(attached: Connection, forwarder: SignalForwarder) -> int:
    """Stream the job's output to this process's until it ends; its exit code."""
    # A program whose reader goes away gets SIGPIPE; the job's pipe is read by its coordinator.
    writer = OutputWriter(on_closed=lambda: forwarder.send(signal.SIGPIPE))
    return read_output(attached, writer.write)


def read_output(attached: Connection, write: Callable[[str, bytes], None]) -> int:
    """Give `write` the job's output until it ends, from one coordinator or several; its exit code.

    Raises CoordinatorGone.
    """
    position: int | None = None
    with contextlib.ExitStack() as stack:
        while True:
            try:
                for event in attached.events():
                    if event["event"] == "output":
                        write(event["stream"], base64.b64decode(event["data"]))
                        position = event["end"]
                    elif event["event"] == "exit":
                        return int(event["code"])
            except CoordinatorGone:
                try:
                    attached = stack.enter_context(next_of(attached))
                except CoordinatorGone:
                    code = _ended(attached, write, position)
                    if code is None:
                        raise
                    return code
                with contextlib.suppress(CoordinatorGone):  # then the next event says so
                    attached.send("attach", **{"from": "start" if position is None else position})


def _ended(
    attached: Connection, write: Callable[[str, bytes], None], position: int | None
) -> int | None:
    """The exit code of a job that ended between two looks, after the rest of its output.

    None if it has not.
    """
    before, record = attached.record, _record(attached.path)
    if before is None or record is None or record.state not in (EXITED, DUMPED):
        return None
    if not before.keeper_pid or record.keeper_pid != before.keeper_pid:
        return None
    directory = JobDir(attached.path.parent)
    for stream, data in rest(directory.output_log, directory.output_streams, position):
        write(stream, data)
    return record.exit_code
