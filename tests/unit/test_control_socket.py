"""Who may ask a coordinator: processes of another user, for which root is needed to start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.server import Server
from flowgpu.client import request
from flowgpu.errors import OtherUser
from tests.patience import SECONDS

NOBODY = 65534
# Imports first: the checkout may be where others cannot read.
AS_NOBODY = f"""
import os, sys
from pathlib import Path
from flowgpu import client, errors
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
try:
    print(client.request(Path(sys.argv[1]), "train", "status"))
except errors.FlowError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others can enter, unlike those of pytest."""
    made = Path(tempfile.mkdtemp(prefix="flowgpu-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize(
    "mode", [0o666, 0o600], ids=["refused by the server", "refused by the kernel"]
)
def test_another_user_is_told_so_and_root_is_answered(mode: int, folder: Path) -> None:
    asked: list[object] = []
    path = folder / "control.sock"
    server = Server(path, "train", {"status": lambda _, fields: asked.append(fields) or {"of": 1}})
    path.chmod(mode)
    other = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(path)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert other.returncode == OtherUser.exit_code, other.stderr
    assert other.stdout == f"Job 'train' is not user {NOBODY}'s, who may ask nothing of it.\n"
    assert not server.heard.is_set()
    assert asked == []
    assert request(path, "train", "status") == {"of": 1}
    server.stop()


def test_a_look_at_the_status_is_not_what_a_job_that_fails_waits_for(folder: Path) -> None:
    path = folder / "control.sock"
    server = Server(path, "train", dict.fromkeys(("status", "kill"), lambda *_: {}))
    request(path, "train", "status")
    assert not server.heard.is_set()
    request(path, "train", "kill")
    assert server.heard.is_set()
    server.stop()
