"""A job that holds all device memory that the driver gives is dumped, restored and goes on.

The emulated device has room for the job's context, its memory and nothing else: a context takes
64 MiB of it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowgpu.errors import CheckpointFailed
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from flowgpu.launch import emulated_driver, emulator_socket
from tests.emu.driver_lib import CALLER
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu
from tests.unit.coordinator_job import children_like, wait_for

MEMORY = 256 << 20
WITHOUT_ROOM = 120 << 20  # too small a device for a room (native/vmm/room.cpp)
CONTEXT = 64 << 20
STEPS, DELAY = 11, 0.4


@contextlib.contextmanager
def device_of(memory: int) -> Iterator[Path]:
    """A runtime folder with a small device of its own."""
    sizes = {"FLOWGPU_EMU_MEMORY": str(memory), "FLOWGPU_EMU_CONTEXT": str(CONTEXT)}
    with emulated_machine(**sizes) as base:
        yield base


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[Path]:
    with device_of(MEMORY) as base:
        yield base


class Full(Run):
    """The program of tests/gpu/full_gpu.py under `flowgpu run`."""

    def __init__(
        self, name: str, ghost: str, folder: Path, *, steps: int = STEPS, engine: str = "native"
    ) -> None:
        self.ghost, self.steps, self.go = ghost, steps, folder / f"{name}.go"
        program = [sys.executable, "tests/gpu/full_gpu.py", "--go", str(self.go)]
        program += ["--steps", str(steps), "--step-delay", str(DELAY)]
        super().__init__(name, program, folder, "", "--ghost", ghost, "--engine", engine)

    def fill(self) -> None:
        """Let the job take its memory, once the ghost has what it wants, and make some steps."""
        self.wait_lines(1)
        if self.ghost == "warm":
            wait_for(lambda: "has contexts on GPUs [0]" in self.log, "a warm ghost")
        self.go.touch()
        self.wait_lines(4)

    @property
    def record(self) -> dict[str, Any]:
        jobs = json.loads(flowgpu("ps", "--all", "--json").stdout)
        return next(job for job in jobs if job["name"] == self.name)

    @property
    def log(self) -> str:
        return Registry().dir(self.record["id"]).coordinator_log.read_text()

    def ghosts(self) -> list[int]:
        """Ids of the job's ghosts."""
        return children_like(self.record["coordinator_pid"], "coordinator.ghost")

    @property
    def held(self) -> int:
        return int(self.lines[1].split()[1])


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    """Starts jobs and fills the device with them; what still runs at the end is killed."""
    started: list[Full] = []

    def start(name: str, ghost: str, engine: str = "native") -> Full:
        run = Full(name, ghost, tmp_path, engine=engine)
        started.append(run)
        run.fill()
        return run

    yield start
    for run in started:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Lines of runs that nobody disturbed, by the ghost that took memory beside them."""
    found = {}
    for ghost in ("auto", "warm"):
        run = Full(f"undisturbed-{ghost}", ghost, tmp_path_factory.mktemp("undisturbed"))
        run.fill()
        assert run.end() == 0
        found[ghost] = run.lines
    return found


def restored_lines(image: Path, *options: str) -> list[str]:
    done = flowgpu("restore", image, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("engine", ["native", "replay"])
@pytest.mark.parametrize(("ghost", "used"), [("auto", "late"), ("warm", "warm")])
def test_a_full_gpu_is_dumped_and_restored(
    ghost: str,
    used: str,
    engine: str,
    runs: Any,
    undisturbed: dict[str, list[str]],
    tmp_path: Path,
) -> None:
    run = runs(f"full-{ghost}-{engine}", ghost, engine)
    if ghost == "auto":
        assert run.held > MEMORY - CONTEXT - (8 << 20)
    run.dump(tmp_path / "image")
    assert run.end() == 75
    manifest = Image(tmp_path / "image").manifest
    assert (manifest.ghost, manifest.job.ghost, manifest.engine) == (used, ghost, engine)
    lines = run.lines + restored_lines(tmp_path / "image")
    assert lines == undisturbed[ghost]
    assert json.loads(flowgpu("inspect", tmp_path / "image", "--json").stdout)["ghost"] == used


@pytest.mark.parametrize(("ghost", "used"), [("auto", "late"), ("warm", "warm")])
def test_a_full_gpu_is_dumped_again_and_again_while_its_job_runs_on(
    ghost: str, used: str, runs: Any, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    run = runs(f"running-{ghost}", ghost)
    before = run.ghosts()
    assert len(before) == (1 if ghost == "warm" else 0)
    for name in ("first", "second"):
        run.dump(tmp_path / name, "--leave-running")
        assert Image(tmp_path / name).manifest.ghost == used
        assert run.ghosts() == before
    assert run.end() == 0
    assert run.lines == undisturbed[ghost]
    for name in ("first", "second"):
        again = restored_lines(tmp_path / name)
        assert again == undisturbed[ghost][-len(again) :]
        assert len(again) > 1


def test_without_room_for_the_drivers_checkpoint_it_is_refused_and_the_job_runs_on(
    tmp_path: Path,
) -> None:
    with device_of(WITHOUT_ROOM):
        run = Full("no-room", "auto", tmp_path)
        try:
            run.fill()
            assert run.held > WITHOUT_ROOM - CONTEXT - (4 << 20)
            for _ in range(2):
                done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
                assert done.returncode == 96, done.stderr
                assert "the driver's own checkpoint needs 4 MiB" in done.stderr
            assert "strip" not in run.log
            assert not list(tmp_path.glob("image*"))
            assert run.end() == 0
            assert len(run.lines) == 2 + STEPS + 1
        finally:
            run.kill()


# Takes all memory, gives some of it back when it is told to, and counts.
GREEDY = """
import os, sys, time
from pathlib import Path
from tests.emu.driver_lib import cu, ok, start
start()
held = []
while True:
    result, address = cu.cuMemAlloc(2 << 20)
    if result != cu.CUresult.CUDA_SUCCESS:
        break
    held.append(address)
