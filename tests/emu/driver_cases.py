"""Programs that check a CUDA driver through its API; each case is one fresh process.

python -m tests.emu.driver_cases CASE
"""

from __future__ import annotations

import sys

from tests.emu import (
    driver_cases_answers,
    driver_cases_arrays,
    driver_cases_capture,
    driver_cases_graphs,
    driver_cases_link,
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
    driver_cases_memory,
    driver_cases_process,
    driver_cases_rewind,
    driver_cases_textures,
    driver_cases_work,
)


def main() -> None:
    CASES[sys.argv[1]].run()
    print("passed")


if __name__ == "__main__":
    main()
