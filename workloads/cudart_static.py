"""Build cudart_static.cu with nvcc and the static CUDA runtime, then become that program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import VerifyError, digest, guarded, verify


def find_nvcc() -> str:
    """Return nvcc from CUDA_HOME, PATH or the toolkit's usual place."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in homes:
        if home and os.access(Path(home, "bin", "nvcc"), os.X_OK):
            return str(Path(home, "bin", "nvcc"))
    found = shutil.which("nvcc")
    if found is None:
        raise VerifyError("nvcc was not found: install the CUDA toolkit or set CUDA_HOME")
    return found


def build() -> Path:
    """Return the program, built once for each version of its source."""
    source = Path(__file__).with_suffix(".cu")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flowgpu")
    program = cache / f"cudart_static-{digest(source.read_bytes())}"
    if program.exists():
        return program
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fresh = Path(folder, "program")
        command = [find_nvcc(), "-O2", "-cudart", "static", "-arch=native", "-o", str(fresh)]
        result = subprocess.run([*command, str(source)], capture_output=True, text=True)
        verify(result.returncode == 0, f"nvcc failed: {result.stderr.strip()}")
        fresh.replace(program)
    return program


def main() -> None:
    program = build()
    # Compiled kernels kept in the home folder would be open files at a checkpoint.
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    guarded(main)
