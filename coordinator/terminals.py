"""Numbers of the terminals that a job has of its own, as script, tmux and pexpect make them.

A terminal comes back with the number that it had: programs have its path. Where another program has
that number meanwhile, the job gets terminals of a numbering of its own: /dev/pts of a mount
namespace that the keeper, its coordinators and the job have.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from flowgpu.errors import ImageDamaged
from flowgpu.host import mounts
from flowgpu.host.criu_images import terminals
from flowgpu.image.layout import CRIU_DIR

FOLDER = Path("/dev/pts")
MOUNTS = Path("/proc/self/mountinfo")


def free_numbers(image: Path) -> None:
    """To be called while this process has one thread. Who may not mount has the numbers as they
    are, and CRIU says what it misses."""
    with contextlib.suppress(ImageDamaged, OSError):  # the restore tells of the first
        if any((FOLDER / str(number)).exists() for number in terminals(image / CRIU_DIR)):
            settings = _settings()
            mounts.leave()
            flags = mounts.MS_NOSUID | mounts.MS_NOEXEC
            mounts.mount("devpts", FOLDER, "devpts", flags, f"{settings},newinstance,ptmxmode=666")


def _settings() -> str:
    """Owner and rights that terminals have on this machine."""
    for line in MOUNTS.read_text().splitlines():
        place, _, system = line.partition(" - ")
        if place.split()[4] == str(FOLDER):
            words = system.split()[2].split(",")
            return ",".join(word for word in words if word.startswith(("gid=", "mode=", "uid=")))
    return "mode=620"
