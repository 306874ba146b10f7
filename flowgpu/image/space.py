"""What a folder's file system can take."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from flowgpu.errors import NotEnoughDisk
from flowgpu.render import size as readable

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def file_system(folder: Path) -> str:
    """Type of the file system of an existing folder as proc(5) names it; empty when unknown."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == number:
                return after.split()[0]
    return ""


def is_memory(folder: Path) -> bool:
    """True if files of the folder live in memory, so that syncing them means nothing."""
    return file_system(folder) in MEMORY_FILE_SYSTEMS


def free(folder: Path) -> int:
    """Bytes that the existing folder's file system can take."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def need(folder: Path, size: int, job: str) -> None:
    """Raise NotEnoughDisk unless the existing folder's file system has `size` bytes free."""
    left = free(folder)
    if left < size:
        raise NotEnoughDisk(
            path=folder, free=readable(left), job=job, needed=f"up to {readable(size)}"
        )


def is_full(error: BaseException) -> bool:
    """True if a file system was full, or its user's quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def lock(folder: Path) -> int | None:
    """Descriptor that holds the lock of a folder until it is closed, at the latest by the kernel.

    None where another process has it, or the file system has no such locks.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd
