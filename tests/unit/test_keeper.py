"""When a job's keeper starts another coordinator, and what it does when it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.keeper import MOST_DEATHS
from flowgpu.jobs import EXITED, RESTORING, RUNNING, Job, JobDir
from tests.patience import SECONDS

# Each coordinator says so, writes the record as the real one does, and ends as it is told.
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from coordinator.keeper import keep
from flowgpu.jobs import JobDir

def coordinate(kept):
    print("first" if kept.writers else "next", flush=True)
    JobDir(Path(sys.argv[1])).update(state=sys.argv[2], keeper_pid=kept.keeper)
    for words in sys.argv[4:]:
        subprocess.run(["sh", "-c", words], start_new_session=True)
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), 9)
    return int(sys.argv[3])

sys.exit(keep(coordinate, sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("state", "end", "code", "coordinators"),
    [
        (RUNNING, "kill", 9, 1 + MOST_DEATHS),
        (RUNNING, "3", 3, 1 + MOST_DEATHS),
        (RUNNING, "0", 0, 1),
        (RESTORING, "kill", 9, 1),
        (EXITED, "kill", 9, 1),
    ],
)
def test_another_coordinator_comes_while_the_job_runs(
    tmp_path: Path, state: str, end: str, code: int, coordinators: int
) -> None:
    JobDir(tmp_path).write(Job("0" * 12, "name", ["true"], "/", "emulated"))
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), state, end]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, timeout=SECONDS)
    assert done.returncode == code
    assert done.stdout.split() == ["first", *["next"] * (coordinators - 1)]


def test_nothing_is_left_of_a_restore_whose_coordinator_was_killed(tmp_path: Path) -> None:
    JobDir(tmp_path).write(Job("0" * 12, "name", ["true"], "/", "emulated"))
    parent = "sh -c 'sleep 100 & echo $! $$; kill -STOP $$' & "
    stopped = "until grep -q '^State:.T' /proc/$!/status; do sleep 0.01; done"
    left = ["sleep 100 & echo $!", parent + stopped]
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), RESTORING, "kill", *left]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, timeout=SECONDS)
    said, *pids = done.stdout.split()
    assert (said, len(pids)) == ("first", 3)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []  # no zombies either
