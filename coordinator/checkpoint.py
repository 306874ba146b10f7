"""A checkpoint of a job: the actions of each phase and what undoes them (phases.py says which
follows which).

Every attribute that an undo reads is set as soon as its fact is true, so that an action may fail at
any line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from coordinator import control_state, faults, phases, watches
from coordinator.blocks import BlockTable
from coordinator.control_state import ControlState, Native
from coordinator.copy_out import FLUSH_SECONDS, POPULATE_SECONDS, CopyOut
from coordinator.failures import Failure, explain
from coordinator.ghost_client import GhostError
from coordinator.job_files import written_files
from coordinator.memory_files import Saving
from coordinator.minimum import NEAR
from coordinator.mover import plan_for
from coordinator.page_server import Pages
from coordinator.phases import Event, Outcome, Phase
from coordinator.polling import readable
from coordinator.process import alive, kill_tree, orphans, other_client
from coordinator.records import Facts, copy_log, libraries, write_manifest
from coordinator.sampler import Sampler
from coordinator.session import (
    DYING_SECONDS,
    GhostLink,
    Job,
    Progress,
    Shared,
    has_room,
    wanted_gpus,
)
from coordinator.task_group import UNDO_SECONDS, TaskGroup
from coordinator.tasks import TaskError
from flowgpu import affinity, criu_images, memory, probes, tcp, wire
from flowgpu.criu import Criu, CriuRun
from flowgpu.errors import (
    CriuFailed,
    CriuUnsupported,
    FlowError,
    JobEnded,
    JobLost,
    MissingCapability,
    RegistersInUse,
    TaskStopped,
    Unsupported,
)
from flowgpu.image import compression, layout
from flowgpu.image.manifest import Affinity, Manifest, OpenFile, Packed, Setting
from flowgpu.image.writer import ImageWriter
from flowgpu.jobs import JobDir
from flowgpu.launch import emulator_socket
from flowgpu.options import CheckpointOptions
from flowgpu.proctree import (
    external_pipes,
    ids,
    is_stopped,
    resume_tree,
    stopped_pids,
    tree_pids,
)
from flowgpu.sandbox import Search
from flowgpu.settings import Survey
from flowgpu.undumpable import is_32_bit, outside_socket, undumpable
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

PIPE_LOOKS, PIPE_RECHECK_SECONDS = 5, 0.02
WATCH_SECONDS = 0.05
LOOK_SECONDS = 0.005
STRAY_SECONDS = 1.0
CLOCK_SECONDS = 0.01
"""How much earlier than its time a step may end that was given it in whole milliseconds."""
PAUSED = (Phase.GATE, Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE, Phase.COMMIT)
DISK_MARGIN = 64 << 20
GHOST_BYTES, CRIU_BYTES = 32 << 20, 16 << 20
"""Memory of the host that a ghost takes at least, before it has an arena or a context, and CRIU
with the page server. What the driver takes for a context is not known before."""


def take(
    job: Job,
    options: CheckpointOptions,
    progress: Progress,
    on_dumped: Callable[[Path], None],
) -> dict[str, Any]:
    """Take a checkpoint; another one where processes that begin or end have disturbed it.

    None is begun once the pause could have taken all of its time. Otherwise as Checkpoint.
    """
    began, paused = time.monotonic(), 0.0
    while True:
        checkpoint = Checkpoint(job, options, progress, on_dumped, began)
        try:
            return checkpoint.run()
        except FlowError as error:
            paused = paused or checkpoint.pause_began or time.monotonic()
            if not checkpoint.disturbed or time.monotonic() >= paused + options.pause_seconds:
                raise
            log.info("taken again: %s", error)


class Checkpoint:
    """One checkpoint; `run` once."""

    def __init__(
        self,
        job: Job,
        options: CheckpointOptions,
        progress: Progress,
        on_dumped: Callable[[Path], None],
        began: float,
    ) -> None:
        """`on_dumped` is called when the image is complete, before the job is killed.

        `began`: when what it is a part of has begun (time.monotonic).
        """
        self._job = job
        self._options = options
        self._report = progress
        self._on_dumped = on_dumped
        self._state = phases.start(options.leave_running)

        self._link = GhostLink(job.start_ghost, job.keep_ghost)
        self._engine: ControlState = Native(job, self._link)
        self._engine_reason = ""
        deadline = time.monotonic() + options.prepare_seconds
        self._shared = Shared(job, self._link, BlockTable(), deadline)
        self._group = TaskGroup(self._shared, self._unless_full)
        self._copy = CopyOut(self._shared, options, self._report)
        self._criu = Criu.locate()
        self._pages = Pages()
        self._manifest: Manifest | None = None
        self._active: str | None = None  # parts of blocks, None: all of them
        self._tcp: tcp.Found | None = None
        self._stopped_before: set[int] | None = None
        self._stop_began = 0.0
        self._stopped_seconds: float | None = None
        self._pids_dumped: list[int] = []
        self._open_files: tuple[OpenFile, ...] = ()
        self._memory_files = Saving(job)
        self._affinities: tuple[Affinity, ...] = ()
        self._survey = Survey()
        self._watched: tuple[Setting, ...] = ()
        self._search = Search([])
        self._unknown: list[str] = []  # which of them are not known to be free of sandboxes

        self._began = began
        self._pause_ended = 0.0
        self._seconds: dict[str, float] = {}
        self._foreign_bytes = 0
        self._failure: Failure | None = None
        self.disturbed = False
        """Whether it failed where a process has begun or ended: another may succeed."""

    def run(self) -> dict[str, Any]:
        """Do it. Gives the report; raises a FlowError after a failure, with everything undone."""
        actions: dict[Phase, Callable[[], None]] = {
            Phase.PREPARE: self._prepare,
            Phase.GATE: self._gate,
            Phase.HANDOVER: self._handover,
            Phase.STRIP: self._strip,
            Phase.CAPTURE: self._capture,
            Phase.COMMIT: self._commit,
            Phase.KILL: self._kill,
            Phase.WAKE: self._wake,
            Phase.MAPBACK: self._map_back,
            Phase.OPEN: self._open,
            Phase.RELEASE: self._release,
        }
        while self._state.phase is not Phase.END:
            phase = self._state.phase
            log.info("checkpoint: %s (%s)", phase.value, self._state.outcome.value)
            began = time.monotonic()
            event = self._perform(phase, actions[phase])
            self._seconds[phase.value] = time.monotonic() - began
            self._state = phases.next(self._state, event)
        if self._state.outcome is not Outcome.GOOD:
            self.disturbed &= self._state.outcome is Outcome.UNDONE
            raise self._explain()
        return self._result()

    @property
    def pause_began(self) -> float:
        """When its gates began to close (time.monotonic); 0: they have not."""
        return self._group.pause_began

    def _perform(self, phase: Phase, action: Callable[[], None]) -> Event:
        faults.halt(phase.value)
        self._set_deadline(phase)
        try:
            action()
        except Exception as error:
            log.exception("checkpoint: %s failed", phase.value)
            if self._failure is None:
                self._failure = Failure(self._named(error), phase, late=self._is_late(phase))
                self.disturbed = self._group.has_changed()
            if self._job_is_gone(error):
                return Event.GONE
            broken = isinstance(error, TaskError) and error.status is wire.Status.LOST
            return Event.BROKEN if broken else Event.FAILED
        return Event.DONE

    def _named(self, error: Exception) -> Exception:
        """By its cause, where a task does not answer because it is stopped."""
        if isinstance(error, TaskError) and error.status is None and is_stopped(error.pid):
            return TaskStopped(pid=error.pid, job=self._job.name, how="SIGSTOP")
        return error

    def _set_deadline(self, phase: Phase) -> None:
        """When the phase is to be over; those of the pause share their time."""
        now = time.monotonic()
        if phase is Phase.GATE:
            self._shared.deadline = now + self._options.pause_seconds
        elif phase in (Phase.WAKE, Phase.MAPBACK, Phase.OPEN):
            # The way back has time of its own: what made us late must not make us give up the job.
            self._shared.deadline = now + UNDO_SECONDS
        elif phase is Phase.COMMIT and self._state.resumed:
            self._shared.deadline = now + FLUSH_SECONDS
        if faults.is_late(phase.value):
            self._shared.deadline = now

    def _is_late(self, phase: Phase) -> bool:
        """Whether the pause has taken all of its time."""
        paused = phase in PAUSED and not self._state.resumed
        return paused and time.monotonic() >= self._shared.deadline - CLOCK_SECONDS

    def _job_is_gone(self, error: Exception) -> bool:
        dying = isinstance(error, ConnectionError) or (
            isinstance(error, TaskError) and error.status is None
        )
        deadline = time.monotonic() + (DYING_SECONDS if dying else 0.0)
        while alive(self._job.root_pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    # Forward

    def _prepare(self) -> None:
        faults.check(Fault.PREPARE)
        self._wait_for_strays()
        self._search = Search(tree_pids(self._job.root_pid))
        if held := undumpable(tree_pids(self._job.root_pid)):
            raise CriuUnsupported(action="dump", what=held)
        self._refuse_32_bit()
        if self._options.compress:
            compression.need_library()
        if not probes.capabilities() & probes.CHECKPOINT_RIGHTS:
            # CRIU says so as well, but in the pause.
            rights = " or ".join(sorted(probes.CHECKPOINT_RIGHTS, reverse=True))
            raise MissingCapability(action="CRIU's dump", capability=rights)
        writer = self._shared.writer = ImageWriter(self._options.output)
        group, shared = self._group, self._shared
        file_bytes = self._memory_files.look(tree_pids(self._job.root_pid))
        group.find(self._options.pause_seconds)
        needs = partial(memory.need, what=f"a checkpoint of job {self._job.name!r}")
        if group.tasks and not self._link.alive:
            needs(CRIU_BYTES + GHOST_BYTES)
        self._refuse_other_users()
        self._refuse_other_clients()
        self._engine, self._engine_reason = control_state.choose(
            self._options.engine, self._job, self._link, group
        )
        self._refuse_connections()
        if group.tasks:
            libraries()  # digested now, not in the pause
            self._link.start(shared.deadline)
            self._engine.refuse(group)
            if "active" in self._options.reductions:
                group.sampler = Sampler(group.tasks, self._options.wait_minimum)
            shared.late = not self._ghost_fits()
            group.export_all()
        size = shared.table.total_bytes()
        if size:
            self._copy.take_links()
        # How much of the linked bytes is of use is not known yet; a full disk is undone like
        # every failure.
        self._check_space(max(size - self._copy.linked_bytes, 0) + file_bytes)
        self._criu.remember()
        self._pages.start(writer.criu_dir, tree_pids(self._job.root_pid))
        if size:
            gpus = len(wanted_gpus(group.tasks))
            if not self._link.warm:  # which may have one
                needs(CRIU_BYTES + plan_for(writer.path, gpus, size).arena)
            self._unless_full(lambda: self._copy.prepare(group.most_bytes(), gpus))
            if self._options.leave_running and not shared.late:
                group.drain(self._copy.prepare_to_hold(group.most_bytes()))
        self._pages.ready(shared.left(POPULATE_SECONDS))
        self._refuse_sandboxes()
        self._find_low()

    def _find_low(self) -> None:
        """Several tasks together are waited for here; a single one knows its low point best."""
        group = self._group
        smallest = group.sampler.smallest()
        if len(group.tasks) == 1 and smallest is not None:
            group.sampler.close()
            group.low, group.low_wait = int(smallest * (1 + NEAR)), self._options.wait_minimum
        else:
            group.sampler.wait()

    def _ghost_fits(self) -> bool:
        """Whether the ghost may have its contexts beside those of the tasks."""
        tasks = self._group.tasks
        if self._job.ghost == "cold" or wanted_gpus(tasks) <= self._link.warm:
            return True
        return has_room(tasks, self._link.gpus, self._shared.deadline)

    def _unless_full(self, action: Callable[[], object]) -> None:
        """Do it; a ghost that finds no device memory gives way to one that waits for the strip."""
        try:
            action()
        except GhostError as error:
            if not error.no_room or self._job.ghost == "cold":
                raise
            log.info("the ghost takes the place of the tasks' contexts: %s", error)
            self._shared.late = True
            self._link.drop()
            self._link.start()
            self._copy.forget_files()

    def _wait_for_strays(self) -> None:
        """An orphan is none of the tree. One that soon ends needs no refusal."""
        deadline = time.monotonic() + STRAY_SECONDS
        lasting = set(self._strays())
        while lasting and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            lasting &= set(self._strays())
        self._refuse_strays(lasting)

    def _refuse_strays(self, strays: Collection[int]) -> None:
        if strays:
            name = f"process {min(strays)}, which has left the job's process tree"
            raise Unsupported(name=name)

    def _strays(self) -> list[int]:
        tree = tree_pids(self._job.root_pid)
        return [p for p in orphans(self._job.keeper) if p not in tree and alive(p)]

    def _refuse_sandboxes(self) -> None:
        """A restored job would be free of them."""
        sandboxed, self._unknown = self._search.result()
        if sandboxed:
            name = "a Landlock sandbox (process {}, thread {})".format(*sandboxed)
            raise Unsupported(name=name)

    def _refuse_32_bit(self) -> None:
        """CRIU may be built without, or the kernel."""
        found = next(filter(is_32_bit, tree_pids(self._job.root_pid)), None)
        if found is not None and not self._criu.has_feature("compat_cr"):
            raise CriuUnsupported(action="dump", what=f"a 32-bit program (process {found})")

    def _refuse_other_users(self) -> None:
        """CRIU asks for the limits of each process, and the kernel for a right or the same user."""
        if "CAP_SYS_RESOURCE" in probes.capabilities():
            return
        for pid in tree_pids(self._job.root_pid):
            found = ids(pid)
            if found and {*found.users[:3]} != {os.getuid()}:
                what = f"process {pid} of another user ({found.users[0]})"
            elif found and {*found.groups[:3]} != {os.getgid()}:
                what = f"process {pid} of another group ({found.groups[0]})"
            else:
                continue
            raise MissingCapability(action=f"CRIU's dump of {what}", capability="CAP_SYS_RESOURCE")

    def _check_space(self, beside: int) -> None:
        resident = 0
        for pid in tree_pids(self._job.root_pid):
            try:
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        needed = beside + resident * os.sysconf("SC_PAGE_SIZE") + DISK_MARGIN
        self._shared.image.need(needed, self._job.name)

    def _gate(self) -> None:
        try:
            self._group.close_gates(self._engine.code)
        except TaskError as error:
            if error.status is not wire.Status.REFUSED:
                raise
            # What it refuses has come since it was asked in PREPARE.
            self._engine, self._engine_reason = control_state.instead(
                self._engine, error, self._options.engine, self._job, self._link
            )
            self._group.reopen()
            self._engine.refuse(self._group)
            self._set_deadline(Phase.GATE)
            self._group.close_gates(self._engine.code)

    def _handover(self) -> None:
        group = self._group
        self._foreign_bytes = sum(task.page.foreign_bytes for task in group.tasks)
        if self._options.leave_running and not self._shared.late:
            self._engine = control_state.of_running_job(
                self._engine, self._job, self._link, self._criu, group
            )
        group.hand_over(lend=self._engine.lends)
        if self._shared.table.all() and "active" in self._options.reductions:
            self._active = group.active()
        self._copy.begin(self._active)

    def _strip(self) -> None:
        self._refuse_other_clients()  # loaded since
        self._engine.strip(self._group)
        if self._shared.late and self._shared.table.all():
            self._copy.begin_late(self._active)
            if self._options.leave_running and self._engine.needs_ghost:
                self._link.prepare_next()

    def _capture(self) -> None:
        faults.check(Fault.CRIU_DUMP)
        writer = self._shared.image
        root = self._job.root_pid
        self._stopped_before = stopped_pids(root)
        began = self._stop_began = time.monotonic()
        if hangs := faults.fires(Fault.CRIU_HANG):
            self._shared.deadline = began + faults.HANG_SECONDS
        run = self._criu.start_dump(
            root,
            writer.criu_dir,
            leave_stopped=True,
            timeout=max(self._shared.deadline - began, 0.001),
            plugins=self._criu.plugins() if self._engine.lends else None,
            pages=self._pages.take(),
            tasks=self._stopped_tasks,
            notes=JobDir(self._job.directory).standstill,
            survey=self._survey,
            let_go=self._let_go,
        )
        if hangs:
            os.kill(run.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(max_workers=1) as pool:
            saved = pool.submit(self._save_files)
            try:
                self._watch(run)
                self._seconds["criu"] = run.wait()
                saved.result()
                self._memory_files.name_links()
            finally:
                self._memory_files.clear()
        self._check_tcp()
        if used := criu_images.unsaved_registers(writer.criu_dir):
            raise RegistersInUse(job=self._job.name, thread=used[0], names=used[1])
        self._pages.finish()
        self._pids_dumped = tree_pids(root)
        # While nothing of the job runs.
        in_image = self._memory_files.mapped
        self._open_files = written_files(writer.criu_dir, self._pids_dumped, in_image)
        self._affinities = affinity.bound(self._pids_dumped)
        self._watched = tuple(watches.folders(writer.criu_dir, root))
        self._job.output.drain()
        output, log_path = self._job.output, JobDir(self._job.directory).output_log
        copy_log(log_path, writer.output_log, output.kept, output.end)
        if self._engine.lends:
            # What of the tasks does not use the GPU need not wait for the copy.
            self._resume()
        faults.check(Fault.COPY_WAIT)
        if self._copy.under_way and not self._copy.wait_held():
            self._copy.place()
            if self._shared.late and self._options.leave_running:
                # This ghost has to go before the tasks' contexts can come back.
                self._copy.wait("done")
                self._copy.under_way = False
            else:
                self._copy.wait("out")

    def _save_files(self) -> None:
        files, shared = self._memory_files, self._shared
        files.save(shared.image.path, tree_pids(self._job.root_pid), shared.deadline)

    def _refuse_connections(self) -> None:
        """Of a task the driver may have some to its own service (MPS), which says more."""
        try:
            self._refuse_sockets()
            self._refuse_tcp(PIPE_LOOKS)
            self._refuse_pipes(PIPE_LOOKS)
        except FlowError:
            self._group.refuse(self._engine.code)
            raise

    def _refuse_sockets(self) -> None:
        task_socket = os.fsencode(JobDir(self._job.directory).task_socket)
        device = os.fsencode(emulator_socket(Path("/")))

        connections = {task.inode for task in self._group.tasks}

        def is_ours(peer: int, path: bytes) -> bool:
            return peer in connections or path == task_socket or path.endswith(device)

        if held := outside_socket(lambda: tree_pids(self._job.root_pid), is_ours):
            raise CriuUnsupported(action="dump", what=held)

    def _refuse_tcp(self, looks: int) -> None:
        """As of pipes, one that is outside is in all looks. The others are soon where they go."""
        lasting: set[int] | None = None
        for look in range(looks):
            if look:
                time.sleep(PIPE_RECHECK_SECONDS)
            found = self._tcp = tcp.look(tree_pids(self._job.root_pid))
            outside = {end.row.inode: end for end in found.outside}
            lasting = set(outside) if lasting is None else lasting & set(outside)
            if not lasting:
                break
        if found.ends and "CAP_NET_ADMIN" not in probes.capabilities():
            raise MissingCapability(action="keeping TCP connections", capability="CAP_NET_ADMIN")
        what = ""
        if lasting and self._options.tcp == "job":
            kind = "a TCP connection to a process outside (`--tcp close` closes it in the image)"
            what = f"{kind} {outside[min(lasting)]}"
        elif found.waiting or found.leaving:
            self._group.disturbed = True
            if found.waiting:
                what = f"a TCP connection that no process has accepted yet {found.waiting[0]}"
            else:
                what = f"data that a closed end has sent to a TCP connection {found.leaving[0]}"
        if what:
            raise CriuUnsupported(action="dump", what=what)

    def _check_tcp(self) -> None:
        """Both ends of a connection were still, but were dumped one after the other."""
        images, found = self._shared.image.criu_dir, self._tcp
        if found is None:
            return
        if tcp.lost(images, found.pairs):
            self._group.disturbed = True
            raise CriuFailed(action="dump", cause="a TCP connection of the job was not still")
        criu_images.note_as_sent(images, found.pairs)
        if found.outside:
            criu_images.close_connections(images, {end.row.inode for end in found.outside})

    def _refuse_pipes(self, looks: int) -> None:
        """Listing the descriptors of live processes is no snapshot: a pipe that is being closed, or
        that a new process has, can look as if its other end were elsewhere. One that all looks see
        is."""
        own = set(self._job.pipes.values())
        lasting: set[int] | None = None
        for look in range(looks):
            if look:
                time.sleep(PIPE_RECHECK_SECONDS)
            found = {p.inode: p for p in external_pipes(self._job.root_pid) if p.inode not in own}
            lasting = set(found) if lasting is None else lasting & set(found)
            if not lasting:
                return
        if lasting:
            pid, fd = found[min(lasting)].holders[0]
            raise Unsupported(
                name=f"a pipe to a process outside the job (process {pid}, descriptor {fd})"
            )

    def _refuse_other_clients(self) -> None:
        """The driver's checkpoint leaves their devices open, and they do not work after it."""
        for pid in self._group.pids():
            if library := other_client(pid):
                raise Unsupported(name=f"{library} beside CUDA (process {pid})")

    def _stopped_tasks(self) -> Sequence[int]:
        """The tree is stopped, so who is in it is final. Gives its tasks."""
        strays = self._strays()
        self._group.disturbed |= bool(strays)
        self._refuse_strays(strays)
        self._refuse_tcp(1)
        if self._tcp:
            tcp.note(self._tcp.ends, JobDir(self._job.directory).tcp_notes)
        self._refuse_pipes(1)
        return self._group.stopped()

    def _watch(self, run: CriuRun) -> None:
        """Until CRIU ends; a ghost or a task that dies meanwhile ends it too."""
        while not readable(run, seconds=WATCH_SECONDS):
            if self._copy.under_way and not self._link.alive:
                run.cancel()
                raise GhostError("the ghost died while CRIU was at work")
            if run.killed_task() or time.monotonic() >= self._shared.deadline:
                return  # run.wait ends it with its own error

    def _commit(self) -> None:
        faults.check(Fault.COMMIT)
        if self._copy.under_way:
            if self._copy.held:
                self._copy.place()
            if self._state.resumed:
                # The job has its memory back; mapped here as well, what it frees would stay taken.
                self._link.ask("forget", self._shared.deadline)
            self._copy.wait("done")
            self._group.drain(under_way=False)
        criu_images.rearm_timers(self._shared.image.criu_dir)
        packed = self._pack() if self._options.compress else ()
        self._manifest = write_manifest(self._shared.image, self._job, self._facts(packed))

    def _facts(self, packed: Sequence[Packed]) -> Facts:
        now = time.monotonic()
        return Facts(
            criu_version=self._criu.version,
            pids=self._pids_dumped,
            engine=self._engine.code.name.lower() if self._group.tasks else "none",
            engine_reason=self._engine_reason,
            live=self._engine.lends,
            driver_version=self._link.driver_version,
            gpus=self._link.gpus,
            indexes=self._copy.indexes,
            blocks=self._shared.table.all(),
            replies=self._group.replies,
            foreign_bytes=self._foreign_bytes,
            stored_bytes=self._copy.stored,
            ghost=self._ghost_kind(),
            reductions=self._options.reductions,
            reduced=self._copy.reduced,
            open_files=self._open_files,
            memory_files=self._memory_files.files,
            links=self._memory_files.links,
            affinities=self._affinities,
            settings=(*self._survey.settings, *self._watched),
            not_kept=tuple(self._not_kept()),
            phases=self._phase_seconds(),
            pause_seconds=(self._pause_ended or now) - self._group.pause_began,
            total_seconds=now - self._began,
            packed=packed,
        )

    def _not_kept(self) -> Iterator[str]:
        """What a restored job is going to miss, in words: the process and the thing."""
        yield from self._unknown
        yield from self._survey.not_kept
        for pid, words in sorted(self._group.not_kept.items()):
            yield f"process {pid}: {words}"

    def _pack(self) -> Sequence[Packed]:
        began = time.monotonic()

        def progress(event: Mapping[str, Any]) -> None:
            if time.monotonic() >= self._shared.deadline:
                raise TimeoutError("packing takes too long")
            self._report("pack", event["done"], event["total"])

        packed = compression.pack_image(self._shared.image.path, self._job.name, progress)
        self._seconds["pack"] = time.monotonic() - began
        return packed

    def _ghost_kind(self) -> str:
        if not self._group.tasks:
            return "none"
        if self._shared.late:
            return "late"
        warm = self._link.warm and set(self._copy.indexes) <= self._link.warm
        return "warm" if warm else "cold"

    def _kill(self) -> None:
        if self._state.outcome is Outcome.GOOD:
            self._on_dumped(self._options.output)
        self._let_go(self._tcp.pairs if self._tcp else ())
        kill_tree(self._job.root_pid)
        self._pause_ended = time.monotonic()

    # The way back: after a failure, or with leave_running

    def _wake(self) -> None:
        if self._state.outcome is not Outcome.GOOD:
            self._copy.cancel()
        self._resume()
        self._job.channel.listen()
        if not self._engine.begun:
            return
        if self._shared.late:
            self._link.drop()
            self._copy.abandon()
        self._engine.rebuild(self._group)

    def _let_go(self, but: Container[int] = ()) -> None:
        tcp.let_go(JobDir(self._job.directory).tcp_notes, but)

    def _resume(self) -> None:
        """Let the processes go on that CRIU has left stopped, or is about to stop."""
        if self._stopped_before is not None:
            self._let_go()
            resume_tree(self._job.root_pid, keep_stopped=self._stopped_before)
            self._stopped_seconds = time.monotonic() - self._stop_began
            self._stopped_before = None

    def _map_back(self) -> None:
        self._group.map_back()

    def _open(self) -> None:
        self._group.open()
        self._job.channel.entrance.open()
        # Not before: a task that waits for its gate is given all of its memory by a takeover.
        self._job.custody.clear()
        self._group.drain(under_way=self._copy.held)
        self._pause_ended = time.monotonic()

    def _release(self) -> None:
        with contextlib.ExitStack() as stack:  # the last first, each whatever becomes of the others
            stack.callback(self._shared.table.close)
            stack.callback(self._job.custody.clear)
            if self._shared.writer is not None:
                stack.callback(self._shared.writer.abort)  # nothing after a commit
            # Before that: it may be writing to the image.
            stack.callback(self._link.quit if self._failure is None else self._link.kill)
            stack.callback(self._job.channel.entrance.open)
            stack.callback(self._group.close)
            stack.callback(lambda: self._group.drain(under_way=False))
            stack.callback(self._pages.close)
            stack.callback(self._search.close)
        if self._manifest is not None:
            self._pages.report(self._options.output / layout.CRIU_DIR)

    # Results

    def _explain(self) -> FlowError:
        failure = self._failure
        if failure is None:
            raise RuntimeError("a checkpoint that failed knows no error")
        if self._state.outcome is Outcome.LOST:
            if Phase.KILL.value not in self._seconds:
                return JobEnded(job=self._job.name, phase=failure.phase.name)
            return JobLost(job=self._job.name, reason=failure.reason)
        return explain(failure, self._job.name, self._options)

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds under the names of the report."""
        found = self._seconds
        back = sum(found.get(p.value, 0.0) for p in (Phase.WAKE, Phase.MAPBACK, Phase.OPEN))
        return {
            "prepare": found.get("prepare", 0.0),
            "gate": max(found.get("gate", 0.0) - self._group.waited, 0.0),
            "handover": found.get("handover", 0.0),
            "strip": found.get("strip", 0.0),
            "copy": self._copy.seconds,
            "criu": found.get("criu", 0.0),
            **({"pack": found["pack"]} if "pack" in found else {}),
            "commit": found.get("commit", 0.0),
            "end": found.get("kill", 0.0) or back,
        }

    def _result(self) -> dict[str, Any]:
        if self._manifest is None:
            raise RuntimeError("a checkpoint that succeeded has no manifest")
        return {
            "job": self._job.name,
            "image": str(self._options.output),
            "engine": self._manifest.engine,
            "engine_reason": self._manifest.engine_reason,
            "live": self._manifest.live,
            "ghost": self._manifest.ghost,
            "gpu": self._job.gpu,
            "pause_seconds": self._pause_ended - self._group.pause_began,
            # In which also those stood that do not use the GPU; none where the job has ended.
            "stopped_seconds": self._stopped_seconds,
            # To copy what is in use on the GPU; none where the job waited until it was out.
            "hold_seconds": self._copy.hold_seconds,
            "total_seconds": time.monotonic() - self._began,
            "phases": self._phase_seconds(),
            **dataclasses.asdict(self._manifest.counts),
            "gpu_bytes_linked": self._manifest.linked_bytes,
            "not_kept": list(self._manifest.not_kept),
        }
