"""Runs kernel cases on the GPU that cuInit finds; a line of JSON for each, with what went wrong, or
what it was given and how near it came (kernel_lib).

python -m tests.emu.kernel_cases [CASE...]

Ends after the first case that the driver has refused or stopped: its context may be lost.
"""

from __future__ import annotations

import json
import sys

from tests.emu import (
    kernel_cases_elementwise,
    kernel_cases_matrix,
    kernel_cases_memory,
    kernel_cases_narrow,
    kernel_cases_programs,
    kernel_cases_rows,
    kernel_cases_textures,
    kernel_cases_threads,
    kernel_cases_triton_elementwise,
    kernel_cases_triton_matrix,
    kernel_cases_triton_memory,
    kernel_cases_triton_rows,
)
from tests.emu.driver_lib import start
from tests.emu.kernel_lib import CASES as CASES
from tests.emu.kernel_lib import run

MODULES = (
    kernel_cases_elementwise,
    kernel_cases_matrix,
    kernel_cases_memory,
    kernel_cases_narrow,
    kernel_cases_programs,
    kernel_cases_rows,
    kernel_cases_textures,
    kernel_cases_threads,
    kernel_cases_triton_elementwise,
    kernel_cases_triton_matrix,
    kernel_cases_triton_memory,
    kernel_cases_triton_rows,
)


def main(names: list[str]) -> None:
    start()
    for name in names or sorted(CASES):
        error, lost, done = "", False, {}
        try:
            done = run(name)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            lost = "CUDA_ERROR" in error
        print(json.dumps({"case": name, "error": error, **done}), flush=True)
        if lost:
            break


if __name__ == "__main__":
    main(sys.argv[1:])
