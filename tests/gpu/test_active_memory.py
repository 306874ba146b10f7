"""Active memory of real PyTorch programs on a real GPU: what the coordinator takes for active is
what PyTorch's own snapshot has, at every stop, and the programs go on right after each hand-over.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.active import active_ranges, merge
from flowgpu import launch
from tests.emu import intercept_lib as lib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not here"),
]
SETTINGS = ["", "expandable_segments:True", "backend:native,max_split_size_mb:64"]


class Torch:
    """tests/gpu/active_steps.py as a task, with the coordinator's end of its connection."""

    def __init__(self, folder: Path, setting: str) -> None:
        self.coordinator = lib.Coordinator(folder / "task.sock")
        environment = dict(os.environ) | {
            "LD_PRELOAD": f"{launch.intercept_library()}:{launch.memory_stub()}",
            "FLOWGPU_REAL_LIBCUDA": str(launch.choose_driver("nvidia").libcuda),
            "FLOWGPU_SOCKET": str(folder / "task.sock"),
            "PYTORCH_CUDA_ALLOC_CONF": setting,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.active_steps"],
            cwd=lib.ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stops(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdin and self.process.stdout
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)
            yield found
            if found["stop"] != "end":
                self.process.stdin.write("\n")
                self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
        self.coordinator.close()


def expected(rows: np.ndarray, segments: list[dict[str, Any]]) -> list[list[int]]:
    """Blocks in segments of the common pools, all of everything else; as places."""
    ranges = []
    for address, size, place in rows.tolist():
        owner = next((s for s in segments if 0 <= address - s["address"] < s["bytes"]), None)
        if owner is None or owner["private"]:
            ranges.append([place, size])
            continue
        for start, length in owner["blocks"]:
            first, end = max(start, address), min(start + length, address + size)
            if first < end:
                ranges.append([first - address + place, end - first])
    merged: list[list[int]] = merge(np.array(ranges, np.uint64).reshape(-1, 2)).tolist()
    return merged


def look(task: lib.Connection) -> tuple[np.ndarray, list[list[int]]]:
    """Hand the task's memory over, give it back, and tell its allocations and active ranges."""
    ghost = lib.Ghost()
    try:
        lib.export(task, ghost)
        task.close_gate()
        assert task.live
        task.ok(lib.Message.HANDOVER)
        rows = np.array([[r.address, r.size, r.place] for r in ghost.allocations], np.uint64)
        rows = rows.reshape(-1, 3)
        found: list[list[int]] = active_ranges(rows, task.live).tolist()
        assert lib.map_back(task, ghost).status == lib.Status.OK
        task.ok(lib.Message.OPEN)
    finally:
        ghost.close()
    return rows, found


@pytest.mark.parametrize("setting", SETTINGS, ids=["default", "expandable", "split"])
def test_active_memory_is_what_the_allocator_has_given_out(setting: str, tmp_path: Path) -> None:
    program = Torch(tmp_path, setting)
    try:
        task = program.coordinator.accept()
        names = []
        for report in program.stops():
            name, segments = report["stop"], report["segments"]
            names.append(name)
            assert task.live
            given = sum(size for segment in segments for _, size in segment["blocks"])
            assert task.live.live_bytes() == given, name
            if name != "end":
                rows, found = look(task)
                assert found == expected(rows, segments), name
        assert program.process.wait(60) == 0
        assert names[-1] == "end" and len(names) >= 16
    finally:
        program.close()
