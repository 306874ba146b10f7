"""The copy of a checkpoint: device memory to the files of an image, or to memory of the host, by
the ghost.

Every attribute that an undo reads is set as soon as its fact is true (checkpoint.py).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future

from coordinator import faults
from coordinator import ghost_commands as commands
from coordinator.ghost_client import Asked, Ghost, GhostError, GhostGone
from coordinator.move_plan import plan_for
from coordinator.phases import FLUSH_SECONDS
from coordinator.session import (
    SPARE_BYTES,
    Progress,
    Shared,
    ghost_room,
    note_limits,
    wait_copy,
)
from flowgpu.image import layout
from flowgpu.image.linked import Linked, take
from flowgpu.timeline import GHOST, MOVE, Open
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

POPULATE_SECONDS = 30.0
CANCEL_SECONDS = 10.0
USUAL_MARGIN = 2
CHANGING = 1.25
"""How much more than was expected may be in use when all stands still."""
MOST_PASSES = 5
SHRINKING = 0.7
"""A pass that copies more of what the one before has copied is the last one."""
LEAST_PASS = 16 << 20
"""One that copies less takes no time when all stands still."""


class CopyOut:
    """The copy of one checkpoint, of all its GPUs."""

    def __init__(self, shared: Shared, report: Progress) -> None:
        self._shared = shared
        self._options = shared.plan.options
        self._report = report
        self.linked_bytes = 0
        self._usual_bytes: int | None = None
        self._most_bytes: int | None = None
        self.before_bytes = 0
        """Copied while the job ran."""
        self.indexes: dict[int, int] = {}
        """Ordinal of a GPU in the ghost -> its index in the image."""
        self.under_way = False
        self._shadow_bytes = 0
        self.hold_seconds: float | None = None
        """Seconds that the copy on the GPU took; None: there is no such copy."""
        self._copy: Asked[commands.Copies] | None = None
        self._done: Asked[commands.Carried] | None = None
        self._ghost: Ghost | None = None
        self._move: Open | None = None  # in the timeline
        self._began = 0.0
        self.seconds = 0.0
        self.stored = 0
        self.reduced: list[commands.Reduced] = []

    def take_links(self) -> None:
        """Link what the base has, so that nobody can remove it meanwhile."""
        base = self._options.base if "dedup" in self._options.reductions else None
        linked = take(base, self._shared.image.path, self._shared.job.id)
        self.linked_bytes = sum(linked.slots) * layout.CHUNK_BYTES
        self._usual_bytes = linked.usual

    def _drop_links(self) -> None:
        if self.linked_bytes:
            Linked(self._shared.image.path).settle([], 1, 0)

    def prepare(self, active: str | None, in_use: int, gpus: int) -> None:
        """Let the ghost make what it needs, while the job runs.

        `active`: parts of blocks that are in use now, None for all; `in_use`: bytes that will be
        when all stands still; `gpus`: how many the tasks use.
        """
        shared = self._shared
        if shared.plan.late:
            # Without a context there is only the arena to make.
            plan = plan_for(shared.target.place, max(gpus, 1), shared.table.total_bytes())
            shared.link.ask(commands.PrepareFill(plan, files={}), shared.deadline)
            return
        seconds = shared.left(POPULATE_SECONDS)
        most = self._most_to_prepare()
        command = commands.PrepareCopy(self._to(), active, in_use, most, seconds)
        shared.link.ask(command, shared.deadline)

    def expect(self, active: str | None) -> int:
        """Bytes that will be stored of these parts of blocks, at most; None: of all. What several
        GPUs have counts once. Takes a while; `prepare` makes no more then."""
        command = commands.Expect(self._to(), active)
        found = self._shared.link.ask(command, self._shared.deadline).bytes
        self._most_bytes = int(found * CHANGING)
        return self._most_bytes

    def copy_before(self, active: Callable[[], str], gpus: int, passes: int = MOST_PASSES) -> bool:
        """Copy to links of the image what is in use and they do not have, again and again until the
        job changes about as much as a pass copies. False: the GPU has no room for that.

        What a pass copies may be torn by the job; its digest tells, when all stands still.
        """
        shared = self._shared
        plan = plan_for(shared.image.path, max(gpus, 1), shared.table.total_bytes())
        last = math.inf
        for _ in range(passes):
            command = commands.CopyBefore(
                plan=plan,
                active=active(),
                links=str(shared.image.path),
                reductions=tuple(self._options.reductions),
                keep=ghost_room(shared.link.gpus),
                seconds=max(shared.deadline - time.monotonic(), 0.0),
            )
            new = shared.link.ask(command, shared.deadline).bytes
            if new is None:
                return False
            self.before_bytes += new
            self.linked_bytes += new
            if not LEAST_PASS < new < SHRINKING * last:
                break
            last = new
        return True

    @property
    def held(self) -> bool:
        """True if the ghost has a copy on the GPU: the job may go on before the copy is out."""
        return self.hold_seconds is not None

    def prepare_to_hold(self) -> bool:
        """Let the ghost take device memory for a copy of what `prepare` was told will be in use;
        False: there is too little.

        As much is left free as a ghost asks for, for the job to go on with.
        """
        link = self._shared.link
        keep = ghost_room(link.gpus)
        self._shadow_bytes = link.ask(commands.Shadow(keep), self._shared.deadline).bytes
        return self._shadow_bytes > 0

    def wait_held(self) -> bool:
        """Wait for that copy; False where there is none."""
        if self._shadow_bytes:
            seconds = max(self._shared.deadline - time.monotonic(), 0.0)
            held = self._shared.link.ask(commands.WaitHeld(seconds), self._shared.deadline)
            self.hold_seconds = held.seconds
        return self.held

    def _most_to_prepare(self) -> int:
        """Less than could be stored, where `expect` has looked, or images before this one say what
        a period changes."""
        usual, size = self._usual_bytes, self._shared.table.total_bytes()
        if self._most_bytes is not None:
            size = min(size, self._most_bytes)
        return size if usual is None else min(size, USUAL_MARGIN * usual + SPARE_BYTES)

    def forget_files(self) -> None:
        """Another ghost is to prepare the copy anew."""
        for index in self.indexes.values():
            self._shared.target.drop_data(index)
        self.indexes.clear()

    def _to(self) -> commands.Target:
        """Where all blocks go; a GPU keeps the index that it was first given."""
        writer, table = self._shared.target, self._shared.table
        for gpu in sorted({block.gpu for block in table.saved()}):
            self.indexes.setdefault(gpu, len(self.indexes))
        plan = plan_for(writer.place, len(self.indexes), table.total_bytes())
        files = {
            gpu: commands.DumpFiles(
                str(writer.gpu_data(index)), str(writer.gpu_chunks(index)), index
            )
            for gpu, index in self.indexes.items()
        }
        return commands.Target(
            plan=plan,
            files=files,
            links=str(writer.path) if self.linked_bytes else None,
            gpus=len(self.indexes),
            reductions=tuple(self._options.reductions),
        )

    def begin(self, active: str | None) -> None:
        """Start once the tasks have handed over. `active`: parts of blocks, None for all."""
        if not self._shared.table.saved():
            self._drop_links()
        elif not self._shared.plan.late:
            # What to store is found out while the strip is under way.
            self._begin(lambda: self._shared.link.submit(commands.Copy(self._to(), active)))
        for gpu in set(self.indexes) - {block.gpu for block in self._shared.table.saved()}:
            self._make_empty(self.indexes[gpu])

    def begin_late(self, active: str | None) -> None:
        """The contexts of the tasks are gone, and in their place there is room for the ghost's."""
        self._begin(lambda: self._submit_late(active))

    def _begin(self, submit: Callable[[], Asked[commands.Copies]]) -> None:
        faults.check(Fault.COPY_START)
        self._began, self.seconds = time.monotonic(), 0.0
        self._ghost = self._shared.link.ghost
        self.under_way = True
        self._copy = submit()
        self._copy.add_done_callback(self._on_planned)

    def _submit_late(self, active: str | None) -> Asked[commands.Copies]:
        shared, asked = self._shared, Asked(commands.Copy)

        def work() -> None:
            try:
                shared.import_all(shared.table.saved())
                copy = commands.Copy(self._to(), active)
                asked.set_result(shared.link.ask(copy, shared.deadline))
            except BaseException as error:
                asked.set_exception(error)

        threading.Thread(target=work, name="late copy").start()
        return asked

    def _on_planned(self, copy: Future[commands.Copies]) -> None:
        if copy.exception() is None:
            self._move = self._shared.timeline.begin(GHOST, MOVE)
            self._done = self._shared.link.submit(commands.Wait("done", FLUSH_SECONDS))
            self._done.add_done_callback(self._note_copied)

    def _note_copied(self, done: Future[commands.Carried] | None = None) -> None:
        """Note that the copy is done. Whoever hears of it calls this; the first call counts."""
        self.seconds = self.seconds or time.monotonic() - self._began
        size = self.stored
        if done is not None and done.exception() is None:
            size = done.result().bytes
        if self._move is not None:
            self._move.end(size)

    def _planned(self) -> commands.Copies:
        """What is copied, once the copy is planned and under way."""
        if self._copy is None:
            raise RuntimeError("no copy was asked for")
        return self._copy.until(self._shared.deadline)

    def place(self) -> None:
        """Note in which order the ghost takes the blocks of each GPU, and what it stores; once."""
        if self.reduced:
            return
        for gpu, planned in self._planned().gpus.items():
            offset = 0
            for key in planned.keys:
                block = self._shared.table[key]
                block.gpu, block.offset = gpu, offset
                offset += block.row.size
            self.reduced.append(planned.reduced)
        if any(block.offset < 0 for block in self._shared.table.saved()):
            raise RuntimeError("the ghost does not have every block")

    def wait(self, stage: str) -> None:
        """Wait until all bytes are `out` of the GPUs, or `done`: in the files."""
        if not self._shared.link.alive or self._shared.link.ghost is not self._ghost:
            raise GhostGone("the ghost that had the copy has ended")
        done = self._done
        if done is not None and done.done() and done.exception() is None:
            self.stored = done.result().bytes
            self._on_copied(self.stored, self.stored)
            return
        shared = self._shared
        carried = wait_copy(shared.link.ghost, stage, shared.deadline, self._on_copied)
        if stage == "done":
            self.stored = carried.bytes
            self._note_copied()

    def end(self) -> None:
        """Wait until all of it is in the files, and need the ghost no more."""
        self.place()
        note_limits(self._shared.job, self._shared.link, self.indexes)
        self.wait("done")
        self.under_way = False

    def _on_copied(self, done: int, total: int) -> None:
        self._report("copy", done, total)

    def cancel(self) -> None:
        """End a copy whose image is given up, with its ghost if need be."""
        if self._copy is None or not self.under_way:
            return
        deadline = time.monotonic() + CANCEL_SECONDS
        try:
            with contextlib.suppress(GhostError):
                # A copy that is still being planned could not be cancelled.
                self._copy.until(deadline)
            self._shared.link.ask(commands.Cancel(), deadline)
        except GhostError as error:
            log.warning("the copy ends with its ghost: %s", error)
            self._shared.link.kill()
        self.under_way = False

    def abandon(self) -> None:
        """The ghost of a late copy has ended: what is left of the copy must not reach the next."""
        futures.wait([self._copy] if self._copy else [])

    def _make_empty(self, index: int) -> None:
        writer = self._shared.target
        for path in (
            writer.gpu_data(index),
            writer.gpu_digests(index),
            writer.gpu_chunks(index),
        ):
            path.write_bytes(b"")
