"""Processors that threads are bound to: CRIU does not keep them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from flowgpu.host.proctree import thread_ids
from flowgpu.image.manifest import Affinity


def bound(pids: Iterable[int]) -> tuple[Affinity, ...]:
    """Threads of these processes whose processors are not those of this process, with theirs.

    The job had this process's when it was started.
    """
    ours = os.sched_getaffinity(0)
    found: dict[tuple[int, ...], list[int]] = {}
    for pid in pids:
        for thread in thread_ids(pid):
            with suppress(OSError):  # it has ended
                if (theirs := os.sched_getaffinity(thread)) != ours:
                    found.setdefault(tuple(sorted(theirs)), []).append(thread)
    return tuple(Affinity(cpus, tuple(sorted(threads))) for cpus, threads in sorted(found.items()))


def bind(affinities: Iterable[Affinity], pids: Iterable[int]) -> None:
    """Bind threads as they were, as far as they are of these processes.

    Where this machine has none of a thread's processors, it keeps this process's.
    """
    threads = {thread for pid in pids for thread in thread_ids(pid)}
    for one in affinities:
        for thread in threads.intersection(one.threads):
            with suppress(OSError, OverflowError, ValueError):
                os.sched_setaffinity(thread, one.cpus)
