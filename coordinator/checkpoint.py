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
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from coordinator import faults, phases
from coordinator.active import active_ranges, by_block, unknown_bytes
from coordinator.blocks import BATCH, Block, BlockTable, Handover
from coordinator.chunks import pack_parts
from coordinator.ghost_client import Answer, Ghost, GhostError
from coordinator.minimum import TOLERANCE, WAIT_SECONDS
from coordinator.mover import plan_for
from coordinator.page_server import Pages
from coordinator.phases import Event, Outcome, Phase, State
from coordinator.polling import readable
from coordinator.process import alive, holds_device, kill_tree, own_children
from coordinator.records import Facts, Reduced, copy_log, libraries, write_manifest
from coordinator.sampler import Sampler
from coordinator.session import (
    DRIVER_ROOM_BYTES,
    GhostLink,
    Job,
    Progress,
    each,
    has_room,
    least_free,
    map_back,
    open_gates,
    wait_copy,
    wanted_gpus,
)
from coordinator.tasks import Task, TaskError
from flowgpu import wire
from flowgpu.criu import Criu, CriuRun
from flowgpu.errors import (
    CheckpointFailed,
    CheckpointTimeout,
    FlowError,
    GpuFull,
    JobEnded,
    JobLost,
    NotEnoughDisk,
    Unsupported,
)
from flowgpu.image import compression, layout
from flowgpu.image.linked import Linked, take
from flowgpu.image.manifest import Manifest, Packed
from flowgpu.image.writer import ImageWriter
from flowgpu.proctree import external_pipes, resume_tree, stopped_pids, tree_pids
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

PAUSE_SECONDS = 60.0
"""Default of --timeout: from the first closing of a gate until the job is gone or runs again."""
PREPARE_SECONDS = 120.0
POPULATE_SECONDS = 30.0
HELLO_SECONDS = 5.0
PIPE_RECHECK_SECONDS = 0.02
UNDO_SECONDS = 60.0
FLUSH_SECONDS = 3600.0
GATE_SECONDS = 1.0
GATE_RETRY_SECONDS = 0.02
WATCH_SECONDS = 0.05
DYING_SECONDS = 0.2
DISK_MARGIN = 64 << 20
# The gates close near the smallest memory in use, and some more may be made until then.
LIVE_MARGIN = 1.05
LIVE_SPARE = 256 << 20
USUAL_MARGIN = 2
REDUCTIONS = ("active", "zero", "dedup")
"""What is left out of an image: chunks not in use, chunks of zeros, all but one of equal chunks."""


Imports = list[tuple[list[Block], Future[Answer]]]


