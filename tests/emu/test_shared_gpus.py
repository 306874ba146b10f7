"""Devices that are no whole GPU of the job's own: those of a service, and parts of a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from flowgpu.errors import Unsupported
from flowgpu.image.reader import Image
from flowgpu.launch import GpuKind
from tests.emu.test_checkpoint import (
    ROOT,
    SECONDS,
    Run,
    command,
    emulated_machine,
    flowgpu,
    undisturbed,
)
from tests.unit.coordinator_job import wait_for

STEPS = 30
WORDS = ["workloads/nbody.py", "--steps", str(STEPS), "--step-delay", "0.1"]
JOB = [sys.executable, *WORDS]
# Forks a child once the driver is there, as loaders of data do. The child uses no GPU.
FORKING = """
import os, runpy, signal, sys
from cuda.bindings import driver
driver.cuInit(0)
if os.fork() == 0:
    parent = os.getppid()
    while os.getppid() == parent:
        signal.sigtimedwait([], 0.1)
    os._exit(0)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
Restore = Callable[[str], list[str]]
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


class Service:
    """A Multi-Process Service for the emulated GPU, and how many clients it has."""

    def __init__(self, folder: Path) -> None:
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder)}
        folder.mkdir()
        words = [sys.executable, ROOT / "tests/emu/mps_service.py", folder]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.wait(0)

    def wait(self, clients: int) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if int(line) == clients:
                return
        raise AssertionError("the service has ended")

    def end(self) -> None:
        assert self._process.stdout
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture
def emulated_service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "service")
    yield made
    made.end()


def test_the_engine_native_is_refused_to_a_client(
    tmp_path: Path, emulated_service: Service
) -> None:
    assert MPS in refusal(tmp_path, engine="native", **emulated_service.variables)


def test_a_client_is_suspended_and_comes_back(tmp_path: Path, emulated_service: Service) -> None:
    service = emulated_service
    with emulated_machine(**service.variables):
        run = Run("client", command("nbody"), tmp_path, "", "--engine", "auto")
        try:
            run.wait_lines(3)
            for keep in ((), ("--keep-context",), ()):
                done = flowgpu("suspend", run.name, *keep)
                assert done.returncode == 0, done.stderr
                if not keep:
                    service.wait(0)
                assert flowgpu("resume", run.name).returncode == 0
                run.wait_more(2)
            assert run.end() == 0
            assert run.lines == undisturbed("nbody")
        finally:
            flowgpu("kill", run.name)


@contextmanager
def images_of_clients(
    folder: Path, gpu: GpuKind, variables: dict[str, str]
) -> Iterator[tuple[Restore, list[str]]]:
    """Gives what restores images of two clients of a service and of a job that is none, and the
    lines that each says in all: `NAME-left` was made while it ran on, `NAME` at its end. The client
    `two` has a forked child."""
    with emulated_machine():
        options = ("--engine", "auto", "--gpu", gpu)
        done = flowgpu("run", "--gpu", gpu, "--", *command("nbody", **{"step-delay": 0}))
        assert done.returncode == 0, done.stderr
        expected = done.stdout.splitlines()
        # Python 3.12 warns of fork() where the driver has threads.
        forking = [sys.executable, "-W", "ignore", "-c", FORKING, *command("nbody")[1:]]
        with ExitStack() as stack:
            runs = []
            for name, words, own in (
                ("one", command("nbody"), variables),
                ("two", forking, variables),
                ("alone", command("nbody"), {}),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    for key, value in own.items():
                        patch.setenv(key, value)
                    runs.append(Run(name, words, folder, "", *options))
                stack.callback(runs[-1].kill)
                runs[-1].wait_lines(3)
            for run in runs:
                report = run.dump(folder / f"{run.name}-left", "--leave-running")
                assert report["live"] == (run.name == "alone")
                said = "Multi-Process Service" in report["rung_reason"]
                assert said == (run.name != "alone")
            for run in runs:
                run.wait_more(2)
                run.dump(folder / run.name)
                assert run.end() == 75

        def restore(name: str) -> list[str]:
            done = flowgpu("restore", folder / name)
            assert done.returncode == 0, done.stderr
            log = (folder / name / "output.log").read_text().splitlines()
            return log + done.stdout.splitlines()

        yield restore, expected


def test_clients_of_one_service_come_back_with_it_and_without(
    tmp_path: Path, emulated_service: Service
) -> None:
    service = emulated_service
    with images_of_clients(tmp_path, "emulated", service.variables) as (restore, expected):
        service.wait(0)
        for name in ("one-left", "two"):
            assert restore(name) == expected
            service.wait(1)
            service.wait(0)
        service.end()
        for name in ("one", "two-left", "alone"):
            assert restore(name) == expected


@contextmanager
def service(folder: Path) -> Iterator[dict[str, str]]:
    """A Multi-Process Service of our own; gives what its clients have in their environment."""
    folder.mkdir(exist_ok=True)
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    environment = os.environ | found
    with subprocess.Popen([CONTROL, "-f"], env=environment, stdin=subprocess.DEVNULL) as control:
        try:
            wait_for((folder / "control").exists, "the service", SECONDS)
            yield found
        finally:
            # Which ends the server too that it has started.
            with suppress(subprocess.TimeoutExpired):
                subprocess.run([CONTROL], input=b"quit -t 1\n", env=environment, timeout=SECONDS)
            control.terminate()  # if it could not be asked


real_service = pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"there is no {CONTROL}")


@pytest.mark.gpu
@real_service
def test_the_engine_native_is_refused_to_a_client_of_a_real_service(tmp_path: Path) -> None:
    with service(tmp_path) as variables:
        assert MPS in refusal(tmp_path, engine="native", gpu="nvidia", **variables)


@pytest.mark.gpu
@real_service
def test_clients_of_a_real_service_come_back_with_it_and_without(tmp_path: Path) -> None:
    with ExitStack() as until_it_ends:
        variables = until_it_ends.enter_context(service(tmp_path / "service"))
        with images_of_clients(tmp_path, "nvidia", variables) as (restore, expected):
            for name in ("one-left", "two"):
                assert restore(name) == expected
            until_it_ends.close()
            for name in ("one", "two-left", "alone"):
                assert restore(name) == expected


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
