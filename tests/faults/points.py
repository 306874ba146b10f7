"""The points of fault.def, by what has them and by the commands that can meet them."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.faults import HALTS
from flowgpu.wire import Fault

MOST = 20  # passes of one fault; no loop comes near


def named(*beginnings: str) -> list[Fault]:
    return [fault for fault in Fault if fault.startswith(beginnings)]


# A task reads once which is to fail, and its image has what it has counted.
TASK = named("task_")
# A process has many pages, all alike: the first pass is tried, the 10th, the 100th and so on.
MANY, MANY_FACTOR = named("pages_"), 10
# They do no harm, so that one command meets them in each of its phases.
EACH_PASS = 0
EACH = [Fault.PHASE_STOP, Fault.PHASE_SECOND]
OF_GHOST = [Fault.GHOST_CONTEXT, Fault.GHOST_ROOM, Fault.GHOST_ARENA, Fault.GHOST_PIN]

RESTORE_ONLY = [
    *(Fault.CRIU_RESTORE, Fault.FILL, Fault.REBUILD),
    *(Fault.GHOST_READ, Fault.PAGES_READ),
]
DUMP_ONLY = [
    fault
    for fault in Fault
    if fault not in (*RESTORE_ONLY, *TASK, *OF_GHOST, *HALTS)
    and fault not in (Fault.MAPBACK, Fault.PHASE_LATE, Fault.CRIU_HANG)
] + [Fault.PHASE_DISK, Fault.PHASE_PAGES]
IN_DUMPS = [fault for fault in Fault if fault not in RESTORE_ONLY]
IN_RESTORES = [fault for fault in Fault if fault not in (*DUMP_ONLY, *TASK)]
# A suspension and the resume after it write no image, and dump no process.
IN_SUSPENSIONS = [
    fault
    for fault in (*IN_DUMPS, Fault.FILL, Fault.REBUILD, Fault.GHOST_READ)
    if fault not in (Fault.PHASE_DISK, Fault.PHASE_PAGES, Fault.PHASE_SECOND, Fault.COMMIT, *TASK)
    and not fault.startswith(("criu_", "image_", "pages_"))
]
# What does not differ between one task and two is tried with one, and with two where the job goes
# on; and writes that find no space in one of these commands, those with other faults in the other.
WRITES = [
    *named("image_", "table_", "pages_full", "pages_error", "pages_short"),
    *(Fault.GHOST_FULL, Fault.GHOST_ERROR, Fault.GHOST_SHORT),
]
ALIKE = [
    *HALTS,
    *OF_GHOST,
    *WRITES,
    Fault.GHOST_READ,
    Fault.PAGES_READ,
    Fault.PHASE_LATE,
    Fault.CRIU_HANG,
]
OF_ONE = [Fault.PHASE_DISK, *(fault for fault in WRITES if fault.endswith("_full"))]
OF_OTHER = [fault for fault in WRITES if fault not in OF_ONE]


def is_tried(fault: Fault, tasks: int, action: str, all_tasks: list[int]) -> bool:
    """True if a fault is to be tried in an action with a job of so many tasks, of `all_tasks`."""
    met = {"restore": IN_RESTORES, "suspend": IN_SUSPENSIONS}.get(action, IN_DUMPS)
    if fault not in met:
        return False
    if fault in {"pause-and-dump": OF_OTHER, "leave-running": OF_ONE}.get(action, ()):
        return False
    alone = min(all_tasks) if action == "pause-and-dump" else max(all_tasks)
    return fault not in ALIKE or tasks == alone


def passes(fault: Fault) -> Iterator[int]:
    """The passes at which a fault is let fire, until it fires no more. Raises RuntimeError when
    there are more than can be."""
    if fault in EACH:
        yield EACH_PASS
        return
    for n in range(MOST):
        yield MANY_FACTOR**n if fault in MANY else n + 1
    raise RuntimeError(f"{fault} fires without end")
