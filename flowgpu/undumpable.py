"""Descriptors that CRIU is known not to dump, found in /proc while the job runs.

CRIU names them too, but once it has frozen the job. What can be told only by asking the kernel
more (where a socket's other end is) is left to it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from flowgpu.proctree import PROC, fd_targets

# Anonymous inodes of which CRIU 4.2 has an image (criu/files.c, dump_one_file).
DUMPED = {"bpf-map", "eventfd", "eventpoll", "fanotify", "inotify", "pidfd"}
DUMPED |= {"signalfd", "timerfd"}
# Character devices likewise: memory devices, terminals and their two ends.
DUMPED_MAJORS = {1, 4, 5, *range(128, 144)}
DUMPED_DEVICES = {(10, 200), (10, 235)}  # /dev/net/tun, /dev/autofs
# The engine takes these out of the process, or the plugin out of the dump (native/criu_plugin).
GPU_DEVICES = "/dev/nvidia"


def undumpable(pids: Iterable[int]) -> str:
    """What one of these processes holds, with its descriptor and process id; empty if none is."""
    for pid in pids:
        for fd, target in fd_targets(pid):
            with suppress(OSError):  # closed by now
                if what := _undumpable(target, PROC / str(pid) / "fd" / str(fd)):
                    return f"{what} as fd {fd} (process {pid})"
    return ""


def _undumpable(target: str, link: Path) -> str:
    if anonymous := re.fullmatch(r"anon_inode:\[?([^\]]*)\]?", target):
        kind = anonymous[1]
        article = "an" if kind == "io_uring" else "a"
        return "" if kind in DUMPED else f"{article} {kind}"
    if target.startswith(GPU_DEVICES):
        return ""
    found = link.stat()
    device = os.major(found.st_rdev), os.minor(found.st_rdev)
    dumped = device[0] in DUMPED_MAJORS or device in DUMPED_DEVICES
    return target if stat.S_ISCHR(found.st_mode) and not dumped else ""
