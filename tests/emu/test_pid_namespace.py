"""What the hint of PidTaken says, tried: a restore in a PID namespace of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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
