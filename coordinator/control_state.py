"""Control-state engines as a checkpoint and a restore use them: what takes CUDA out of the tasks
and puts it back, apart from the bytes.

`native` is the driver's own checkpoint API, worked by the ghost (engine.py). `replay` is done by
each task in itself, from its record of calls (docs/design/replay-engine.md). Where they differ is
stated here and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from coordinator import faults
from coordinator.engine import EngineSpoilt
from coordinator.ghost_client import GhostError
from coordinator.open_files import lifted
from coordinator.process import service_threads
from coordinator.session import GhostLink, Job, ask_all, least_free, remake_cuda
from coordinator.task_group import UNDO_SECONDS, TaskGroup
from coordinator.tasks import CAN_LEND, Task, TaskError
from flowgpu import wire
from flowgpu.criu import Criu
from flowgpu.errors import (
    CheckpointSpoilt,
    EngineUnusable,
    FlowError,
    GpuFull,
    RestoreFailed,
    Unsupported,
)
from flowgpu.image import manifest as m
from flowgpu.jobs import is_process, start_time
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

# A checkpoint by driver 580 succeeded on an H200 with so much free, and with nothing free left a
# process that could not be checkpointed any more (docs/design/hardware-notes.md).
DRIVER_ROOM_BYTES = 4 << 20


Device = Mapping[str, Any]
"""A GPU as the ghost describes it."""

Seen = Mapping[int, Mapping[int, str]]
"""Of each process, the UUIDs of the GPUs whose memory it has, by its own ordinals."""


class ControlState(Protocol):
    """An engine, for one checkpoint or one restore."""

    code: ClassVar[wire.Engine]
    needs_ghost: ClassVar[bool]
    """Whether a ghost, with or without a context, is needed to put CUDA back."""

    lends: ClassVar[bool]
    """Whether tasks keep CUDA and their memory, and CRIU leaves what is the driver's out."""

    begun: bool
    """Whether `strip` may have done something that `rebuild` must undo."""

    def refuse(self, group: TaskGroup) -> None:
        """Refuse by name what `strip` would fail at, with the tasks still running."""

    def strip(self, group: TaskGroup) -> None:
        """Make tasks behind closed gates, without their memory, ordinary detached processes."""

    def rebuild(self, group: TaskGroup) -> None:
        """Give the tasks CUDA back, whatever `strip` has left."""

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Device]) -> Device | None:
        """The device for what was on a GPU of the image that is not here; None: none will do."""

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        """Of each restored, stopped process, the thread that has to run for `restore`.

        Raises GhostError, OSError.
        """

    def restore(self, gpus: Mapping[str, str], seen: Seen, deadline: float) -> None:
        """Give restored processes CUDA back.

        `gpus` maps old to new UUIDs, and is empty where all are the same; `seen` has each process,
        and its new UUIDs. Raises GhostError, TaskError, RestoreFailed.
        """


