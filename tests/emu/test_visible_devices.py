"""Checkpoints of a job that sees one of two devices, by CUDA_VISIBLE_DEVICES.

On the emulated GPU, and on two real ones where there are so many. The ghost is of FlowGPU's
environment, which may differ from the job's: what is device 0 to the one is device 1 to the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import RestoreFailed
from flowgpu.image.reader import Image
from flowgpu.launch import GpuKind
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu
from tests.emu.test_replay import LANES

ROOT = Path(__file__).resolve().parents[2]
# This program has no variables in a library: replay saves none where a job sees two devices.
JOB = [sys.executable, "workloads/streams_events.py", "--steps", "60", "--step-delay", "0.3"]
ONLY_1 = ["env", "CUDA_VISIBLE_DEVICES=1"]


@pytest.fixture(scope="module", autouse=True, params=LANES)
def lane(request: pytest.FixtureRequest) -> Iterator[GpuKind]:
    """A runtime folder of its own; the emulated machine has two devices."""
    kind: GpuKind = request.param
    if kind == "nvidia" and len(nvidia_uuids()) < 2:
        pytest.skip("it takes 2 GPUs")
    with pytest.MonkeyPatch.context() as patch, emulated_machine(FLOWGPU_EMU_DEVICES="2"):
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield kind


def nvidia_uuids() -> list[str]:
    words = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def expected(lane: GpuKind) -> list[str]:
    done = flowgpu("run", "--gpu", lane, "--", *JOB[:4], env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def runs(lane: GpuKind, tmp_path: Path) -> Iterator[Any]:
    started: list[Run] = []

    def start(name: str, words: list[str], *options: str) -> Run:
        started.append(Run(name, words, tmp_path, "", "--gpu", lane, *options))
        started[-1].wait_lines(5)
        return started[-1]

    yield start
    for run in started:
        run.kill()


def numbers(image: Path) -> list[int]:
    """The machine's numbers of the image's devices."""
    of_image = [gpu.uuid for gpu in Image(image).manifest.gpus]
    if of_image[0] in (real := nvidia_uuids() if shutil.which("nvidia-smi") else []):
        return [real.index(uuid) for uuid in of_image]
    return [int(uuid[-3:-2]) for uuid in of_image]  # the emulated ones' names end with them


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_job_that_sees_one_device_comes_back_on_it_again_and_again(
    engine: str, runs: Any, expected: list[str], tmp_path: Path
) -> None:
    run = runs(f"sees-one-{engine}", [*ONLY_1, *JOB], "--engine", engine)
    assert run.dump(tmp_path / "first")["engine"] == engine
    assert run.end(hurry=False) == 75
    assert numbers(tmp_path / "first") == [1]
    done = flowgpu("restore", tmp_path / "first", "--detach")
    assert done.returncode == 0, done.stderr
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "second")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "second") == [1]
    run.hurry()
    done = flowgpu("restore", tmp_path / "second")
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "second" / "output.log").read_text().splitlines()
    assert log + done.stdout.splitlines() == expected


@pytest.mark.parametrize(
    ("engine", "at_start", "ordinal", "at_restore"),
    [
        *(("native", *row) for row in (("1", 0, "1,0"), ("0,1", 1, "0"), ("1,0", 0, "0"))),
        *(("replay", *row) for row in (("1", 0, "0"), ("1", 0, "1,0"), ("1,0", 0, "0"))),
    ],
)
def test_a_job_comes_back_on_what_the_restore_sees(
    engine: str,
    at_start: str,
    ordinal: int,
    at_restore: str,
    runs: Any,
    expected: list[str],
    tmp_path: Path,
) -> None:
    """On its own device where that is visible, else on the other."""
    image, again = tmp_path / "image", tmp_path / "again"
    environment = {"CUDA_VISIBLE_DEVICES": at_restore}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", at_start)
        name = f"{engine}-sees-{at_start}-then-{at_restore}".replace(",", "-")
        run = runs(name, [*JOB, "--device", str(ordinal)], "--engine", engine)
        assert run.dump(image)["engine"] == engine
        assert run.end(hurry=False) == 75
    assert numbers(image) == [1]
    done = flowgpu("restore", image, "--detach", env=environment)
    assert done.returncode == 0, done.stderr
    done = flowgpu("pause-and-dump", run.name, "--output", again)
    assert done.returncode == 0, done.stderr
    assert numbers(again) == [0 if at_restore == "0" else 1]
    run.hurry()
    done = flowgpu("restore", again, env=environment)
    assert done.returncode == 0, done.stderr
    log = (again / "output.log").read_text().splitlines()
    assert log + done.stdout.splitlines() == expected


def test_the_driver_moves_no_job_that_sees_one_of_two_devices(
    runs: Any, expected: list[str], tmp_path: Path
) -> None:
    image = tmp_path / "image"
    run = runs("sees-one-moved", [*ONLY_1, *JOB], "--engine", "native")
    assert run.dump(image)["engine"] == "native"
    assert run.end() == 75
    done = flowgpu("restore", image, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == RestoreFailed.exit_code
    own = Image(image).manifest.gpus[0].uuid
    assert "sees only some of the machine's GPUs" in done.stderr
    assert f"restores on {own}" in done.stderr
    done = flowgpu("restore", image)
    assert done.returncode == 0, done.stderr
    assert run.lines + done.stdout.splitlines() == expected


def test_replay_needs_as_many_devices_as_the_number_of_the_one_says(
    runs: Any, expected: list[str], tmp_path: Path
) -> None:
    run = runs("second-of-two", [*JOB, "--device", "1"], "--engine", "replay")
    assert run.dump(tmp_path / "image")["engine"] == "replay"
    assert run.end() == 75
    done = flowgpu("restore", tmp_path / "image", env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.returncode == RestoreFailed.exit_code
    assert "knows a GPU by the number 1, and there are 1" in done.stderr
    done = flowgpu("restore", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert run.lines + done.stdout.splitlines() == expected


def test_a_job_that_sees_more_than_flowgpu_is_told_so_and_goes_on(
    runs: Any, expected: list[str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        run = runs("sees-more", [*ONLY_1, *JOB])
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
    assert done.returncode != 0
    assert "CUDA_VISIBLE_DEVICES" in done.stderr, done.stderr
    assert run.end() == 0
    assert run.lines == expected


def test_nothing_visible_is_no_gpu(lane: GpuKind) -> None:
    program = "from cuda.bindings import driver as cu; print(cu.cuInit(0)[0].name)"
    words = [sys.executable, "-m", "flowgpu", "run", "--gpu", lane, "--"]
    done = subprocess.run(
        [*words, sys.executable, "-c", program],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "CUDA_ERROR_NO_DEVICE\n", done.stderr
