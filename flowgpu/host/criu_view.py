"""A view of CRIU's images without most of the pages, which threads of ours write after CRIU.

    view = criu_view.make(images, folder)     # None: CRIU reads all pages itself
    pid = criu.restore(images, leave_stopped=True, view=view)
    view.remove()

CRIU reads a process's pages with one thread. The view is a folder of links to the image files, in
which `pagemap-PID.img` and `pages-N.img` of large processes are new and have only the other pages.
When CRIU ends, every process stands stopped before its first instruction, and what was left out is
written into it from the files of the image. The images are never changed. The view also cuts
mappings of which CRIU would ask the kernel for more memory than there is.

`flowgpu-fill` (native/pages) does both: one process a view, which ends when the view is removed.
What may come late is said in native/pages/view.h.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from flowgpu import launch
from flowgpu.errors import CriuFailed
from flowgpu.host.proctree import end_before_others, how_ended, task_states

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0


class FillFailed(Exception):
    """A page could not be written; the text names process and address."""


class View:
    """A folder for CRIU, and the program that writes the rest into what CRIU restores from it."""

    def __init__(
        self, path: Path, program: subprocess.Popen[bytes], lacks: dict[str, Any], seconds: float
    ) -> None:
        """`lacks`: the program's line about the view, which took `seconds`."""
        self.path = path
        self.pids: list[int] = lacks["pids"]
        """Processes of which something is left out."""
        self.bytes: int = lacks["bytes"]
        """What CRIU does not read."""
        self.cut: int = lacks["cut"]
        """How many processes have mappings that are cut for CRIU (native/pages/mappings.h)."""
        self.inherits: bool = lacks["inherits"]
        """True where CRIU cannot do without the view: pages of a process are with its parent."""
        self.seconds = seconds
        self._program = program

    def fill(self) -> None:
        """Write what was left out; once. Raises FillFailed.

        The processes must be stopped, and are so again afterwards: one that somebody has let go on
        in between has run without its memory.
        """
        if not self.pids:
            return
        self._require_stopped(STOP_SECONDS)
        self._write()
        self._require_stopped(0.0)

    def remove(self) -> None:
        """Remove the folder, and end the program."""
        self._program.communicate()
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self) -> None:
        assert self._program.stdin and self._program.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, and says why
            self._program.stdin.write(b"\n")
        if self._program.stdout.readline() != b"filled\n":
            raise FillFailed(_reason(self._program))

    def _require_stopped(self, seconds: float) -> None:
        """Wait for it: CRIU ends with the signal sent, and a thread meets it on its way to the
        program.

        Raises FillFailed.
        """
        deadline = time.monotonic() + seconds
        for pid in self.pids:
            while set(task_states(pid).values()) != {"T"}:
                if time.monotonic() >= deadline:
                    reason = "did not stay stopped until its memory was there"
                    raise FillFailed(f"process {pid} {reason}")
                time.sleep(0.0005)


def make(images: Path, folder: Path, *, needed: bool = False) -> View | None:
    """Make `folder`, which must not exist; None, and no folder, when there is nothing to gain.

    The images need not have been checked: what is wrong with them is said in the log, and is None.
    Raises CriuFailed instead where the view is `needed`: pages of a process are with its parent.
    """
    began = time.monotonic()
    try:
        folder.mkdir(mode=0o700)
        program = subprocess.Popen(
            [str(launch.program("flowgpu-fill")), str(images.absolute()), str(folder)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        end_before_others(program.pid)
        assert program.stdout
        line = program.stdout.readline()
        if line.endswith(b"\n"):
            view = View(folder, program, json.loads(line), time.monotonic() - began)
            if view.pids or view.cut or view.inherits:
                return view
            program.communicate()
            reason = "the images have no such pages"
        else:
            reason = _reason(program)
            log.warning("CRIU reads all pages itself: %s", reason)
    except OSError as error:
        reason = str(error)
        log.warning("CRIU reads all pages itself: %s", reason)
    shutil.rmtree(folder, ignore_errors=True)
    if needed:
        cause = f"the pages that processes have of their parents cannot be found: {reason}"
        raise CriuFailed(action="restore", cause=cause)
    return None


def _reason(program: subprocess.Popen[bytes]) -> str:
    """Why it has ended."""
    _, words = program.communicate()
    how = how_ended(program.returncode)
    return words.decode(errors="replace").strip() or f"flowgpu-fill {how}"
