"""What became of the checkpoints that a program has asked for itself (flowgpu/sdk.py)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from flowgpu.errors import FlowError
from flowgpu.sdk import DONE, FAILED, RUNNING, WAITING

log = logging.getLogger(__name__)


class Ticket:
    """A file that the program looks at, which is never half written."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / str(len(os.listdir(folder)))
        self._write(WAITING, str(os.getpid()))

    def running(self, seconds: float) -> None:
        """The program runs on; its calls have waited for so long."""
        self._write(RUNNING, str(seconds))

    def done(self, seconds: float) -> None:
        """The image is complete."""
        self._write(DONE, str(seconds))

    def failed(self, error: FlowError) -> None:
        """There is no image."""
        self._write(FAILED, json.dumps(error.as_dict()))

    def _write(self, state: str, text: str) -> None:
        try:
            write(self.path, f"{state} {text}")
        except OSError as error:  # the job's folder is full: no reason to undo a checkpoint
            log.error("%s: %s", self.path, error)


def write(path: Path, text: str) -> None:
    """Raises OSError."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def give_up(folder: Path, error: FlowError) -> None:
    """Fail those whose checkpoint nobody takes any more. Raises OSError."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.read_text().startswith((WAITING, RUNNING)):
            write(path, f"{FAILED} {json.dumps(error.as_dict())}")
