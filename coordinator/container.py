"""A job whose processes are a container's: who starts, dumps and restores those is not FlowGPU.

The CRIU that dumps a container asks here, by a plugin (native/criu_plugin/container.cpp), before it
stops the processes: `hand-over` suspends the job, with its GPU memory in files beside CRIU's images
in the place of the host's memory, and cuts the connections to its tasks. The plugin's connection
ends with CRIU. What then still runs is resumed.

After a restore, and before the processes run, the plugin asks for `take-back` of the coordinator
that waits under the same job id: device memory is made and filled from those files while nothing
of the job runs. The rest is that of a resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import faults
from coordinator.control_state import engines
from coordinator.descriptors import lift_limits
from coordinator.ghost_client import GhostError
from coordinator.host_copy import HostCopy
from coordinator.parked import Parked
from coordinator.process import alive, kill_tree, own_children, reap
from coordinator.records import is_same, libraries
from coordinator.refill import Refill
from coordinator.resume import Resume
from coordinator.server import Client
from coordinator.session import GhostLink, RunningJob, Shared
from coordinator.supervisor import POLL_SECONDS, Supervisor
from coordinator.task_group import TaskGroup
from coordinator.task_state import TaskState
from flowgpu import codec, wire
from flowgpu.container import ENGINE
from flowgpu.errors import (
    Busy,
    FileMissing,
    FlowError,
    ImageDamaged,
    NothingToSuspend,
    RestoreFailed,
    Suspended,
    Unsupported,
    words_of,
)
from flowgpu.host.prctl import end_with_parent
from flowgpu.host.proctree import inner_pid, status_numbers, tree_pids
from flowgpu.image import layout
from flowgpu.image import manifest as m
from flowgpu.image.digests import Meter, file_digests
from flowgpu.jobs import RUNNING, JobDir, start_time
from flowgpu.options import CheckpointOptions, SuspendOptions
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

Handler = Callable[[Client, dict[str, Any]], dict[str, Any] | None]

FOLDER, RECORD = "flowgpu", "flowgpu.json"
"""Beside CRIU's images, with the files of the GPUs and what they are of."""
LAST_OF_CRIU = "inventory.img"
"""What CRIU writes once it has dumped all processes."""
VERSION = 1
DETACH_SECONDS = 60.0
FREE_SECONDS = 120.0
ENDING_SECONDS = 0.02
PF_EXITING = 0x4
SIGKILL_PENDING = 1 << 8


@dataclass(frozen=True)
class Record:
    """What was handed over. Process ids are those of the container's namespace."""

    version: int
    job: str
    engine: str
    libraries: tuple[m.Library, ...]
    parked: Parked
    tables: dict[str, str]
    """Digests of the small files. The large ones have theirs in those."""

    def save(self, folder: Path) -> None:
        """Write it, last of all."""
        with open(folder / RECORD, "xb", opener=layout.private) as file:
            file.write(json.dumps(dataclasses.asdict(self)).encode())

    @staticmethod
    def load(folder: Path) -> Record:
        """What `save` has written, with all that it names. Raises ImageDamaged, FileMissing."""
        try:
            found = codec.decode(Record, json.loads((folder / RECORD).read_bytes()), "record")
            if found.version != VERSION:
                raise ValueError(f"it is of version {found.version}")
            if digests(folder, found.tables) != found.tables:
                raise ValueError("a table is not what was written")
        except (OSError, ValueError) as error:
            raise ImageDamaged(path=folder, reason=str(error)) from error
        for library in found.libraries:
            if not is_same(library):
                raise FileMissing(path=library.path)
        return found


def _nobody(phase: str, done: int, total: int) -> None:
    """CRIU shows no progress."""


def digests(folder: Path, names: Any) -> dict[str, str]:
    """Digest of each of these files."""
    files = [(folder / name, (folder / name).stat().st_size) for name in names]
    total = sum(size for _, size in files)
    return dict(zip(names, file_digests(files, Meter("tables", total, None)), strict=True))


