"""A workload that is submitted to a Slurm of one's own (cluster.py)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.emu.test_checkpoint import ROOT, SECONDS, command
from tests.slurm.cluster import SHIPPED, Cluster
from tests.unit.coordinator_job import wait_for

WORDS = command("digits_mlp")


@contextmanager
def cluster(nodes: int, cpus: int = 2, without: tuple[str, ...] = ()) -> Iterator[Cluster]:
    # Daemons of Slurm want a folder that others may look into.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        os.chmod(folder, 0o755)
        with Cluster(Path(folder), nodes, cpus, without) as found:
            yield found


class Job:
    """A script of contrib/slurm with a workload, submitted to the partition `low`."""

    def __init__(
        self,
        slurm: Cluster,
        folder: Path,
        *options: str,
        script: str = "job.sh",
        words: Sequence[str] = WORDS,
        every: str = "1",
        first: str = "",
    ) -> None:
        """`first`: what the shell does before each `flowgpu`."""
        self.slurm, self.folder = slurm, folder
        self.hurrying, self.out, self.err = (folder / name for name in ("hurry", "out", "err"))
        programs = folder / "bin"
        programs.mkdir()
        program = programs / "flowgpu"
        line = f'exec {sys.executable} -m flowgpu "$@"'
        program.write_text(f"#!/bin/sh\n{first}\ncd {ROOT}\n{line}\n")
        program.chmod(0o755)
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "WORKLOAD_HURRY": str(self.hurrying),
            "FLOWGPU_IMAGES": str(folder / "images"),
            "FLOWGPU_EVERY": every,
        }
        streams = (f"--output={self.out}", f"--error={self.err}")
        asked = ("--parsable", "--mem=500", *streams, *options, SHIPPED / script, *words)
        self.number = slurm.ask("sbatch", *asked, **variables).strip()

    @property
    def lines(self) -> list[str]:
        return self.out.read_text().splitlines() if self.out.exists() else []

    @property
    def said(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    def wait_more(self, count: int) -> None:
        wanted = len(self.lines) + count
        wait_for(lambda: len(self.lines) >= wanted, f"{wanted} lines", SECONDS)

    def ends_as(self, expected: list[str], restarts: int) -> None:
        """It goes to its end, with the lines of an undisturbed run, after so many restarts."""
        self.hurrying.touch()
        record = self.slurm.wait_state(self.number, "COMPLETED")
        assert record["Restarts"] == str(restarts), self.said
        assert self.lines == expected
