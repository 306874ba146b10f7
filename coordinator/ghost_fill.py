"""The ghost's fill: an image's bytes into the blocks that it has created, on all GPUs at once.

filling.py has the copy into one of them.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import chunks
from coordinator.chunks import U8, U64, FillPlan
from coordinator.device import DriverError
from coordinator.filling import FillJob, Meeting
from coordinator.ghost_devices import Devices, Fields, files_of
from coordinator.mover import CopyJob, Plan
from flowgpu.image import layout
from flowgpu.image.chunks import ChunkTable, decode, whole
from flowgpu.native import MoverError


class Fill:
    """The commands that copy into blocks of `devices`."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def prepare(self, fields: Fields) -> None:
        """Make the arena for a fill, and what else takes time."""
        self._devices.make_arena(Plan(**fields["plan"]))
        for ordinal in fields["ordinals"]:
            self._devices.pin(ordinal)

    def load_kernels(self, fields: Fields) -> None:
        """Load the chunk kernels where there is room; a fill may do without them."""
        for ordinal in fields["ordinals"]:
            with contextlib.suppress(MoverError):
                self._devices.kernels(ordinal)

    def start(self, fields: Fields) -> None:
        """Start to fill created blocks from an image, checking every chunk's digest."""
        self._devices.make_arena(Plan(**fields["plan"]))
        files = files_of(fields)
        chunked = chunks.at_once(self._chunks_to_fill, list(files), list(files.values()))
        plans = self._plan_fills(list(files), chunked)
        meeting = Meeting(len(files))
        for (ordinal, (_, _, extents)), plan in zip(files.items(), plans, strict=True):
            self._devices.pin(ordinal)
            self._devices.jobs[ordinal] = self._fill_job(
                ordinal, plan, extents, fields["poison"], meeting
            )

    def _chunks_to_fill(self, ordinal: int, files: list[Any]) -> tuple[U64, ChunkTable]:
        table, index, extents = files
        where = chunks.addresses(self._devices.staging[ordinal].segments())
        if table is None:
            return where, whole(len(where), index)
        slots = [count for _, _, count, _ in extents]
        return where, decode(Path(table).read_bytes(), len(where), slots, index)

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
        """Let a GPU read memory of others, of which it wants chunks."""
        if not len(sources):
            return
        for staging in self._devices.staging.values():
            for start, size in staging.segments():
                if np.any((sources >= start) & (sources < start + size)):
                    self._devices.driver.allow(ordinal, start, size)

    def _fill_job(
        self, ordinal: int, plan: FillPlan, extents: list[Any], poison: bool, meeting: Meeting
    ) -> CopyJob:
        context = self._devices.driver.context(ordinal)
        kernels = self._devices.kernels(ordinal) if plan.needs_kernels(poison) else None

        def read(extent: int) -> CopyJob:
            data, digests, _, frames = extents[extent]
            return self._devices.mover.restore_job(
                Path(data), Path(digests), context, self._devices.plan, kernels, frames
            )

        def digests_of(extent: int) -> U8:
            return np.memmap(extents[extent][1], np.uint8, "r").reshape(-1, layout.DIGEST_BYTES)

        return FillJob(plan, read, kernels, poison, meeting, digests_of)
