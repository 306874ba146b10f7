"""Stop the processes of a job for CRIU's dump, and put back what a CRIU that was killed left there.

CRIU works in the processes that it dumps, with their registers and over a few bytes of their code,
of which each piece ends in a trap. When their tracer dies, the kernel lets them go on wherever that
was, with CRIU's registers, and a trap that nobody had waited for is theirs: SIGTRAP, which ends
them. So they are stopped by a signal before, which outlasts the tracer, and have a handler of
SIGTRAP meanwhile, which never runs: it is enough that there is one. Then all that CRIU may have
changed is written back from what was noted: registers, signal masks, code, mappings, descriptors
and the file mode mask. The notes lie in a file, too, for who takes the job over from a coordinator
that was killed (`take_up`).

What is done in a process is a system call of its first thread, by the instruction that the vDSO
has. All calls of one method come from one thread: to the kernel, it is the tracer.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from flowgpu.host import inject, ptrace, sockets, stops
from flowgpu.host.criu_images import GUARD, Action
from flowgpu.host.inject import (
    ALL_SIGNALS,
    CALL_WORDS,
    CS,
    FLAGS,
    LONG_CODE,
    ORIG_RAX,
    R11,
    RAX,
    RCX,
    RIP,
    SYSCALL,
    TRAP,
    Caller,
    seized,
    to_bytes,
    to_words,
    wait_stopped,
)
from flowgpu.host.proctree import (
    children,
    is_dead,
    is_stopped,
    resume_tree,
    send,
    thread_ids,
    tree_pids,
)
from flowgpu.host.settings import Survey

log = logging.getLogger(__name__)

PROC = Path("/proc")
SETTLE_SECONDS = 1.0  # for threads to stop again after the death of their tracer
CODE_BYTES = 64  # at the start of the first executable mapping; CRIU 4.2 uses 16
UNASKED = "NUMA policies, keyrings and what else it alone can tell"
HEAD = struct.Struct("=II")  # of notes in their file
# asm/unistd_64.h
CLOSE, MPROTECT, MUNMAP, SIGACTION, UMASK, RESTART, USERFAULTFD = 3, 10, 11, 13, 95, 219, 323
MOV_EAX, CALL_BYTES = b"\xb8", 7  # mov $NUMBER,%eax; syscall
USER_MODE_ONLY = 1  # linux/userfaultfd.h
# linux/errno.h: what a system call has in RAX that a stop has interrupted
ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND, ERESTART_RESTARTBLOCK = 512, 513, 514, 516


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/PID/maps. `access`: bits of mprotect(2)."""

    start: int
    end: int
    access: int


@dataclass(frozen=True)
class Thread:
    """What a thread goes on with."""

    id: int
    general: bytes
    extended: bytes
    mask: int


@dataclass(frozen=True)
class Notes:
    """What CRIU may change of a stopped process."""

    pid: int
    maps: bytes
    status: dict[str, int]
    fds: list[int]
    code_at: int
    code: bytes
    threads: list[Thread]  # the first one first
    action: Action | None  # at SIGTRAP, where GUARD is put in its place

    def pack(self) -> bytes:
        """What is short as JSON, then the rest, after the lengths of both."""
        rest = [
            self.maps,
            self.code,
            *(data for t in self.threads for data in (t.general, t.extended)),
        ]
        threads = [(t.id, t.mask) for t in self.threads]
        short = [self.pid, self.status, self.fds, self.code_at, self.action, threads]
        text = json.dumps([*short, [len(data) for data in rest]]).encode()
        return b"".join([HEAD.pack(len(text), sum(map(len, rest))), text, *rest])

    @staticmethod
    def unpack(file: BinaryIO) -> Notes | None:
        """The next of a file; None at its end, and where what follows is not whole."""
        lengths = HEAD.unpack(file.read(HEAD.size).ljust(HEAD.size, b"\0"))
        text, rest = (io.BytesIO(file.read(length)) for length in lengths)
        if not lengths[0] or len(rest.getvalue()) < lengths[1]:
            return None
        pid, status, fds, code_at, action, threads, sizes = json.load(text)
        maps, code, *states = map(rest.read, sizes)
        of_threads = [
            Thread(number, general, extended, mask)
            for (number, mask), general, extended in zip(
                threads, states[::2], states[1::2], strict=True
            )
        ]
        return Notes(pid, maps, status, fds, code_at, code, of_threads, action and Action(*action))


