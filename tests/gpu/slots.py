"""Which workload of a campaign runs when and on which GPU: places, and memory for images."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.machine import memory
from flowgpu.launch import GpuKind
from tests.gpu.catalogue import Workload

MIB = 1 << 20
VISIBLE = "CUDA_VISIBLE_DEVICES"
# An image is in memory while the next one is made, beside what a CUDA process has of its own.
IMAGES = 2
PROCESS_MIB: dict[GpuKind, int] = {"nvidia": 4096, "emulated": 256}


def visible_gpus(kind: GpuKind, wanted: int | None) -> list[str]:
    """The first `wanted` GPUs as CUDA_VISIBLE_DEVICES names them; None: all that this process sees.

    Raises ValueError if there are fewer.
    """
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        found = [word.strip() for word in chosen.split(",") if word.strip()]
    elif kind == "emulated":
        found = [str(i) for i in range(int(os.environ.get("FLOWGPU_EMU_DEVICES", "1")))]
    else:
        names = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia[0-9]+", name)]
        own = [name for name in names if os.access(f"/dev/{name}", os.R_OK | os.W_OK)]
        found = [str(i) for i in range(len(own))]
    if wanted is not None and len(found) < wanted:
        raise ValueError(f"{wanted} GPUs were asked for, {len(found)} are visible")
    return found if wanted is None else found[:wanted]


@contextmanager
def seeing(kind: GpuKind, devices: int) -> Iterator[None]:
    """So many devices, also on a machine that has more; skips the test where there are fewer."""
    with pytest.MonkeyPatch.context() as environment:
        if kind == "emulated":
            environment.setenv("FLOWGPU_EMU_DEVICES", str(devices))
        else:
            try:
                environment.setenv(VISIBLE, ",".join(visible_gpus(kind, devices)))
            except ValueError as fewer:
                pytest.skip(str(fewer))
        yield


def host_memory(images: Path) -> int:
    """Bytes that processes and images may take together; images may be on a tmpfs."""
    free = os.statvfs(images)
    return min(memory("MemAvailable"), free.f_bavail * free.f_frsize)


@dataclass
class Gpu:
    """One GPU of the machine; `name` is its word in CUDA_VISIBLE_DEVICES."""

    name: str
    running: list[Workload] = field(default_factory=list)

    @property
    def load(self) -> int:
        """MiB that its workloads need."""
        return sum(int(workload.needs["gpu_memory"]) for workload in self.running)


class Slots:
    """`parallel` places on each GPU; a heavy workload takes a whole GPU, and one of several GPUs a
    place on each.

    A workload also takes host memory, of which there are `memory` bytes. One that needs more than
    there is runs when nothing else does.
    """

    def __init__(self, kind: GpuKind, gpus: Sequence[str], parallel: int, memory: int) -> None:
        self._kind, self._parallel = kind, parallel
        self._gpus = [Gpu(name) for name in gpus]
        self._memory = memory
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def places(self) -> int:
        """Workloads that can run at once."""
        return len(self._gpus) * self._parallel

    def cost(self, workload: Workload) -> int:
        """Bytes of host memory that it may take."""
        needs = workload.needs
        processes = int(needs["processes"]) * PROCESS_MIB[self._kind]
        return (IMAGES * workload.gpus * int(needs["gpu_memory"]) + processes) * MIB

    def take(self, workload: Workload, seconds: float) -> str | None:
        """Its GPU, or several as CUDA_VISIBLE_DEVICES names them, once there is a place; None if
        there is none in so many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not (gpus := self._place(workload)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            for gpu in gpus:
                gpu.running.append(workload)
            self._taken += self.cost(workload)
            return ",".join(gpu.name for gpu in gpus)

    def give_back(self, workload: Workload, names: str) -> None:
        """It has ended."""
        with self._changed:
            for gpu in self._gpus:
                if gpu.name in names.split(","):
                    gpu.running.remove(workload)
            self._taken -= self.cost(workload)
            self._changed.notify_all()

    def _place(self, workload: Workload) -> list[Gpu]:
        """The GPUs with the least to do that have a place for it; none while there are too few."""
        if self._taken and self._taken + self.cost(workload) > self._memory:
            return []
        free = [gpu for gpu in self._gpus if self._has_place(gpu, workload)]
        free.sort(key=lambda gpu: (len(gpu.running), gpu.load))
        chosen = free[: workload.gpus]
        # In the order of the machine: NCCL joins them by their neighbours.
        return [gpu for gpu in self._gpus if gpu in chosen] if len(chosen) == workload.gpus else []

    def _has_place(self, gpu: Gpu, workload: Workload) -> bool:
        if workload.heavy or any(other.heavy for other in gpu.running):
            return not gpu.running
        return len(gpu.running) < self._parallel
