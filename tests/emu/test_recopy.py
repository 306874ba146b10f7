"""Mode recopy: what is in use is copied while the job runs, and what it has changed since again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import CheckpointFailed, FlowError, ModeUnusable
from flowgpu.image.reader import Image
from tests.emu.gpu_job import GPU, said_with_a_checkpoint_between
from tests.emu.series_task import CHANGING, CHUNK, CONSTANT
from tests.emu.test_checkpoint import ROOT, Run, emulated_machine, flowgpu, runs

__all__ = ["runs"]  # a fixture

GPUS, STEPS = 2, 30  # it waits near its end until it is hurried
RECOPY = ("--mode", "recopy")


def command(delay: float = 0.05) -> list[str]:
    program = str(ROOT / "tests" / "emu" / "series_task.py")
    return [sys.executable, program, str(GPUS), str(STEPS), str(delay)]


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[None]:
    """A runtime folder of its own, so that its emulated device has two GPUs."""
    with emulated_machine(FLOWGPU_EMU_DEVICES=str(GPUS)):
        yield


@pytest.fixture(scope="module")
def expected() -> list[str]:
    done = flowgpu("run", "--gpu", "emulated", "--", *command(0))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def ends_as(image: Path, expected: list[str]) -> None:
    for _ in range(2):
        done = flowgpu("restore", image)
        assert done.returncode == 0, done.stderr
        assert [*(image / "output.log").read_text().splitlines(), *done.stdout.splitlines()] == (
            expected
        )


def is_recopied(report: dict[str, Any], image: Path) -> None:
    assert report["mode"] == "recopy"
    assert report["gpu_bytes_before"] >= (CONSTANT + GPUS * CHANGING) * CHUNK
    # In the pause at most what a step writes; what nobody has written comes from the copy before.
    assert report["gpu_bytes_stored"] <= GPUS * CHANGING * CHUNK
    assert report["gpu_bytes_linked"] >= CONSTANT * CHUNK
    assert Image(image).manifest.mode == "recopy"
    Image(image).verify()


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_job_that_is_left_running_and_one_that_ends_store_what_has_changed(
    engine: str, runs: Any, tmp_path: Path, expected: list[str]
) -> None:
    run: Run = runs(f"recopy-{engine}", command(), "", "--engine", engine)
    run.wait_lines(3)
    copy, image = tmp_path / "copy", tmp_path / "image"
    done = flowgpu("checkpoint", run.name, "--output", copy, "--json", *RECOPY)
    assert done.returncode == 0, done.stderr
    is_recopied(json.loads(done.stdout), copy)
    report = run.dump(image, *RECOPY)
    is_recopied(report, image)
    # Pages of a job that ends are copied before as well.
    assert report["rung"] == ("early-pages" if engine == "replay" else "all-pages")
    assert run.end() == 75
    assert expected[: len(run.lines)] == run.lines
    run.hurry()  # what is restored, too
    ends_as(image, expected)
    ends_as(copy, expected)


def test_images_of_a_series_share_what_was_copied_before(
    runs: Any, tmp_path: Path, expected: list[str]
) -> None:
    run: Run = runs("recopy-series", command(), "", "--engine", "replay")
    run.wait_lines(3)
    words = ("--store", tmp_path / "store", "--every", 0.5, "--count", 3, "--json")
    done = flowgpu("checkpoint", run.name, *words, *RECOPY)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in reports[1:]:
        # Nobody writes the constant part: what two passes copy is of the other one.
        assert report["gpu_bytes_before"] <= 2 * GPUS * CHANGING * CHUNK
    run.kill()
    run.hurry()  # what is restored, too
    ends_as(Path(reports[-1]["image"]), expected)


def test_what_it_cannot_be_used_with_is_named_before_the_pause(
    runs: Any, tmp_path: Path, expected: list[str]
) -> None:
    run: Run = runs("recopy-not", command())
    run.wait_lines(3)
    words = ("pause-and-dump", run.name, "--output", tmp_path / "image")
    done = flowgpu(*words, *RECOPY, "--without", "dedup")
    assert done.returncode == ModeUnusable.exit_code
    assert "mode recopy: --without dedup stores every chunk anew" in done.stderr
    done = flowgpu(*words, "--mode", "cow")
    assert done.returncode == FlowError.exit_code
    assert "'mode' of a checkpoint cannot be cow" in done.stderr
    assert not list(tmp_path.glob("image*"))
    assert run.end() == 0
    assert run.lines == expected


# Its image is made before the job uses the GPU.
BEGINS_LATER = f"""
import os, sys, time
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
{GPU}
print(gpu())
"""


@pytest.mark.parametrize("mode", ["cow", "recopy", "stop"])
def test_a_job_that_does_not_use_a_gpu_yet_is_copied_in_each_mode(
    mode: str, tmp_path: Path
) -> None:
    name, options = f"later-{mode}", ("--leave-running", "--mode", mode)
    done, lines = said_with_a_checkpoint_between(name, "auto", BEGINS_LATER, tmp_path, "", *options)
    assert done.returncode == 0, done.stderr
    assert lines == ["ready", "True"]
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines() == ["True"]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_copy_that_fails_before_the_pause_or_in_it_leaves_the_job_as_it_was(
    nth: int, runs: Any, tmp_path: Path, expected: list[str]
) -> None:
    """Two copies before, and the one in the pause."""
    fault = tmp_path / "fault"
    fault.write_text(f"ghost_dump:{nth}")
    run: Run = runs(f"recopy-fault-{nth}", command(), f"@{fault}")
    run.wait_lines(3)
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image", *RECOPY)
    assert done.returncode == CheckpointFailed.exit_code, done.stderr
    assert ("in phase PREPARE" in done.stderr) == (nth < 3)
    fault.write_text("")
    assert not list(tmp_path.glob("image*"))
    run.dump(tmp_path / "image", *RECOPY)
    assert run.end() == 75
    assert expected[: len(run.lines)] == run.lines
