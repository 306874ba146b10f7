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

    def prepare(self, command: commands.PrepareFill) -> None:
        """Make the arena for a fill, and what else takes time."""
        self._devices.make_arena(command.plan)
        for ordinal in command.ordinals:
            self._devices.pin(ordinal)

    def load_kernels(self, command: commands.Kernels) -> None:
        """Load the chunk kernels where there is room; a fill may do without them."""
        for ordinal in command.ordinals:
            with contextlib.suppress(MoverError):
                self._devices.kernels(ordinal)

    def start(self, command: commands.Fill) -> None:
        """Start to fill created blocks from an image, checking every chunk's digest."""
        self._devices.make_arena(command.plan)
        files = command.files
        chunked = chunks.at_once(self._chunks_to_fill, list(files), list(files.values()))
        plans = self._plan_fills(list(files), chunked)
        meeting = Meeting(len(files))
        for (ordinal, own), plan in zip(files.items(), plans, strict=True):
            self._devices.pin(ordinal)
            self._devices.jobs[ordinal] = self._fill_job(
                ordinal, plan, own.extents, command.poison, meeting
            )

    def _chunks_to_fill(self, ordinal: int, files: FillFiles) -> tuple[U64, ChunkTable]:
        where = chunks.addresses(self._devices.staging[ordinal].segments())
        if files.table is None:
            return where, whole(len(where), files.index)
        slots = [extent.slots for extent in files.extents]
        return where, decode(Path(files.table).read_bytes(), len(where), slots, files.index)

    def _plan_fills(
        self, ordinals: list[int], chunked: list[tuple[U64, ChunkTable]]
    ) -> list[FillPlan]:
        """Plans by which GPUs take from each other what several want, where they can."""
        # Without kernels, and so without room for them, a GPU reads for itself.
        with_kernels = [self._devices.has_kernels(ordinal) for ordinal in ordinals]
        reaches = [
            [both and with_kernels[row] and self._reaches(one, other)
             for other, both in zip(ordinals, with_kernels, strict=True)]
            for row, one in enumerate(ordinals)
        ]  # fmt: skip
        plans = chunks.plan_fills(chunked, chunks.islands(reaches))
        try:
            for ordinal, plan in zip(ordinals, plans, strict=True):
                self._let_reach(ordinal, plan.passed.sources)
        except DriverError as error:
            print(f"each GPU reads for itself: {error}", file=sys.stderr)
            return chunks.plan_fills(chunked, [[row] for row in range(len(ordinals))])
        return plans

    def _reaches(self, ordinal: int, other: int) -> bool:
        return bool(ordinal != other and self._devices.gpus[ordinal].peers[other]["access"])

    def _let_reach(self, ordinal: int, sources: U64) -> None:
        """Let a GPU read blocks of others, of which it wants chunks: each block takes time."""
        if not len(sources):
            return
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
