"""What a driver promises, a program sees behind the intercept library as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emu.driver_cases import CASES
from tests.emu.intercept_lib import ROOT, bare_environment, intercepted

# Cases whose answer differs behind the intercept library: the check that fails there, and why.
# Blocks are whole pages of 2 MiB, so what lies behind the end of an allocation is memory as well.
ROUNDED = "the device does not see where an allocation inside a block ends"
DIFFERENT = {
    "copies_and_memsets_of_every_kind": (
        'refuses(cu.cuMemcpyDtoH(out.ctypes.data, a, source.nbytes + 1), "INVALID_VALUE")',
        ROUNDED,
    ),
    "copies_of_rectangles": ('refuses(cu.cuMemcpy2D(up), "INVALID_VALUE")', ROUNDED),
    "one_byte_past_an_allocation_is_illegal": (
        'refuses(cu.cuCtxSynchronize(), "ILLEGAL_ADDRESS")',
        ROUNDED,
    ),
}


# A driver is rewound behind the intercept library, never in front of it.
NAMES = sorted(n for n, case in CASES.items() if "rewind" not in case.run.__module__)


@pytest.mark.parametrize("replay", [False, True], ids=["native", "replay"])
@pytest.mark.parametrize("name", NAMES)
def test_intercepted_driver(name: str, replay: bool, tmp_path: Path) -> None:
    environment = intercepted(bare_environment(tmp_path) | CASES[name].environment, tmp_path)
    if replay:  # the program holds handles of ours
        environment["FLOWGPU_REPLAY"] = "1"
    result = subprocess.run(
        [sys.executable, "-m", "tests.emu.driver_cases", name],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if name in DIFFERENT:
        check, _ = DIFFERENT[name]
        assert result.returncode == 1
        assert check in result.stderr
    else:
        assert result.stdout.endswith("passed\n"), result.stderr


def test_every_difference_is_of_a_case() -> None:
    assert DIFFERENT.keys() <= CASES.keys()
