"""The workloads as their description files have them, and how long to let each run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowgpu.launch import GpuKind
from tests.gpu.site import ROOT

FOLDER = ROOT / "workloads"
# Seconds that a job spends at work: its steps follow from it, and what is missing to the wanted
# length of the job is slept between steps.
WORK_SECONDS = 12.0
FEWEST_STEPS, MOST_STEPS = 40, 3000
# MiB on the GPU from which a workload runs with no other beside it: its image is in memory too.
HEAVY = 20_000


@dataclass(frozen=True)
class Workload:
    name: str
    needs: dict[str, Any]
    costs: dict[str, Any]

    def command(self, steps: int, delay: float = 0.0) -> list[str]:
        words = [sys.executable, f"workloads/{self.name}.py", "--steps", str(steps)]
        return [*words, "--step-delay", f"{delay:.4f}"] if delay > 0 else words

    def steps(self, kind: GpuKind, seconds: float = WORK_SECONDS) -> int:
        """Steps that take about `seconds`."""
        wanted = round(seconds / float(self.costs["seconds_per_step"][kind]))
        return min(max(wanted, FEWEST_STEPS), MOST_STEPS)

    @property
    def heavy(self) -> bool:
        return int(self.needs["gpu_memory"]) >= HEAVY

    @property
    def gpus(self) -> int:
        """How many GPUs it works on at a time."""
        return int(self.needs.get("gpus", 1))

    @property
    def engines(self) -> list[str]:
        """Those that save it."""
        return list(self.needs.get("engines", ["replay", "native"]))

    def runs_on(self, kind: GpuKind) -> bool:
        return kind == "nvidia" or self.needs["gpu"] == "any"

    def missing(self) -> str | None:
        """The first package or program that it needs and this machine lacks."""
        for package in self.needs.get("packages", ()):
            if not _importable(package):
                return f"the package {package}"
        for program in self.needs.get("programs", ()):
            if not _runnable(program):
                return f"the program {program}"
        if self.needs["gpu"] == "nvidia" and self.gpus > 1 and gpus_here() < self.gpus:
            return f"GPU {gpus_here() + 1} of {self.gpus}"
        return None


def gpus_here() -> int:
    """NVIDIA's that this process sees."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([word for word in chosen.split(",") if word.strip()])
    return len([name for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name)])


def _importable(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _runnable(program: str) -> bool:
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    toolkit = [Path(home, "bin", program) for home in homes if home]
    return any(os.access(path, os.X_OK) for path in toolkit) or shutil.which(program) is not None


def catalogue() -> dict[str, Workload]:
    """All workloads by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.toml")):
        about = tomllib.loads(path.read_text())
        found[path.stem] = Workload(path.stem, about["needs"], about["costs"])
    return found


def choose(words: str, kind: GpuKind) -> list[Workload]:
    """The workloads of `a,b`; `all` is all that run on one GPU of this kind but the heavy ones.

    Raises ValueError for an unknown name or one that does not run there.
    """
    known = catalogue()
    chosen: list[Workload] = []
    for word in words.split(","):
        if word == "all":
            fit = (w for w in known.values() if w.runs_on(kind) and not w.heavy)
            chosen += [w for w in fit if w.gpus == 1]
        elif word not in known:
            raise ValueError(f"no workload {word!r}; there are {', '.join(known)}")
        elif not known[word].runs_on(kind):
            raise ValueError(f"{word} does not run on a GPU of kind {kind}")
        else:
            chosen.append(known[word])
    return list({workload.name: workload for workload in chosen}.values())
