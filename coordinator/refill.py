"""Device memory made anew and filled with bytes that were kept: those of an image, or of the host
copy of a suspended job.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coordinator import faults
from coordinator import ghost_commands as commands
from coordinator.blocks import BATCH
from coordinator.control_state import UNMOVED, ControlState, Moved
from coordinator.device import Gpu
from coordinator.ghost_client import Asked
from coordinator.move_plan import restore_plan_for
from coordinator.session import Progress, Session, ghost_room, note_limits, wait_copy
from flowgpu import wire
from flowgpu.errors import DriverMismatch, GpuMismatch, TopologyMismatch
from flowgpu.image import manifest as m
from flowgpu.timeline import GHOST, MOVE, Open
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

Answers = deque[Asked[commands.Created]]


@dataclass(frozen=True)
class Saved:
    """What is kept of a job's device memory."""

    gpus: Sequence[m.Gpu]
    imports: Sequence[m.Import]
    peers: Sequence[m.Peer]
    pids: Sequence[int]
    """Process ids of the tasks, in the order that blocks and imports go by."""
    reserved: int
    """Bytes of device memory that they had in all."""
    place: Path | None
    """The folder with the bytes; None: they are in memory."""
    extents: Sequence[commands.Extent]
    tables: Mapping[int, str | None]
    """The chunk table of each GPU; none in version 1 of an image."""


