"""Devices that are no whole GPU of the job's own: nothing of a process there can be taken apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu

STEPS = 30
JOB = [sys.executable, "workloads/nbody.py", "--steps", str(STEPS), "--step-delay", "0.1"]
ENGINES = pytest.mark.parametrize("engine", ["native", "replay"])


def is_refused(name: str, folder: Path, *, engine: str, **device: str) -> None:
    """A job on such a device is refused as `name`, and goes on."""
    with emulated_machine(**device):
        run = Run(f"shared-{engine}", JOB, folder, "", "--engine", engine)
        try:
            run.wait_lines(3)
            done = flowgpu("pause-and-dump", run.name, "--output", folder / "image")
            assert done.returncode == Unsupported.exit_code, done.stderr
            assert name in done.stderr
            assert not (folder / "image").exists()
            assert run.end() == 0
            assert len(run.lines) == STEPS + 1
        finally:
            flowgpu("kill", run.name)


@ENGINES
def test_a_job_of_the_multi_process_service_is_refused(tmp_path: Path, engine: str) -> None:
    name = "a GPU of the Multi-Process Service (MPS)"
    is_refused(name, tmp_path, engine=engine, FLOWGPU_EMU_MPS="1")


@ENGINES
def test_a_job_on_a_part_of_a_gpu_is_refused(tmp_path: Path, engine: str) -> None:
    device = "NVIDIA A100 80GB PCIe MIG 3g.40gb"
    is_refused("a part of a GPU (MIG)", tmp_path, engine=engine, FLOWGPU_EMU_NAME=device)
