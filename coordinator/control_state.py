"""Control-state engines as a checkpoint and a restore use them: what takes CUDA out of the tasks
and puts it back, apart from the bytes.

`native` is the driver's own checkpoint API, worked by the ghost (engine.py). `replay` is done by
each task in itself, from its record of calls (docs/design/replay-engine.md). Where they differ is
stated here and nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from coordinator import faults
from coordinator import ghost_commands as commands
from coordinator.bringup import BringUp
from coordinator.device import Gpu
from coordinator.engine import EngineSpoilt
from coordinator.ghost_client import GhostError
from coordinator.open_files import lifted
from coordinator.process import service_threads
from coordinator.session import Session, least_free
from coordinator.task_group import TaskGroup
from coordinator.task_state import Step, TaskState
from coordinator.tasks import IS_CURRENT, Task
from flowgpu import wire
from flowgpu.errors import (
    CheckpointSpoilt,
    FlowError,
    GpuFull,
    RestoreFailed,
    Unsupported,
)
from flowgpu.host.criu import Criu
from flowgpu.image import manifest as m
from flowgpu.jobs import is_process, start_time
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

# A checkpoint by driver 580 succeeded on an H200 with so much free, and with nothing free left a
# process that could not be checkpointed any more (docs/design/hardware-notes.md).
DRIVER_ROOM_BYTES = 4 << 20


@dataclass(frozen=True)
class Moved:
    """The GPUs that restored processes get in the place of others."""

    gpus: Mapping[str, str] = field(default_factory=dict)
    """Old and new UUIDs."""
    seen: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    """New UUIDs of the GPUs whose memory a process has, by process id and its own ordinals."""


UNMOVED = Moved()


class ControlState(Protocol):
    """An engine. It knows nothing of what it has done: the state of each task says that."""

    code: ClassVar[wire.Engine]
    needs_ghost: ClassVar[bool]
    """True if the engine needs a ghost, with or without a context, to put CUDA back."""

    def refuse(self, group: TaskGroup) -> None:
        """Refuse by name what `strip` would fail at, with the tasks still running."""

    def strip(self, group: TaskGroup) -> None:
        """Make tasks behind closed gates, whose memory others have, ordinary detached processes.

        Those that keep CUDA stay as they are, detached.
        """

    def rebuild(self, tasks: BringUp, moved: Moved = UNMOVED) -> None:
        """Give those CUDA back that it may be taken from.

        Raises GhostError, TaskError, RestoreFailed.
        """

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Gpu]) -> Gpu | None:
        """The device for what was on a GPU of the image that is not here; None: none will do."""

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        """The thread that has to run for `rebuild`, for each restored, stopped process.

        Raises GhostError, OSError.
        """


class Native:
    """The driver's checkpoint API. See ControlState."""

    code: ClassVar[wire.Engine] = wire.Engine.NATIVE
    needs_ghost: ClassVar[bool] = True

    def __init__(self, session: Session) -> None:
        self._job = session.job
        self._link = session.link

    def refuse(self, group: TaskGroup) -> None:
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
        self._refuse_full(group)  # asked again: what was free in PREPARE may be gone
        group.seclude()
        group.detach()
        if not group.tasks:
            return
        for pid in group.pids():
            group.note(pid, Step.STRIP)
        deadline = group.deadline
        left = max(deadline - time.monotonic(), 0.0)
        try:
            with lifted(group.pids()):
                self._link.ask(commands.Strip(tuple(group.pids()), left), deadline)
        except GhostError as error:
            if error.kind != EngineSpoilt.__name__:
                self._link.kill()  # it may still be at work on the processes
                raise
            raise self._spoilt(error, group.pids()) from error
        faults.check(Fault.STRIP)

    def _spoilt(self, error: GhostError, pids: Sequence[int]) -> CheckpointSpoilt:
        """The name of an EngineSpoilt, noted for the checkpoints to come."""
        pid = next(pid for pid in pids if f"process {pid}:" in str(error))
        self._job.spoilt[pid] = start_time(pid)
        return CheckpointSpoilt(pid=pid, job=self._job.name, reason=str(error))

    def rebuild(self, tasks: BringUp, moved: Moved = UNMOVED) -> None:
        """See ControlState. The ghost finds by itself who sees which GPU."""
        pids = tasks.having(TaskState.STRIPPED)
        if not pids:
            return
        half = (time.monotonic() + tasks.deadline) / 2
        with lifted(pids):
            try:
                self._link.rebuild(pids, moved.gpus, half if tasks.again else tasks.deadline)
            except GhostError as error:
                if not tasks.again:
                    raise
                log.warning("rebuilt by another ghost: %s", error)
                self._link.kill()
                self._link.rebuild(pids, moved.gpus, time.monotonic() + tasks.again)
        for pid in pids:
            tasks.note(pid, Step.REBUILD)

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Gpu]) -> Gpu | None:
        """See ControlState: the driver goes by UUIDs, and asks for the same model."""
        return next((device for device in devices if device.name == gpu.name), None)

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        return list(self._link.ask(commands.Threads(tuple(pids)), deadline).threads)


