"""The ghost's fill: an image's bytes into the blocks that it has created, on all GPUs at once.

filling.py has the copy into one of them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from coordinator import chunks
from coordinator import ghost_commands as commands
from coordinator.chunks import U8, U64, FillPlan
from coordinator.device import DriverError
from coordinator.filling import FillJob, Meeting
from coordinator.ghost_commands import Extent, FillFiles
from coordinator.ghost_devices import Devices
from coordinator.mover import CopyJob
from flowgpu.host.native import MoverError
from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, decode, whole


class Fill:
    """The commands that copy into blocks of `devices`."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._files: dict[int, FillFiles] = {}
        self._chunked: list[tuple[U64, ChunkTable]] = []
        self._plans: list[FillPlan] = []
        """By which GPUs take from each other what several want, where they can."""

    def prepare(self, command: commands.PrepareFill) -> None:
        """Make the arena for a fill, and plan it, while blocks are made."""
        self._devices.make_arena(command.plan)
        self._files = command.files
        ordinals = list(command.files)
        for ordinal in ordinals[:1]:
            self._devices.pin(ordinal)
        self._chunked = chunks.at_once(self._chunks_to_fill, ordinals, list(command.files.values()))
        reaches = [[self._reaches(one, other) for other in ordinals] for one in ordinals]
        self._plans = chunks.plan_fills(self._chunked, chunks.islands(reaches))

    def load_kernels(self, command: commands.Kernels) -> None:
        """Load the chunk kernels where there is room; a fill may do without them."""
        for ordinal in command.ordinals:
            with contextlib.suppress(MoverError):
                self._devices.kernels(ordinal)

    def start(self, command: commands.Fill) -> None:
        """Start to fill created blocks from an image, checking every chunk's digest."""
        files, plans = self._files, self._plans
        if why := self._why_apart():
            print(f"each GPU reads for itself: {why}", file=sys.stderr)
            plans = chunks.plan_fills(self._chunked, [[row] for row in range(len(files))])
        self._chunked, self._plans = [], []
        meeting = Meeting(len(files))
        for (ordinal, own), plan in zip(files.items(), plans, strict=True):
            self._devices.pin(ordinal)
            self._devices.jobs[ordinal] = self._fill_job(
                ordinal, plan, own.extents, command.poison, meeting
            )

    def _chunks_to_fill(self, ordinal: int, files: FillFiles) -> tuple[U64, ChunkTable]:
        start = self._devices.staging[ordinal].first_address(files.size)
        where = chunks.addresses([(start, files.size)])
        if files.table is None:
            return where, whole(len(where), files.index)
        slots = [extent.slots for extent in files.extents]
        return where, decode(Path(files.table).read_bytes(), len(where), slots, files.index)

    def _why_apart(self) -> str:
        """Let the GPUs reach what they take from others, or say why they cannot."""
        passing = {
            ordinal: plan.passed.sources
            for ordinal, plan in zip(self._files, self._plans, strict=True)
            if len(plan.passed.sources)
        }
        if passing and not all(map(self._devices.has_kernels, self._files)):
            return "a GPU has no room for kernels"
        try:
            for ordinal, sources in passing.items():
                self._let_reach(ordinal, sources)
        except DriverError as error:
            return str(error)
        return ""

    def _reaches(self, ordinal: int, other: int) -> bool:
        return bool(ordinal != other and self._devices.gpus[ordinal].peers[other]["access"])

    def _let_reach(self, ordinal: int, sources: U64) -> None:
        """Let a GPU read blocks of others, of which it wants chunks: each block takes time."""
        for staging in self._devices.staging.values():
            for start, size in staging.segments(sources):
                self._devices.driver.allow(ordinal, start, size)

    def _fill_job(
        self,
        ordinal: int,
        plan: FillPlan,
        extents: Sequence[Extent],
        poison: bool,
        meeting: Meeting,
    ) -> CopyJob:
        context = self._devices.driver.context(ordinal)
        kernels = self._devices.kernels(ordinal) if plan.needs_kernels(poison) else None

        def read(extent: int) -> CopyJob:
            one = extents[extent]
            return self._devices.mover.restore_job(
                Path(one.data), Path(one.digests), context, self._devices.plan, kernels, one.frames
            )

        def digests_of(extent: int) -> U8:
            digests = np.memmap(extents[extent].digests, np.uint8, "r")
            return digests.reshape(-1, layout.DIGEST_BYTES)

        return FillJob(plan, read, kernels, poison, meeting, digests_of)
