"""The coordinator's end of the task channel (wire.h): who has said HELLO, and one request at a time
to each.

Ownership: TaskChannel owns the listening socket and each Task; a Task owns its connection, its
control page and its live set. Descriptors given to `Task.request` stay the caller's.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakValueDictionary

from coordinator import line
from coordinator.communicators import Communicators
from coordinator.entrance import Entrance
from coordinator.live_set import LiveSet
from coordinator.polling import readable
from coordinator.process import serves
from flowgpu import nccl, wire
from flowgpu.jobs import ENTRANCE, is_process, start_time

log = logging.getLogger(__name__)

ACCEPT_SECONDS = 0.1
HELLO_SECONDS = 5.0
SETTLE_SECONDS = 0.01
# How often those are looked at that are to connect: one may end, or run another program.
LOOK_SECONDS = 0.05
CALLED_SECONDS = 0.005
CLOSED_SECONDS = 2.0  # a child that the task has made without the C library may have its end too
PACKET_BYTES = 1 << 16
# HELLO has these values in its fields `resumed` and `replay` (wire.h).
NEEDS_OPEN = 2
IS_CURRENT = 3  # less: a task of an older library, without LEND and what came after it
DYING_SECONDS = 1.0
"""A task that ends closes its connection so long before it is gone, at most."""
DRAINING_AT = 72
"""Where the control page has `draining`; wire.h asserts it."""


class TaskError(Exception):
    """A task answered a request with a failure, or not at all."""

    def __init__(
        self,
        pid: int,
        request: wire.Message,
        status: wire.Status | None,
        detail: str,
        waited_us: int = 0,
    ) -> None:
        self.waited_us = waited_us
        self.pid = pid
        self.request = request
        self.status = status
        self.detail = detail
        answer = status.name if status is not None else "no answer"
        super().__init__(f"task {pid}: {request.name}: {answer}: {detail or 'no detail'}")


class Task:
    """One process of the job that uses CUDA."""

    def __init__(
        self,
        pid: int,
        connection: socket.socket,
        hello: wire.Hello,
        page: mmap.mmap,
        live: LiveSet | None = None,
        nccl: Communicators | None = None,
    ):
        self.pid = pid
        self.hello = hello
        self.live = live
        """What the task's stub knows of its memory (coordinator/active.py), if there is one."""
        self.nccl = nccl
        """The counts of its communicators, if there are any."""
        self._connection = connection
        self._page: mmap.mmap | bytes = page
        self.again = False
        """True once the same process has connected once more."""
        # A task that connects anew is closed by who asked it and by who welcomes it, at once.
        self._closing = threading.Lock()

    @property
    def page(self) -> wire.ControlPage:
        """What the task's control page says now, or said when the connection was closed."""
        return wire.ControlPage.unpack(self._page[: wire.ControlPage.SIZE])

    def drain(self, under_way: bool) -> None:
        """Tell it whether device memory that it misses is free again soon."""
        if isinstance(self._page, mmap.mmap):
            struct.pack_into("=Q", self._page, DRAINING_AT, under_way)

    def fileno(self) -> int:
        """The descriptor of this side's end of the connection; -1 once it is closed."""
        return self._connection.fileno()

    @property
    def inode(self) -> int:
        """Inode of this side's end of the connection; 0 once it is closed."""
        number = self._connection.fileno()
        return os.fstat(number).st_ino if number >= 0 else 0

    def live_bytes(self) -> int | None:
        """Bytes that the allocators of the task's frameworks have given out now, or None if that is
        not known, or no framework has asked for any yet. Does not ask the task."""
        return None if self.live is None else self.live.live_bytes()

    def connected(self) -> bool:
        """False once the task has closed its connection: it ended, or replaced its program."""
        if self._connection.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(self._connection, select.POLLRDHUP)
        return not poller.poll(0)

    def request(
        self,
        kind: wire.Message,
        deadline: float,
        *,
        packet: bytes | None = None,
        fds: Iterable[int] = (),
        send: Callable[[bytes, float], None] | None = None,
    ) -> wire.Reply:
        """Send one request and wait for its reply until `deadline` (time.monotonic).

        `send`: what sends the packet in our place, in at most so many seconds. Raises OSError.

        Raises TaskError when the task refuses, ends or does not answer in time; after a missing
        answer the connection is closed, because a late reply would be taken for that of the next
        request.
        """
        try:
            seconds = max(deadline - time.monotonic(), 0.001)
            self._connection.settimeout(seconds)
            if send is None:
                socket.send_fds(self._connection, [packet or wire.packet(kind)], list(fds))
            else:
                send(packet or wire.packet(kind), seconds)
            data = self._connection.recv(PACKET_BYTES)
            if not data:
                raise ConnectionResetError("the task closed its connection")
            reply = wire.Reply.unpack(data)
            if reply.request != kind:
                raise wire.WireError(f"reply to request {reply.request}")
            status = wire.Status(reply.status)
        except (OSError, ValueError) as error:
            detail = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            if self._connection.fileno() < 0:  # it was closed by who noticed first
                detail = "the task closed its connection"
            self.close()
            raise TaskError(self.pid, kind, None, detail) from error
        if status is not wire.Status.OK:
            detail = reply.detail
            if status is wire.Status.DRIVER:
                detail = f"driver error {reply.driver_result}: {detail}"
            raise TaskError(self.pid, kind, status, detail, reply.waited_us)
        if reply.detail:
            log.info("task %d: %s: %s", self.pid, kind.name, reply.detail)
        return reply

    def detach(self, deadline: float) -> None:
        """Have it close its sockets, and close this side's. Raises TaskError."""
        self.request(wire.Message.DETACH, deadline)
        if self._connection.fileno() >= 0:
            # It closes its end after the answer, and CRIU must not find it open.
            readable(self._connection, seconds=min(deadline - time.monotonic(), CLOSED_SECONDS))
        self.close()

    def gate(
        self,
        deadline: float,
        seconds: float,
        wait: float = 0.0,
        live_bytes: int = 0,
        engine: wire.Engine = wire.Engine.NATIVE,
    ) -> wire.Reply:
        """Close the task's gate; the task itself gives up after `seconds` and opens it again.

        Before that it waits, `wait` seconds at most, until no more than `live_bytes` are live.
        """
        packet = wire.Gate(
            timeout_ms=max(int(seconds * 1000), 1),
            wait_ms=int(wait * 1000),
            live_bytes=live_bytes,
            engine=engine,
        ).pack()
        return self.request(wire.Message.GATE, deadline, packet=packet)

    def refusal(self, deadline: float, engine: wire.Engine) -> str:
        """What that engine cannot save of the task, as far as is known now; empty if it can."""
        try:
            self.request(wire.Message.ASK, deadline, packet=wire.Ask(engine).pack())
        except TaskError as error:
            if error.status is not wire.Status.REFUSED:
                raise
            return error.detail
        return ""

    def close(self) -> None:
        """Close the connection, the control page and the live set."""
        with self._closing:
            self._connection.close()
            page, self._page = self._page, self._page[: wire.ControlPage.SIZE]
            if isinstance(page, mmap.mmap):
                page.close()
            for one in (self.live, self.nccl):
                if one is not None:
                    one.close()
            self.live = self.nccl = None


