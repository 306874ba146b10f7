"""Devices that are no whole GPU of the job's own: those of a service, and parts of a GPU."""

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
from flowgpu.image.reader import Image
from flowgpu.launch import GpuKind
from tests.emu.test_checkpoint import (
    SECONDS,
    Run,
    command,
    emulated_machine,
    flowgpu,
    undisturbed,
)

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
PART = "NVIDIA A100 80GB PCIe MIG 3g.40gb"
TRIED = ("--engine", "replay", "--untried", "mig")
CONTROL = "nvidia-cuda-mps-control"


def refusal(
    folder: Path,
    *options: str,
    engine: str,
    gpu: GpuKind = "emulated",
    job: list[str] = JOB,
    **device: str,
) -> str:
    """What is said of a job on such a device, which is refused and goes on."""
    with emulated_machine(**device):
        run = Run(f"shared-{engine}", job, folder, "", "--gpu", gpu, "--engine", engine, *options)
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
    said = refusal(tmp_path, engine=engine, FLOWGPU_EMU_NAME=PART)
    assert "a part of a GPU (MIG)" in said


def test_the_engine_native_is_refused_on_a_part_of_a_gpu_also_where_it_is_to_be_tried(
    tmp_path: Path,
) -> None:
    options = ("--untried", "mig")
    said = refusal(tmp_path, *options, engine="native", FLOWGPU_EMU_NAME=PART)
    assert "a part of a GPU (MIG)" in said


def test_a_job_on_a_part_of_a_gpu_comes_back_on_it_or_on_another(tmp_path: Path) -> None:
    with emulated_machine(FLOWGPU_EMU_NAME=PART, FLOWGPU_EMU_DEVICES="2"):
        expected = undisturbed("nbody")
        seen = {}
        for part in "01":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CUDA_VISIBLE_DEVICES", part)
                run = Run(f"part-{part}", command("nbody"), tmp_path, "", *TRIED)
            try:
                run.wait_lines(3)
                run.dump(tmp_path / part, "--leave-running")
                run.wait_more(2)
                run.dump(tmp_path / f"{part}-last")
                assert run.end() == 75
            finally:
                run.kill()
            (gpu,) = Image(tmp_path / f"{part}-last").manifest.gpus
            seen[part] = gpu.uuid
        assert len(set(seen.values())) == 2
        assert all(uuid.startswith("MIG-") for uuid in seen.values())
        for image in ("0", "0-last", "1-last"):
            for uuid in seen.values():
                done = flowgpu("restore", tmp_path / image, env={"CUDA_VISIBLE_DEVICES": uuid})
                assert done.returncode == 0, done.stderr
                log = (tmp_path / image / "output.log").read_text().splitlines()
                assert log + done.stdout.splitlines() == expected
