"""Mounts that a process and those that it starts have for themselves."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from flowgpu.host.probes import libc

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x8, 0x20
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
MNT_DETACH = 2
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT = 430, 431, 432
CLOEXEC = 1  # of fsopen(2) and fsmount(2)
SET_STRING, CREATE = 1, 6  # commands of fsconfig(2)


def leave() -> None:
    """Enter a mount namespace of this process's own, which sees what others mount and not the
    reverse. To be called while it has one thread. Raises OSError."""
    _call(libc().unshare(CLONE_NEWNS))
    mount("none", "/", "", MS_REC | MS_SLAVE)


def mount(source: str, target: Path | str, kind: str, flags: int, data: str = "") -> None:
    """As mount(2). Raises OSError."""
    words = (os.fsencode(word) for word in (source, str(target), kind))
    _call(libc().mount(*words, ctypes.c_ulong(flags), os.fsencode(data)))


def unmount(target: Path) -> None:
    """Take away what is mounted there, once nobody uses it."""
    libc().umount2(os.fsencode(target), MNT_DETACH)


def huge_file() -> int:
    """A file without a name in memory, with huge pages where the machine has them free.

    A memfd has none, unless the whole machine is set to that. So the file is on a tmpfs that is
    mounted nowhere. Raises OSError where the kernel is older than Linux 5.2, or this process may
    not mount.
    """
    system = _call(libc().syscall(SYS_FSOPEN, b"tmpfs", CLOEXEC))
    try:
        # It may grow to all memory, as a memfd may.
        for key, value in ((b"huge", b"always"), (b"size", b"0"), (b"mode", b"0700")):
            _call(libc().syscall(SYS_FSCONFIG, system, SET_STRING, key, value, 0))
        _call(libc().syscall(SYS_FSCONFIG, system, CREATE, None, None, 0))
        top = _call(libc().syscall(SYS_FSMOUNT, system, CLOEXEC, 0))
    finally:
        os.close(system)
    try:
        # It keeps the file system, whose last descriptor but this one is closed here.
        return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=top)
    finally:
        os.close(top)


def _call(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)
