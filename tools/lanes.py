#!/usr/bin/env python3
"""Tests that run when what they test has changed.

    lanes.py files LANE      their files, for pytest
    lanes.py ignore          the options by which pytest leaves out the files of every lane
    lanes.py fresh LANE      fails where the lane's inputs are not those of its last passing run
    lanes.py passed LANE     notes the inputs as those of a passing run, in tests/lanes.json

`make test-LANE` runs a lane and notes that it has passed; CI runs a lane that is not fresh.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOTES = ROOT / "tests" / "lanes.json"


class Lane(NamedTuple):
    """Test files, and what they test beside themselves: patterns of the repository's files."""

    tests: tuple[str, ...]
    inputs: tuple[str, ...]


LANES = {
    # What the emulated GPU computes: each instruction, whole kernels, and Triton's.
    "emulator": Lane(
        tests=(
            "tests/emu/test_kernels.py",
            "tests/emu/test_ptx.py",
            "tests/emu/test_ptx_faults.py",
            "tests/emu/test_ptx_math.py",
            "tests/emu/test_ptx_opcodes.py",
            "tests/emu/test_ptx_threads.py",
            "tests/emu/test_emulated_cubin.py",
            "tests/emu/test_interpreter_bench.py",
            "tests/unit/test_kernel_results.py",
            "tests/unit/test_triton_kernels.py",
        ),
        inputs=(
            "native/emu/**",
            "native/common/**",
            "bench/interpreter.py",
            "tests/emu/array_lib.py",
            "tests/emu/cubin_*.py",
            "tests/emu/cuda_source.py",
            "tests/emu/image_reader.py",
            "tests/emu/kernel_*.py",
            "tests/emu/ptx_*.py",
            "tests/emu/triton_*",
            "tests/emu/triton_ptx/**",
            "tools/compile_triton.py",
            "pyproject.toml",
        ),
    ),
}


def digest(lane: Lane) -> str:
    """Of the names and bytes of the lane's files that git tracks."""
    pathspecs = [f":(glob){pattern}" for pattern in (*lane.tests, *lane.inputs)]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *pathspecs],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    found = hashlib.sha256()
    for name in sorted(filter(None, listed.split("\0"))):
        found.update(f"{name}\0".encode())
        found.update(hashlib.sha256((ROOT / name).read_bytes()).digest())
    return found.hexdigest()


def main(words: list[str]) -> int:
    verb, *names = words
    if verb == "ignore":
        files = (file for lane in LANES.values() for file in lane.tests)
        print(" ".join(f"--ignore={file}" for file in files))
        return 0
    (name,) = names
    lane = LANES[name]
    notes = json.loads(NOTES.read_text()) if NOTES.exists() else {}
    if verb == "files":
        print(" ".join(lane.tests))
    elif verb == "fresh":
        return 0 if notes.get(name) == digest(lane) else 1
    elif verb == "passed":
        NOTES.write_text(json.dumps(notes | {name: digest(lane)}, indent=1, sort_keys=True) + "\n")
    else:
        raise SystemExit(f"lanes.py: no verb {verb}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
