"""Fixtures that every test folder shares."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.criu import Criu


@pytest.fixture(scope="session")
def criu() -> Criu:
    """The CRIU that `make setup` provides. A machine without one fails, it does not skip."""
    return Criu.locate()


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Where a folder for jobs can be made; the path of `tmp_path` may be too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="flowgpu-", ignore_cleanup_errors=True) as folder:
        yield Path(folder) / "run"
