"""What a checkpoint, a restore and a takeover have in common: the job they work on, its ghost, and
the blocks of its tasks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator import ghost_commands as commands
from coordinator.blocks import BATCH, Block, BlockTable
from coordinator.custody import Custody
from coordinator.device import Gpu
from coordinator.ghost_client import Asked, Ghost, GhostError, GhostGone
from coordinator.ghost_commands import Answer, Command
from coordinator.others import ALONE, Others
from coordinator.output import Output
from coordinator.plan import Plan
from coordinator.process import alive
from coordinator.tasks import Task, TaskChannel, TaskError, is_end
from flowgpu import wire
from flowgpu.host import pcie
from flowgpu.timeline import GHOST, Limit, Recorder

if TYPE_CHECKING:
    from coordinator.host_copy import HostCopy
    from coordinator.parked import Parked
    from coordinator.renewal import IdsElsewhere
    from flowgpu.image.writer import ImageWriter

log = logging.getLogger(__name__)

GHOST_START_SECONDS = 60.0
GHOST_ROOM_BYTES = 2 << 30
GHOST_ROOM_SHARE = 16
# What a file is prepared for besides what is expected in it.
SPARE_BYTES = 256 << 20

Progress = Callable[[str, int, int], None]
"""Called with (phase, bytes done, bytes in all); quickly and often."""


@dataclass
class RunningJob:
    """The job as its supervisor runs it."""

    id: str
    name: str
    gpu: str
    command: list[str]
    cwd: str
    channel: TaskChannel
    output: Output
    directory: Path
    start_ghost: Callable[[], Ghost]
    custody: Custody
    keep_ghost: Callable[[Ghost, bool], bool] = lambda ghost, stays: False
    ghost: str = "auto"  # vocabulary.GhostChoice
    engine: str = "auto"  # vocabulary.EngineChoice: what its tasks are prepared for
    keeper: int = 0  # process id
    root_pid: int = 0
    spoilt: dict[int, int] = field(default_factory=dict)  # pid -> start time, see refuse_spoilt
    pipes: dict[str, int] = field(default_factory=dict)  # stdout, stderr -> inode
    host: HostCopy | None = None  # kept from a suspend to the next one
    parked: Parked | None = None  # what is there, while the job is suspended
    path: str = ""  # this host's end of the way to the leader of several nodes
    ids_elsewhere: IdsElsewhere | None = None  # of communicators that have ranks on other nodes


class GhostLink:
    """The ghost of a session: started when first needed, and again when it has died."""

    def __init__(
        self,
        start: Callable[[], Ghost],
        keep: Callable[[Ghost, bool], bool] = lambda ghost, stays: False,
        timeline: Recorder | None = None,
    ) -> None:
        """`keep` is asked at the end whether the ghost is to live on, for a ghost and whether it is
        to have its contexts in any case; it then owns it.

        `timeline` notes what is asked of the ghost.
        """
        self._start = start
        self._keep = keep
        self.timeline = timeline or Recorder()
        self._ghost: Ghost | None = None
        self._spare: Ghost | None = None
        self.warm: set[int] = set()
        """Ordinals on which the ghost had a context before this session."""
        self.gpus: Sequence[Gpu] = ()
        self.driver_version = 0
        self.has_checkpoints = False
        """True if the driver has a checkpoint API, which the engine native needs."""

    @property
    def alive(self) -> bool:
        """True while there is a ghost that can be asked."""
        return self._ghost is not None and self._ghost.alive()

    @property
    def ghost(self) -> Ghost:
        """The ghost. Raises GhostGone when there is none."""
        if self._ghost is None:
            raise GhostGone("there is no ghost")
        return self._ghost

    def start(self, deadline: float = math.inf) -> None:
        """Start a ghost with the driver initialised, in place of one that died."""
        if self.alive:
            return
        self.drop()
        spare, self._spare = self._spare, None
        with self.timeline.span(GHOST, "start"):
            self._ghost = spare or self._start()
            limit = min(time.monotonic() + GHOST_START_SECONDS, deadline)
            machine = self._ghost.ask(commands.Hello(), limit)
        self.gpus, self.driver_version = machine.gpus, machine.version
        self.has_checkpoints = machine.has_checkpoints
        self.warm = set(machine.warm)

    def prepare_next(self) -> None:
        """Start a ghost without a context, to be the next one after `drop`."""
        if self._spare is None:
            self._spare = self._start()
            with contextlib.suppress(GhostError):
                self._spare.submit(commands.Hello())

    def ask(self, command: Command[Answer], deadline: float) -> Answer:
        """See Ghost.ask."""
        with self.timeline.span(GHOST, command.do):
            return self.ghost.ask(command, deadline)

    def submit(self, command: Command[Answer]) -> Asked[Answer]:
        """See Ghost.submit; a ghost that is gone fails the answer instead."""
        try:
            asked = self.ghost.submit(command)
            if not isinstance(command, commands.Wait):  # which is not its work
                self.timeline.until(asked, GHOST, command.do)
            return asked
        except GhostError as error:
            failed = Asked(type(command))
            failed.set_exception(error)
            return failed

    def rebuild(self, pids: Iterable[int], gpus: Mapping[str, str], deadline: float) -> None:
        """Put CUDA back into those of `pids` that live, with a fresh ghost if need be."""
        while True:
            living = [pid for pid in pids if alive(pid)]
            self.start()
            try:
                self.ask(commands.Rebuild(tuple(living), dict(gpus)), deadline)
                return
            except GhostError:
                if all(map(alive, living)):
                    raise
                # The driver finds no process of one that has ended. It is asked for the others.

    def end(self) -> None:
        """Let the ghost end, and wait until nothing of it is on the GPUs."""
        ghost, self._ghost = self._ghost, None
        if ghost is not None:
            ghost.quit()
        self.kill()

    def quit(self, *, stays: bool = False) -> None:
        """Let the ghost end, unless it is to be kept. `stays`: it is, with its contexts."""
        ghost, self._ghost = self._ghost, None
        if ghost is not None and not self._keep(ghost, stays):
            ghost.leave()
        self.kill()

    def drop(self) -> None:
        """End the ghost at once: its device memory is free then, but for what is exported."""
        ghost, self._ghost = self._ghost, None
        if ghost is not None:
            ghost.kill()

    def kill(self) -> None:
        """End every ghost at once."""
        self.drop()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()


Imports = list[tuple[list[Block], Asked[commands.Ordinals]]]


@dataclass
class Session:
    """What the parts of each share."""

    job: RunningJob
    link: GhostLink
    table: BlockTable = field(default_factory=BlockTable)
    deadline: float = 0.0  # of what is under way, time.monotonic
    timeline: Recorder = field(default_factory=Recorder)  # when each step began and ended


@dataclass(kw_only=True)
class Shared(Session):
    """What the parts of a checkpoint share as well."""

    plan: Plan
    others: Others = ALONE
    writer: ImageWriter | None = None
    host: HostCopy | None = None

    @property
    def target(self) -> ImageWriter | HostCopy:
        """Where the copy goes."""
        return self.host or self.image

    @property
    def image(self) -> ImageWriter:
        """The image that is being written."""
        if self.writer is None:
            raise RuntimeError("no image is being written")
        return self.writer

    def left(self, seconds: float) -> float:
        """`seconds`, but at most half of the time that is left for what is under way."""
        return max(min(seconds, (self.deadline - time.monotonic()) / 2), 0.0)

    def import_blocks(self, blocks: list[Block]) -> tuple[list[Block], Asked[commands.Ordinals]]:
        """Send blocks to the ghost, without waiting for it."""
        command = commands.Import(
            keys=tuple(block.key for block in blocks),
            sizes=tuple(block.row.size for block in blocks),
            devices=tuple(block.row.device for block in blocks),
            fds=tuple(block.fd for block in blocks),
        )
        return blocks, self.link.submit(command)

    def import_all(self, blocks: Sequence[Block]) -> None:
        """Send blocks to the ghost, in as many messages as it takes, and wait for it."""
        batches = [list(blocks[at : at + BATCH]) for at in range(0, len(blocks), BATCH)]
        self.settle([self.import_blocks(batch) for batch in batches])

    def settle(self, imports: Imports) -> None:
        """Wait until the ghost has imported what was sent to it."""
        while imports:
            blocks, asked = imports.pop(0)
            for block, gpu in zip(blocks, asked.until(self.deadline).ordinals, strict=True):
                block.gpu = gpu


def wanted_gpus(tasks: Iterable[Task]) -> set[int]:
    """Ordinals of the GPUs that the tasks use, or will if they see only one.

    A task's ordinals are those of the ghost unless the job has set CUDA_VISIBLE_DEVICES itself;
    then a checkpoint makes the contexts that are missing.
    """
    found: set[int] = set()
    for task in tasks:
        devices = task.page.devices
        found |= {bit for bit in range(64) if devices >> bit & 1}
        if task.hello.device_count == 1:
            found.add(0)
    return found


def ghost_room(gpus: Sequence[Gpu]) -> int:
    """Device memory that a GPU must have free for a context beside the job's.

    A context takes about 500 MiB on an H200, scratch memory 64 MiB. What more there is lets the job
    go on allocating while the ghost is there.
    """
    smallest = min((gpu.memory for gpu in gpus), default=0)
    return int(min(GHOST_ROOM_BYTES, smallest // GHOST_ROOM_SHARE))


def least_free(tasks: Iterable[Task], deadline: float) -> int:
    """Free bytes of that GPU of the tasks which has least. Raises TaskError.

    What a task keeps free by itself counts (native/vmm/room.cpp).
    """
    least = (1 << 64) - 1
    for task in tasks:
        try:
            least = min(least, task.request(wire.Message.ROOM, deadline).block_bytes)
        except TaskError as error:
            # PROTOCOL: restored from an image that is older than this question.
            if error.status is not wire.Status.PROTOCOL and not is_end(task, error):
                raise
    return least


def note_limits(job: RunningJob, link: GhostLink, ordinals: Iterable[int]) -> None:
    """Tell the timeline what the links of these GPUs carry, if the kernel knows it of each."""
    if job.gpu != "nvidia":  # an emulated one has the bus id of another device, if of any
        return
    found = []
    for ordinal in ordinals:
        gpu = next(gpu for gpu in link.gpus if gpu.ordinal == ordinal)
        known = pcie.link(gpu.pci)
        if known is None:
            return
        found.append(Limit(gpu.name, *known))
    link.timeline.limits = tuple(found)


def has_room(tasks: Iterable[Task], gpus: Sequence[Gpu], deadline: float) -> bool:
    """True if each GPU of the tasks has room for a ghost. Raises TaskError."""
    free = least_free(tasks, deadline)
    if free < ghost_room(gpus):
        log.info("a GPU has %d MiB free", free >> 20)
        return False
    return True


def wait_copy(
    ghost: Ghost, stage: str, deadline: float, report: Callable[[int, int], None]
) -> commands.Carried:
    """Wait until the ghost's copies are `out` or `done`, reporting bytes; gives its answer."""
    future = ghost.submit(commands.Wait(stage, max(deadline - time.monotonic(), 0.0)))
    while True:
        try:
            carried = future.result(0.1)
            break
        except TimeoutError:
            if future.done():
                raise
            if time.monotonic() > deadline + 1.0:
                raise GhostGone(f"the copy was not {stage} in time") from None
            so_far = ghost.ask(commands.Progress(), deadline + 1.0)
            report(so_far.done, so_far.total)
    report(carried.bytes, carried.bytes)
    return carried
