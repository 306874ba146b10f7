#!/usr/bin/env python3
"""Print the folder of cuda.h: in $CUDA_HOME, the nvidia-cuda-runtime wheel, or a toolkit."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates() -> Iterator[Path]:
    """Folders to look in; the first with the header wins."""
    if "CUDA_HOME" in os.environ:
        yield Path(os.environ["CUDA_HOME"]) / "include"
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # CUDA 13 wheels share one folder, older ones have one a library.
        yield from (Path(folder) / "cu13" / "include", Path(folder) / "cuda_runtime" / "include")
    yield Path("/usr/local/cuda/include")


def main() -> int:
    for folder in candidates():
        if (folder / "cuda.h").is_file():
            print(folder)
            return 0
    print("find_cuda: no cuda.h: run `make setup`, or set CUDA_HOME", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
