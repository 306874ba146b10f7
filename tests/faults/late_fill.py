"""The real coordinator and ghost, but that a fill reads nothing before $FILL_AFTER is there."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from coordinator import ghost_client


def wait() -> None:
    while not Path(os.environ["FILL_AFTER"]).exists():
        time.sleep(0.01)


def be_ghost() -> None:
    from coordinator.mover import NativeMover

    restore_job = NativeMover.restore_job

    def late(*arguments: Any) -> Any:
        wait()
        return restore_job(*arguments)

    NativeMover.restore_job = late  # type: ignore[method-assign]
    runpy.run_module("coordinator.ghost_main", run_name="__main__")


if __name__ == "__main__":
    if "--fd" in sys.argv:
        be_ghost()
    else:
        *words, _, _ = ghost_client.COMMAND
        ghost_client.COMMAND = (*words, __file__)
        from coordinator import __main__ as program

        sys.exit(program.main())
