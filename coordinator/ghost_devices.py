"""What a ghost has of the machine: GPUs, the job's blocks on them, and what its copies need.

The copies (ghost_dump.py, ghost_fill.py) share the arena, the kernels in each context and the plan.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from coordinator import chunks, faults
from coordinator import ghost_commands as commands
from coordinator.chunks import Kernels
from coordinator.device import Driver, Gpu
from coordinator.move_plan import Plan
from coordinator.mover import CopyJob, Mover
from coordinator.staging import Staging
from flowgpu.host.native import MoverError, Status
from flowgpu.wire import Fault


class Devices:
    """The driver and the mover, and what was made with them. `jobs`: the copies, by ordinal."""

    def __init__(self, make_driver: Callable[[], Driver], make_mover: Callable[[str], Mover]):
        self._make_driver = make_driver
        self._make_mover = make_mover
        self._driver: Driver | None = None
        self._mover: Mover | None = None
        self.gpus: list[Gpu] = []
        self.staging: dict[int, Staging] = {}
        self.jobs: dict[int, CopyJob] = {}
        self._kernels: dict[int, Kernels] = {}
        self._warm: set[int] = set()
        self._job_users = 0
        self._jobs_free = threading.Condition()
        self._pinned: set[int] = set()
        self._plan: Plan | None = None
        self._arena_lock = threading.Lock()

    @property
    def driver(self) -> Driver:
        """The driver; `hello` must have come before."""
        if self._driver is None:
            raise RuntimeError("hello was not asked first")
        return self._driver

    @property
    def mover(self) -> Mover:
        """The mover; made at its first use."""
        if self._mover is None:
            self._mover = self._make_mover(self.driver.library)
        return self._mover

    def hello(self, _: commands.Hello) -> commands.Machine:
        """Initialise the driver, the first time."""
        if self._driver is None:
            self._driver = self._make_driver()
            self.gpus = self._driver.gpus()
            self.staging = {gpu.ordinal: Staging(self._driver, gpu) for gpu in self.gpus}
        return commands.Machine(
            version=self._driver.version,
            has_checkpoints=self._driver.checkpoints is not None,
            gpus=tuple(self.gpus),
            warm=tuple(sorted(self._warm)),
        )

    def open(self, command: commands.Open) -> None:
        """Make contexts, several at a time."""
        chunks.at_once(self.driver.context, command.ordinals)

    def warm(self, command: commands.Warm) -> None:
        """Take all the device memory that a checkpoint will want, in advance."""
        chunks.at_once(self.driver.context, command.ordinals)
        for ordinal in command.ordinals:
            self.kernels_for(ordinal, ("zero", "dedup"))
        self._warm |= set(command.ordinals)

    def room(self, command: commands.Room) -> commands.Size:
        """How much device memory is left on these GPUs."""
        return commands.Size(self.free(command.ordinals))

    def import_(self, command: commands.Import) -> commands.Ordinals:
        """Import and map blocks; the coordinator keeps the descriptors that last."""
        ordinals: list[int] = []
        batches: dict[int, list[tuple[int, int, int]]] = {}
        columns = command.keys, command.sizes, command.devices, command.fds
        for key, size, device, fd in zip(*columns, strict=True):
            faults.check(Fault.GHOST_IMPORT)
            # The task's number of the device is only a hint, but some context must be current.
            self.driver.use(device if device < len(self.gpus) else 0)
            handle, ordinal = self.driver.import_block(fd)
            ordinals.append(ordinal)
            batches.setdefault(ordinal, []).append((key, size, handle))
        for ordinal, batch in batches.items():
            self.driver.use(ordinal)
            self.staging[ordinal].add(batch)
        return commands.Ordinals(tuple(ordinals))

    def create(self, command: commands.Create) -> commands.Created:
        """Allocate and map exportable blocks and give their descriptors."""
        ordinal = command.ordinal
        self.driver.use(ordinal)
        batch: list[tuple[int, int, int]] = []
        exported: list[int] = []
        # The table of blocks is the coordinator's: here keys only have to differ.
        for key, size in enumerate(command.sizes, len(self.staging[ordinal].keys())):
            handle, fd = self.driver.create_block(ordinal, size)
            batch.append((key, size, handle))
            exported.append(fd)
        self.staging[ordinal].add(batch)
        return commands.Created(tuple(exported))

    def drop(self, command: commands.Drop) -> None:
        """Release blocks that the task has freed."""
        keys = set(command.keys)
        for ordinal in self.used():
            self.driver.use(ordinal)
            self.staging[ordinal].drop(keys)

    def forget(self, _: commands.Forget) -> None:
        """Give the device memory up."""
        for ordinal in self.used():
            self.driver.use(ordinal)
            self.staging[ordinal].clear()

    def free(self, ordinals: Iterable[int] | None = None) -> int:
        """Bytes that the fullest of these GPUs has left; None: of those with blocks."""
        chosen = self.used() if ordinals is None else ordinals
        return min((self.driver.free(ordinal) for ordinal in chosen), default=1 << 63)

    def used(self) -> list[int]:
        """Ordinals of the GPUs with blocks."""
        return [ordinal for ordinal, staging in self.staging.items() if staging.size]

    def gpu(self, ordinal: int) -> Gpu:
        """The GPU of this ordinal."""
        return next(gpu for gpu in self.gpus if gpu.ordinal == ordinal)

    @contextlib.contextmanager
    def using_jobs(self) -> Iterator[list[CopyJob]]:
        """The jobs, none of which is closed meanwhile."""
        with self._jobs_free:
            self._job_users += 1
            jobs = list(self.jobs.values())
        try:
            yield jobs
        finally:
            with self._jobs_free:
                self._job_users -= 1
                self._jobs_free.notify_all()

    def add_job(self, ordinal: int, job: CopyJob) -> None:
        """Have the copy of a GPU among the jobs."""
        with self._jobs_free:
            self.jobs[ordinal] = job

    def end_jobs(self) -> None:
        """End all copies."""
        with self._jobs_free:
            for job in self.jobs.values():
                job.cancel()
            # A job that is cancelled ends every wait for it.
            self._jobs_free.wait_for(lambda: self._job_users == 0)
            for job in self.jobs.values():
                job.close()
            self.jobs.clear()

    @property
    def plan(self) -> Plan:
        """The plan of the copies; `make_arena` must have come before."""
        if self._plan is None:
            raise RuntimeError("no plan was given before the copy")
        return self._plan

    def make_arena(self, plan: Plan) -> None:
        """Make the arena for copies by this plan, where what is there is too small. While there
        are jobs it stays as it is."""
        with self._arena_lock:
            before = self._plan
            if before is not None and self.jobs:
                return
            if before and before.arena >= plan.arena and before.piece == plan.piece:
                self._plan = replace(plan, arena=before.arena)
                return
            if faults.fires(Fault.GHOST_ARENA):
                raise MoverError(Status.SYSTEM, "no memory for the arena")
            self.mover.make_arena(plan)
            self._pinned.clear()
            self._plan = plan

    def pin(self, ordinal: int) -> int:
        """Pin the arena. Gives the context of the GPU."""
        context = self.driver.context(ordinal)
        # Pinned memory is pinned for every context of the process, so once is enough.
        if not self._pinned:
            if faults.fires(Fault.GHOST_PIN):
                raise MoverError(Status.DRIVER, "cuMemHostRegister: CUDA_ERROR_UNKNOWN")
            self.mover.pin_arena(context)
            self._pinned.add(ordinal)
        return context

    def kernels_for(self, ordinal: int, reductions: Sequence[str]) -> Kernels | None:
        """The chunk kernels that a dump needs for these; None: none, or there is no room."""
        if not {"zero", "dedup"} & set(reductions):
            return None
        try:
            return self.kernels(ordinal)
        except MoverError as error:
            # No room on the GPU must not mean no checkpoint: everything active is stored.
            print(f"storing every chunk of GPU {ordinal}: {error}", file=sys.stderr)
            return None

    def kernels(self, ordinal: int) -> Kernels:
        """The chunk kernels in the GPU's context. Raises MoverError."""
        if ordinal not in self._kernels:
            self._kernels[ordinal] = self.mover.kernels(self.driver.context(ordinal))
        return self._kernels[ordinal]