def namespace(pid: int) -> str:
    """Which PID namespace a process is in. Raises OSError."""
    return os.readlink(f"/proc/{pid}/ns/pid")


def first_of(pid: int) -> int:
    """The first process of the namespace of `pid`, as seen from here. Raises Unsupported."""
    with contextlib.suppress(OSError, IndexError):
        own = namespace(pid)
        if own != namespace(os.getpid()):
            while namespace(parent := status_numbers(pid, "PPid")[0]) == own:
                pid = parent
            return pid
    raise Unsupported(name=f"process {pid}, which is in no PID namespace of a container's")


def inner_ids(root: int) -> dict[int, int]:
    """Process ids of a container's tree: from here -> inside."""
    return {pid: inner for pid in tree_pids(root) if (inner := inner_pid(pid))}


def renamed(parked: Parked, ids: dict[int, int]) -> Parked:
    """The same of tasks with other process ids. Raises KeyError."""
    tasks = tuple(dataclasses.replace(task, pid=ids[task.pid]) for task in parked.gpu.tasks)
    return dataclasses.replace(parked, gpu=dataclasses.replace(parked.gpu, tasks=tasks))


def is_ending(pid: int) -> bool:
    """True if a process is gone, or about to be: SIGKILL takes a moment."""
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if not alive(pid) or int(fields[6]) & PF_EXITING:
            return True
        pending = status_numbers(pid, "SigPnd", 16) + status_numbers(pid, "ShdPnd", 16)
        return any(signals & SIGKILL_PENDING for signals in pending)
    return True


def put_beside(job: RunningJob, images: Path) -> None:
    """Write what is known of a job that is suspended with its memory in the images' folder."""
    parked, host = job.parked, job.host
    if parked is None or host is None:
        raise RuntimeError("the job is not suspended")
    folder = images / FOLDER
    tables = sorted(path.name for path in host.path.iterdir())
    for name in tables:
        shutil.copyfile(host.path / name, folder / name)
    inside = renamed(parked, inner_ids(job.root_pid))
    Record(VERSION, job.id, job.engine, libraries(), inside, digests(folder, tables)).save(folder)


def let_go(job: RunningJob) -> None:
    """Cut the connections of a suspended job's tasks, so that CRIU finds none. Raises TaskError."""
    assert job.parked is not None
    shared = Shared(job, GhostLink(job.start_ghost), plan=_plan(job))
    shared.deadline = time.monotonic() + DETACH_SECONDS
    group = TaskGroup(shared, lambda action: None)
    pids = [task.pid for task in job.parked.gpu.tasks]
    group.expect(pids, TaskState.STRIPPED)
    group.tasks = job.channel.wait_resumed(pids, shared.deadline)
    group.seclude()
    group.detach()


def _plan(job: RunningJob) -> Any:
    from coordinator.plan import Plan

    return Plan(CheckpointOptions(job.directory))