class Refill:
    """The memory of all tasks, into the session's table."""

    def __init__(
        self,
        session: Session,
        engine: ControlState,
        saved: Saved,
        deadline: float,
        report: Progress,
        *,
        poison: bool = False,
    ) -> None:
        """`deadline`: time.monotonic."""
        self._job = session.job
        self._link = session.link
        self._table = session.table
        self._engine = engine
        self._saved = saved
        self._deadline = deadline
        self._report = report
        self._poison = poison
        self._gpu_map: dict[int, Gpu] = {}  # index in `saved` -> device of the ghost
        self._begun: list[Asked[None]] = []  # what the copy waits for, once blocks are made
        self._gpus = [gpu for gpu in saved.gpus if gpu.data_bytes]
        size = sum(gpu.data_bytes for gpu in self._gpus)
        self._plan = restore_plan_for(saved.place, len(self._gpus), size)
        self._move: Open | None = None
        self.full = False
        """Once it is open: the tasks' contexts may not fit beside the ghost's and the blocks."""

    def open(self) -> None:
        """Start the ghost, and make its contexts."""
        self._link.start()
        self._map_gpus()
        ordinals = tuple(gpu.ordinal for gpu in self._gpu_map.values())
        self._link.ask(commands.Open(ordinals), self._deadline)
        self.full = self._is_full()

    def create(self) -> None:
        """Make the blocks, and begin to fill each GPU's when they are there."""
        prepared = self._link.submit(commands.PrepareFill(self._plan, self._files()))
        asked = deque((gpu, self._ask_for_blocks(gpu)) for gpu in self._saved.gpus)
        try:
            while asked:
                gpu, answers = asked[0]
                self._take_blocks(gpu, answers)
                asked.popleft()
                if gpu.data_bytes:
                    prepared.until(self._deadline)
                    self._begin_to_fill(gpu)
        except BaseException:
            for _, answers in asked:
                for one in answers:
                    one.add_done_callback(_close_blocks)
            raise
        prepared.until(self._deadline)
        self._begun.append(self._link.submit(commands.Reach()))
        self._add_imports()
        if self.full and self._engine.needs_ghost:
            self._link.prepare_next()

    def fill(self) -> dict[str, float]:
        """Wait until they are filled, and every chunk is checked; gives what was moved, as in a
        report."""
        faults.check(Fault.FILL)
        if self._move is None:
            return {}
        for begun in self._begun:
            begun.until(self._deadline)
        note_limits(self._job, self._link, self._with_data())
        report = partial(self._report, "copy")
        carried = wait_copy(self._link.ghost, "done", self._deadline, report)
        self._move.end(carried.bytes)
        return {
            "gpu_bytes_read": carried.bytes,
            "moved_seconds": self._move.seconds,  # since the first GPU had its blocks
            "gpu_bytes_passed": carried.passed_bytes,  # between GPUs
            "passed_seconds": carried.passed_seconds,
        }

    def rename(self, pids: Mapping[int, int]) -> None:
        """The tasks have other process ids than those that were saved."""
        self._saved = replace(self._saved, pids=[pids[pid] for pid in self._saved.pids])
        self._table.rename(pids)

    def _with_data(self) -> tuple[int, ...]:
        return tuple(self._gpu_map[gpu.index].ordinal for gpu in self._gpus)

    def _is_full(self) -> bool:
        saved, plan = self._saved, self._plan
        if not saved.gpus:
            return False
        others = saved.reserved - sum(gpu.data_bytes for gpu in self._gpus)
        needed = len(saved.pids) * ghost_room(self._link.gpus) + others
        needed += plan.streams * plan.piece  # what scatters pieces
        needed += max(gpu.data_bytes for gpu in saved.gpus)
        free = self._link.ask(commands.Room(self._with_data()), self._deadline).bytes
        if free < needed:
            log.info("a GPU has %d MiB free, the ghost ends before CUDA is put back", free >> 20)
        return free < needed

    def _files(self) -> dict[int, commands.FillFiles]:
        saved = self._saved
        extents = tuple(saved.extents)
        return {
            ordinal: commands.FillFiles(saved.tables[gpu.index], gpu.index, gpu.data_bytes, extents)
            for gpu, ordinal in zip(self._gpus, self._with_data(), strict=True)
        }

    def _map_gpus(self) -> None:
        """Choose a device for each GPU of the image: the same one, else one that will do."""
        version = str(self._link.driver_version)
        if driver := next((gpu.driver for gpu in self._saved.gpus if gpu.driver != version), None):
            raise DriverMismatch(image=driver, here=version)
        free = {gpu.uuid: gpu for gpu in self._link.gpus}
        for wanted in self._saved.gpus:
            if wanted.uuid in free:
                self._gpu_map[wanted.index] = free.pop(wanted.uuid)
        for wanted in self._saved.gpus:
            if wanted.index in self._gpu_map:
                continue
            other = self._engine.instead_of(wanted, free.values())
            if other is None:
                here = ", ".join(gpu.name for gpu in self._link.gpus) or "no GPU"
                there = ", ".join(gpu.name for gpu in self._saved.gpus)
                raise GpuMismatch(image=there, here=here)
            self._gpu_map[wanted.index] = free.pop(other.uuid)
        self._compare_topology()

    def _compare_topology(self) -> None:
        """NCCL and its like have chosen their ways between GPUs by how these reach each other."""
        for peer in self._saved.peers:
            gpu, other = self._gpu_map[peer.gpu], self._gpu_map[peer.other]
            here = gpu.peers[other.ordinal]
            if any(here[name] != getattr(peer, name) for name in here):
                raise TopologyMismatch(
                    gpu=peer.gpu, other=peer.other, image=_way(vars(peer)), here=_way(here)
                )

    def moved(self) -> Moved:
        """The GPUs that the job gets; none where each is the one of the image."""
        pairs = {gpu.uuid: self._gpu_map[gpu.index].uuid for gpu in self._saved.gpus}
        if all(old == new for old, new in pairs.items()):
            return UNMOVED
        seen: dict[int, dict[int, str]] = {pid: {} for pid in self._saved.pids}
        uuids = {}
        for gpu in self._saved.gpus:
            for block in gpu.blocks:
                uuids[block.task, block.id] = pairs[gpu.uuid]
                seen[self._saved.pids[block.task]][block.device] = pairs[gpu.uuid]
        for one in self._saved.imports:
            uuid = uuids[one.owner, one.block]
            seen[self._saved.pids[one.task]].setdefault(one.device, uuid)
        return Moved(pairs, seen)

    def _ask_for_blocks(self, gpu: m.Gpu) -> Answers:
        ordinal = self._gpu_map[gpu.index].ordinal
        sizes = tuple(block.bytes for block in gpu.blocks)
        return deque(
            self._link.submit(commands.Create(ordinal, sizes[at : at + BATCH]))
            for at in range(0, len(sizes), BATCH)
        )

    def _take_blocks(self, gpu: m.Gpu, answers: Answers) -> None:
        blocks = iter(gpu.blocks)
        while answers:
            fds = answers[0].until(self._deadline).fds
            answers.popleft()
            for fd in fds:
                block = next(blocks)
                row = wire.Block(block.id, block.address, block.bytes, block.device, 0, 0, 0)
                self._table.add(self._saved.pids[block.task], [row], [fd])

    def _begin_to_fill(self, gpu: m.Gpu) -> None:
        ordinal = self._gpu_map[gpu.index].ordinal
        self._begun.append(self._link.submit(commands.Fill(ordinal, self._poison)))
        if self._move is None:
            self._move = self._link.timeline.begin(GHOST, MOVE)

    def _add_imports(self) -> None:
        """Each gets a descriptor of its own, as if the task had sent it."""
        made = {(block.pid, block.row.id): block for block in self._table.saved()}
        pids = self._saved.pids
        for one in self._saved.imports:
            block = made[pids[one.owner], one.block]
            row = wire.Block(one.id, one.address, block.row.size, one.device, 0, 0, 0)
            self._table.add(pids[one.task], [row], [os.dup(block.fd)])


def _close_blocks(answer: Future[commands.Created]) -> None:
    """Nobody takes these blocks any more."""
    if not answer.exception():
        for fd in answer.result().fds:
            os.close(fd)


def _way(peer: Mapping[str, int]) -> str:
    if not peer["access"]:
        return "without access"
    atomics = "with" if peer["atomics"] else "without"
    return f"with access, {atomics} atomics, performance rank {peer['rank']}"
