"""Programs that do not come through, so that a trial has to say so. They are not on the page."""

from __future__ import annotations

import os
from pathlib import Path

from tests.trials.prelude import Here, program, say


def disturbed(here: Here) -> bool:
    """Stand at the place of the dump; False in an undisturbed run, which has no need to wait."""
    waits = not here.go.exists()
    here.ready()
    return waits


@program("says another line when it was dumped")
def another_line(here: Here) -> None:
    say(disturbed(here))


@program("leaves a file in memory when it was dumped")
def leaves_a_file(here: Here) -> None:
    if disturbed(here):
        (Path("/dev/shm") / here.unique).touch()


@program("fails when it was dumped")
def fails(here: Here) -> None:
    if disturbed(here):
        os._exit(9)
