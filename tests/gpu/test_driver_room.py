"""What the driver's own checkpoint does on a device without free memory: why tasks keep a room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.emu.test_driver import device_environment
from tests.emu.test_driver_checkpoint import Task, check_the_drivers_room

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


def test_a_checkpoint_without_room_is_the_last(tmp_path: Path) -> None:
    emulated = os.environ.get("FLOWGPU_TEST_GPU") == "emulated"
    environment = device_environment(tmp_path) if emulated else dict(os.environ)
    task = Task(tmp_path, environment=environment)
    try:
        check_the_drivers_room(task)
    finally:
        task.process.kill()
        task.process.wait()
