"""A job whose runtime folder is full: it goes on, and what is lost is said."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu import errors
from flowgpu.launch import emulator_socket
from tests.emu.test_cli_end_to_end import end_emulator, flowgpu, job, read_lines, rest_of, started

TALKER = """
import os, sys, time
def until(name):
    while not os.path.exists(os.path.join(sys.argv[1], name)):
        time.sleep(0.01)
print("ready", flush=True)
until("go")
for n in range(200_000):  # many times what a pipe takes
    print(n)
print("last of many", flush=True)
open(os.path.join(sys.argv[1], "said"), "w").close()
until("stop")
print("end", flush=True)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder with room for a little."""
    base = Path(tempfile.mkdtemp(prefix="flowgpu-"))
    options = "size=256k,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(base)], check=True)
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(base))
    yield base
    end_emulator(emulator_socket(base))
    subprocess.run(["umount", "--lazy", str(base)], check=True)
    base.rmdir()


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "fill").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_runtime_folder_costs_a_job_its_output_alone(folder: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TALKER, str(tmp_path)]
    with started("run", "--gpu", "emulated", "--name", "talker", "--", *words) as process:
        assert read_lines(process, 1) == ["ready"]
        fill(folder)
        (tmp_path / "go").touch()
        while not (tmp_path / "said").exists():
            assert process.poll() is None
        refused = flowgpu("run", "--gpu", "emulated", "--", "true")
        assert refused.returncode == errors.RuntimeDirUnsafe.exit_code, refused.stderr
        assert "No space left on device" in refused.stderr
        done = flowgpu(
            "pause-and-dump", "talker", "--output", tmp_path / "image", "--leave-running"
        )
        assert done.returncode == 0, done.stderr
        trouble = str(job("talker")["trouble"])
        assert trouble.endswith(f"of output lost: No space left on device, in {folder}/jobs/"
                                f"{job('talker')['id']}")  # fmt: skip
        assert f"running ({trouble})" in flowgpu("ps").stdout
        (folder / "fill").unlink()
        (tmp_path / "stop").touch()
        out, messages = rest_of(process)
    assert process.returncode == 0, messages
    assert out.splitlines()[-1] == "end"
    assert "of output are lost here: No space left on device" in messages
    assert job("talker")["state"] == "exited"
    log = flowgpu("logs", "talker")
    assert log.stdout.endswith("\nend\n") and "are lost here" in log.stdout


def test_a_job_that_says_much_in_a_small_folder_ends_and_its_log_has_the_newest(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("go", "stop"):
        (tmp_path / name).touch()
    words = [sys.executable, "-c", TALKER, str(tmp_path)]
    done = flowgpu("run", "--gpu", "emulated", "--name", "talker", "--", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["last of many", "end"]
    assert json.loads(flowgpu("ps", "--all", "--json").stdout)[0]["trouble"] == ""
    log = flowgpu("logs", "talker")
    assert log.stdout.endswith("last of many\nend\n")
    assert " of output before this are not kept\n" in log.stderr
