"""ptrace(2), as far as stopped threads are held, read and written with it (x86-64)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

from flowgpu.host.proctree import children

# linux/ptrace.h
CONT, GETREGS, SETREGS, DETACH, SYSCALL = 7, 12, 13, 17, 24
SETOPTIONS = 0x4200
GETREGSET, SETREGSET = 0x4204, 0x4205
SEIZE, INTERRUPT = 0x4206, 0x4207
PEEKSIGINFO = 0x4209
GETSIGMASK, SETSIGMASK = 0x420A, 0x420B
SECCOMP_GET_FILTER = 0x420C
GET_RSEQ_CONFIGURATION = 0x420F
O_TRACESYSGOOD, O_EXITKILL, O_SUSPEND_SECCOMP = 1, 1 << 20, 1 << 21
SYSCALL_STOP = 0x80 | 5  # with O_TRACESYSGOOD: what a thread stops with at a system call
EVENT_STOP = 128  # after INTERRUPT, or for a signal that stops: the high byte of a thread's status
NT_X86_XSTATE = 0x202  # linux/elf.h: all that XSAVE saves
# linux/wait.h: without it, only leaders are waited for
WALL = 0x40000000

STOP_SECONDS = 10.0
"""For a thread that is to stop, where nothing that is known could keep it from that."""
END_SECONDS = 60.0
"""For threads to end, which those with much memory take long for."""
SOON_SECONDS, LOOK_SECONDS = 0.0005, 0.0002
"""A thread stops in some microseconds, or when it has a processor."""

_RSEQ_CS = 8  # of struct rseq: offset of rseq_cs
_GENERAL_BYTES = 27 * 8  # user_regs_struct
_PEEKSIGINFO_SHARED, _SIGNALS, _SIGINFO_BYTES = 1, 64, 128
_SET_BYTES = 1 << 14  # more than any register set has: with AMX, XSAVE's has 11,000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def ptrace(request: int, thread: int, data: ctypes._CData | int = 0, address: int = 0) -> int:
    """Raises OSError."""
    value = data if isinstance(data, int) else ctypes.addressof(data)
    if (answer := _libc.ptrace(request, thread, address, value)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace of thread {thread}: {os.strerror(error)}")
    return int(answer)


def wait_stop(thread: int, deadline: float) -> int:
    """Wait until a traced thread has stopped. Gives its status (waitpid(2)).

    Raises ProcessLookupError where it has ended, and TimeoutError.
    """
    soon = time.monotonic() + SOON_SECONDS
    while True:
        found, status = os.waitpid(thread, WALL | os.WNOHANG)
        if found and os.WIFSTOPPED(status):
            return status
        if found:
            raise ProcessLookupError(errno.ESRCH, f"thread {thread} has ended")
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"thread {thread} does not stop")
        time.sleep(LOOK_SECONDS if now >= soon else 0.0)


def wait_event_stop(thread: int, deadline: float) -> None:
    """Wait until a thread has stopped after INTERRUPT, or after SEIZE of a stopped one. A signal
    that comes first is delivered.

    Raises as `wait_stop`; the thread stops as soon as it can then.
    """
    while (status := wait_stop(thread, deadline)) >> 16 != EVENT_STOP:
        ptrace(CONT, thread, os.WSTOPSIG(status))


def let_go(pid: int, threads: Iterable[int]) -> None:
    """Trace these threads of a process no more. Those that are dead are collected, but not a child
    of ours: how it has ended is for whoever waits for that."""
    left = []
    for thread in threads:
        try:
            ptrace(DETACH, thread)
        except ProcessLookupError:  # it has ended, or does not stand still
            left.append(thread)
    ours = children(os.getpid()) if left else ()
    collect(pid, (thread for thread in left if thread not in ours))


def collect(pid: int, threads: Iterable[int]) -> None:
    """A tracer is told of each thread's end, of the leader's last, and only then its parent. One
    that does not end is let go once it stands still."""
    deadline = time.monotonic() + END_SECONDS
    for thread in sorted(threads, key=lambda thread: thread == pid):
        with suppress(ProcessLookupError):
            ptrace(INTERRUPT, thread)
        with suppress(ProcessLookupError, ChildProcessError, TimeoutError):
            wait_event_stop(thread, deadline)
            ptrace(DETACH, thread)


def general_registers(thread: int) -> bytes:
    """The user_regs_struct of a thread that is stopped, also of a 32-bit program, which has another
    register set (NT_PRSTATUS). Raises OSError."""
    buffer = ctypes.create_string_buffer(_GENERAL_BYTES)
    ptrace(GETREGS, thread, buffer)
    return buffer.raw


def set_general_registers(thread: int, values: bytes) -> None:
    """Raises OSError."""
    ptrace(SETREGS, thread, ctypes.create_string_buffer(values, _GENERAL_BYTES))


def registers(thread: int, kind: int) -> bytes:
    """A register set of a thread that is stopped. Raises OSError."""
    buffer = ctypes.create_string_buffer(_SET_BYTES)
    vector = _Vector(ctypes.addressof(buffer), _SET_BYTES)
    ptrace(GETREGSET, thread, vector, kind)
    return ctypes.string_at(buffer, vector.bytes)


def set_registers(thread: int, kind: int, values: bytes) -> None:
    """Raises OSError."""
    buffer = ctypes.create_string_buffer(values, len(values))
    ptrace(SETREGSET, thread, _Vector(ctypes.addressof(buffer), len(values)), kind)


def signal_mask(thread: int) -> int:
    """Signals that a stopped thread blocks. Raises OSError."""
    mask = ctypes.c_uint64()
    ptrace(GETSIGMASK, thread, mask, ctypes.sizeof(mask))
    return mask.value


def pending_signals(thread: int) -> list[tuple[int, int, int, int]]:
    """Signals that wait for the process of a stopped thread: number, code, and what for SIGCHLD is
    the child and its status. Raises OSError."""
    wanted = ctypes.create_string_buffer(struct.pack("=QIi", 0, _PEEKSIGINFO_SHARED, _SIGNALS), 16)
    found = ctypes.create_string_buffer(_SIGNALS * _SIGINFO_BYTES)
    count = ptrace(PEEKSIGINFO, thread, found, ctypes.addressof(wanted))
    fields = (struct.unpack_from("=iiiiiii", found, n * _SIGINFO_BYTES) for n in range(count))
    return [(number, code, child, status) for number, _, code, _, child, _, status in fields]


def restartable_section(thread: int) -> int:
    """Where a stopped thread names the restartable sequence (rseq(2)) that it may be in; 0 if
    nowhere, or if the kernel does not tell."""
    found = (ctypes.c_uint64 * 3)()  # struct ptrace_rseq_configuration
    try:
        ptrace(GET_RSEQ_CONFIGURATION, thread, found, ctypes.sizeof(found))
    except OSError:
        return 0
    return found[0] + _RSEQ_CS if found[0] else 0


def set_signal_mask(thread: int, mask: int) -> None:
    """Raises OSError."""
    value = ctypes.c_uint64(mask)
    ptrace(SETSIGMASK, thread, value, ctypes.sizeof(value))


def seccomp_filters(pid: int, thread: int) -> list[bytes]:
    """The filters of a thread of a process, which runs, as classic BPF. Raises OSError."""
    found: list[bytes] = []
    ptrace(SEIZE, thread)
    try:
        ptrace(INTERRUPT, thread)
        wait_event_stop(thread, time.monotonic() + STOP_SECONDS)
        while True:
            try:
                count = ptrace(SECCOMP_GET_FILTER, thread, 0, len(found))
            except FileNotFoundError:
                return found
            program = ctypes.create_string_buffer(8 * count)
            ptrace(SECCOMP_GET_FILTER, thread, program, len(found))
            found.append(program.raw)
    finally:
        let_go(pid, [thread])