class Native:
    """The driver's checkpoint API. See ControlState."""

    code: ClassVar[wire.Engine] = wire.Engine.NATIVE
    needs_ghost: ClassVar[bool] = True
    lends: ClassVar[bool] = False

    def __init__(self, job: Job, link: GhostLink) -> None:
        self._job = job
        self._link = link
        self._unsure = False  # whether the ghost may still be at work on the processes
        self.begun = False

    def refuse(self, group: TaskGroup) -> None:
        """See ControlState."""
        if not self._link.has_checkpoints:
            raise Unsupported(name=f"CUDA on driver version {self._link.driver_version}")
        group.refuse(self.code)
        self._refuse_spoilt(group.pids())
        self._refuse_full(group)

    def _refuse_spoilt(self, pids: Sequence[int]) -> None:
        """No process that the driver will not checkpoint any more is stopped for another try."""
        for pid in pids:
            if is_process(pid, self._job.spoilt.get(pid, 0)):
                reason = "an earlier checkpoint found no device memory"
                raise CheckpointSpoilt(pid=pid, job=self._job.name, reason=reason)

    def _refuse_full(self, group: TaskGroup) -> None:
        """The driver would fail, and never checkpoint these processes again."""
        free = least_free(group.tasks, group.deadline)
        if free < DRIVER_ROOM_BYTES:
            needed = f"the driver's own checkpoint needs {DRIVER_ROOM_BYTES >> 20} MiB"
            reason = f"{needed}, {free >> 20} MiB are free"
            raise GpuFull(job=self._job.name, reason=reason)

    def strip(self, group: TaskGroup) -> None:
        """See ControlState."""
        self._refuse_full(group)  # asked again: what was free in PREPARE may be gone
        group.seclude()
        group.detach()
        if not group.tasks:
            return
        self.begun = True
        deadline = group.deadline
        left = max(deadline - time.monotonic(), 0.0)
        try:
            with lifted(group.pids()):
                self._link.ask("strip", deadline, pids=group.pids(), seconds=left)
        except GhostError as error:
            if error.kind != EngineSpoilt.__name__:
                self._unsure = True
                raise
            raise self._spoilt(error, group.pids()) from error
        faults.check(Fault.STRIP)

    def _spoilt(self, error: GhostError, pids: Sequence[int]) -> CheckpointSpoilt:
        """The name of an EngineSpoilt, noted for the checkpoints to come."""
        pid = next(pid for pid in pids if f"process {pid}:" in str(error))
        self._job.spoilt[pid] = start_time(pid)
        return CheckpointSpoilt(pid=pid, job=self._job.name, reason=str(error))

    def rebuild(self, group: TaskGroup) -> None:
        """See ControlState."""
        if self._unsure:
            self._link.kill()
        half = (time.monotonic() + group.deadline) / 2
        with lifted(group.pids()):
            try:
                self._link.rebuild(group.pids(), {}, half)
            except GhostError as error:
                log.warning("rebuilt by another ghost: %s", error)
                self._link.kill()
                self._link.rebuild(group.pids(), {}, time.monotonic() + UNDO_SECONDS)

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Device]) -> Device | None:
        """See ControlState: the driver goes by UUIDs, and asks for the same model."""
        return next((device for device in devices if device["name"] == gpu.name), None)

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        """See ControlState."""
        return list(self._link.ask("threads", deadline, pids=list(pids))["threads"])

    def restore(self, gpus: Mapping[str, str], seen: Seen, deadline: float) -> None:
        """See ControlState."""
        with lifted(seen):
            self._link.rebuild(seen, gpus, deadline)


class Replay:
    """Each task ends CUDA in itself, and makes it anew. See ControlState."""

    code: ClassVar[wire.Engine] = wire.Engine.REPLAY
    needs_ghost: ClassVar[bool] = False
    lends: ClassVar[bool] = False

    def __init__(self, job: Job, link: GhostLink) -> None:
        self._link = link  # the ghost has no part in it, but it knows which GPUs there are
        self._job = job
        self._channel = job.channel
        self.begun = False

    def refuse(self, group: TaskGroup) -> None:
        """See ControlState; `choose` has asked the tasks, and nothing else is needed."""

    def strip(self, group: TaskGroup) -> None:
        """See ControlState. The tasks are asked, so they detach afterwards."""
        group.seclude()
        self.begun = True
        group.strip()
        group.detach()

    def rebuild(self, group: TaskGroup) -> None:
        """See ControlState."""
        group.rebuild()

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Device]) -> Device | None:
        """See ControlState: any model of enough memory."""
        needed = sum(block.bytes for block in gpu.blocks)
        return next((device for device in devices if device["memory"] >= needed), None)

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        """See ControlState."""
        del deadline  # nobody is asked
        return [_service_thread(pid) for pid in pids]

    def restore(self, gpus: Mapping[str, str], seen: Seen, deadline: float) -> None:
        """See ControlState. A task that gets other GPUs is told them in its own order."""
        visible = {pid: self._visible(pid, own) for pid, own in seen.items()} if gpus else {}
        tasks = self._channel.wait_resumed(list(seen), deadline)

        def remake(task: Task) -> None:
            remake_cuda(task, deadline, visible.get(task.pid, ""))

        ask_all(self._channel, tasks, remake, deadline)

    def _visible(self, pid: int, own: Mapping[int, str]) -> str:
        """All GPUs that there are, with those of a process where it knows them."""
        others = [gpu["uuid"] for gpu in self._link.gpus if gpu["uuid"] not in own.values()]
        row: list[str] = []
        while own.keys() - range(len(row)) or others:
            if len(row) not in own and not others:
                reason = f"process {pid} knows a GPU by the number {max(own)}, and there are "
                raise RestoreFailed(job=self._job.name, reason=f"{reason}{len(self._link.gpus)}")
            row.append(own[len(row)] if len(row) in own else others.pop(0))
        return ",".join(row)


