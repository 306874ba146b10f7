"""The real coordinator, of which a job's first, second, .. are killed where $DIE_AT says.

A point of fault.def for each, joined by commas; `open`: when gates are to open; `kill`: when the
image is whole and the job is to end; `criu`: when CRIU has failed; `alone`: as `commit`, with
nothing in custody.
"""

from __future__ import annotations

import json
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
    from coordinator import bringup, cpu_side, custody
    from flowgpu.host import standstill

    with open(os.path.join(json.loads(text)["job_dir"], "coordinators"), "a") as count:
        number = count.tell()
        count.write(".")
    points = os.environ.get("DIE_AT", "").split(",")
    if number < len(points):
        wanted = points[number]
        if wanted == "open":
            bringup.open_gate = die
        if wanted == "kill":
            cpu_side.kill_tree = die
        if wanted == "criu":
            standstill.Standstill.put_back = die  # type: ignore[method-assign, assignment]
        if wanted == "alone":
            custody.Custody.put = lambda *_: None  # type: ignore[method-assign]
            wanted = "commit"
        faults.check = lambda point: die() if point == wanted else None
    return coordinate(text, kept)


if __name__ == "__main__":
    program.coordinate = coordinate_and_die
    sys.exit(program.main())
