"""A program that takes checkpoints of itself. Real coordinator, real CRIU, emulated GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.emu.gpu_job import GPU
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import FLOWGPU, ROOT, flowgpu, runs, runtime_dir

__all__ = ["runs", "runtime_dir"]  # fixtures

PROGRAM = (
    GPU
    + """
import flowgpu
def step(number):
    ok(cu.cuMemsetD8(memory, number, 4096))
    data = bytearray(4096)
    ok(cu.cuMemcpyDtoH(data, memory, 4096))
    print("step", number, data == bytes([number]) * 4096, flush=True)
for number in range(3):
    step(number)
"""
)
TAKES = """
made = flowgpu.checkpoint(sys.argv[1], wait={wait})
print("complete" if made.wait().done() else "", "restored" if made.restored else "", flush=True)
print(made.stall_seconds > 0 or made.restored)
for number in range(3, 6):
    step(number)
"""
BEFORE = [f"step {number} True" for number in range(3)]
AFTER = ["True", *(f"step {number} True" for number in range(3, 6))]


def run(program: str, *arguments: str, words: Sequence[str] = FLOWGPU) -> list[str]:
    """The lines of a job that ends by itself."""
    job = [sys.executable, "-c", program, *arguments]
    command = [*words, "run", "--gpu", "emulated", "--name", "sdk", "--", *job] if words else job
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("wait", [False, True])
def test_a_program_goes_on_after_its_checkpoint_and_a_copy_of_it_too(
    wait: bool, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    assert run(PROGRAM + TAKES.format(wait=wait), str(image)) == [*BEFORE, "complete ", *AFTER]
    for _ in range(2):
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.splitlines() == ["complete restored", *AFTER]


@pytest.mark.usefixtures("runs")
def test_a_restored_program_takes_the_next_checkpoint(tmp_path: Path) -> None:
    program = PROGRAM + "for name in ('one', 'two'):\n    made = flowgpu.checkpoint(\n"
    program += (
        "        f'{sys.argv[1]}/{name}', wait=True)\n    print(name, made.restored, flush=True)\n"
    )
    assert run(program, str(tmp_path)) == [*BEFORE, "one False", "two False"]
    (tmp_path / "two").rename(tmp_path / "first")
    restored = flowgpu("restore", tmp_path / "one")
    assert restored.stdout.splitlines() == ["one True", "two False"], restored.stderr
    assert flowgpu("restore", tmp_path / "two").stdout.splitlines() == ["two True"]


# What the first checkpoint says once there is another, and in a child.
SAID_LATER = """
import os
first = flowgpu.checkpoint(f"{sys.argv[1]}/one", wait=True)
second = flowgpu.checkpoint(f"{sys.argv[1]}/two", wait=True)
def tell(who):
    print(who, *(f"{one.restored} {one.done()}" for one in (first, second)), flush=True)
tell("program")
if os.fork() == 0:
    tell("child")
    os._exit(0)
os.wait()
"""


@pytest.mark.usefixtures("runs")
def test_each_checkpoint_tells_whether_its_own_image_was_restored(tmp_path: Path) -> None:
    said = ["program False True False True", "child False True False True"]
    assert run(PROGRAM + SAID_LATER, str(tmp_path)) == [*BEFORE, *said]
    restored = flowgpu("restore", tmp_path / "two")
    said = ["program False True True True", "child False True True True"]
    assert restored.stdout.splitlines() == said, restored.stderr


@pytest.mark.usefixtures("runs")
def test_a_checkpoint_that_fails_raises_its_error_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    program = (
        PROGRAM
        + """
from flowgpu.errors import FlowError
for options in ({}, {"engine": "none of ours"}):
    try:
        flowgpu.checkpoint(sys.argv[1], **options)
    except FlowError as error:
        print(type(error).__name__)
step(3)
"""
    )
    said = run(program, str(tmp_path))
    assert said == [*BEFORE, "OutputNotEmpty", "FlowError", "step 3 True"]
    assert os.listdir(tmp_path) == ["mine"]


def test_without_flowgpu_it_does_nothing_and_says_so_once(tmp_path: Path) -> None:
    program = (
        "import flowgpu, sys, warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    made = [flowgpu.checkpoint(sys.argv[1]) for _ in range(2)]\n"
        "print(len(said), made[0].wait().done(), made[1].stall_seconds, made[0].restored)\n"
    )
    assert run(program, str(tmp_path / "image"), words=()) == ["1 True 0.0 False"]
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("runs")
def test_a_program_in_c_does_the_same(tmp_path: Path) -> None:
    header = f"-I{ROOT / 'native' / 'include'}"
    program = compile_program("checkpoints_itself.c", tmp_path / "program", "-Wconversion", header)
    folder = tmp_path / 'with "quotes"'
    folder.mkdir()
    words = [*FLOWGPU, "run", "--gpu", "emulated", "--name", "c", "--", program, "image"]
    done = [
        subprocess.run(
            words,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        for _ in range(2)
    ]
    assert done[0].stdout.splitlines() == ["cut 1", "done 1 restored 0"]
    assert '"OutputNotEmpty"' in done[1].stdout
    restored = flowgpu("restore", folder / "image")
    assert restored.stdout.splitlines() == ["cut 1", "done 1 restored 1"], restored.stderr
    alone = subprocess.run([program, "alone"], cwd=folder, capture_output=True, text=True)
    assert alone.stdout.splitlines() == ["cut 1", "done 1 restored 0"]
    assert os.listdir(folder) == ["image"]
