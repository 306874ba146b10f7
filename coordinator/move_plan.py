"""How the bytes of an image are to be moved: a plan for a target. A job starts without what moves
them, which needs numpy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from flowgpu.image import space

MIB = 1 << 20
RESTORE_PIECE = 8 * MIB
"""Bytes of a slot on a memory-backed file system: so small that the slots in use stay in the
processor's cache between a read, its digests and the copy. A multiple of a packed file's frame."""
ESTIMATE_BYTES = 1 << 30
"""Below it, to make a file's pages for all that is in use takes less than to find out what of it is
stored."""
COPIES_A_STREAM = 3
"""A restore has so many copies under way at most (native/ghost/copy_queue.cpp)."""


@dataclass(frozen=True)
class Plan:
    """How to move the bytes of an image to or from one target."""

    mode: str  # ring | mapped | registered: of a dump, a restore's is ring
    threads: int  # a GPU
    streams: int
    piece: int  # bytes
    arena: int  # bytes, shared by all GPUs
    direct: bool


def plan_for(folder: Path | None, gpus: int, size: int) -> Plan:
    """The plan for a dump of `size` bytes from `gpus` GPUs to `folder`, which exists; None: to
    files in memory."""
    memory_backed = folder is None or space.is_memory(folder)
    cores = len(os.sched_getaffinity(0))
    piece = 32 * MIB
    most = 1024 * MIB if cores >= 8 else 256 * MIB
    arena = min(most, max(-(-size // piece) * piece, 4 * piece))
    return Plan(
        mode="registered" if memory_backed else "ring",
        threads=max(2, (cores - 1) // max(gpus, 1)),
        streams=2,
        piece=piece,
        arena=arena,
        direct=not memory_backed,
    )


def restore_plan_for(folder: Path | None, gpus: int, size: int) -> Plan:
    """The plan for the way back, from an image in `folder`, or from memory."""
    plan = plan_for(folder, gpus, size)
    if plan.direct:
        return plan
    slots = max(gpus, 1) * (plan.threads + COPIES_A_STREAM * plan.streams)
    return replace(plan, mode="ring", piece=RESTORE_PIECE, arena=slots * RESTORE_PIECE)
