"""A device that the Multi-Process Service shares: nothing of a process there can be taken apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu

STEPS = 30
JOB = [sys.executable, "workloads/nbody.py", "--steps", str(STEPS), "--step-delay", "0.1"]


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[None]:
    """A runtime folder of its own, with a device of the service."""
    with emulated_machine(FLOWGPU_EMU_MPS="1"):
        yield


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_job_of_the_multi_process_service_is_refused(tmp_path: Path, engine: str) -> None:
    run = Run(f"mps-{engine}", JOB, tmp_path, "", "--engine", engine)
    try:
        run.wait_lines(3)
        done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
        assert done.returncode == Unsupported.exit_code, done.stderr
        assert "a GPU of the Multi-Process Service (MPS)" in done.stderr
        assert not (tmp_path / "image").exists()
        assert run.end() == 0
        assert len(run.lines) == STEPS + 1
    finally:
        flowgpu("kill", run.name)
