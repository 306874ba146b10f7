"""What a fault is injected into: jobs on the fakes, or on the real parts and the emulated GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowgpu import launch
from flowgpu.jobs import JobDir, Registry
from flowgpu.launch import EngineChoice
from tests.emu.test_checkpoint import end_emulator
from tests.unit.coordinator_job import FAKES, ROOT, Jobs


class EmulatedJobs(Jobs):
    """Jobs with the intercept library under the real coordinator and ghost."""

    coordinator = (sys.executable, "-P", "-m", "coordinator")

    def __init__(self, base: Path, states: Path) -> None:
        super().__init__(base, states)
        self.driver = launch.choose_driver("emulated")

    def task_environment(self, directory: JobDir) -> dict[str, str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
        return launch.task_env(env, self.driver, directory, self.registry.base)

    def ghost_environment(self) -> dict[str, str]:
        return launch.ghost_env(os.environ, self.driver, self.registry.base)

    def coordinator_environment(self) -> dict[str, str]:
        return launch.coordinator_env(os.environ)


TASKS = {
    "fakes": [sys.executable, str(FAKES / "task.py"), "3"],
    "emulated": [sys.executable, "-m", "tests.faults.task"],
}


def lane_name(kind: str, engine: EngineChoice) -> str:
    """What a document of results calls the lane: the GPU, and the engine if it was asked for."""
    return kind if engine == "auto" else f"{kind}, {engine}"


@contextmanager
def lane(name: str, folder: Path, engine: EngineChoice = "auto") -> Iterator[Jobs]:
    """The jobs of a lane, in a runtime folder whose path is short enough for sockets."""
    base, states = folder / "run", folder / "states"
    states.mkdir(parents=True)
    if name == "fakes":
        jobs = Jobs(base, states)
    else:
        jobs = EmulatedJobs(base, states)
        launch.start_emulator(Registry(base).base)
    jobs.engine = engine
    try:
        yield jobs
    finally:
        jobs.close()
        if name == "emulated":
            end_emulator(launch.emulator_socket(base))