def has_ended(task: Task) -> bool:
    """True if a task whose connection has ended is gone, or runs another program."""
    deadline = time.monotonic() + DYING_SECONDS
    while serves(task.pid):
        if task.again or time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
    return True


def is_cut(error: Exception) -> bool:
    """True if that error is the end of a connection to a task."""
    if isinstance(error, TaskError):
        return error.status is None
    return isinstance(error, ConnectionError)


def is_end(task: Task, error: TaskError | ConnectionError) -> bool:
    """True if that error of a connection to the task is the task's end."""
    if is_cut(error) and has_ended(task):
        log.info("process %d has ended: %s", task.pid, error)
        return True
    return False


def unless_ended(task: Task, action: Callable[[Task], object]) -> None:
    """Do it; a task that has ended, or is another program by now, wants nothing back."""
    try:
        action(task)
    except (TaskError, ConnectionError) as error:
        if not is_end(task, error):
            raise


class TaskChannel:
    """Listens on the job's task.sock and keeps the tasks that have said HELLO."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = threading.Condition()
        self._tasks: dict[int, Task] = {}
        self._last: WeakValueDictionary[int, Task] = WeakValueDictionary()
        self._refused: dict[int, tuple[int, str]] = {}  # pid -> start time, why
        self._greeting = False
        self.entrance = Entrance(path.with_name(ENTRANCE))
        self._listener: socket.socket | None = None
        self._stop: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Start to accept tasks. Does nothing when it listens already."""
        if self._listener is not None:
            return
        self.entrance.make()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._stop, other = socket.socketpair()
        self._thread = threading.Thread(
            target=self._accept_loop, args=(self._listener, other), daemon=True, name="tasks"
        )
        self._thread.start()

    def stop_listening(self) -> None:
        """Let nobody connect any more; tasks that are connected stay so."""
        listener, stop, thread = self._listener, self._stop, self._thread
        self._listener = self._stop = self._thread = None
        if listener is None or stop is None or thread is None:
            return
        stop.close()
        thread.join()
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def settle(self, deadline: float) -> None:
        """Wait until everybody who has connected so far is among the tasks, or refused."""
        with self._changed:
            while (listener := self._listener) is not None and time.monotonic() < deadline:
                if not self._greeting and not readable(listener, seconds=0):
                    return
                self._changed.wait(SETTLE_SECONDS)

    def forget(self) -> None:
        """Close the connections of all tasks."""
        with self._changed:
            for task in self._tasks.values():
                task.close()
            self._tasks.clear()

    def tasks(self) -> list[Task]:
        """The tasks that are connected now, by pid."""
        with self._changed:
            for pid in [pid for pid, task in self._tasks.items() if not task.connected()]:
                self._tasks.pop(pid).close()
            return [self._tasks[pid] for pid in sorted(self._tasks)]

    def refused(self, pids: Iterable[int]) -> tuple[int, str] | None:
        """The first of `pids` whose last HELLO was of another version, and what it said."""
        with self._changed:
            for pid in pids:
                start, why = self._refused.get(pid, (0, ""))
                if is_process(pid, start):
                    return pid, why
            return None

    def wait_resumed(self, pids: Iterable[int], deadline: float) -> list[Task]:
        """Wait until each of `pids` has connected after a DETACH, or has ended; gives those that
        have connected. Raises TaskError."""
        return self._wait_for(list(pids), lambda task: task.hello.resumed != 0, deadline)

    def wait_again(self, lost: Iterable[Task], deadline: float) -> list[Task]:
        """Wait until tasks whose connection has ended have a new one. Raises TaskError."""
        old = {task.pid: task for task in lost}
        found = self._wait_for(list(old), lambda task: task is not old[task.pid], deadline)
        for pid in old.keys() - {task.pid for task in found}:
            raise TaskError(pid, wire.Message.HELLO, None, "it has ended")
        return found

    def wait_known(self, pids: Iterable[int], deadline: float) -> None:
        """Wait until each of `pids` has a connection, or has ended. Raises TaskError."""
        self._wait_for(list(pids), lambda task: True, deadline)

    def renew(self, tasks: Iterable[Task], deadline: float) -> list[Task]:
        """Call tasks that are connected, as after a DETACH, in place of their connections; gives
        those that do not end meanwhile.

        Those that have no line stay as they are: they connect by themselves. Raises TaskError.
        """
        calls: dict[int, socket.socket] = {}
        called: dict[int, Task] = {}
        kept = []
        try:
            for task in tasks:
                if (connection := line.call(task.pid)) is None:
                    kept.append(task)
                    continue
                calls[task.pid], called[task.pid] = connection, task
                task.close()
            pids = list(called)
            new = self._wait_for(pids, lambda task: task is not called[task.pid], deadline, calls)
        finally:
            for connection in calls.values():
                connection.close()
        return sorted([*kept, *new], key=lambda task: task.pid)

    def _wait_for(
        self,
        pids: list[int],
        wanted: Callable[[Task], bool],
        deadline: float,
        calls: dict[int, socket.socket] | None = None,
    ) -> list[Task]:
        """Wait for tasks; gives those that do not end before. `calls`: calls under way, by process
        id."""
        calls = {} if calls is None else calls
        look = 0.0
        try:
            while True:
                with self._changed:
                    found = [self._tasks[pid] for pid in pids if pid in self._tasks]
                    found = [task for task in found if wanted(task)]
                    # Who is called drops the connection that it has made by itself meanwhile.
                    there = {task.pid for task in found} - calls.keys()
                    missing = [pid for pid in pids if pid not in there]
                    if not missing:
                        return found
                    now = time.monotonic()
                    if not calls and now < min(look, deadline):
                        self._changed.wait(min(look, deadline) - now)
                        continue
                if now >= look:
                    look = now + LOOK_SECONDS
                    if other := self.refused(missing):
                        raise TaskError(other[0], wire.Message.HELLO, None, other[1])
                    missing = [pid for pid in missing if serves(pid)]
                    if not missing:
                        return found
                    self._call(missing, calls)
                if now >= deadline:
                    what = "it did not connect again in time"
                    raise TaskError(missing[0], wire.Message.HELLO, None, what)
                if calls:
                    self._answered(calls, min(deadline - now, CALLED_SECONDS))
        finally:
            for connection in calls.values():
                connection.close()

    def _call(self, pids: list[int], calls: dict[int, socket.socket]) -> None:
        """Call those that have a line and were not called."""
        for pid in pids:
            if pid not in calls and (connection := line.call(pid)) is not None:
                calls[pid] = connection

    def _answered(self, calls: dict[int, socket.socket], seconds: float) -> None:
        """Welcome who answers; who has not taken the connection may be called again."""
        answered = readable(*calls.values(), seconds=seconds)
        for pid in [pid for pid, connection in calls.items() if connection.fileno() in answered]:
            self._welcome(calls.pop(pid), pid)

    def _accept_loop(self, listener: socket.socket, stop: socket.socket) -> None:
        with stop:
            while True:
                if stop.fileno() in readable(listener, stop):
                    return
                # Who is in the queue and who is being greeted is looked at together (settle).
                with self._changed:
                    self._greeting = True
                self._welcome_next(listener)
                with self._changed:
                    self._greeting = False
                    self._changed.notify_all()

    def _welcome_next(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor is free, for now
            log.error("a task cannot connect: %s", error)
            time.sleep(ACCEPT_SECONDS)
            return
        self._welcome(connection)

    def _welcome(self, connection: socket.socket, called: int = 0) -> None:
        """Take up who has connected, or the process that was called."""
        connection.settimeout(HELLO_SECONDS)
        pid = called
        try:
            pid = called or _peer(connection)
            task = _read_hello(pid, connection)
        except (OSError, ValueError) as error:
            connection.close()
            self._refuse(pid, error)
            return
        log.info("task %d: HELLO resumed=%d", task.pid, task.hello.resumed)
        with self._changed:
            if not task.connected():
                # It has ended, or has another connection by now, which may be among ours already.
                task.close()
                return
            old = self._tasks.pop(task.pid, None)
            if old is not None:
                old.close()
            self._tasks[task.pid] = task
            if (last := self._last.get(task.pid)) is not None:
                last.again = True
            self._last[task.pid] = task
            self._refused.pop(task.pid, None)
            self._changed.notify_all()

    def _refuse(self, pid: int, error: Exception) -> None:
        refused = (start_time(pid), str(error))
        with self._changed:
            if self._refused.get(pid) == refused:
                return  # it comes again and again
            if isinstance(error, ValueError):  # not what this version says
                self._refused[pid] = refused
                self._changed.notify_all()
        log.warning("process %d was refused on task.sock: %s", pid, error)


def _peer(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("iII", credentials)
    if uid != os.geteuid() and os.geteuid() != 0:
        raise PermissionError(f"process {pid} belongs to user {uid}")
    return int(pid)


def _read_hello(pid: int, connection: socket.socket) -> Task:
    data, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES, 4)
    if not data:
        raise ConnectionResetError("it closed its connection")
    try:
        hello = wire.Hello.unpack(data)
        if len(fds) not in (1, 2, 3):
            raise wire.WireError(f"HELLO with {len(fds)} descriptors")
        page = mmap.mmap(fds[0], mmap.PAGESIZE)
        control = wire.ControlPage.unpack(page[: wire.ControlPage.SIZE])
        if control.magic != wire.MAGIC or control.version != wire.VERSION:
            raise wire.WireError("the control page has another magic or version")
        counts = _open_counts(pid, fds.pop()) if _is_counts(fds[-1]) else None
        live = _open_live(pid, fds.pop()) if len(fds) == 2 else None
    finally:
        for fd in fds:
            os.close(fd)
    return Task(pid, connection, hello, page, live, counts)


def _is_counts(fd: int) -> bool:
    """True if that descriptor of a HELLO is that of the counts of communicators."""
    return os.fstat(fd).st_size == nccl.BYTES


def _open_counts(pid: int, fd: int) -> Communicators | None:
    """The counts; None, and so what has communicators is refused, where they are another's."""
    try:
        return Communicators(fd)
    except wire.WireError as error:
        log.warning("communicators of process %d are not seen: %s", pid, error)
        return None


def _open_live(pid: int, fd: int) -> LiveSet | None:
    """The live set; None, and so all memory active, where it is another version's."""
    try:
        return LiveSet(fd)
    except wire.WireError as error:
        log.warning("all memory of process %d counts as active: %s", pid, error)
        return None