print("full", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
for address in held[8:]:
    ok(cu.cuMemFree(address))
step, left = 0, 5
while left:
    ok(cu.cuCtxSynchronize())
    print(step, flush=True)
    step, left = step + 1, left - os.path.exists(os.environ["WORKLOAD_HURRY"])
    time.sleep(0.05)
"""


def test_a_process_that_another_tool_has_spoilt_is_explained_and_runs_on(tmp_path: Path) -> None:
    with device_of(WITHOUT_ROOM) as base:
        go = tmp_path / "go"
        run = Run("spoilt", [sys.executable, "-c", GREEDY, str(go)], tmp_path)
        try:
            run.wait_lines(1)
            (job,) = json.loads(flowgpu("ps", "--json").stdout)
            tool = {
                **os.environ,
                "LD_LIBRARY_PATH": str(emulated_driver().parent),
                "FLOWGPU_EMU_SOCKET": str(emulator_socket(base)),
            }
            for words, answer in (
                (["Lock", str(job["root_pid"]), "5000"], "CUDA_SUCCESS"),
                (["Checkpoint", str(job["root_pid"])], "CUDA_ERROR_OUT_OF_MEMORY"),
                (["Unlock", str(job["root_pid"])], "CUDA_SUCCESS"),
            ):
                command = [sys.executable, "-c", CALLER, *words]
                done = subprocess.run(command, env=tool, capture_output=True, text=True, check=True)
                assert done.stdout.strip() == answer
            go.touch()
            run.wait_lines(4)
            done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
            assert done.returncode == CheckpointFailed.exit_code, done.stderr
            assert "cannot be checkpointed any more" in done.stderr
            assert not list(tmp_path.glob("image*"))
            assert run.end() == 0
            assert run.lines == ["full", *map(str, range(len(run.lines) - 1))]
        finally:
            run.kill()


def test_a_warm_ghost_that_was_killed_is_made_up_for(
    runs: Any, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    run = runs("killed", "warm")
    (ghost,) = run.ghosts()
    psutil.Process(ghost).kill()
    run.dump(tmp_path / "image")
    run.hurry()
    assert restored_lines(tmp_path / "image") == undisturbed["warm"][len(run.lines) :]


def test_a_restored_job_keeps_its_choice_or_gets_another(
    runs: Any, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    run = runs("choice", "auto")
    run.dump(tmp_path / "first")
    run.end(hurry=False)
    # Earlier versions offered a choice that is no more: it is taken as the usual one.
    manifest = Image(tmp_path / "first").manifest
    old = dataclasses.replace(manifest, job=dataclasses.replace(manifest.job, ghost="cold"))
    (tmp_path / "first" / "manifest.json").write_bytes(old.to_bytes())
    done = flowgpu("restore", tmp_path / "first", "--detach")
    assert done.returncode == 0, done.stderr
    assert run.record["ghost"] == "auto"
    run.dump(tmp_path / "second")
    done = flowgpu("restore", tmp_path / "second", "--ghost", "warm", "--detach")
    assert done.returncode == 0, done.stderr
    assert run.record["ghost"] == "warm"
    run.hurry()
    wait_for(lambda: run.record["state"] == "exited", "the end of the job")
    assert flowgpu("logs", run.name).stdout.splitlines() == undisturbed["auto"]


@pytest.mark.parametrize("fault", ["strip", "ghost_import", "ghost_dump", "criu_dump", "commit"])
def test_what_fails_on_a_full_gpu_is_undone(
    fault: str, runs: Any, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWGPU_FAULT", f"{fault}:1")
        run = runs(f"fault-{fault.replace('_', '-')}", "auto")
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image")
    assert done.returncode == 73, done.stderr
    assert run.end() == 0
    assert run.lines == undisturbed["auto"]
