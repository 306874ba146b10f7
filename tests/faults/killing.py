"""Which processes a command of FlowGPU has at work, and ending one of them at a drawn moment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.process import EMULATED_DEVICE, alive
from flowgpu.host.proctree import arguments, children
from tests.unit.coordinator_job import FAKES

LOOK_SECONDS = 0.004
# A kind of process, and a word of its arguments or its program's name.
WORDS = {
    "ghost": {"coordinator.ghost_main", str(FAKES / "ghost.py")},
    "coordinator": {"coordinator"},
    "task": {"tests.faults.task"},
}
PROGRAMS = {
    "page server": "flowgpu-pages",
    "filler": "flowgpu-fill",
    "keeper": "flowgpu-keeper",
}


def below(roots: Sequence[int]) -> list[int]:
    """The processes below `roots` and these, parents first, without the emulated device's."""
    found = [pid for pid in dict.fromkeys(roots) if Path(f"/proc/{pid}").exists()]
    for pid in found:
        found += [child for child in children(pid) if child not in found]
    return [pid for pid in found if program(pid) != EMULATED_DEVICE]


def program(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def kind_of(pid: int) -> str:
    """One of the words above, or nothing for another process."""
    name, words = program(pid), arguments(pid)
    for kind, wanted in PROGRAMS.items():
        if name == wanted:
            return kind
    # Its program may be a loader's, and it is also asked for its version.
    if "--images-dir" in words and {"dump", "restore"} & {*words}:
        return "criu"
    return next((kind for kind, known in WORDS.items() if known & {*words}), "")


def running(kind: str, roots: Sequence[int]) -> list[int]:
    return [pid for pid in below(roots) if kind_of(pid) == kind and alive(pid)]


@dataclass(frozen=True)
class Target:
    """A process to end. `which`, `part`: from 0 to 1, of those that there are, and of its time.

    The kind `criu and coordinator` names two processes: the second is ended right after the first.
    """

    kind: str
    which: float
    part: float

    @property
    def first(self) -> str:
        return self.kind.partition(" and ")[0]

    def find(self, command: int, roots: Sequence[int]) -> int:
        """Its pid, 0 while there is none. `command`: the process of the command line."""
        found = [command] if self.first == "cli" else running(self.first, roots)
        # CRIU's first process is the parent of those that are to become the job's.
        found = found[:1] if self.first == "criu" else found
        return found[int(self.which * len(found))] if found else 0

    def kill(
        self, command: subprocess.Popen[str], roots: Sequence[int], seconds: float
    ) -> tuple[int, float]:
        """Its pid, and when it was killed, in seconds from now; 0 if it was not there.

        `seconds`: how long a process of its kind lives in such a command.
        """
        began = time.monotonic()
        while command.poll() is None:
            pid = self.find(command.pid, roots)
            if pid:
                with suppress(ProcessLookupError):
                    return pid, self._kill(pid, command, roots, seconds) - began
                break
            time.sleep(LOOK_SECONDS)
        return 0, 0.0

    def _kill(
        self, pid: int, command: subprocess.Popen[str], roots: Sequence[int], seconds: float
    ) -> float:
        """When it was killed. Raises ProcessLookupError."""
        handle, second = os.pidfd_open(pid), self.kind.partition(" and ")[2]
        others = running(second, roots) if second else []
        try:
            with suppress(subprocess.TimeoutExpired):
                command.wait(self.part * seconds)
            if not alive(pid):
                raise ProcessLookupError
            at = time.monotonic()
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            for other in others:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            return at
        finally:
            os.close(handle)


def lifetimes(command: subprocess.Popen[str], roots: Sequence[int]) -> dict[str, float]:
    """Seconds for which each kind of process is there while `command` runs, by looking."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while command.poll() is None:
        now = time.monotonic()
        for kind in {"cli", *map(kind_of, below(roots))}:
            first.setdefault(kind, now)
            last[kind] = now
        time.sleep(LOOK_SECONDS)
    return {kind: last[kind] - first[kind] + LOOK_SECONDS for kind in first if kind}
