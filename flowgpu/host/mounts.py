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


def _call(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