class Replay:
    """Each task ends CUDA in itself, and makes it anew. See ControlState."""

    code: ClassVar[wire.Engine] = wire.Engine.REPLAY
    needs_ghost: ClassVar[bool] = False

    def __init__(self, session: Session) -> None:
        self._link = session.link  # the ghost has no part in it, but it knows which GPUs there are
        self._job = session.job

    def refuse(self, group: TaskGroup) -> None:
        """See ControlState; the tasks were asked for the plan, and nothing else is needed."""

    def strip(self, group: TaskGroup) -> None:
        """See ControlState. The tasks are asked, so they detach afterwards."""
        group.seclude()
        group.strip()
        group.detach()

    def rebuild(self, tasks: BringUp, moved: Moved = UNMOVED) -> None:
        """See ControlState. A task that gets other GPUs is told them in its own order."""
        tasks.rebuild({pid: self._visible(pid, own) for pid, own in moved.seen.items()})

    def instead_of(self, gpu: m.Gpu, devices: Iterable[Gpu]) -> Gpu | None:
        """See ControlState: any model of enough memory."""
        needed = sum(block.bytes for block in gpu.blocks)
        return next((device for device in devices if device.memory >= needed), None)

    def threads(self, pids: Sequence[int], deadline: float) -> list[int]:
        del deadline  # nobody is asked
        return [_service_thread(pid) for pid in pids]

    def _visible(self, pid: int, own: Mapping[int, str]) -> str:
        """All GPUs that there are, with those of a process where it knows them."""
        others = [gpu.uuid for gpu in self._link.gpus if gpu.uuid not in own.values()]
        row: list[str] = []
        while own.keys() - range(len(row)) or others:
            if len(row) not in own and not others:
                reason = f"process {pid} knows a GPU by the number {max(own)}, and there are "
                raise RestoreFailed(job=self._job.name, reason=f"{reason}{len(self._link.gpus)}")
            row.append(own[len(row)] if len(row) in own else others.pop(0))
        return ",".join(row)


def engines(session: Session) -> dict[wire.Engine, ControlState]:
    """Each of them."""
    return {wire.Engine.NATIVE: Native(session), wire.Engine.REPLAY: Replay(session)}


def put_back(session: Session, tasks: BringUp, needy: Sequence[Task]) -> None:
    """Give tasks CUDA back that wait for it, whichever engine it was: each does nothing where it
    has taken nothing. Raises TaskError, GhostError."""
    both, link = engines(session), session.link
    prepared = [task.pid for task in needy if task.hello.replay]
    native = [task.pid for task in needy if not task.hello.replay]
    tasks.expect(prepared, TaskState.STRIPPED)
    both[wire.Engine.REPLAY].rebuild(tasks)
    link.start()
    tasks.expect(native, TaskState.STRIPPED if link.has_checkpoints else TaskState.AWAY)
    both[wire.Engine.NATIVE].rebuild(tasks)
    if link.has_checkpoints:
        with contextlib.suppress(GhostError):  # MAPBACK tells whether there is CUDA
            link.rebuild(prepared, {}, session.deadline)


def why_taken(criu: Criu, group: TaskGroup, of_service: bool = False) -> str:
    """Why CUDA has to be taken from tasks that go on after the checkpoint; empty: all of them know
    how to keep it, and this CRIU knows how to dump them with it. `of_service`: one is a client of
    the Multi-Process Service."""
    taken = "CUDA has to be taken from its processes: "
    if any(task.hello.replay < IS_CURRENT for task in group.tasks):
        return f"{taken}one has an older FlowGPU"
    if any(task.page.managed_bytes for task in group.tasks):
        return f"{taken}one has managed memory"
    if of_service:
        return f"{taken}one is a client of the Multi-Process Service"
    try:
        criu.plugins()
    except FlowError as error:
        return f"{taken}{error}"
    return ""


def _service_thread(pid: int) -> int:
    """The thread of a task that answers the coordinator. Raises OSError."""
    named = service_threads(pid)
    if len(named) != 1:
        raise OSError(f"process {pid} has {len(named)} threads named as that of the service")
    return named[0]
