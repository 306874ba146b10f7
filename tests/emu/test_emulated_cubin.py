"""Cubins of the emulated linker's form, each case in a process of its own with its own device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emu import image_reader
from tests.emu.cubin_cases import CASES
from tests.emu.test_driver import ROOT, device_environment, nothing_is_left
from tests.patience import SECONDS


def run(name: str, folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.emu.cubin_cases", name, str(folder)],
        env=device_environment(folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    device = (folder / "device.log").read_text()
    assert result.stdout.endswith("passed\n"), f"{result.stderr}\n{device}"
    assert result.returncode == 0, result.stderr
    nothing_is_left(folder / "device.log")


@pytest.mark.parametrize("name", sorted(CASES))
def test_emulated_cubin(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        (
            "the_tables_are_those_of_a_cubin",
            ("chain", "counter", "hidden", "home", "table", "zeros"),
        ),
        ("functions_are_symbols_whose_addresses_are_relocations", ("home", "start", "table")),
    ],
)
def test_the_reader_of_real_cubins_reads_it(
    name: str, variables: tuple[str, ...], tmp_path: Path
) -> None:
    run(name, tmp_path)
    code = (tmp_path / "cubin").read_bytes()
    reader = image_reader.Reader(image_reader.build(tmp_path))
    found = reader.limited(code)
    assert (found.known, found.why, found.length) == (True, "", len(code))
    assert not found.by_address_alone
    assert found.variables == variables
    reader.close()
