"""The real coordinator, of which a job's first is killed where $DIE_AT says: at a point of
fault.def, or at `kill`, when the image is whole and the job is to end."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from coordinator import __main__ as program
from coordinator import faults
from coordinator.keeper import Kept

coordinate = program.coordinate


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def coordinate_and_die(text: bytes, kept: Kept) -> int:
    if kept.writers is not None:
        from coordinator import checkpoint

        wanted = os.environ.get("DIE_AT")
        faults.check = lambda point: die() if point == wanted else None
        if wanted == "kill":
            checkpoint.kill_tree = die
    return coordinate(text, kept)


if __name__ == "__main__":
    program.coordinate = coordinate_and_die
    sys.exit(program.main())
