#!/usr/bin/env python3
"""Print the requirements of pyproject.toml, one a line, or with `--check` name the missing ones.

Those of other extras than `dev` are printed too when they are named: `requirements.py tensorflow`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# The build uses only headers of the first, which a toolkit may have as well (find_cuda.py). Without
# the second, FlowGPU refuses `--compress` and images that it has packed.
DISPENSABLE = ("nvidia-cuda-runtime", "zstandard")
TESTS_NEED = ("psutil", "pytest", "pytest-timeout")  # without pytest-xdist they run one by one
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def main() -> int:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    runtime, dev = project["dependencies"], project["optional-dependencies"]["dev"]
    if "--check" not in sys.argv[1:]:
        extras = (project["optional-dependencies"][extra] for extra in sys.argv[1:])
        print("\n".join(sum(extras, runtime + dev)))
        return 0
    missing = {}
    for requirement in runtime + dev:
        name = re.split(r"[<>=!~ ]", requirement)[0]
        try:
            version(name)
        except PackageNotFoundError:
            missing[requirement] = name in TESTS_NEED or (
                requirement in runtime and name not in DISPENSABLE
            )
    for requirement, needed in missing.items():
        print(f"setup: {'missing' if needed else 'without'} {requirement}", file=sys.stderr)
    return 1 if any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
