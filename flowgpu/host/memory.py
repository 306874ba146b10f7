"""What memory of the host is left to this process and its children: of the machine, and of the
control groups they are in, which is what a container is given."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import starmap
from pathlib import Path

from flowgpu.errors import NotEnoughMemory
from flowgpu.render import size as readable

PROC = Path("/proc")
MACHINE = "the machine"
# By the interface's version: the limit, what is used of it, and words of memory.stat for what the
# kernel gives back before it ends a process.
FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "cgroup2": ("memory.max", "memory.current", ""),
}
GIVEN_BACK = ("inactive_file", "active_file", "slab_reclaimable")


def groups() -> Iterator[tuple[Path, str]]:
    """This process's control groups of memory, from its own one to the outermost that is seen here,
    with the type of their file system. Raises OSError where the kernel has none."""
    ours = {}
    for line in Path(PROC, "self", "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            ours["cgroup" if controllers else "cgroup2"] = path
    for line in Path(PROC, "self", "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, place = before.split()[3:5]
        kind, _, options = after.split()[:3]
        path = ours.get(kind, "")
        if kind == "cgroup" and "memory" not in options.split(","):
            continue
        if path == root or path.startswith(root.rstrip("/") + "/"):
            top, own = Path(place), Path(place, path[len(root.rstrip("/")) :].lstrip("/"))
            yield from ((group, kind) for group in (own, *own.parents) if group.is_relative_to(top))


def left() -> tuple[int, str]:
    """Bytes that are left, and of what: the machine, or a control group. What is not known counts
    as enough."""
    found = [(sys.maxsize, MACHINE)]
    with suppress(OSError):
        if available := _number("MemAvailable", Path(PROC, "meminfo").read_text()):
            found.append((available << 10, MACHINE))
        found += filter(None, starmap(_left_to, groups()))
    return min(found)


def _left_to(group: Path, kind: str) -> tuple[int, str] | None:
    """None for a group without a limit, or without the controller."""
    limit, used, prefix = FILES[kind]
    with suppress(OSError, ValueError):
        most = int((group / limit).read_text())
        stat = (group / "memory.stat").read_text()
        back = sum(_number(prefix + word, stat) for word in GIVEN_BACK)
        return most - int((group / used).read_text()) + back, f"{group}"
    return None


def need(size: int, what: str) -> None:
    """Raise NotEnoughMemory unless `size` bytes are left for `what`, which is said in the error."""
    bytes_left, place = left()
    if bytes_left < size:
        raise NotEnoughMemory(
            place=place, free=readable(max(bytes_left, 0)), what=what, needed=readable(size)
        )


def _number(word: str, text: str) -> int:
    found = re.search(rf"^{word}:?\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0