class Checkpoint:
    """One checkpoint; `run` once."""

    def __init__(
        self,
        job: Job,
        output: Path,
        *,
        leave_running: bool = False,
        timeout: float = PAUSE_SECONDS,
        base: Path | None = None,
        reductions: Sequence[str] = REDUCTIONS,
        wait_minimum: float = WAIT_SECONDS,
        compress: bool = False,
        overlap: bool = True,
        progress: Progress | None = None,
        on_dumped: Callable[[Path], None] | None = None,
    ) -> None:
        """`on_dumped` is called when the image is complete, before the job is killed.

        `base` is an earlier image of the job, of which the new one takes what has not changed.
        `reductions` are those to use, in the order of the manifest's. `wait_minimum`: seconds for
        which the gates wait for the memory in use to be near its minimum. `compress`: pack pages
        and extents where it pays. `overlap`: strip the tasks while the copy is under way.
        """
        self._job = job
        self._output = output
        self._timeout = timeout
        self._base = base if "dedup" in reductions else None
        self._reductions = list(reductions)
        self._wait_minimum = wait_minimum
        self._compress = compress
        self._overlap = overlap
        self._sampler = Sampler([], 0.0)
        self._report = progress or (lambda phase, done, total: None)
        self._on_dumped = on_dumped or (lambda image: None)
        self._state = phases.start(leave_running)
        self._deadline = time.monotonic() + PREPARE_SECONDS

        self._link = GhostLink(job.start_ghost, job.keep_ghost)
        self._late = False
        self._table = BlockTable()
        self._criu = Criu.locate()
        self._pages = Pages()
        self._writer: ImageWriter | None = None
        self._manifest: Manifest | None = None
        self._linked_bytes = 0
        self._usual_bytes: int | None = None
        self._stored = 0
        self._low = 0  # live bytes at which a single task closes its gate; 0: at once
        self._waited = 0.0  # seconds, for that, with the gate open
        self._indexes: dict[int, int] = {}
        self._tasks: list[Task] = []
        self._handovers: dict[int, Handover] = {}
        self._gated: set[int] = set()
        self._handed: set[int] = set()
        self._detached: set[int] = set()
        self._strip_asked = False
        self._stopped_before: set[int] | None = None
        self._copying = False
        self._copy: Future[Answer] | None = None
        self._done: Future[Answer] | None = None
        self._pids_dumped: list[int] = []

        self._began = time.monotonic()
        self._pause_began = self._pause_ended = 0.0
        self._copy_began = 0.0
        self._seconds: dict[str, float] = {}
        self._counts: dict[int, wire.Reply] = {}
        self._reduced: list[Reduced] = []
        self._foreign_bytes = 0
        self._error: Exception | None = None
        self._failed: Phase | None = None

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
            raise self._explain(self._state)
        return self._result()

    def _perform(self, phase: Phase, action: Callable[[], None]) -> Event:
        if phase in (Phase.WAKE, Phase.MAPBACK, Phase.OPEN):
            # The way back has time of its own: what made us late must not make us give up the job.
            self._deadline = time.monotonic() + UNDO_SECONDS
        try:
            action()
        except Exception as error:
            log.exception("checkpoint: %s failed", phase.value)
            if self._error is None:
                self._error, self._failed = error, phase
            return Event.GONE if self._job_is_gone(error) else Event.FAILED
        return Event.DONE

    def _job_is_gone(self, error: Exception) -> bool:
        # A task that ends closes its connection some time before its process is gone.
        dying = isinstance(error, TaskError) and error.status is None
        deadline = time.monotonic() + (DYING_SECONDS if dying else 0.0)
        while alive(self._job.root_pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    # Forward

    def _prepare(self) -> None:
        faults.check(Fault.PREPARE)
        self._refuse_strays()
        if self._compress:
            compression.need_library()
        self._writer = ImageWriter(self._output)
        self._tasks = self._known_tasks()
        if self._tasks:
            libraries()  # digested now, not in the pause
            self._link.start()
            if not self._link.has_engine:
                raise Unsupported(name=f"CUDA on driver version {self._link.driver_version}")
            if "active" in self._reductions:
                self._sampler = Sampler(self._tasks, self._wait_minimum)
            self._refuse_full()
            self._late = not self._ghost_fits()
            self._unless_full(lambda: each(self._tasks, self._export))
        size = self._block_bytes()
        if size:
            self._take_links()
        # How much of the linked bytes is of use is not known yet; a full disk is undone like
        # every failure.
        self._check_space(max(size - self._linked_bytes, 0))
        self._pages.start(self._writer.criu_dir, tree_pids(self._job.root_pid))
        if size:
            self._unless_full(self._prepare_copy)
        self._pages.ready(POPULATE_SECONDS)
        self._find_low()

    def _find_low(self) -> None:
        """Several tasks together are waited for here; a single one knows its low point best."""
        smallest = self._sampler.smallest()
        if len(self._tasks) == 1 and smallest is not None:
            self._sampler.close()
            self._low = int(smallest * (1 + TOLERANCE))
        else:
            self._sampler.wait()

    def _prepare_copy(self) -> None:
        if self._late:
            # Without a context there is only the arena to make.
            gpus = max(len(wanted_gpus(self._tasks)), 1)
            plan = plan_for(self._need_writer().path, gpus, self._block_bytes())
            self._link.ask("prepare-fill", self._deadline, plan=vars(plan), ordinals=[])
            return
        self._link.ask(
            "prepare-copy",
            self._deadline,
            seconds=POPULATE_SECONDS,
            most=self._bytes_to_prepare(),
            **self._copy_fields(),
        )

    def _refuse_full(self) -> None:
        """The driver would fail, and never checkpoint these processes again."""
        free = least_free(self._tasks, self._deadline)
        if free < DRIVER_ROOM_BYTES:
            needed = f"the driver's own checkpoint needs {DRIVER_ROOM_BYTES >> 20} MiB"
            raise GpuFull(job=self._job.name, reason=f"{needed}, {free >> 20} MiB are free")

    def _ghost_fits(self) -> bool:
        """Whether the ghost may have its contexts beside those of the tasks."""
        if self._job.ghost == "cold" or wanted_gpus(self._tasks) <= self._link.warm:
            return True
        return has_room(self._tasks, self._link.gpus, self._deadline)

    def _unless_full(self, action: Callable[[], object]) -> None:
        """Do it; a ghost that finds no device memory gives way to one that waits for the strip."""
        try:
            action()
        except GhostError as error:
            if not error.no_room or self._job.ghost == "cold":
                raise
            log.info("the ghost takes the place of the tasks' contexts: %s", error)
            self._late = True
            self._link.drop()
            self._link.start()
            for index in self._indexes.values():
                self._need_writer().gpu_data(index).unlink(missing_ok=True)
            self._indexes.clear()

    def _take_links(self) -> None:
        """Link what the base has, so that nobody can remove it meanwhile."""
        linked = take(self._base, self._need_writer().path, self._job.id)
        self._linked_bytes = sum(linked.slots) * layout.CHUNK_BYTES
        self._usual_bytes = linked.usual

    def _drop_links(self) -> None:
        if self._linked_bytes:
            Linked(self._need_writer().path).settle([], 1, 0)

    def _most_bytes(self) -> int:
        """About what will be stored at most: more is stored as well, only not prepared for."""
        smallest = self._sampler.smallest()
        if smallest is None:
            return self._block_bytes()
        unknown = 0
        for task in self._tasks:
            rows = self._table.rows(task.pid)[:, [1, 2, 1]]
            unknown += unknown_bytes(rows, None if task.live_bytes() is None else task.live)
        return int(smallest * LIVE_MARGIN) + unknown + LIVE_SPARE

    def _bytes_to_prepare(self) -> int:
        """Less than could be stored, where images before this one say what a period changes."""
        usual = self._usual_bytes
        most = self._most_bytes()
        return most if usual is None else min(most, USUAL_MARGIN * usual + LIVE_SPARE)

    def _block_bytes(self) -> int:
        return sum(block.row.size for block in self._table.all())

    def _copy_fields(self) -> dict[str, Any]:
        """Plan and files of a copy of all blocks; a GPU keeps the index that it was first given."""
        writer = self._need_writer()
        for gpu in sorted({block.gpu for block in self._table.all()}):
            self._indexes.setdefault(gpu, len(self._indexes))
        plan = plan_for(writer.path, len(self._indexes), self._block_bytes())
        files = {
            str(gpu): [str(writer.gpu_data(index)), str(writer.gpu_chunks(index)), index]
            for gpu, index in self._indexes.items()
        }
        return {
            "plan": vars(plan),
            "files": files,
            "links": str(writer.path) if self._linked_bytes else None,
            "gpus": len(self._indexes),
            "reductions": self._reductions,
        }

    def _known_tasks(self) -> list[Task]:
        """The tasks, once each process that holds a device has introduced itself (P23)."""
        deadline = time.monotonic() + HELLO_SECONDS
        while True:
            tasks = self._job.channel.tasks()
            known = {task.pid for task in tasks}
            unknown = [
                pid
                for pid in tree_pids(self._job.root_pid)
                if pid not in known and holds_device(pid)
            ]
            if not unknown:
                return tasks
            if time.monotonic() >= deadline:
                name = f"process {unknown[0]}, which uses the GPU but not through FlowGPU"
                raise Unsupported(name=name)
            time.sleep(0.01)

    def _refuse_strays(self) -> None:
        tree = set(tree_pids(self._job.root_pid))
        for pid in own_children():
            if pid not in tree and pid not in Ghost.pids and alive(pid):
                raise Unsupported(name=f"process {pid}, which has left the job's process tree")

    def _check_space(self, gpu_bytes: int) -> None:
        resident = 0
        for pid in tree_pids(self._job.root_pid):
            try:
                resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        needed = gpu_bytes + resident * os.sysconf("SC_PAGE_SIZE") + DISK_MARGIN
        self._need_writer().need(needed, self._job.name)

    def _export(self, task: Task) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports: Imports = []

        def forward(blocks: list[Block]) -> None:
            # Without the ghost, the descriptors that the table has keep the memory.
            if not self._late:
                imports.append(self._import(blocks))

        def confirm(live: list[int]) -> None:
            if not self._late:
                self._settle(imports)
            gone = self._table.keep_live(task.pid, live)
            if gone and not self._late:
                self._link.ask("drop", self._deadline, keys=[block.key for block in gone])

        handover = Handover(task.pid, ours, self._table, forward, confirm)
        self._handovers[task.pid] = handover
        with theirs:
            task.request(wire.Message.EXPORT, self._deadline, fds=[theirs.fileno()])
        faults.check(Fault.EXPORT)
        handover.wait_idle(self._deadline)
        self._settle(imports)

    def _import(self, blocks: list[Block]) -> tuple[list[Block], Future[Answer]]:
        rows = [[block.key, block.row.size, block.row.device] for block in blocks]
        fds = [block.fd for block in blocks]
        return blocks, self._link.submit("import", fds, blocks=rows)

    def _settle(self, imports: Imports) -> None:
        """Wait until the ghost has imported what was sent to it."""
        while imports:
            blocks, future = imports.pop(0)
            answer = Ghost.result(future, "import", self._deadline)
            for block, gpu in zip(blocks, answer["ordinals"], strict=True):
                block.gpu = gpu

    def _gate(self) -> None:
        self._pause_began = time.monotonic()
        self._deadline = self._pause_began + self._timeout
        patience = GATE_SECONDS
        while True:
            new = [task for task in self._job.channel.tasks() if task.pid not in self._gated]
            if not new:
                return
            for task in new:
                if task.pid not in self._handovers:
                    # A process that has begun to use CUDA since: P23 is this race.
                    self._tasks.append(task)
                    self._link.start()
                    self._unless_full(partial(self._export, task))
            try:
                each(new, partial(self._close_gate, seconds=patience))
            except TaskError as error:
                if error.status is not wire.Status.BUSY or time.monotonic() >= self._deadline:
                    raise
                self._open_gated()
                time.sleep(GATE_RETRY_SECONDS)
                self._pause_began = time.monotonic()
                # Long kernels, or a queue of many: what did not drain in this time may in twice.
                patience *= 2

    def _close_gate(self, task: Task, seconds: float) -> None:
        left = self._wait_minimum if self._low else 0.0
        limit = min(seconds, self._deadline - time.monotonic())
        try:
            waited = task.gate(self._deadline + left, limit, left, self._low).waited_us
        except TaskError as error:
            self._note_waited(error.waited_us)
            raise
        self._note_waited(waited)
        self._gated.add(task.pid)
        faults.check(Fault.GATE)

    def _note_waited(self, microseconds: int) -> None:
        """The job ran while its task waited for the low point: that is no part of the pause."""
        self._waited += microseconds * 1e-6
        self._pause_began += microseconds * 1e-6
        self._deadline += microseconds * 1e-6

    def _handover(self) -> None:
        self._foreign_bytes = sum(task.page.foreign_bytes for task in self._tasks)
        each(self._tasks, self._hand_over)
        if not self._table.all():
            self._drop_links()
        elif not self._late:
            # What to store is found out while the strip is under way.
            self._begin_copy(
                lambda: self._link.submit("copy", active=self._active(), **self._copy_fields())
            )
        for gpu in set(self._indexes) - {block.gpu for block in self._table.all()}:
            self._make_empty(self._indexes[gpu])

    def _begin_copy(self, submit: Callable[[], Future[Answer]]) -> None:
        faults.check(Fault.COPY_START)
        self._copy_began = time.monotonic()
        self._copying = True
        self._copy = submit()
        self._copy.add_done_callback(self._on_planned)
        if not self._overlap:
            self._planned()
            self._wait_copy("done")

    def _begin_late_copy(self) -> None:
        """The contexts of the tasks are gone, and in their place there is room for the ghost's."""
        pool = ThreadPoolExecutor(max_workers=1)
        self._begin_copy(lambda: pool.submit(self._copy_late))
        pool.shutdown(wait=False)
        if self._state.leave_running:
            self._link.prepare_next()

    def _copy_late(self) -> Answer:
        blocks = self._table.all()
        self._settle([self._import(blocks[at : at + BATCH]) for at in range(0, len(blocks), BATCH)])
        fields = self._copy_fields()
        return self._link.ask("copy", self._deadline, active=self._active(), **fields)

    def _active(self) -> str | None:
        """Active parts of blocks, as they go to the ghost; None: all of them."""
        if "active" not in self._reductions:
            return None
        found = [
            by_block(
                active_ranges(self._handovers[task.pid].allocations(), task.live),
                self._table.rows(task.pid),
            )
            for task in self._tasks
        ]
        return pack_parts(np.concatenate(found))

    def _hand_over(self, task: Task) -> None:
        handover = self._handovers[task.pid]
        try:
            reply = task.request(wire.Message.HANDOVER, self._deadline)
        except TaskError as error:
            # A task that was not told that its memory is safe says only that; we know why.
            raise handover.failure() or error from error
        self._handed.add(task.pid)
        self._counts[task.pid] = reply
        handover.wait_end(self._deadline)
        faults.check(Fault.HANDOVER)

    def _place(self, gpus: dict[str, dict[str, Any]]) -> None:
        """Note in which order the ghost takes the blocks of each GPU, and what it stores."""
        for gpu, found in gpus.items():
            offset = 0
            for key in found.pop("keys"):
                block = self._table[key]
                block.gpu, block.offset = int(gpu), offset
                offset += block.row.size
            self._reduced.append(Reduced(**found))
        if any(block.offset < 0 for block in self._table.all()):
            raise RuntimeError("the ghost does not have every block")

    def _on_planned(self, copy: Future[Answer]) -> None:
        if copy.exception() is None:
            self._done = self._link.submit("wait", stage="done", seconds=FLUSH_SECONDS)
            self._done.add_done_callback(self._note_copied)

    def _planned(self) -> Answer:
        """The answer to `copy`, once the copy is planned and under way."""
        if self._copy is None:
            raise RuntimeError("no copy was asked for")
        return Ghost.result(self._copy, "copy", self._deadline)

    def _make_empty(self, index: int) -> None:
        writer = self._need_writer()
        for path in (
            writer.gpu_data(index),
            writer.gpu_digests(index),
            writer.gpu_chunks(index),
        ):
            path.write_bytes(b"")

    def _strip(self) -> None:
        self._refuse_full()  # asked again: what was free in PREPARE may be gone
        # First of all: a task that has detached tries to connect at once, and must not get through.
        self._job.channel.stop_listening()
        strangers = {task.pid for task in self._job.channel.tasks()} - self._gated
        if strangers:
            raise RuntimeError(f"process {min(strangers)} began to use CUDA in the meantime")
        each(self._tasks, self._detach)
        self._job.channel.forget()
        if not self._tasks:
            return
        self._strip_asked = True
        left = max(self._deadline - time.monotonic(), 0.0)
        self._link.ask("strip", self._deadline, pids=self._pids(), seconds=left)
        faults.check(Fault.STRIP)
        if self._late and self._table.all():
            self._begin_late_copy()

    def _detach(self, task: Task) -> None:
        task.request(wire.Message.DETACH, self._deadline)
        self._detached.add(task.pid)
        faults.check(Fault.DETACH)

    def _capture(self) -> None:
        faults.check(Fault.CRIU_DUMP)
        writer = self._need_writer()
        root = self._job.root_pid
        self._refuse_pipes()
        self._stopped_before = stopped_pids(root)
        began = time.monotonic()
        run = self._criu.start_dump(
            root,
            writer.criu_dir,
            leave_stopped=True,
            timeout=max(self._deadline - began, 0.001),
            pages=self._pages.take(),
        )
        self._watch(run)
        self._seconds["criu"] = run.wait()
        self._pages.finish()
        self._pids_dumped = tree_pids(root)
        self._job.output.drain()
        copy_log(self._job.directory / "output.log", writer.output_log, self._job.output.end)
        faults.check(Fault.COPY_WAIT)
        if self._copying:
            self._place(self._planned()["gpus"])
            if self._late and self._state.leave_running:
                # This ghost has to go before the tasks' contexts can come back.
                self._stored = self._wait_copy("done")
                self._copying = False
            else:
                self._wait_copy("out")

    def _wait_copy(self, stage: str) -> int:
        done = self._done
        if done is not None and done.done() and done.exception() is None:
            moved = int(done.result()["bytes"])
            self._on_copied(moved, moved)
            return moved
        return wait_copy(self._link.ghost, stage, self._deadline, self._on_copied)

    def _refuse_pipes(self) -> None:
        own = set(self._job.pipes.values())
        suspects: set[int] = set()
        # Listing the descriptors of a live process is no snapshot: a pipe that is being closed can
        # look as if its other end were elsewhere. One that is seen so twice is.
        for _ in range(2):
            found = {p.inode: p for p in external_pipes(self._job.root_pid) if p.inode not in own}
            lasting = suspects & set(found)
            if lasting:
                pid, fd = found[min(lasting)].holders[0]
                raise Unsupported(
                    name=f"a pipe to a process outside the job (process {pid}, descriptor {fd})"
                )
            suspects = set(found)
            if not suspects:
                return
            time.sleep(PIPE_RECHECK_SECONDS)

    def _watch(self, run: CriuRun) -> None:
        """Report progress while CRIU works; a ghost that dies meanwhile ends CRIU too."""
        while not readable(run, seconds=WATCH_SECONDS):
            if self._copying and not self._link.alive:
                run.cancel()
                raise GhostError("the ghost died while CRIU was at work")
            if time.monotonic() >= self._deadline:
                return  # run.wait ends it with its own error

    def _note_copied(self, _done: Future[Answer]) -> None:
        self._seconds["copy"] = time.monotonic() - self._copy_began

    def _on_copied(self, done: int, total: int) -> None:
        self._report("copy", done, total)

    def _commit(self) -> None:
        faults.check(Fault.COMMIT)
        if self._state.resumed:
            self._deadline = time.monotonic() + FLUSH_SECONDS
        if self._copying:
            if self._state.resumed:
                # The job has its memory back; mapped here as well, what it frees would stay taken.
                self._link.ask("forget", self._deadline)
            self._stored = self._wait_copy("done")
        packed = self._pack() if self._compress else ()
        now = time.monotonic()
        facts = Facts(
            criu_version=self._criu.version,
            pids=self._pids_dumped,
            engine="native" if self._tasks else "none",
            driver_version=self._link.driver_version,
            gpus=self._link.gpus,
            indexes=self._indexes,
            blocks=self._table.all(),
            replies=self._counts,
            foreign_bytes=self._foreign_bytes,
            stored_bytes=self._stored,
            ghost=self._ghost_kind(),
            reductions=self._reductions,
            reduced=self._reduced,
            phases=self._phase_seconds(),
            pause_seconds=(self._pause_ended or now) - self._pause_began,
            total_seconds=now - self._began,
            packed=packed,
        )
        self._manifest = write_manifest(self._need_writer(), self._job, facts)

    def _pack(self) -> Sequence[Packed]:
        began = time.monotonic()

        def progress(event: Mapping[str, Any]) -> None:
            if time.monotonic() >= self._deadline:
                raise TimeoutError("packing takes too long")
            self._report("pack", event["done"], event["total"])

        packed = compression.pack_image(self._need_writer().path, self._job.name, progress)
        self._seconds["pack"] = time.monotonic() - began
        return packed

    def _ghost_kind(self) -> str:
        if not self._tasks:
            return "none"
        if self._late:
            return "late"
        return "warm" if self._link.warm and set(self._indexes) <= self._link.warm else "cold"

    def _kill(self) -> None:
        if self._state.outcome is Outcome.GOOD:
            self._on_dumped(self._output)
        kill_tree(self._job.root_pid)
        self._pause_ended = time.monotonic()

    # The way back: after a failure, or with leave_running

    def _wake(self) -> None:
        failing = self._state.outcome is not Outcome.GOOD
        if failing and self._copying and self._link.alive:
            with contextlib.suppress(GhostError):
                # A copy that is still being planned could not be cancelled.
                self._planned()
            self._link.ask("cancel", self._deadline)
            self._copying = False
        if self._stopped_before is not None:
            resume_tree(self._job.root_pid, keep_stopped=self._stopped_before)
        self._job.channel.listen()
        if self._strip_asked:
            # A ghost that did not answer may still be at work on the processes: it must be gone
            # first.
            if isinstance(self._error, GhostError) and self._failed is Phase.STRIP:
                self._link.kill()
            if self._late:
                self._link.drop()
                # What is left of the copy ends with its ghost, and must not reach the next one.
                futures.wait([self._copy] if self._copy else [])
            living = [pid for pid in self._pids() if alive(pid)]
            self._link.rebuild(living, {}, self._deadline)
        # A task whose connection has ended without DETACH connects again as well.
        cut = [task for task in self._tasks if alive(task.pid) and not task.connected()]
        again = self._job.channel.wait_again(cut, self._deadline)
        resumed = {task.pid: task for task in again}
        self._tasks = [resumed.get(task.pid, task) for task in self._tasks]
        self._detached.clear()

    def _map_back(self) -> None:
        handed = [task for task in self._tasks if task.pid in self._handed and alive(task.pid)]
        each(handed, lambda task: map_back(task, self._table.of(task.pid), self._deadline))
        self._handed.clear()

    def _open(self) -> None:
        self._open_gated()
        self._pause_ended = time.monotonic()

    def _open_gated(self) -> None:
        gated = [task for task in self._tasks if task.pid in self._gated and alive(task.pid)]
        open_gates(gated, self._deadline)
        self._gated.clear()

    def _release(self) -> None:
        self._sampler.close()
        self._pages.close()
        if self._manifest is not None:
            self._pages.report(self._output / layout.CRIU_DIR)
        if self._writer is not None:
            self._writer.abort()  # nothing after a commit
        for handover in self._handovers.values():
            handover.close()
        for task in self._tasks:
            if task.pid in self._handovers and task.pid not in self._counts:
                self._drop(task)
        if self._error is None:
            self._link.quit()
        else:
            self._link.kill()
        self._table.close()

    def _drop(self, task: Task) -> None:
        """Let a task forget the channel of an export that no handover followed."""
        try:
            task.request(wire.Message.DROP, time.monotonic() + UNDO_SECONDS)
        except TaskError as error:
            log.warning("%s", error)

    # Results

    def _pids(self) -> list[int]:
        return sorted(task.pid for task in self._tasks)

    def _need_writer(self) -> ImageWriter:
        if self._writer is None:
            raise RuntimeError("no image is being written")
        return self._writer

    def _explain(self, state: State) -> FlowError:
        error, name = self._error, self._job.name
        phase = (self._failed or state.phase).name
        reason = str(error) or type(error).__name__
        if state.outcome is Outcome.LOST:
            if self._seconds.get(Phase.KILL.value) is None:
                return JobEnded(job=name, phase=phase)
            return JobLost(job=name, reason=reason)
        if isinstance(error, FlowError):
            return error
        if isinstance(error, TaskError) and error.status is wire.Status.REFUSED:
            return Unsupported(name=error.detail)
        if isinstance(error, GhostError) and error.no_room:
            return GpuFull(job=name, reason=reason)
        if isinstance(error, GhostError) and error.kind == "NO_SPACE":
            return NotEnoughDisk(path=self._output, free="too little", job=name, needed="more")
        late = self._pause_began and self._failed_at_deadline()
        if late:
            return CheckpointTimeout(job=name, seconds=self._timeout, phase=phase)
        return CheckpointFailed(job=name, phase=phase, reason=reason)

    def _failed_at_deadline(self) -> bool:
        spent = sum(
            self._seconds.get(phase.value, 0.0)
            for phase in (Phase.GATE, Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE, Phase.COMMIT)
        )
        return spent >= self._timeout

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds under the names of the report."""
        found = self._seconds
        back = sum(found.get(p.value, 0.0) for p in (Phase.WAKE, Phase.MAPBACK, Phase.OPEN))
        return {
            "prepare": found.get("prepare", 0.0),
            "gate": max(found.get("gate", 0.0) - self._waited, 0.0),
            "handover": found.get("handover", 0.0),
            "strip": found.get("strip", 0.0),
            "copy": found.get("copy", 0.0),
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
            "image": str(self._output),
            "engine": self._manifest.engine,
            "ghost": self._manifest.ghost,
            "gpu": self._job.gpu,
            "pause_seconds": self._pause_ended - self._pause_began,
            "total_seconds": time.monotonic() - self._began,
            "phases": self._phase_seconds(),
            **dataclasses.asdict(self._manifest.counts),
            "gpu_bytes_linked": self._manifest.linked_bytes,
        }