class TakeBack(Resume):
    """The GPU side of a restored container: `fill` before there is a process, `meet` before one
    runs, and then `finish`."""

    def __init__(self, job: RunningJob, record: Record, folder: Path) -> None:
        """Raises ImageDamaged."""
        flags, fds = os.O_RDONLY | os.O_CLOEXEC, []
        try:
            for index in range(len(record.parked.gpu.gpus)):
                fds.append(os.open(folder / layout.gpu_data(index), flags))
        except OSError as error:
            raise ImageDamaged(path=folder, reason=str(error)) from error
        host = HostCopy(folder, fds, folder)
        super().__init__(job, record.parked, host, _nobody, drop=False)
        self._fds = fds
        self._refill: Refill | None = None

    def fill(self) -> None:
        """Make the memory, with every byte of it checked, while no process of the job runs."""
        self._session.deadline = self._begin("fill")
        engine = engines(self._session)[wire.Engine[self._parked.gpu.engine.upper()]]
        try:
            deadline = self._session.deadline
            self._refill = Refill(self._session, engine, self._saved(), deadline, self._report)
            self._refill.open()
            self._make(self._refill)
        except Exception as error:
            self.close()
            raise self._explain(error) from error
        finally:
            for fd in self._fds:
                os.close(fd)

    def meet(self) -> None:
        """Find the tasks in the tree. Raises RestoreFailed where it is not what was dumped."""
        assert self._refill is not None
        outer = {inner: pid for pid, inner in inner_ids(self._job.root_pid).items()}
        try:
            self._parked = renamed(self._parked, outer)
            self._refill.rename(outer)
        except KeyError as error:
            reason = f"no process of the container has the id {error} in it"
            raise RestoreFailed(job=self._job.name, reason=reason) from error

    def finish(self) -> None:
        """Give the processes CUDA and their memory. After a FlowError the job is to be ended."""
        assert self._refill is not None
        try:
            if self._refill.full:
                self._link.drop()
            pids = [task.pid for task in self._parked.gpu.tasks]
            engine = engines(self._session)[wire.Engine[self._parked.gpu.engine.upper()]]
            self._session.deadline = self._begin("mapback")
            with self._timed("engine"):
                faults.check(Fault.REBUILD)
                self._tasks.expect(pids, TaskState.STRIPPED)
                engine.rebuild(self._tasks, self._refill.moved())
            self._open()
        except Exception as error:
            log.exception("take-back")
            self.close()
            raise self._explain(error) from error
        self._session.table.close()
        self._job.channel.entrance.open()
        self._job.custody.clear()
        self._link.quit()

    def close(self) -> None:
        """Let go of the memory."""
        self._link.kill()
        self._session.table.close()

    def _explain(self, error: Exception) -> FlowError:
        if isinstance(error, FlowError):
            return error
        if isinstance(error, GhostError) and error.kind in ("DAMAGED", "SHORT"):
            return ImageDamaged(path=self._host.path, reason=str(error))
        return RestoreFailed(job=self._job.name, reason=words_of(error))


def _for_outside(handler: Handler) -> Handler:
    """The same, but for the container's own processes, which see the job's folder: its root is not
    to have files written on this machine."""

    def handle(client: Client, fields: dict[str, Any]) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            if namespace(client.peer()) == namespace(os.getpid()):
                return handler(client, fields)
        raise Unsupported(name="what a process of the container asks for")

    return handle


