"""NCCL's communicators, ended behind the cut of a checkpoint and made anew when the job goes on.

A rank that ends or makes one waits for the others, so each step is asked of all tasks at once:

    hold   nobody is in NCCL any more, and what was issued is done
    end    the communicators are gone; who calls NCCL waits, also in a restored process
    make   each first rank makes a new unique id, and all of them make their communicators by it

Between hold and end nothing has changed yet. From end on only make leads back. The program keeps
its handles (native/nccl/communicators.h).

Where ranks are on several nodes, each node's coordinator does its part. All have held before any
ends, and the leader passes on the ids (reunion.py). So a node that has ended finds all others at
the making, whatever has failed between.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from coordinator.communicators import Communicators, ranks_here, refuse_fixed
from coordinator.tasks import Task
from flowgpu import nccl, wire

log = logging.getLogger(__name__)

Each = Callable[[str, Callable[[Task], None], Sequence[Task]], None]
"""Does it for all of these tasks at once; the name is what the timeline calls it."""


def with_communicators(tasks: Sequence[Task], *states: int) -> list[Task]:
    """Those of the tasks whose communicators are in one of these states."""
    return [task for task in tasks if task.nccl is not None and _state(task.nccl) in states]


Ranks = tuple[int, Sequence[int]]
IdsElsewhere = Callable[[Mapping[int, Ranks], Mapping[int, bytes], float], dict[int, bytes]]
"""Communicators with ranks on other nodes, each with the number of its ranks and those that are
here; ids that were made here; and the seconds that this may take. It gives the ids of those whose
ranks are all ready to be made."""


def hold(tasks: Sequence[Task], each: Each, deadline: float) -> None:
    """Hold the communicators of all these tasks. Raises Unsupported, or TaskError: REFUSED names
    what cannot be made anew, and BUSY may be tried again. With these nothing has changed."""
    each("hold communicators", _asking(wire.Renewal.HOLD, deadline), tasks)
    refuse_fixed(_pages(tasks))


def end(tasks: Sequence[Task], each: Each, deadline: float) -> None:
    """End the communicators of all these tasks, which are held."""
    each("end communicators", _asking(wire.Renewal.END, deadline), tasks)


def new_ids(tasks: Sequence[Task], each: Each, deadline: float) -> dict[int, bytes]:
    """New unique ids of the communicators that have their first rank in these tasks."""
    each("new unique ids", _asking(wire.Renewal.IDS, deadline), tasks)
    ids: dict[int, bytes] = {}
    for page in _pages(tasks).values():
        ids |= page.unique_ids()
    return ids


def make_anew(tasks: Sequence[Task], ids: Mapping[int, bytes], each: Each, deadline: float) -> None:
    """Make the communicators of all these tasks by these ids. One without an id is not made: to the
    program a rank of it has failed."""
    for page in _pages(tasks).values():
        page.put_unique_ids(ids)
    each("make communicators", _asking(wire.Renewal.MAKE, deadline), tasks)


def bring_back(
    tasks: Sequence[Task], each: Each, deadline: float, elsewhere: IdsElsewhere | None = None
) -> None:
    """Make all communicators anew that were ended in a task, unless they have lost a rank."""
    if not with_communicators(tasks, nccl.ENDED):
        return
    # Where a task has failed at the end, some have not been asked for it.
    if left := with_communicators(tasks, nccl.HELD, nccl.FREE):
        log.warning("communicators of %d tasks are ended late", len(left))
        hold(left, each, deadline)
        end(left, each, deadline)
    ended = with_communicators(tasks, nccl.ENDED)
    ids = new_ids(ended, each, deadline)
    missing = {
        communicator: (ranks.count, sorted(ranks.here))
        for communicator, ranks in ranks_here(_pages(ended)).items()
        if len(ranks.here) < ranks.count
    }
    own = {one: ids.pop(one) for one in missing if one in ids}
    if missing and elsewhere is not None:
        ids |= elsewhere(missing, own, max(deadline - time.monotonic(), 0.0) / 2)
    for communicator, (count, here) in missing.items():
        if communicator not in ids:
            log.warning("communicator %x has lost %d ranks", communicator, count - len(here))
    make_anew(ended, ids, each, deadline)


def _pages(tasks: Sequence[Task]) -> dict[int, Communicators]:
    return {task.pid: task.nccl for task in tasks if task.nccl is not None}


def _state(page: Communicators) -> int:
    header = page.header()
    return header.held if header.living else -1


def _asking(step: wire.Renewal, deadline: float) -> Callable[[Task], None]:
    packet = wire.packet(wire.Message.RENEW, count=step)

    def ask(task: Task) -> None:
        task.request(wire.Message.RENEW, deadline, packet=packet)

    return ask
