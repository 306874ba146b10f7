"""Who saves a running job again and again, to which store, and when next.

The command that does it notes that in `saving.json` of the job's folder, for those who look.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from flowgpu.jobs import JobDir, is_process, replace_note, start_time


@dataclass(frozen=True)
class Saving:
    """What `note` wrote."""

    store: Path
    next: float | None
    """When the next image is begun, in seconds since 1970; None: only when it is asked for, or
    never, since the command that saved the job has ended."""


def note(directory: JobDir, store: Path, wait: float | None) -> None:
    """This process saves the job to `store`, again in `wait` seconds; None: only when asked."""
    pid = os.getpid()
    due = None if wait is None else time.time() + wait
    row = {"store": str(store), "next": due, "pid": pid, "start": start_time(pid)}
    replace_note(directory.saving, json.dumps(row))


def read(directory: JobDir) -> Saving | None:
    """What was noted last; None where nothing was that can be read."""
    try:
        data = json.loads(directory.saving.read_text())
        saves = is_process(int(data["pid"]), int(data["start"]))
        due = float(data["next"]) if saves and data["next"] is not None else None
        return Saving(Path(data["store"]), due)
    except (OSError, ValueError, KeyError, TypeError):
        return None
