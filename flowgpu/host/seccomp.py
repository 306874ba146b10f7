"""Which system calls the seccomp filters of a thread let through (seccomp(2), x86-64).

They are read as CRIU reads them, and worked out here: a thread that tried might be killed for it.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from flowgpu.host import ptrace

AUDIT_ARCH_X86_64 = 0xC000003E
DATA = struct.Struct("=iIQ6Q")  # struct seccomp_data
INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter
RET_ACTION = 0xFFFF0000
RET_ERRNO, RET_LOG, RET_ALLOW = 0x00050000, 0x7FFC0000, 0x7FFF0000
_MASK = 0xFFFFFFFF

# asm/unistd_64.h


def _numbers(text: str) -> Mapping[str, int]:
    words = text.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


BY_TASK = _numbers("""
    read 0 write 1 close 3 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 rt_sigaction 13
    rt_sigprocmask 14 rt_sigreturn 15 ioctl 16 sched_yield 24 madvise 28 dup 32 getpid 39 socket 41
    sendmsg 46 recvmsg 47 bind 49 exit 60 fcntl 72 prctl 157 gettid 186 futex 202 getdents64 217
    clock_nanosleep 230 tgkill 234 openat 257 newfstatat 262 readlinkat 267 set_robust_list 273
    eventfd2 290 epoll_create1 291 pipe2 293 prlimit64 302 memfd_create 319 membarrier 324 rseq 334
    clone3 435
""")
"""What a task calls when it answers, ends CUDA in itself and has it again, as strace(1) sees it."""
BY_EXCHANGE = _numbers("mremap 25")
"""And with managed memory."""
BY_EMULATED_DRIVER = _numbers("""
    connect 42 recvfrom 45 listen 50 getsockname 51 getpeername 52 getsockopt 55 flock 73 getuid 102
    accept4 288
""")
AF_UNIX, AT_FDCWD = 1, _MASK - 99
ARGUMENTS: Mapping[str, tuple[int, ...]] = {
    "socket": (AF_UNIX, 1),
    "openat": (AT_FDCWD, 0, os.O_RDWR | os.O_CLOEXEC),
}
"""What a filter may look at."""


def forbidden(pid: int, thread: int, calls: Mapping[str, int]) -> list[str]:
    """Names of the calls that filters of the thread forbid; none where they cannot be read."""
    status = b""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/task/{thread}/status").read_bytes()
    if b"\nSeccomp:\t2" not in status:
        return []
    try:
        filters = ptrace.seccomp_filters(pid, thread)
    except OSError:
        return []  # CRIU says so when it is to dump them
    return [
        name for name, number in calls.items() if forbids(filters, number, ARGUMENTS.get(name, ()))
    ]


def forbids(filters: Iterable[bytes], number: int, words: tuple[int, ...]) -> bool:
    """True if one of the filters forbids a call with these arguments."""
    data = DATA.pack(number, AUDIT_ARCH_X86_64, 0, *words, *[0] * (6 - len(words)))
    for program in filters:
        answer = run(program, data)
        # A libc takes an older call where the kernel does not know the new one.
        known = answer != RET_ERRNO | errno.ENOSYS
        if known and answer & RET_ACTION not in (RET_LOG, RET_ALLOW):
            return True
    return False


def run(program: bytes, data: bytes) -> int:
    """The answer of a filter, a classic BPF program, to a `struct seccomp_data`."""
    code = list(INSTRUCTION.iter_unpack(program))
    memory = [0] * 16
    a = x = at = 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        kind = op & 0x07
        if kind == 0x06:  # RET
            return a if op & 0x18 == 0x10 else k
        if kind in (0x00, 0x01):  # LD, LDX
            mode = op & 0xE0
            words = {0x00: k, 0x80: len(data), 0x60: memory[k & 15]}
            value = struct.unpack_from("=I", data, k)[0] if mode == 0x20 else words[mode]
            a, x = (value, x) if kind == 0x00 else (a, value)
        elif kind in (0x02, 0x03):  # ST, STX
            memory[k] = a if kind == 0x02 else x
        elif kind == 0x04:  # ALU
            a = _compute(op & 0xF0, a, x if op & 0x08 else k)
        elif kind == 0x05:  # JMP
            at += (
                k if op & 0xF0 == 0x00 else yes if _holds(op & 0xF0, a, x if op & 8 else k) else no
            )
        else:  # MISC: TAX, TXA
            a, x = (x, x) if op & 0xF8 == 0x80 else (a, a)


def _compute(op: int, a: int, b: int) -> int:
    if op == 0x30:
        return a // b if b else 0
    results = {
        0x00: a + b,
        0x10: a - b,
        0x20: a * b,
        0x40: a | b,
        0x50: a & b,
        0x60: a << (b & 31),
        0x70: a >> (b & 31),
        0x80: -a,
        0xA0: a ^ b,
    }
    return results[op] & _MASK


def _holds(op: int, a: int, b: int) -> bool:
    return {0x10: a == b, 0x20: a > b, 0x30: a >= b, 0x40: a & b != 0}[op]
