"""Who uses the real GPU: tests that fill it have it to themselves, the others share it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def gpu(whole: bool = False) -> Iterator[None]:
    """Wait for the GPU, among all test processes of this user."""
    path = Path(tempfile.gettempdir()) / f"flowgpu-tests-gpu-{os.getuid()}"
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if whole else fcntl.LOCK_SH)
        yield
