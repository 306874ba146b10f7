"""What a fault is injected into: jobs on the fakes, or on the real parts and a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowgpu import launch
from flowgpu.host import probes
from flowgpu.jobs import JobDir, Registry
from flowgpu.launch import EngineChoice, GpuKind
from tests.emu.test_checkpoint import end_emulator
from tests.unit.coordinator_job import FAKES, ROOT, Jobs


class DriverJobs(Jobs):
    """Jobs with the intercept library under the real coordinator and ghost."""

    coordinator = (sys.executable, "-P", "-m", "coordinator")

    def __init__(self, base: Path, states: Path, gpu: GpuKind) -> None:
        super().__init__(base, states)
        self.gpu, self.driver = gpu, launch.choose_driver(gpu)

    def task_environment(self, directory: JobDir) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        return launch.task_env(env, self.driver, directory, self.registry.base, "native")

    def ghost_environment(self) -> dict[str, str]:
        return launch.ghost_env(os.environ, self.driver, self.registry.base)

    def coordinator_environment(self) -> dict[str, str]:
        return launch.coordinator_env(os.environ)


ON_A_GPU = [sys.executable, "-m", "tests.faults.task"]
TASKS = {
    "fakes": [sys.executable, str(FAKES / "task.py"), "3"],
    "emulated": ON_A_GPU,
    "nvidia": ON_A_GPU,
}


def gpu_of(lane: str) -> GpuKind:
    return "nvidia" if lane == "nvidia" else "emulated"


def lane_name(kind: str, engine: EngineChoice) -> str:
    """What a document of results calls the lane: the GPU, and the engine if it was asked for."""
    gpus = probes.driver(launch.choose_driver(kind).libcuda).gpus if kind == "nvidia" else []
    gpu = gpus[0][0] if gpus else kind
    return gpu if engine == "native" else f"{gpu}, {engine}"


@contextmanager
def lane(name: str, folder: Path, engine: EngineChoice = "native") -> Iterator[Jobs]:
    """The jobs of a lane, in a runtime folder whose path is short enough for sockets."""
    base, states = folder / "run", folder / "states"
    states.mkdir(parents=True)
    jobs = Jobs(base, states) if name == "fakes" else DriverJobs(base, states, gpu_of(name))
    if name == "emulated":
        launch.start_emulator(Registry(base).base)
    jobs.engine = engine
    try:
        yield jobs
    finally:
        jobs.close()
        if name == "emulated":
            end_emulator(launch.emulator_socket(base))