class Process:
    """A stopped process, and how it becomes again what it was."""

    def __init__(self, notes: Notes) -> None:
        self.pid, self.was, self.action = notes.pid, notes, notes.action
        self._caller: Caller  # in `_calling`
        self._folder = PROC / str(self.pid)

    @staticmethod
    def hold(pid: int, keep: Callable[[Notes], None], *, all_threads: bool = True) -> Process:
        """Note what it is, and have a handler of SIGTRAP that never runs. `keep` is called with the
        notes before anything is changed, and again when more is known. Raises OSError."""
        folder = PROC / str(pid)
        maps = (folder / "maps").read_bytes()
        with (folder / "mem").open("rb", buffering=0) as memory:
            found = re.search(rb"^([0-9a-f]+)-\S+ ..x", maps, re.MULTILINE)
            code_at = int(found[1], 16) if found else 0
            code = os.pread(memory.fileno(), CODE_BYTES, code_at)
        fds, threads = sorted(_open_fds(pid)), thread_ids(pid) if all_threads else [pid]
        with seized(pid, threads), (folder / "mem").open("rb", buffering=0) as memory:
            states = [
                Thread(
                    thread,
                    _made_again(ptrace.general_registers(thread), memory.fileno()),
                    ptrace.registers(thread, ptrace.NT_X86_XSTATE),
                    ptrace.signal_mask(thread),
                )
                for thread in sorted(threads, key=lambda thread: thread != pid)
            ]
            notes = Notes(pid, maps, _status(pid), fds, code_at, code, states, None)
            keep(notes)
            for state in states:
                ptrace.set_general_registers(state.id, state.general)
            process = Process(notes)
            if process._is_64_bit:
                with suppress(OSError), process._calling():  # else it is put back all the same
                    process.action = process._sigaction(None)
                    keep(replace(notes, action=process.action))
                    process._sigaction(GUARD)
        return process

    def unguard(self, survey: Survey | None) -> None:
        """Have what there was instead, and answer the survey. Raises OSError."""
        if self.action is None:
            return  # it makes no calls
        with seized(self.pid, [self.pid]), self._calling():
            self._reset_action()
            if survey is None:
                return
            survey.ask(self.pid, self._caller)
        others = survey.others(self.pid)
        filtered = bool(self.was.status["Seccomp"])
        with seized(self.pid, others):
            for thread in others:
                with inject.calling(thread, self._instruction, filtered=filtered) as caller:
                    survey.ask(self.pid, caller)

    def forget_stops(self, kept: Container[int]) -> None:
        """Have it not be told of stops of children but of `kept`. Raises OSError."""
        if self._is_64_bit:
            with seized(self.pid, [self.pid]), self._calling():
                stops.forget(self.pid, self._caller, kept)

    def userfaultfd(self) -> int:
        """One of the process (userfaultfd(2)), of which it has none itself. Raises OSError."""
        with seized(self.pid, [self.pid]), self._calling():
            theirs = self._call(USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK | USER_MODE_ONLY)
            try:
                return sockets.duplicate(self.pid, theirs)
            finally:
                self._call(CLOSE, theirs)

    def put_back(self) -> None:
        """Raises OSError."""
        code, at = self.was.code, self.was.code_at
        with (self._folder / "mem").open("r+b", buffering=0) as memory:
            if os.pread(memory.fileno(), len(code), at) != code:
                os.pwrite(memory.fileno(), code, at)
        with seized(self.pid, [thread.id for thread in self.was.threads]):
            ran_on = self._ran_on()
            for thread in self.was.threads:
                if not ran_on or thread.id != self.pid:
                    _put_back(thread)
            with self._calling():
                failed = list(self._undo(self._left() if ran_on else self._changed()))
        if failed:
            raise failed[0]

    def _undo(self, calls: Iterable[tuple[int, ...]]) -> Iterator[OSError]:
        """Make the calls, and what SIGTRAP does as it was; gives the errors."""
        for call in calls:
            try:
                self._call(*call)
            except OSError as error:
                yield error
        self._reset_action()

    def _reset_action(self) -> None:
        if self.action is not None:
            self._sigaction(self.action)
            self.action = None

    def _ran_on(self) -> bool:
        """True if CRIU's code has returned to the first thread's code, and the thread has gone on.

        CRIU's code does so when its connection ends, before the kernel ends the tracing. What was
        noted is out of date then.
        """
        now = to_words(ptrace.general_registers(self.pid))
        then = to_words(self.was.threads[0].general)
        code = (GUARD.handler, 1), (self.was.code_at, len(self.was.code)), *self._of_criu()
        in_criu = any(start <= now[RIP] < start + size for start, size in code)
        return not in_criu and not _is_same(now, then) and not self._calls(now, then)

    def _calls(self, now: list[int], then: list[int]) -> bool:
        """True if the first thread is in a call of `_call`, whose caller was killed."""
        try:
            at = now[RIP] - self._syscall_instruction
        except OSError:
            return False  # it can make none
        others = set(range(len(then))) - {RAX, ORIG_RAX, RIP, FLAGS, *CALL_WORDS, RCX, R11}
        return 0 <= at <= len(SYSCALL) and all(now[n] == then[n] for n in others)

    def _of_criu(self) -> Iterator[tuple[int, int]]:
        """Mappings that CRIU has made: where they are, and their bytes."""
        line = rb"^([0-9a-f]+)-([0-9a-f]+) .*/memfd:CRIUMFD.*$"
        for found in re.finditer(line, (self._folder / "maps").read_bytes(), re.MULTILINE):
            start, end = (int(found[n], 16) for n in (1, 2))
            yield start, end - start

    def _left(self) -> Iterator[tuple[int, ...]]:
        for start, size in self._of_criu():
            yield MUNMAP, start, size

    def _changed(self) -> Iterator[tuple[int, ...]]:
        for fd in _open_fds(self.pid).difference(self.was.fds):
            yield CLOSE, fd
        text = (self._folder / "maps").read_bytes()
        if text != self.was.maps:
            yield from _undoing(_mappings(self.was.maps), _mappings(text))
        if self.was.status["Umask"] != _status(self.pid)["Umask"]:
            yield UMASK, self.was.status["Umask"]

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Meanwhile the first thread, which is traced, may be let call; then it is as it was."""
        filtered = bool(self.was.status["Seccomp"])
        with inject.calling(self.pid, self._instruction, filtered=filtered) as self._caller:
            yield

    def _instruction(self) -> int:
        return self._syscall_instruction

    def _call(self, number: int, *arguments: int) -> int:
        return self._caller.call(number, *arguments)

    @property
    def _is_64_bit(self) -> bool:
        return to_words(self.was.threads[0].general)[CS] == LONG_CODE

    @cached_property
    def _syscall_instruction(self) -> int:
        if not self._is_64_bit:  # its numbers of calls are others
            raise OSError(f"process {self.pid} is a 32-bit program, which calls nothing for us")
        return inject.syscall_instruction(self.pid, self.was.maps)

    def _sigaction(self, action: Action | None) -> Action:
        """What is done at SIGTRAP; then `action` is, where one is given."""
        size = 4 * 8
        with self._caller.memory(to_bytes(action or ()).ljust(2 * size, b"\0")) as memory:
            new, old = memory.at if action is not None else 0, memory.at + size
            self._call(SIGACTION, signal.SIGTRAP, new, old, 8)
            return Action(*to_words(memory.read()[size:]))


class Standstill:
    """A tree of which every process is stopped. `before`: those that were so already."""

    def __init__(
        self,
        root: int,
        seconds: float,
        notes: Path | None = None,
        stopped: Callable[[Sequence[int]], None] | None = None,
        *,
        all_threads: bool = True,
    ) -> None:
        """`notes`: a file for `take_up`, there as long as there is something to put back. `stopped`
        is called with the processes as soon as all are. Without `all_threads`, for who lets none
        but first threads do something.

        Raises TimeoutError where one does not stop in time; then all run on as before.
        """
        self._root = root
        self._all_threads = all_threads
        self._notes = notes
        self.before: set[int] = set()
        self._pids: list[int] = []
        self._processes: list[Process] = []
        deadline = time.monotonic() + seconds
        try:
            self._stop(deadline)
            if stopped is not None:
                stopped(self._pids)
            for pid in self._pids:
                # One that was killed, or that CRIU may not trace either, which says more.
                with suppress(OSError):
                    held = Process.hold(pid, self._keep, all_threads=self._all_threads)
                    self._processes.append(held)
            # A thread that is traced no more runs for a moment before it stops again. If CRIU comes
            # upon it there, it takes one stop for two and waits for the second one for ever.
            for pid in self._pids:
                wait_stopped(pid, deadline)
            # Only now each parent has been told of all of them.
            for process in self._processes:
                if stops.is_told(process.pid):
                    with suppress(OSError):
                        process.forget_stops(self.before)
                    wait_stopped(process.pid, deadline)
        except BaseException:
            self.finish()
            self.end()
            raise

    def _stop(self, deadline: float) -> None:
        """A process is stopped before its children: it has no more of them then, and one that
        waits in vfork(2) needs its child for that."""
        level = [self._root]
        while level:
            self.before |= set(filter(is_stopped, level))
            self._pids += level
            send(signal.SIGSTOP, level)
            for pid in level:
                wait_stopped(pid, deadline)
            level = [child for pid in level for child in children(pid)]

    def _keep(self, notes: Notes) -> None:
        if self._notes is None:
            return
        try:
            fd = os.open(self._notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                file.write(notes.pack())
        except OSError as error:
            log.warning("%s, for who comes after a killed coordinator: %s", self._notes, error)

    def _forget(self) -> None:
        """While all are stopped: one that has run on is not to be put back."""
        if self._notes is not None:
            self._notes.unlink(missing_ok=True)

    def userfaultfds(self) -> dict[int, int]:
        """The userfaultfds of all processes, by process id. Raises OSError."""
        found: dict[int, int] = {}
        try:
            held = {process.pid for process in self._processes}
            missing = [pid for pid in self._pids if pid not in held and not is_dead(pid)]
            if missing:
                raise OSError(f"process {missing[0]} may not be traced")
            for process in self._processes:
                found[process.pid] = process.userfaultfd()
        except BaseException:
            for fd in found.values():
                os.close(fd)
            raise
        return found

    def put_back(self) -> list[OSError]:
        """Make all as they were before CRIU, which has ended; what it does not succeed in."""
        failed = _put_all_back(self._processes)
        self._forget()
        return failed

    def finish(self, survey: Survey | None = None) -> dict[int, Action | None]:
        """Take back what was done for CRIU, which has made its image. Gives what each process did
        at SIGTRAP, where it has done something else meanwhile."""
        found = {process.pid: process.action for process in self._processes}
        for process in self._processes:
            try:
                process.unguard(survey)
            except (ProcessLookupError, FileNotFoundError):
                pass  # it was killed
            except OSError as error:
                log.warning("what process %d has of the kernel: %s", process.pid, error)
                if survey is not None:
                    survey.not_kept.append(f"process {process.pid}: {UNASKED} ({error.strerror})")
        self._forget()
        return {pid: found.get(pid) for pid in self._pids}

    def end(self) -> None:
        """Let all go on that were not stopped before."""
        resume_tree(self._root, keep_stopped=self.before)


def take_up(notes: Path, root: int) -> list[OSError]:
    """What `put_back` does, for a Standstill that was killed, as CRIU may have been: of those of
    the tree of `root` that are noted. They are still stopped afterwards."""
    noted: dict[int, Notes] = {}
    with suppress(FileNotFoundError), notes.open("rb") as file:
        while one := Notes.unpack(file):
            noted[one.pid] = one
    tree = tree_pids(root)
    failed = _put_all_back(Process(one) for pid, one in noted.items() if pid in tree)
    notes.unlink(missing_ok=True)
    return failed


def _put_all_back(processes: Iterable[Process]) -> list[OSError]:
    failed: list[OSError] = []
    for process in processes:
        try:
            wait_stopped(process.pid, time.monotonic() + SETTLE_SECONDS)
            process.put_back()
        except (ProcessLookupError, FileNotFoundError):
            pass  # it was killed
        except OSError as error:
            failed.append(error)
    return failed


def _put_back(then: Thread) -> None:
    if _status(then.id)["SigPnd"] & TRAP:
        ptrace.set_signal_mask(then.id, ALL_SIGNALS & ~TRAP)
        inject.let_run(then.id, ptrace.CONT, signal.SIGTRAP)  # and there it ends
    ptrace.set_general_registers(then.id, then.general)
    ptrace.set_registers(then.id, ptrace.NT_X86_XSTATE, then.extended)
    ptrace.set_signal_mask(then.id, then.mask)


def _open_fds(pid: int) -> set[int]:
    return set(map(int, os.listdir(PROC / str(pid) / "fd")))


def _status(pid: int) -> dict[str, int]:
    text = (PROC / str(pid) / "status").read_text(errors="replace")
    bases = {"Umask": 8, "Seccomp": 10, "SigPnd": 16}
    found = dict(re.findall(rf"^({'|'.join(bases)}):\t(\w+)$", text, re.MULTILINE))
    return {name: int(found.get(name, "0"), base) for name, base in bases.items()}


def _made_again(general: bytes, memory: int) -> bytes:
    """Registers with which a call that a stop has interrupted is made again. `memory`: that of the
    process, open.

    The kernel alone would go on in poll(2) and nanosleep(2) where it was. CRIU ends them with
    EINTR, which a program without handlers of signals does not expect.
    """
    words = to_words(general)
    if words[RAX] == ALL_SIGNALS + 1 - ERESTART_RESTARTBLOCK:
        if words[ORIG_RAX] == RESTART:  # after a stop before: its number is in the program alone
            code = os.pread(memory, CALL_BYTES, words[RIP] - CALL_BYTES)
            if not (code.startswith(MOV_EAX) and code.endswith(SYSCALL)):
                return general
            words[ORIG_RAX] = int.from_bytes(code[len(MOV_EAX) : -len(SYSCALL)], "little")
        words[RAX] = ALL_SIGNALS + 1 - ERESTARTNOHAND
    return to_bytes(words)


def _is_same(now: list[int], then: list[int]) -> bool:
    """True if a thread has executed nothing since.

    A stop may have interrupted a system call. The kernel or CRIU's code changes two registers then,
    so that the call is made again or ends with EINTR.
    """
    result, at = then[RAX] - ALL_SIGNALS - 1, then[RIP]
    changed = {(then[RAX], at)}
    if result in (-ERESTARTSYS, -ERESTARTNOINTR, -ERESTARTNOHAND):
        changed.add((then[ORIG_RAX], at - len(SYSCALL)))
    if result == -ERESTART_RESTARTBLOCK:
        changed |= {(RESTART, at - len(SYSCALL)), (ALL_SIGNALS + 1 - errno.EINTR, at)}
    others = set(range(len(then))) - {RAX, ORIG_RAX, RIP, FLAGS}
    return (now[RAX], now[RIP]) in changed and all(now[n] == then[n] for n in others)


def _mappings(text: bytes) -> list[Mapping]:
    found = []
    for line in text.splitlines():
        span, access, _ = line.split(maxsplit=2)
        start, end = (int(part, 16) for part in span.split(b"-"))
        bits = sum(1 << n for n, letter in enumerate(b"rwx") if access[n] == letter)
        found.append(Mapping(start, end, bits))
    return found


def _undoing(before: list[Mapping], now: list[Mapping]) -> Iterator[tuple[int, ...]]:
    """Calls that unmap what is new and give the rest the access that it had."""
    edges = sorted({edge for area in (*before, *now) for edge in (area.start, area.end)})
    for start, end in pairwise(edges):
        was, has = _access_at(before, start), _access_at(now, start)
        if was is None and has is not None:
            yield MUNMAP, start, end - start
        elif was is not None and was != has:
            yield MPROTECT, start, end - start, was


def _access_at(areas: list[Mapping], address: int) -> int | None:
    number = bisect_right(areas, address, key=lambda area: area.start) - 1
    return areas[number].access if number >= 0 and address < areas[number].end else None
