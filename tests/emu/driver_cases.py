"""Programs that check a CUDA driver through its API; each is a process of its own (forks.py)."""

from __future__ import annotations

from tests.emu import (
    driver_cases_answers,
    driver_cases_arrays,
    driver_cases_capture,
    driver_cases_graphs,
    driver_cases_link,
    driver_cases_managed,
    driver_cases_memory,
    driver_cases_process,
    driver_cases_rewind,
    driver_cases_textures,
    driver_cases_work,
)
from tests.emu.driver_lib import CASES

FAMILIES = (
    driver_cases_answers,
    driver_cases_arrays,
    driver_cases_capture,
    driver_cases_graphs,
    driver_cases_link,
    driver_cases_managed,
    driver_cases_memory,
    driver_cases_process,
    driver_cases_rewind,
    driver_cases_textures,
    driver_cases_work,
)


MODULE = "tests.emu.driver_cases"
REWINDING = {n for n, c in CASES.items() if c.run.__module__ == driver_cases_rewind.__name__}


def run(name: str) -> None:
    CASES[name].run()
    print("passed")
