"""Give pages of zeros of a running process tree back, so that CRIU neither writes nor reads them.

    stats = quiet.drop_zero_pages(tree_pids(root))

The program of native/quiet holds all threads for the time of it. A process reads the same bytes
there before and after, and in a restored copy: private anonymous memory without a page is zeros.

Nothing depends on it: a process that cannot be treated is left as it is and named in `skipped`, and
a run that fails has changed nothing but pages that were zeros.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgpu import launch

MINIMUM_RUN = 64 << 10
"""Shorter runs of zeros stay: a call costs about what CRIU needs for 16 pages."""
HOLD_SECONDS = 1.0
"""Longest time for which the threads are held; what is not done by then stays."""
_SPARE_SECONDS = 2.0


@dataclass(frozen=True)
class Stats:
    """What one run found and did; sizes in bytes."""

    processes: int = 0
    scanned: int = 0
    zero: int = 0
    dropped: int = 0
    runs: int = 0
    stopping_seconds: float = 0.0
    seconds: float = 0.0
    skipped: tuple[tuple[int, str], ...] = ()


class QuietFailed(Exception):
    """Nothing was dropped, or not all of it; the processes go on as before."""


def program() -> Path:
    """The program, where the build leaves it or where the package has it."""
    beside = launch.library_dir().parent / "bin" / "flowgpu-quiet"
    return beside if beside.is_file() else launch.library_dir() / "flowgpu-quiet"


def drop_zero_pages(
    pids: Sequence[int], *, threads: int | None = None, minimum_run: int = MINIMUM_RUN
) -> Stats:
    """Drop runs of zero pages of at least `minimum_run` bytes. Raises QuietFailed."""
    if not pids:
        return Stats()
    workers = threads or len(os.sched_getaffinity(0))
    words = [workers, minimum_run, int(HOLD_SECONDS * 1000), *pids]
    command = [str(program()), *map(str, words)]
    try:
        # On a timeout `run` kills it: that is safe, but it ends itself well before.
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=HOLD_SECONDS + _SPARE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise QuietFailed(str(error)) from error
    if done.returncode != 0:
        raise QuietFailed(done.stderr.strip() or f"it ended with status {done.returncode}")
    found = json.loads(done.stdout)
    skipped = tuple((pid, reason) for pid, reason in found.pop("skipped"))
    return Stats(skipped=skipped, **found)
