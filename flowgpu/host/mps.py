"""The Multi-Process Service (MPS): what its processes have of the descriptors of its clients."""

from __future__ import annotations

import re
from contextlib import suppress

from flowgpu.host.proctree import PROC, fd_targets

NAME = b"nvidia-cuda-mps"
"""How the names of its processes begin; the kernel keeps 15 characters."""


def ends() -> frozenset[int]:
    """Inodes of the sockets and pipes that the service has, as far as this user may look."""
    found = set()
    for folder in PROC.iterdir():
        with suppress(OSError):  # it is no process, or has ended
            if folder.name.isdigit() and (folder / "comm").read_bytes().startswith(NAME):
                for _, target in fd_targets(int(folder.name)):
                    if inode := re.fullmatch(r"(?:socket|pipe):\[(\d+)\]", target):
                        found.add(int(inode[1]))
    return frozenset(found)
