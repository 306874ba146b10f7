"""A process that has rewound its driver goes through CRIU as any other, and CUDA begins anew."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from flowgpu.host.criu import Criu
from tests.emu.driver_cases import REWINDING
from tests.emu.forks import Forks
from tests.emu.test_driver import ROOT, cases, device_environment, nothing_is_left, passes
from tests.gpu.strips import repeat
from tests.patience import SECONDS

__all__ = ["cases"]


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not (folder / name).exists():
        assert time.monotonic() < deadline, (folder / "task.log").read_text()
        time.sleep(0.005)


def through_criu(folder: Path, environment: Mapping[str, str], criu: Criu) -> None:
    with (folder / "task.log").open("wb") as log:
        task = subprocess.Popen(
            [sys.executable, "-m", "tests.emu.rewind_task", str(folder)],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        for life in (1, 2):
            wait_for(folder, f"stripped.{life}")
            images = folder / f"images.{life}"
            images.mkdir()
            criu.dump(task.pid, images)
            os.kill(task.pid, signal.SIGKILL)
            os.waitpid(task.pid, 0)
            assert criu.restore(images) == task.pid
            os.kill(task.pid, signal.SIGCONT)
            (folder / f"go.{life}").touch()
        wait_for(folder, "stripped.3")
        (folder / "go.3").touch()
        wait_for(folder, "done")
        code = os.waitstatus_to_exitcode(os.waitpid(task.pid, 0)[1])
        assert code == 7, (folder / "task.log").read_text()
    finally:
        task.returncode = 0  # it has been waited for above, or is killed here
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(task.pid, signal.SIGKILL)
            os.waitpid(task.pid, 0)


@pytest.mark.parametrize("name", sorted(REWINDING))
def test_an_emulated_driver_is_rewound(name: str, cases: Forks, tmp_path: Path) -> None:
    passes(name, cases, tmp_path)


def test_a_rewound_process_goes_through_criu(criu: Criu, tmp_path: Path) -> None:
    through_criu(tmp_path, device_environment(tmp_path), criu)
    nothing_is_left(tmp_path / "device.log")


@pytest.mark.gpu
def test_a_process_rewound_on_a_gpu_goes_through_criu(criu: Criu, tmp_path: Path) -> None:
    through_criu(tmp_path, os.environ, criu)


def test_cuda_ends_and_is_made_anew_again_and_again() -> None:
    name, rounds, _, _, end = repeat("streams", "emulated", rounds=8)
    assert (name, rounds, end) == ("streams", 8, "ok")
