"""Where the bytes of a suspended job wait."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from coordinator.host_copy import HostCopy
from flowgpu.host import mounts, probes

PAGE = 2 << 20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


@pytest.fixture
def copy(tmp_path: Path) -> HostCopy:
    return HostCopy(tmp_path / "host")


def written(copy: HostCopy, size: int) -> str:
    """The descriptor of its first GPU is opened as the ghost does it, and gets so many bytes. Gives
    what the kernel says of the mapping."""
    fd = os.open(copy.gpu_data(0), os.O_RDWR)
    try:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as memory:
            memory[:] = b"a" * size
            inode = os.fstat(fd).st_ino
            maps = Path("/proc/self/smaps").read_text().split("\n")
            (at,) = (n for n, line in enumerate(maps) if f" {inode} " in line and "deleted" in line)
            return next(line for line in maps[at:] if line.startswith("ShmemPmdMapped"))
    finally:
        os.close(fd)


@pytest.mark.skipif(
    "CAP_SYS_ADMIN" not in probes.capabilities() or not HUGE.exists(),
    reason="this process may not mount, or the kernel has no huge pages",
)
def test_its_pages_are_huge(copy: HostCopy) -> None:
    assert written(copy, 4 * PAGE).split() == ["ShmemPmdMapped:", str(4 * PAGE >> 10), "kB"]
    assert copy.held() == 4 * PAGE
    copy.close()


def test_where_nobody_may_mount_its_pages_are_small(
    copy: HostCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(mounts, "huge_file", refuse)
    assert written(copy, PAGE).split() == ["ShmemPmdMapped:", "0", "kB"]
    assert copy.held() == PAGE
    copy.close()


def test_nothing_is_left_of_it(copy: HostCopy) -> None:
    copy.gpu_data(1)
    held = list(copy.fds)
    copy.gpu_chunks(0).write_bytes(b"table")
    copy.close()
    assert len(held) == 2 and not copy.path.exists()
    for fd in held:
        with pytest.raises(OSError):
            os.fstat(fd)
