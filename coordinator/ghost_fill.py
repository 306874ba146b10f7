"""The ghost's fill: an image's bytes into the blocks that it has created, one GPU after another has
them.

filling.py has the copy into one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from coordinator import chunks
from coordinator import ghost_commands as commands
from coordinator.chunks import U8, U64, FillPlan, Kernels
from coordinator.device import DriverError
from coordinator.filling import FillJob, Meeting
from coordinator.ghost_commands import FillFiles
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
        self._plans: dict[int, FillPlan] = {}
        """By which GPUs take from each other what several want, where they can."""
        self._passed: dict[int, U64] = {}
        """Addresses of what each GPU takes from others."""
        self._meeting = Meeting(0)

    def prepare(self, command: commands.PrepareFill) -> None:
        """Make the arena for a fill, and plan it, while blocks are made."""
        self._devices.make_arena(command.plan)
        self._files = command.files
        ordinals = list(command.files)
        for ordinal in ordinals[:1]:
            self._devices.pin(ordinal)
        chunked = chunks.at_once(self._chunks_to_fill, ordinals, list(command.files.values()))
        reaches = [[self._reaches(one, other) for other in ordinals] for one in ordinals]
        plans = chunks.plan_fills(chunked, chunks.islands(reaches))
        self._plans = dict(zip(ordinals, plans, strict=True))
        self._passed = {ordinal: plan.passed.sources for ordinal, plan in self._plans.items()}
        self._meeting = Meeting(len(ordinals))

    def start(self, command: commands.Fill) -> None:
        """Start to fill a GPU's created blocks from an image, checking every chunk's digest."""
        ordinal, files = command.ordinal, self._files[command.ordinal]
        plan, plan_of_copies = self._plans.pop(ordinal), self._devices.plan
        context = self._devices.pin(ordinal)
        kernels = self._kernels(ordinal, plan, command.poison)

        def read(extent: int) -> CopyJob:
            one = files.extents[extent]
            data, digests = Path(one.data), Path(one.digests)
            return self._devices.mover.restore_job(
                data, digests, context, plan_of_copies, kernels, one.frames
            )

        def digests_of(extent: int) -> U8:
            digests = np.memmap(files.extents[extent].digests, np.uint8, "r")
            return digests.reshape(-1, layout.DIGEST_BYTES)

        job = FillJob(plan, read, kernels, command.poison, self._meeting, digests_of)
        self._devices.add_job(ordinal, job)

    def reach(self, _: commands.Reach) -> None:
        """Let the GPUs reach what they take from each other; else each reads it for itself."""
        passed, self._passed = self._passed, {}
        can_reach = True
        try:
            for ordinal, sources in passed.items():
                if len(sources):
                    self._let_reach(ordinal, sources)
        except DriverError as error:
            print(f"each GPU reads for itself: {error}", file=sys.stderr)
            can_reach = False
        except Exception as error:
            self._meeting.fail(error)
            raise
        self._meeting.tell(can_reach)

    def _chunks_to_fill(self, ordinal: int, files: FillFiles) -> tuple[U64, ChunkTable]:
        start = self._devices.staging[ordinal].first_address(files.size)
        where = chunks.addresses([(start, files.size)])
        if files.table is None:
            return where, whole(len(where), files.index)
        slots = [extent.slots for extent in files.extents]
        return where, decode(Path(files.table).read_bytes(), len(where), slots, files.index)

    def _reaches(self, ordinal: int, other: int) -> bool:
        return bool(ordinal != other and self._devices.gpus[ordinal].peers[other]["access"])

    def _let_reach(self, ordinal: int, sources: U64) -> None:
        """Let a GPU read blocks of others, of which it wants chunks: each block takes time."""
        for staging in self._devices.staging.values():
            for start, size in staging.segments(sources):
                self._devices.driver.allow(ordinal, start, size)

    def _kernels(self, ordinal: int, plan: FillPlan, poison: bool) -> Kernels | None:
        """The chunk kernels, if the plan has work for them. Raises MoverError where it cannot do
        without, and there is no room."""
        must = plan.needs_kernels(poison)
        if not must and not len(plan.passed.sources):
            return None
        try:
            return self._devices.kernels(ordinal)
        except MoverError as error:
            if must:
                raise
            print(f"GPU {ordinal} reads for itself: {error}", file=sys.stderr)
            return None
