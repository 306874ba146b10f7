"""What the hint of PidTaken says, tried: a restore in a PID namespace of its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.first_ids import BEHIND
from flowgpu.errors import PidTaken
from flowgpu.image.manifest import Manifest
from tests.emu.test_cli_end_to_end import FLOWGPU, SECONDS, flowgpu, runtime_dir, started, until
from tests.unit.criu_job import taken

__all__ = ["runtime_dir"]


def test_a_job_whose_pid_is_taken_restores_in_a_new_pid_namespace(tmp_path: Path) -> None:
    image, name = tmp_path / "image", "namespace"
    task = [sys.executable, "-m", "tests.emu.checkpoint_task", str(tmp_path)]
    with started("run", "--gpu", "emulated", "--name", name, "--", *task) as process:
        until((tmp_path / "ready").exists)
        done = flowgpu("pause-and-dump", name, "--output", image)
        assert done.returncode == 0, done.stderr
        process.wait(SECONDS)
    with taken(Manifest.load(image).root_pid):
        refused = flowgpu("restore", image)
        assert refused.returncode == PidTaken.exit_code
        # The command that it says, word by word.
        advice = re.search(r"`(unshare .*) flowgpu restore DIR`", refused.stderr)
        assert advice, refused.stderr
        command = [*advice[1].split(), *FLOWGPU, "restore", str(image)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as inside:
            assert inside.stderr
            for line in inside.stderr:
                if line.startswith(b"flowgpu: restored "):
                    break
            else:
                raise AssertionError("it was not restored")
            # It works with its old handles, and can be ended from outside.
            (tmp_path / "go.1").touch()
            until((tmp_path / "done.1").exists)
            assert flowgpu("kill", name).returncode == 0
            inside.communicate(timeout=SECONDS)
    assert inside.returncode == 128 + 9


READ_ONLY = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && "


@pytest.mark.parametrize("before", ["", READ_ONLY], ids=["writable", "as in a container"])
def test_a_job_in_a_new_pid_namespace_leaves_low_ids_to_flowgpu(before: str) -> None:
    """The same command in the next namespace has them, and the job is to have its own there."""
    words = shlex.join([*FLOWGPU, "run", "--gpu", "emulated", "--", "sh", "-c", "echo $$"])
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{before}exec {words}"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert BEHIND < int(done.stdout) < BEHIND + 100
