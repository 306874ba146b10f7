"""Limits of the shell (`ulimit`) at run and at restore: they bind the job, and FlowGPU only where
it may not raise them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import errors
from tests.emu.test_cli_end_to_end import (
    SECONDS,
    flowgpu,
    read_lines,
    rest_of,
    runtime_dir,
    started,
)

__all__ = ["runtime_dir"]

pytestmark = pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv")

# Holds many descriptors and says which limits it has.
HOLDER = """
import os, resource, sys, time
files = [open(os.devnull) for _ in range(200)]
while not os.path.exists(sys.argv[1]):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
    time.sleep(0.02)
"""


def below(limit: str, *words: str) -> list[str]:
    """A command line without the right to raise limits, after one of a shell's commands."""
    drop = ["setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]
    return [*drop, "sh", "-c", f'{limit} && exec "$@"', "sh", *words]


def image_of(name: str, folder: Path, limit: str = "true") -> tuple[Path, list[str]]:
    """An image of a job, and what it said last."""
    command = [sys.executable, "-c", HOLDER, str(folder / "stop")]
    words = ["run", "--gpu", "emulated", "--name", name, "--", *below(limit, *command)]
    with started(*words) as process:
        said = read_lines(process, 2)
        done = flowgpu("pause-and-dump", name, "--output", folder / "image")
        assert done.returncode == 0, done.stderr
        rest_of(process)
    return folder / "image", said


def restore(image: Path, limit: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "flowgpu", "restore", str(image)]
    return subprocess.run(below(limit, *words), capture_output=True, text=True, timeout=SECONDS)


def test_too_few_descriptors_are_named_and_the_image_restores_with_more(
    runtime_dir: Path, tmp_path: Path
) -> None:
    image, _ = image_of("few", tmp_path)
    done = restore(image, "ulimit -n 100")
    assert done.returncode == errors.LimitTooLow.exit_code, done.stderr
    assert "CRIU's restore does not work where `ulimit -n` is 100: " in done.stderr
    (tmp_path / "stop").touch()
    assert restore(image, "ulimit -n 1000").returncode == 0


def test_soft_limits_of_the_shell_do_not_bind_a_restore(runtime_dir: Path, tmp_path: Path) -> None:
    image, _ = image_of("soft", tmp_path)
    (tmp_path / "stop").touch()
    assert restore(image, "ulimit -S -n 64 && ulimit -S -f 10").returncode == 0


def test_a_job_has_its_soft_limit_under_a_lower_hard_one(runtime_dir: Path, tmp_path: Path) -> None:
    image, said = image_of("lower", tmp_path, "ulimit -S -n 300")
    assert {line.split()[0] for line in said} == {"300"}
    words = [sys.executable, "-m", "flowgpu", "restore", str(image)]
    with subprocess.Popen(
        below("ulimit -n 2000", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert read_lines(process, 2) == ["300 2000"] * 2
        (tmp_path / "stop").touch()
        rest_of(process)
    assert process.returncode == 0


def test_a_restore_writes_no_large_files(runtime_dir: Path, tmp_path: Path) -> None:
    image, _ = image_of("small", tmp_path)
    (tmp_path / "stop").touch()
    done = restore(image, "ulimit -f 10")
    assert done.returncode == 0, done.stderr
