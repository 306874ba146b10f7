"""A job that holds all device memory that the driver gives, on a real GPU: dumped, left running,
restored, with a ghost that is warm, cold, or waits for the strip.

Another process takes all but FLOWGPU_TEST_ROOM GiB (8) first, so that images stay small; the job
gets the rest to the last 2 MiB. It checks every word itself. `pytest -s` shows the numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.image.reader import Image
from flowgpu.launch import GpuKind
from tests.emu.support_lib import ENGINES
from tests.gpu.job import Job
from tests.gpu.site import Site
from tests.unit.coordinator_job import wait_for

KIND: GpuKind = "emulated" if os.environ.get("FLOWGPU_TEST_GPU") == "emulated" else "nvidia"
ROOM = int(os.environ.get("FLOWGPU_TEST_ROOM", "8")) << 30
PROGRAM = [sys.executable, "tests/gpu/full_gpu.py"]
STEPS, DELAY = 40, 0.1
SECONDS = 100.0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWGPU_EMU_MEMORY", "256M")
        with Site(KIND) as made:
            yield made


@pytest.fixture(scope="module", autouse=True)
def others(site: Site) -> Iterator[None]:
    """A process that has most of a real GPU."""
    if KIND == "emulated":
        yield
        return
    with subprocess.Popen(
        [*PROGRAM, "--take-but", str(ROOM)],
        env=site.plain_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    ) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"taken\n"
        yield
        process.stdin.close()


class Full:
    """The job, holding all that is left."""

    def __init__(self, site: Site, ghost: str, engine: str, folder: Path) -> None:
        go, self.ghost, self.engine, self.site = folder / "go", ghost, engine, site
        scale = "big" if KIND == "nvidia" else "small"
        words = ["--steps", str(STEPS), "--step-delay", str(DELAY), "--scale", scale]
        command = [*PROGRAM, *words, "--go", str(go)]
        options = ["--ghost", ghost, "--engine", engine]
        self.job = Job(site, f"full-{ghost}-{folder.name}", command, folder, options)
        self.deadline = time.monotonic() + SECONDS
        self.images = site.images / self.job.name
        self.images.mkdir()
        self.job.start(self.deadline)
        wait_for(lambda: "context" in self.output, "the context")
        if ghost == "warm":
            wait_for(lambda: "has contexts on GPUs" in self.log, "a warm ghost")
        go.touch()
        self.job.wait_step(2, self.deadline)

    @property
    def output(self) -> str:
        path = self.job.directory.output_log
        return path.read_text() if path.exists() else ""

    @property
    def log(self) -> str:
        return self.job.directory.coordinator_log.read_text()

    def dump(self, name: str, ghost: str, *, leave_running: bool = False) -> Path:
        image = self.images / name
        report = self.job.dump(image, self.deadline, leave_running=leave_running)
        assert report is not None and report["engine"] == self.engine
        manifest = Image(image).manifest
        show(self, f"dump {name}", {**report, "ghost": manifest.ghost})
        assert manifest.ghost == ghost
        return image

    def restore(self, image: Path) -> None:
        show(self, f"restore {image.name}", self.job.restore(image, self.deadline))

    def ends_well(self) -> None:
        """Every step was made once and found every word as the step before left it."""
        assert self.job.wait_end(self.deadline) == 0, self.output
        steps = [line.split()[1] for line in self.output.splitlines() if line.startswith("step ")]
        assert steps == [str(n) for n in range(STEPS)]


def show(full: Full, what: str, report: dict[str, Any]) -> None:
    kept = {key: value for key, value in report.items() if key not in ("job", "image", "engine")}
    print(f"\n{full.ghost}, {full.engine}: {what}: {json.dumps(kept)}")


@pytest.fixture(params=ENGINES)
def start(site: Site, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    started: list[Full] = []

    def one(ghost: str) -> Full:
        started.append(Full(site, ghost, request.param, tmp_path))
        print("\n" + started[-1].output.splitlines()[1])
        return started[-1]

    yield one
    for full in started:
        full.job.kill()


def test_a_job_with_all_memory_is_dumped_and_restored(start: Any) -> None:
    full = start("auto")
    image = full.dump("image", "late")
    full.restore(image)
    full.ends_well()


def test_it_goes_on_after_a_checkpoint(start: Any) -> None:
    full = start("auto")
    full.dump("image", "late", leave_running=True)
    full.ends_well()


def test_a_warm_ghost_takes_two_checkpoints_and_the_job_is_restored(start: Any) -> None:
    full = start("warm")
    full.dump("first", "warm", leave_running=True)
    image = full.dump("second", "warm")
    full.restore(image)
    full.ends_well()
