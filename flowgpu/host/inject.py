"""Let a thread of a stopped process make system calls, by the instruction that the vDSO has.

What only a process itself may ask or set (get_mempolicy(2), most of prctl(2)) is done this way. All
calls for one thread come from one of ours: to the kernel, it is the tracer.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flowgpu.host import ptrace
from flowgpu.host.proctree import thread_ids, thread_state

PROC = Path("/proc")
LOOK_SECONDS = 0.0005
ALL_SIGNALS = (1 << 64) - 1
TRAP = 1 << signal.SIGTRAP - 1
FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS}
"""What a thread gets for an instruction of its own, though it blocks them."""
MOST_ERROR = 4095
SYSCALL = b"\x0f\x05"
RED_ZONE_BYTES = 128  # below the stack pointer, which is the program's
# Places in user_regs_struct, in words of 8 bytes, and the code segment of 64-bit programs.
R11, R10, R9, R8, RAX, RCX, RDX, RSI, RDI, ORIG_RAX, RIP, CS, FLAGS, RSP = range(6, 20)
CALL_WORDS = RDI, RSI, RDX, R10, R8, R9
LONG_CODE = 0x33


class Caller:
    """A thread that is stopped and traced by this one. `calling` gives one."""

    def __init__(self, thread: int, instruction: Callable[[], int], registers: list[int]) -> None:
        self.thread = thread
        self._instruction = instruction
        self._words = registers

    def call(self, number: int, *arguments: int) -> int:
        """What the system call returns. Raises OSError."""
        words = self._words.copy()
        if words[CS] != LONG_CODE:
            raise OSError(f"thread {self.thread} is in 32-bit code")
        words[RAX], words[ORIG_RAX], words[RIP] = number, ALL_SIGNALS, self._instruction()
        for register, value in zip(CALL_WORDS, arguments, strict=False):
            words[register] = value & ALL_SIGNALS
        ptrace.set_general_registers(self.thread, to_bytes(words))
        for _ in ("its begin", "its end"):
            let_run(self.thread, ptrace.SYSCALL, ptrace.SYSCALL_STOP)
        result = to_words(ptrace.general_registers(self.thread))[RAX]
        if result > ALL_SIGNALS - MOST_ERROR:
            error = ALL_SIGNALS + 1 - result
            raise OSError(error, f"call {number} of thread {self.thread}: {os.strerror(error)}")
        return result

    @contextmanager
    def memory(self, data: bytes) -> Iterator[Memory]:
        """Memory of the thread with these bytes, below its stack; then it is as it was."""
        at = (self._words[RSP] - RED_ZONE_BYTES - len(data)) & ~0xF
        with (PROC / str(self.thread) / "mem").open("r+b", buffering=0) as file:
            below = os.pread(file.fileno(), len(data), at)
            os.pwrite(file.fileno(), data, at)
            try:
                yield Memory(file.fileno(), at, len(data))
            finally:
                os.pwrite(file.fileno(), below, at)


class Memory:
    """Some bytes of a thread's, at the address `at`."""

    def __init__(self, fd: int, at: int, size: int) -> None:
        self._fd, self.at, self._size = fd, at, size

    def read(self) -> bytes:
        """What they are now."""
        return os.pread(self._fd, self._size, self.at)


@contextmanager
def calling(thread: int, instruction: Callable[[], int], *, filtered: bool) -> Iterator[Caller]:
    """Meanwhile the thread, which is stopped and traced, can be let call; then it is as it was.

    `instruction` gives the address of a system call, `filtered`: the thread has a seccomp filter,
    which does not see these calls. Raises OSError.
    """
    options = ptrace.O_TRACESYSGOOD | (ptrace.O_SUSPEND_SECCOMP if filtered else 0)
    ptrace.ptrace(ptrace.SETOPTIONS, thread, options)
    general = ptrace.general_registers(thread)
    section = ptrace.restartable_section(thread)
    sequence = _peek(thread, section) if section else bytes(8)
    mask = ptrace.signal_mask(thread)
    ptrace.set_signal_mask(thread, ALL_SIGNALS & ~TRAP)
    try:
        yield Caller(thread, instruction, to_words(general))
    finally:
        ptrace.set_general_registers(thread, general)
        ptrace.set_signal_mask(thread, mask)
        if any(sequence):  # the kernel forgets it in a thread that runs elsewhere
            _poke(thread, section, sequence)


def wait_stopped(pid: int, deadline: float) -> None:
    """Wait until all threads are stopped, or the process is dead. Raises TimeoutError."""
    for thread in thread_ids(pid):
        while thread_state(pid, thread) not in "TtZX":
            if time.monotonic() >= deadline:
                raise TimeoutError(f"process {pid} does not stop")
            time.sleep(LOOK_SECONDS)


@contextmanager
def seized(pid: int, threads: Iterable[int]) -> Iterator[None]:
    """Trace threads of a stopped process. Raises OSError."""
    held: list[int] = []
    try:
        for thread in threads:
            ptrace.ptrace(ptrace.SEIZE, thread)
            held.append(thread)
        deadline = time.monotonic() + ptrace.STOP_SECONDS
        for thread in held:
            ptrace.wait_event_stop(thread, deadline)
        yield
    finally:
        ptrace.let_go(pid, held)


def _peek(thread: int, at: int) -> bytes:
    with (PROC / str(thread) / "mem").open("rb", buffering=0) as file:
        return os.pread(file.fileno(), 8, at)


def _poke(thread: int, at: int, data: bytes) -> None:
    with (PROC / str(thread) / "mem").open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), data, at)


def let_run(thread: int, request: int, until: int) -> None:
    """Let the thread run until it stops with the signal `until`, which it does not get.

    Raises OSError, where it runs into a fault: it would meet that again and again. Raises
    TimeoutError after STOP_SECONDS, with a thread that has stopped, unless it cannot.
    """
    status, deadline = 0, time.monotonic() + ptrace.STOP_SECONDS
    while status >> 8 != until:
        # One that stops its process is for all of it, and takes effect when it is let go.
        ptrace.ptrace(request, thread, signal.SIGSTOP if status >> 8 == signal.SIGSTOP else 0)
        try:
            status = ptrace.wait_stop(thread, deadline)
        except TimeoutError:
            ptrace.ptrace(ptrace.INTERRUPT, thread)  # only then it can be put back
            ptrace.wait_stop(thread, time.monotonic() + ptrace.STOP_SECONDS)
            raise
        if status >> 8 in FAULTS:
            name = signal.Signals(status >> 8).name
            raise OSError(errno.EFAULT, f"thread {thread} ran into {name} at a call")


def syscall_instruction(pid: int, maps: bytes) -> int:
    """Where the process has a system call, by its /proc/PID/maps. Raises OSError."""
    name = maps.rfind(b"[vdso]\n")
    line = maps[maps.rfind(b"\n", 0, max(name, 0)) + 1 : name]
    start, end = (int(part, 16) for part in line.split()[0].split(b"-")) if name > 0 else (0, 0)
    with (PROC / str(pid) / "mem").open("rb", buffering=0) as memory:
        at = os.pread(memory.fileno(), end - start, start).find(SYSCALL)
    if at < 0:
        raise OSError(f"process {pid} has no system call in its vDSO")
    return start + at


def to_words(data: bytes) -> list[int]:
    """Registers of a thread as numbers."""
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


def to_bytes(words: Sequence[int]) -> bytes:
    """The other way round."""
    return b"".join(word.to_bytes(8, "little") for word in words)