class Live(Replay):
    """For tasks that go on: nothing is taken from them. A restored copy ends CUDA in itself first.

    See ControlState.
    """

    lends: ClassVar[bool] = True

    def strip(self, group: TaskGroup) -> None:
        """See ControlState: CUDA stays, and what `rebuild` has to bring back are connections."""
        group.seclude()
        self.begun = True
        group.keep()
        group.detach()


ENGINES: dict[str, Callable[[Job, GhostLink], ControlState]] = {
    "native": Native,
    "replay": Replay,
    "none": Native,  # of a job without tasks, so it never has anything to do
}
"""By the names that manifests have."""


def choose(asked: str, job: Job, link: GhostLink, group: TaskGroup) -> tuple[ControlState, str]:
    """The engine for one checkpoint of all tasks, and why; empty where there was no choice.

    `asked` is auto, native or replay. Raises EngineUnusable.
    """
    if asked == "native":
        return Native(job, link), "asked for"
    prepared = [task.hello.replay != 0 for task in group.tasks]
    if asked == "auto" and not any(prepared):
        return Native(job, link), ""
    why = ""
    if not all(prepared):
        pid = group.tasks[prepared.index(False)].pid
        why = f"process {pid} was started with --engine native"
    elif group.tasks:
        why = "; ".join(group.refusals(wire.Engine.REPLAY))
    if not why:
        return Replay(job, link), "asked for" if asked == "replay" else "it can save every task"
    return _not_replay(why, asked, job, link)


def instead(
    engine: ControlState, refused: TaskError, asked: str, job: Job, link: GhostLink
) -> tuple[ControlState, str]:
    """The engine, and why, after one that a gate has refused. Raises that, or EngineUnusable."""
    if engine.code is wire.Engine.NATIVE:
        raise refused
    return _not_replay(f"{refused.detail} (process {refused.pid})", asked, job, link)


def of_running_job(
    engine: ControlState, job: Job, link: GhostLink, criu: Criu, group: TaskGroup
) -> ControlState:
    """The engine for tasks that are left running beside the ghost: if it can be, one that lends."""
    if engine.code is not wire.Engine.REPLAY or not group.tasks:
        return engine
    if any(task.hello.replay < CAN_LEND for task in group.tasks):
        log.info("CUDA is taken from the tasks: one is of a FlowGPU that knows nothing else")
        return engine
    try:
        criu.plugins()
    except FlowError as error:
        log.warning("CUDA is taken from the tasks: %s", error)
        return engine
    return Live(job, link)


def _not_replay(why: str, asked: str, job: Job, link: GhostLink) -> tuple[ControlState, str]:
    if asked == "replay":
        raise EngineUnusable(job=job.name, engine=asked, reason=why)
    return Native(job, link), f"no replay: {why}"


def _service_thread(pid: int) -> int:
    """The thread of a task that answers the coordinator. Raises OSError."""
    named = service_threads(pid)
    if len(named) != 1:
        raise OSError(f"process {pid} has {len(named)} threads named as that of the service")
    return named[0]
