"""The mover with the kernels that it ships, case by case, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emu.mover_cases import CASES
from tests.emu.test_driver import ROOT, device_environment
from tests.patience import SECONDS


def run_case(
    name: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.emu.mover_cases", name, str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_the_emulated_gpu(name: str, tmp_path: Path) -> None:
    result = run_case(name, tmp_path, device_environment(tmp_path))
    log = tmp_path / "device.log"
    device = log.read_text() if log.exists() else "(no device log)"
    assert result.stdout.endswith("passed\n"), f"{result.stderr}\n{device}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_on_a_real_gpu(name: str, tmp_path: Path) -> None:
    result = run_case(name, tmp_path, dict(os.environ))
    assert result.stdout.endswith("passed\n"), result.stderr
