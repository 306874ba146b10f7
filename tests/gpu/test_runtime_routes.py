"""The CUDA runtime, linked either way, finds the intercept library, and so does who asks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emu.intercept_lib import PROGRAMS
from tests.emu.test_intercept_routes import in_window

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("runtime", ["shared", "static"])
def test_the_runtime_leads_through_the_library(runtime: str, tmp_path: Path) -> None:
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    nvcc = shutil.which("nvcc", path=f"{toolkit}:{os.environ['PATH']}")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    program = tmp_path / runtime
    words = [nvcc, "-cudart", runtime, str(PROGRAMS / "runtime.c"), "-o", str(program)]
    subprocess.run(words, check=True)
    for before in ([], [sys.executable, "-m", "flowgpu", "run", "--"]):
        done = subprocess.run([*before, program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        addresses = [int(word, 16) for word in done.stdout.split()]
        assert [in_window(address) for address in addresses] == [bool(before)] * 2
