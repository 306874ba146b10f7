"""Programs that save themselves: at the end of the step in which SIGUSR1 comes, then exit.

    --save-to FILE   save to FILE when asked, and say in FILE.saved.json what it took
    --load FILE      go on behind the step that FILE was saved after; FILE.loaded.json likewise

This is what a framework's own save and restart is to a user. The times are of the monotonic clock,
which all processes of a machine share. The last line, `done`, is over the lines since the load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

SAVED_EXIT = 75


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save-to", type=Path, help="save to this file on SIGUSR1 and exit")
    parser.add_argument("--load", type=Path, help="go on from this file")


class Saver:
    """Saves after the step in which it was asked to, and loads."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._target: Path | None = arguments.save_to
        self._source: Path | None = arguments.load
        self._asked = False
        if self._target is not None:
            signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, _signum: int, _frame: object) -> None:
        self._asked = True

    def load(self, read: Callable[[Path], int]) -> int:
        """Give the first step to do: `read` takes the state in and gives the last one done."""
        if self._source is None:
            return 0
        began = time.monotonic()
        step = read(self._source)
        _note(self._source, "loaded", {"began": began, "loaded": time.monotonic(), "step": step})
        return step + 1

    def end_of_step(self, step: int, write: Callable[[IO[bytes]], Any]) -> None:
        """If asked to, have the state written, wait until it is on the storage, and exit."""
        if not self._asked or self._target is None:
            return
        began = time.monotonic()
        temporary = self._target.with_name(self._target.name + ".part")
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            written = time.monotonic()
            os.fsync(file.fileno())
        temporary.rename(self._target)
        folder = os.open(self._target.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        times = {"began": began, "written": written, "synced": time.monotonic(), "step": step}
        _note(self._target, "saved", times)
        sys.exit(SAVED_EXIT)


def _note(path: Path, what: str, found: dict[str, Any]) -> None:
    """Whole or not at all: somebody waits for the file."""
    temporary = path.with_name(f"{path.name}.{what}.part")
    temporary.write_text(json.dumps(found))
    temporary.rename(path.with_name(f"{path.name}.{what}.json"))
