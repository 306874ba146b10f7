"""What a run of the kernel cases found: a results file, for docs/reference/kernels.md.

Written where $FLOWGPU_KERNELS_OUT names a file. A case that failed has its error and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import machine
from flowgpu.host import probes

OUT = "FLOWGPU_KERNELS_OUT"
LANES = {"emulated": "not gpu", "nvidia": "gpu"}  # and the tests of each, for pytest's -m
Outcome = dict[str, Any]  # a line of kernel_cases


def keep(lane: str, outcomes: Mapping[str, Outcome]) -> None:
    """Write the outcomes, by case, to the file, if one is named."""
    if not (name := os.environ.get(OUT)):
        return
    command = f"{OUT}={name} python -m pytest tests/emu/test_kernels.py -m '{LANES[lane]}'"
    document = machine.heading("kernels", command) | {
        "lane": lane,
        "gpu": gpu_name() if lane == "nvidia" else None,
        "rows": [outcomes[case] for case in sorted(outcomes)],
    }
    Path(name).write_text(json.dumps(document, indent=1) + "\n")


def gpu_name() -> str:
    """Name of the first GPU; the driver's error where there is none, so that no run fails."""
    answer = probes.driver(Path("libcuda.so.1"))
    return answer.gpus[0][0] if answer.gpus else answer.error
