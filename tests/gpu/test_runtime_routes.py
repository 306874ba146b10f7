"""The CUDA runtime, linked either way, finds the intercept library, and so does who asks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu.launch import intercept_library
from tests.emu.intercept_lib import PROGRAMS
from tests.emu.test_intercept_routes import in_window

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("stream", ["legacy", "per-thread"])
@pytest.mark.parametrize("runtime", ["shared", "static"])
def test_the_runtime_leads_through_the_library(runtime: str, stream: str, tmp_path: Path) -> None:
    toolkit = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    nvcc = shutil.which("nvcc", path=f"{toolkit}:{os.environ['PATH']}")
    if nvcc is None:
        pytest.skip("there is no nvcc")
    program = tmp_path / runtime
    words = [nvcc, "-cudart", runtime, "--default-stream", stream]
    source = str(PROGRAMS / "runtime.c")
    subprocess.run([*words, source, "-o", str(program), "-ldl"], check=True)
    default = "cuStreamSynchronize_ptsz" if stream == "per-thread" else "cuStreamSynchronize"
    names = [default, "cuStreamSynchronize", "cuStreamSynchronize_ptsz"]
    for engine in ("", "native", "replay"):
        before = [sys.executable, "-m", "flowgpu", "run", "--engine", engine, "--"]
        words = [*before, str(program)] if engine else [str(program)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        addresses, *entry_points = (line.split() for line in done.stdout.splitlines())
        assert [in_window(int(word, 16)) for word in addresses] == [bool(engine)] * 2
        ours = [file == str(intercept_library()) for file, _ in entry_points]
        assert ours == [bool(engine)] * 3
        if engine == "native":  # prepared for replay it has those behind the exported ones
            assert [name for _, name in entry_points] == names
