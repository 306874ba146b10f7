"""What a driver promises, a program sees behind the intercept library as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emu.driver_cases import CASES, MODULE, REWINDING
from tests.emu.forks import Forks, forks
from tests.emu.intercept_lib import bare_environment, intercepted

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
NAMES = sorted(CASES.keys() - REWINDING)
# In replay the program holds handles of ours.
MODES: dict[str, dict[str, str]] = {"native": {}, "replay": {"FLOWGPU_REPLAY": "1"}}


@pytest.fixture(scope="module", params=MODES)
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("none")
    environment = intercepted(bare_environment(folder), folder) | MODES[request.param]
    with forks(MODULE, environment) as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_intercepted_driver(name: str, cases: Forks, tmp_path: Path) -> None:
    environment = intercepted(bare_environment(tmp_path) | CASES[name].environment, tmp_path)
    code, said = cases.run(name, environment)
    if name in DIFFERENT:
        check, _ = DIFFERENT[name]
        assert code == 1
        assert check in said
    else:
        assert said.endswith("passed\n"), said


def test_every_difference_is_of_a_case() -> None:
    assert DIFFERENT.keys() <= CASES.keys()