class ContainerSupervisor(Supervisor):
    """One container's job, from before its start to its end."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._over = threading.Event()
        self._handed = self._directory.path / "handed"
        """There while a CRIU may be at work that a dead coordinator has handed the job to."""

    def _start(self) -> None:
        lift_limits()
        if self._kept.writers is None:
            self._take_over()
            if self._handed.exists() and self._job.parked is not None:
                self._wait_untraced()
                self._resume()
            self._handed.unlink(missing_ok=True)
            return
        for writer in self._kept.writers:
            os.close(writer)
        self._doing = ""
        self._record(state=RUNNING)
        end_with_parent(False)

    def _wait_untraced(self) -> None:
        root, deadline = self._job.root_pid, time.monotonic() + FREE_SECONDS
        while any(status_numbers(root, "TracerPid")) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _wait_for_root(self) -> None:
        """Until the container has ended, once its first process is known."""
        while not self._over.wait(POLL_SECONDS):
            with self._session:
                if not self._job.root_pid:
                    self._find_root()
                elif not alive(self._job.root_pid):
                    return
                reap(own_children(self._kept.keeper))

    def _find_root(self) -> None:
        for task in self._job.channel.tasks():
            with contextlib.suppress(FlowError):
                self._know(task.pid)
                return

    def _know(self, pid: int) -> None:
        root = self._job.root_pid = first_of(pid)
        self._record(root_pid=root, root_start=start_time(root))

    def _handlers(self) -> dict[str, Any]:
        ours = {"hand-over": self._on_hand_over, "take-back": self._on_take_back}
        refused = dict.fromkeys(("pause-and-dump", "checkpoint"), self._on_other_dump)
        asked = super()._handlers() | ours | refused
        return {verb: _for_outside(handler) for verb, handler in asked.items()}

    def _on_other_dump(self, client: Client, fields: dict[str, Any]) -> None:
        raise Unsupported(
            name="a container, which its runtime dumps (`podman container checkpoint`)"
        )

    def _on_kill(self, client: Client, fields: dict[str, Any]) -> dict[str, Any]:
        self._over.set()
        return super()._on_kill(client, fields)

    def _on_hand_over(self, client: Client, fields: dict[str, Any]) -> None:
        images = Path(fields["images"])
        self._know(int(fields["pid"]))
        self._wait_free()
        with self._only_session("a checkpoint of its container"):
            if self._job.parked is not None:
                raise Suspended(job=self._job.name, action="dumped with its container")
            self._handed.touch()
            try:
                with self._ghosts.session():
                    if self._suspend_beside(images):
                        self._let_go(client)
                    else:
                        client.send("result", {"tasks": 0})
            finally:
                self._handed.unlink(missing_ok=True)
                self._record_state()

    def _wait_free(self) -> None:
        """The way back from the checkpoint before may still be under way."""
        deadline = time.monotonic() + FREE_SECONDS
        while self._doing and time.monotonic() < deadline:
            time.sleep(0.01)

    def _suspend_beside(self, images: Path) -> bool:
        """Gives whether the job uses a GPU."""
        from coordinator.suspend import suspend

        job, folder = self._job, images / FOLDER
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier checkpoint, as CRIU's images are
        folder.mkdir(layout.DIR_MODE)
        if job.host is not None:
            job.host.close()
        job.host = HostCopy(JobDir(job.directory).host_copy, data=folder)
        options = SuspendOptions(engine=ENGINE)
        try:
            suspend(job, options, _nobody)
        except NothingToSuspend:
            folder.rmdir()
            return False
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return True

    def _let_go(self, client: Client) -> None:
        """Let CRIU work, and bring back what is left running."""
        job = self._job
        try:
            put_beside(job, Path(job.host.place or "").parent if job.host else Path())
            let_go(job)
            client.send("result", {"tasks": len(job.parked.gpu.tasks) if job.parked else 0})
            client.wait_gone()
            time.sleep(ENDING_SECONDS)
        finally:
            folder = job.host.place if job.host else None
            if is_ending(job.root_pid):
                if folder and (folder.parent / LAST_OF_CRIU).exists():
                    self._dumped_to = folder
            else:
                job.channel.listen()
                self._resume()

    def _resume(self) -> None:
        job = self._job
        assert job.parked is not None and job.host is not None
        try:
            Resume(job, job.parked, job.host, _nobody, drop=True).run()
        except FlowError as error:
            self._on_trouble(str(error))
            log.error("%s", error)

    def _on_take_back(self, client: Client, fields: dict[str, Any]) -> None:
        job, folder = self._job, Path(fields["images"]) / FOLDER
        with self._before_it_is_there():
            record = Record.load(folder)
            if record.job != job.id:
                reason = f"the images are of another job ({record.job})"
                raise RestoreFailed(job=job.name, reason=reason)
            with self._ghosts.session():
                back = TakeBack(job, record, folder)
                back.fill()
                try:
                    tasks = {"tasks": len(record.parked.gpu.tasks)}
                    client.send("result", tasks)
                    self._know(int(client.next()["pid"]))
                    back.meet()
                    client.send("result", tasks)
                except BaseException:
                    back.close()
                    raise
                try:
                    back.finish()
                except FlowError as error:
                    self._on_trouble(str(error))
                    log.error("%s", error)
                    client.wait_gone()  # CRIU would wait for ever for a process that is killed
                    kill_tree(job.root_pid)

    @contextlib.contextmanager
    def _before_it_is_there(self) -> Iterator[None]:
        """As _only_session, of a job that has no process yet."""
        if self._job.root_pid or not self._session.acquire(blocking=False):
            raise Busy(job=self._job.name, action="another container of this name")
        try:
            self._doing = "the restore of its container"
            yield
        except FlowError as error:
            log.error("%s", error)
            raise
        finally:
            self._doing = ""
            self._session.release()
