"""What became of the checkpoints that a program has asked for itself (flowgpu/sdk.py)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from flowgpu.errors import FlowError, words_of
from flowgpu.sdk import DONE, FAILED, RUNNING, WAITING

log = logging.getLogger(__name__)

MOST_BYTES = 4095
"""A symbolic link names no more."""
SHOWN = 250
"""Characters of an error that is too long for that: JSON may write each twice, as six bytes."""


class Ticket:
    """A symbolic link whose words the program reads: never half of them, and with no descriptor,
    which an image of the program would have."""

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
        self._write(FAILED, _told(error))

    def _write(self, state: str, text: str) -> None:
        try:
            write(self.path, f"{state} {text}")
        except OSError as error:  # the job's folder is full: no reason to undo a checkpoint
            log.error("%s: %s", self.path, error)


def write(path: Path, text: str) -> None:
    """Raises OSError."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(text)
    partial.rename(path)


def _told(error: FlowError) -> str:
    text = json.dumps(error.as_dict())
    if len(FAILED) + 1 + len(text) <= MOST_BYTES:
        return text
    return json.dumps(FlowError(reason=words_of(error)[:SHOWN]).as_dict())


def give_up(folder: Path, error: FlowError) -> None:
    """Fail those whose checkpoint nobody takes any more. Raises OSError."""
    for path in folder.iterdir() if folder.exists() else ():
        if os.readlink(path).startswith((WAITING, RUNNING)):
            write(path, f"{FAILED} {_told(error)}")
