"""Devices that are no whole GPU of the job's own: nothing of a process there can be taken apart."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from flowgpu.launch import GpuKind
from tests.emu.test_checkpoint import SECONDS, Run, emulated_machine, flowgpu

STEPS = 30
WORDS = ["workloads/nbody.py", "--steps", str(STEPS), "--step-delay", "0.1"]
JOB = [sys.executable, *WORDS]
# Holds a connection to a server outside, as clients of the service do.
CLIENT = """
import os, socket, sys
service = socket.socket(socket.AF_UNIX)
service.connect(sys.argv[1])
service.set_inheritable(True)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
ENGINES = pytest.mark.parametrize("engine", ["native", "replay"])


MPS = "a GPU of the Multi-Process Service (MPS)"
CONTROL = "nvidia-cuda-mps-control"


def refusal(
    folder: Path,
    *,
    engine: str,
    gpu: GpuKind = "emulated",
    job: list[str] = JOB,
    **device: str,
) -> str:
    """What is said of a job on such a device, which is refused and goes on."""
    with emulated_machine(**device):
        run = Run(f"shared-{engine}", job, folder, "", "--gpu", gpu, "--engine", engine)
        try:
            run.wait_lines(3)
            done = flowgpu("pause-and-dump", run.name, "--output", folder / "image")
            assert done.returncode == Unsupported.exit_code, done.stderr
            assert not (folder / "image").exists()
            assert run.end() == 0
            assert len(run.lines) == STEPS + 1
            return done.stderr
        finally:
            flowgpu("kill", run.name)


@ENGINES
def test_a_job_of_the_multi_process_service_is_refused(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as control, ThreadPoolExecutor() as pool:
        control.bind(str(path))
        control.listen()
        control.settimeout(SECONDS)
        accepted = pool.submit(control.accept)
        job = [sys.executable, "-c", CLIENT, str(path), *WORDS]
        assert MPS in refusal(tmp_path, engine=engine, job=job, FLOWGPU_EMU_MPS="1")
        accepted.result()[0].close()


@contextmanager
def service(folder: Path) -> Iterator[dict[str, str]]:
    """A Multi-Process Service of our own; gives what its clients have in their environment."""
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = os.environ | found
    with subprocess.Popen([CONTROL, "-f"], env=environment, stdin=subprocess.DEVNULL) as control:
        try:
            yield found
        finally:
            # Which ends the server too that it has started.
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([CONTROL], input=b"quit -t 1\n", env=environment, timeout=SECONDS)
            control.terminate()  # if it could not be asked


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"there is no {CONTROL}")
@ENGINES
def test_a_job_of_a_real_service_is_refused(tmp_path: Path, engine: str) -> None:
    with service(tmp_path) as variables:
        assert MPS in refusal(tmp_path, engine=engine, gpu="nvidia", **variables)


@ENGINES
def test_a_job_on_a_part_of_a_gpu_is_refused(tmp_path: Path, engine: str) -> None:
    device = "NVIDIA A100 80GB PCIe MIG 3g.40gb"
    said = refusal(tmp_path, engine=engine, FLOWGPU_EMU_NAME=device)
    assert "a part of a GPU (MIG)" in said
