"""Several ranks that a launcher starts on one node, as one tree of processes.

CRIU dumps a tree, and memory that two trees share is in neither's image. So of the commands that
srun or mpirun starts on a node the first one *hosts* the ranks of all: the others write down what
they were to run, and wait. What runs it is rank_root.py, the root of the job. The ranks' output is
the job's, and so the host's. Each rank's exit code is a file of the job's folder, where the command
that waits for it finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgpu.errors import DUMPED_EXIT, StartFailed
from flowgpu.jobs import DUMPED, Registry, is_process, prepare_runtime_dir, start_time, user_umask
from flowgpu.nodes import LauncherPlace

ROOT = Path(__file__).with_name("rank_root.py")
COME_SECONDS = 120.0
"""For all of a node to come."""
SEEN_SECONDS = 5.0
LOOK_SECONDS = 0.05
NOT_OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the host passes on to the whole job."""


class Ranks:
    """The ranks of one node; each command makes one."""

    def __init__(self, registry: Registry, job: str, place: LauncherPlace) -> None:
        self._registry = registry
        self._job = job
        self._place = place
        self._folder = registry.base / "join" / f"{job}-{place.launch}"

    @property
    def hosts(self) -> bool:
        """True if this command is the one that hosts all."""
        return self._place.local_rank == 0

    @contextlib.contextmanager
    def hosting(self) -> Iterator[None]:
        """While entered, the others wait for this process. Raises StartFailed."""
        self._make_folder()
        host = {"pid": os.getpid(), "start": start_time(os.getpid())}
        self._write("host", host)
        try:
            yield
        finally:
            with contextlib.suppress(StartFailed):  # those that have not come need nothing
                self._wait(self._seen, "has not seen its host", SEEN_SECONDS)
            shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs all ranks, once all have come. Raises StartFailed."""
        self._write("rank-0", self._rank(words))
        self._wait(lambda rank: (self._folder / f"rank-{rank}").exists(), "has not come")
        ranks = [
            json.loads((self._folder / f"rank-{rank}").read_text())
            for rank in range(self._place.local_count)
        ]
        self._write("all", ranks)
        # The words are for who compares commands.
        return [sys.executable, "-S", "-P", str(ROOT), str(self._folder / "all"), *words]

    def wait_as_guest(self, words: Sequence[str] | None, signals: Iterable[int] = ()) -> int:
        """Have the host run these words, and give the rank's exit code at the job's end; None: it
        restores what it has run before. `signals` are the host's too. Raises StartFailed."""
        for signum in (*NOT_OURS, *signals):
            signal.signal(signum, lambda *_: None)
        if words is not None:
            self._make_folder()
            self._write(f"rank-{self._place.local_rank}", self._rank(words))
        deadline = time.monotonic() + COME_SECONDS
        while not (self._folder / "host").exists():
            if time.monotonic() >= deadline:
                raise StartFailed(job=self._job, reason="the first rank of this node is not there")
            time.sleep(LOOK_SECONDS)
        host = json.loads((self._folder / "host").read_text())
        self._write(f"seen-{self._place.local_rank}", {})
        while is_process(host["pid"], host["start"]):
            time.sleep(LOOK_SECONDS)
        record = self._registry.find(self._job)
        if record.state == DUMPED:
            return DUMPED_EXIT
        code = self._registry.dir(record.id).path / f"code-{self._place.local_rank}"
        with contextlib.suppress(OSError, ValueError):
            return int(code.read_text())
        return 0 if record.live else record.exit_code or 1

    def _seen(self, rank: int) -> bool:
        return (self._folder / f"seen-{rank}").exists()

    def _wait(
        self, done: Callable[[int], bool], otherwise: str, seconds: float = COME_SECONDS
    ) -> None:
        deadline = time.monotonic() + seconds
        for rank in range(1, self._place.local_count):
            while not done(rank):
                if time.monotonic() >= deadline:
                    raise StartFailed(job=self._job, reason=f"rank {rank} of this node {otherwise}")
                time.sleep(LOOK_SECONDS)

    def _make_folder(self) -> None:
        prepare_runtime_dir(self._registry.base)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _rank(self, words: Sequence[str]) -> dict[str, Any]:
        from flowgpu.launch import FOR_NCCL, clean_env

        env = FOR_NCCL | clean_env(os.environ)
        return {"words": list(words), "env": env, "cwd": os.getcwd(), "umask": user_umask()}

    def _write(self, name: str, data: object) -> None:
        partial = self._folder / f".{name}"
        partial.write_text(json.dumps(data))
        partial.rename(self._folder / name)


def is_hosted(command: Sequence[str]) -> bool:
    """True if a job of this command is several ranks."""
    return str(ROOT) in command
