"""The tasks of a checkpoint on their way out of CUDA, and back.

Every attribute that an undo reads is set as soon as its fact is true (checkpoint.py).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from coordinator import faults, holding, renewal
from coordinator import ghost_commands as commands
from coordinator.active import active_ranges, by_block, unknown_bytes
from coordinator.blocks import Block, Handover, Token
from coordinator.bringup import BringUp, each
from coordinator.chunks import pack_parts
from coordinator.communicators import (
    Communicators,
    CutFailed,
    idle,
    make_cut,
    ranks_here,
    refuse_outside,
    refuse_uncounted,
)
from coordinator.cut import Cut
from coordinator.device_files import DeviceFiles
from coordinator.holding import Holder
from coordinator.listing import listed
from coordinator.phases import UNDO_SECONDS
from coordinator.process import device_files, serves
from coordinator.reach import obstacle, refuse_stopped
from coordinator.sampler import Sampler
from coordinator.session import Imports, Shared
from coordinator.sharing import owner_of
from coordinator.task_state import BEHIND_GATE, Step, TaskState
from coordinator.tasks import IS_CURRENT, Task, TaskError, has_ended, is_end
from flowgpu import nccl, wire
from flowgpu.errors import OtherVersion, SharedOutside, Unreachable, Unsupported
from flowgpu.host.proctree import ids, tree_pids
from flowgpu.jobs import start_time
from flowgpu.timeline import COORDINATOR, of_task
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
LOOK_SECONDS = 0.2
GATE_SECONDS = 1.0
GATE_RETRY_SECONDS = 0.02
ALL_MEMORY = [(0, 1 << 47)]


def _refuse_other_users(pids: Sequence[int]) -> None:
    """No process that uses the GPU may be another user's, who may not enter the job's folder.

    One that has become so since it connected could not connect again, and its memory were lost.
    """
    for pid in pids:
        found = ids(pid)
        if found and (user := found.users[-1]) != os.geteuid():
            raise Unsupported(name=f"process {pid}, which uses the GPU as another user ({user})")


class Unsettled(Exception):
    """Who uses the GPU is not who did when the gates were closed."""


class Stranger(Unsettled):
    """A process uses the GPU but has not connected; `name` tells which."""

    def __init__(self, pid: int) -> None:
        self.name = f"process {pid}, which uses the GPU but not through FlowGPU"
        super().__init__(self.name)


class BusyElsewhere(Exception):
    """A task of another node is, so that all nodes try again."""


class TaskGroup(BringUp):
    """The tasks of one checkpoint."""

    def __init__(self, shared: Shared, unless_full: Callable[[Callable[[], object]], None]) -> None:
        """`unless_full` does what may find no device memory for the ghost."""
        super().__init__(shared, again=UNDO_SECONDS)
        self._shared = shared
        self._unless_full = unless_full
        self.sampler = Sampler([], 0.0)
        self.pause_began = 0.0
        self.waited = 0.0
        """Seconds that were waited, with the gate open."""
        self.cut: Cut | None = None
        """The cut through what ranks of NCCL have issued, if there are any."""
        self.cut_seconds = 0.0
        self.not_kept: dict[int, str] = {}
        """What tasks behind their gates say that they will have lost after a checkpoint, by pid."""
        self.replies: dict[int, wire.Reply] = {}
        """Answers to HANDOVER or LEND, by pid."""
        self._handovers: dict[int, Handover] = {}
        self._holders: dict[int, Holder] = {}  # of those that have managed memory
        emulated = shared.job.gpu == "emulated"
        self.device_files = DeviceFiles(emulated, shared.timeline)
        self._joined: set[int] = set()
        """Tasks that noted nothing while pages were copied: they were none yet."""
        self.settled = False
        """True once the memory to save is fixed: a task that has some cannot drop out any more."""
        self.disturbed = False
        """True if a task has ended since, or another has begun: another checkpoint may succeed."""

    def drain(self, under_way: bool) -> None:
        """Say whether the ghost has device memory that is free again soon."""
        for task in self.tasks:
            task.drain(under_way)

    def find(self, seconds: float) -> None:
        """Take the job's tasks, once each process that holds a device has said HELLO.

        One that has passed the entrance may take `seconds` to its HELLO. Another is a child that
        soon drops what it has of its parent, or will never say it.
        All are called then as after a DETACH: who does not answer now would not then.
        """
        self._find_all(seconds)
        job = self._shared.job
        deadline = min(time.monotonic() + HELLO_SECONDS, self.deadline)
        try:
            self.tasks = job.channel.renew(self.tasks, deadline)
        except TaskError as error:
            refuse_stopped([error.pid], job.name, 0.0)
            reason = "it did not answer when it was called"
            raise Unreachable(pid=error.pid, job=job.name, reason=reason) from error

    def _find_all(self, seconds: float) -> None:
        entrance = self._shared.job.channel.entrance
        since: dict[tuple[int, int], float] = {}
        while True:
            self.tasks = self._shared.job.channel.tasks()
            strangers = self._strangers()
            _refuse_other_users([*self.pids(), *strangers])
            self._refuse_unreachable(strangers)
            if not strangers:
                return
            now = time.monotonic()
            since = {one: since.get(one, now) for one in ((p, start_time(p)) for p in strangers)}
            for (pid, _), first in since.items():
                patience = max(seconds if entrance.is_in(pid) else 0.0, HELLO_SECONDS)
                if now - first >= patience and pid in self._strangers():
                    raise Stranger(pid)
            if now >= self._shared.deadline:
                raise Stranger(strangers[0])
            with suppress(TaskError):  # it was given up, and waits for a call
                self._shared.job.channel.wait_known(strangers, now + LOOK_SECONDS)
            time.sleep(0.01)

    def _refuse_unreachable(self, strangers: Sequence[int]) -> None:
        job = self._shared.job
        refuse_stopped([*self.pids(), *strangers], job.name, self.deadline)
        for task in self.tasks:
            why = obstacle(task.pid, task.page.blocks, managed=task.page.managed_bytes > 0)
            # One that is ending has lost its root folder before its connection.
            if why and not has_ended(task):
                raise Unreachable(pid=task.pid, job=job.name, reason=why)

    def _strangers(self) -> list[int]:
        """Processes of the tree that hold a device and are no tasks of this group."""
        tree = self._refuse_other_versions()
        known = {task.pid for task in self.tasks}
        return [pid for pid in tree if pid not in known and device_files(pid)]

    def _refuse_other_versions(self) -> list[int]:
        """Gives the process ids of the job's tree."""
        job = self._shared.job
        tree = tree_pids(job.root_pid)
        if other := job.channel.refused(tree):
            raise OtherVersion(pid=other[0], job=job.name, reason=other[1])
        return tree

    def refusals(self, engine: wire.Engine) -> list[str]:
        """What that engine cannot save, of each task that has any."""
        found: dict[int, str] = {}

        def ask(task: Task) -> None:
            found[task.pid] = task.refusal(self._shared.deadline, engine)

        self._each("ask", ask)
        return [f"{why} (process {pid})" for pid, why in sorted(found.items()) if why]

    def refuse(self, engine: wire.Engine) -> None:
        """Raise Unsupported where that engine cannot save something of a task."""
        if why := self.refusals(engine):
            raise Unsupported(name="; ".join(why))

    def in_use(self) -> int:
        """Bytes that will be in use when all stands still, about."""
        live = self.sampler.at_minimum()
        if live is None:
            return self._shared.table.total_bytes()
        unknown = 0
        for task in self.tasks:
            rows = self._shared.table.rows(task.pid)[:, [1, 2, 1]]
            unknown += unknown_bytes(rows, None if task.live_bytes() is None else task.live)
        return live + unknown

    def export_all(self) -> None:
        """Let every task send its blocks while it runs on."""
        self._unless_full(lambda: self._each("export", self._take_blocks))

    def _each(
        self, name: str, action: Callable[[Task], None], tasks: Sequence[Task] | None = None
    ) -> None:
        """Do it for all tasks, or these, at once. One that ends meanwhile is none any more.

        `name` is what the timeline calls it.
        """
        wanted = list(self.tasks if tasks is None else tasks)
        each(wanted, partial(self._if_it_lives, name, action))

    def _if_it_lives(self, name: str, action: Callable[[Task], None], task: Task) -> None:
        try:
            with self._shared.timeline.span(of_task(task.pid), name):
                action(task)
        except (TaskError, ConnectionError) as error:
            if not is_end(task, error):
                raise
            self._drop_out(task)

    def _drop_out(self, task: Task) -> None:
        """Go on without a task that has ended: it has nothing to save.

        Raises Unsettled where the copy of its memory has begun.
        """
        if self.settled and any(block.saved for block in self._shared.table.of(task.pid)):
            self.disturbed = True
            raise Unsettled(f"process {task.pid} has ended")
        self.tasks = [one for one in self.tasks if one is not task]
        self.replies.pop(task.pid, None)
        self._forget_blocks(task.pid)
        self._states.pop(task.pid, None)

    def _take_blocks(self, task: Task) -> None:
        shared = self._shared
        again = task.pid in self._handovers
        self._forget_blocks(task.pid)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports: Imports = []

        def forward(blocks: list[Block]) -> None:
            # Without the ghost, the descriptors that the table has keep the memory.
            own = [block for block in blocks if block.saved]
            if own and not shared.plan.late:
                imports.append(shared.import_blocks(own))

        def confirm(live: list[int]) -> None:
            plan = shared.plan
            if not plan.late:
                shared.settle(imports)
            self._drop_blocks(shared.table.keep_live(task.pid, live))
            if not plan.keeps_cuda:
                shared.job.custody.put(task.pid, shared.table.of(task.pid))
            self.note(task.pid, self._taking(task))

        handover = Handover(task.pid, ours, shared.table, forward, confirm)
        self._handovers[task.pid] = handover
        self.note(task.pid, Step.EXPORT)
        with theirs:
            try:
                notes = wire.ExportNotes.NONE
                if not shared.plan.why_not_early:
                    notes = wire.ExportNotes.GO_ON if again else wire.ExportNotes.BEGIN
                packet = wire.packet(wire.Message.EXPORT, count=notes)
                fds = [theirs.fileno()]
                task.request(wire.Message.EXPORT, shared.deadline, packet=packet, fds=fds)
            except TaskError as error:
                if "CUDA_ERROR_DEINITIALIZED" not in error.detail:
                    raise
                # The program is in exit(): its gate is busy until it ends, and then it drops out.
                log.info("%s", error)
                return
        if shared.plan.engine is wire.Engine.REPLAY and task.page.managed_bytes:
            self._make_holder(task)
        faults.check(Fault.EXPORT)
        handover.wait_idle(shared.deadline)
        shared.settle(imports)

    def _make_holder(self, task: Task) -> None:
        """In the pause nobody waits for its start."""
        if old := self._holders.pop(task.pid, None):
            old.close()
        holder = self._holders[task.pid] = Holder(task)
        try:
            holder.start()
        except OSError as error:
            log.warning("who is to hold the threads of process %d is late: %s", task.pid, error)

    def _forget_blocks(self, pid: int) -> None:
        """Let go of what a task has exported, if it has."""
        handover = self._handovers.pop(pid, None)
        if handover is None:
            return
        handover.close()
        self._drop_blocks(self._shared.table.keep_live(pid, []))

    def _drop_blocks(self, gone: Sequence[Block]) -> None:
        """Let the ghost drop what it has of blocks that are no more."""
        keys = tuple(block.key for block in gone if block.saved)
        if keys and not self._shared.plan.late:
            self._shared.link.ask(commands.Drop(keys), self._shared.deadline)

    def close_gates(self) -> None:
        """Stop every task at its next driver call; the pause begins.

        A task that has what the plan's engine cannot save answers REFUSED.
        """
        # From here on no process begins to use the GPU; who has begun is a task now.
        self._shared.job.channel.entrance.shut(self._shared.deadline)
        self.pause_began = time.monotonic()
        patience = GATE_SECONDS
        others = self._shared.others
        while True:
            new = self._take_again()
            if new and not self.having(*BEHIND_GATE):
                self._find_low()
            if not others.any_of(self.deadline, bool(new)):
                return
            if not self.having(*BEHIND_GATE):
                self.pause_began = time.monotonic()  # all of them begin only now
            busy = False
            try:
                self._cut()
                self._each("gate", partial(self._close_gate, seconds=patience), new)
            except TaskError as error:
                busy = error.status is wire.Status.BUSY
                if not busy or time.monotonic() >= self._shared.deadline:
                    raise
            except BusyElsewhere:
                busy = True
            # What is busy on one node may need the ranks of another to go on.
            if others.any_of(self.deadline, busy):
                self.reopen()
                time.sleep(GATE_RETRY_SECONDS)
                self.pause_began = time.monotonic()
                # Long kernels, or a queue of many: what did not drain in this time may in twice.
                patience *= 2

    def communicators(self) -> dict[int, Communicators]:
        """The counts of each task that has communicators of NCCL."""
        pages = {task.pid: task.nccl for task in self.tasks if task.nccl is not None}
        return {pid: page for pid, page in pages.items() if page.header().living}

    def closes_itself(self) -> bool:
        """True if the task waits at its gate for its lowest point, which it knows best: it is the
        only one, and nothing that it waits for is behind a cut."""
        return len(self.tasks) == 1 and not self.communicators()

    def _find_low(self) -> None:
        """Wait for the lowest point of several tasks together; a single one does so itself."""
        if not self.closes_itself():
            self._note_waited(waited := self.sampler.wait())
            log.info("%.3f s for the low point: %s", waited, self.sampler)
        self.sampler.stop()

    def _cut(self) -> None:
        """Let ranks of NCCL go on until each has issued what the others wait for on their GPUs, and
        no further: so the GPUs become idle behind the gates. Raises PeerIsIdle."""
        pages = self.communicators()
        part = self._shared.others.cut()
        if not pages and part is None:
            return
        began = time.monotonic()
        try:
            cut = make_cut(pages, self.deadline, part)
            self.cut = cut if pages else self.cut
        except CutFailed as error:
            raise idle(error, pages, self._shared.job.name) from error
        finally:
            self.cut_seconds += time.monotonic() - began
            self._shared.timeline.add(COORDINATOR, "cut", began, time.monotonic())
        log.info("cut in %.2f ms: %s", (time.monotonic() - began) * 1e3, cut)
        refuse_uncounted(pages)
        refuse_outside(pages, self._ranks_elsewhere(pages))
        if self._shared.plan.rebuilds:
            self._end_communicators()

    def _ranks_elsewhere(self, pages: Mapping[int, Communicators]) -> dict[int, set[int]]:
        """Ranks that communicators have on other nodes."""
        ours = [[one, sorted(ranks.here)] for one, ranks in ranks_here(pages).items()]
        found: dict[int, set[int]] = {}
        for theirs in self._shared.others.exchange(self.deadline, ours):
            for communicator, ranks in theirs:
                found.setdefault(communicator, set()).update(ranks)
        return found

    def _end_communicators(self) -> None:
        """End those that are not ended yet, behind the cut. Raises Unsupported, BusyElsewhere."""
        began = time.monotonic()
        there = renewal.with_communicators(self.tasks, nccl.FREE, nccl.HELD)
        busy: TaskError | None = None
        try:
            renewal.hold(there, self._each, self.deadline)
        except TaskError as error:
            if error.status is wire.Status.REFUSED:
                raise Unsupported(name=f"{error.detail} (process {error.pid})") from error
            if error.status is not wire.Status.BUSY:
                raise
            busy = error
        try:
            # Ranks that end wait for all others, so nobody ends where one could not be held.
            if self._shared.others.any_of(self.deadline, busy is not None):
                raise busy or BusyElsewhere
            renewal.end(there, self._each, self.deadline)
        finally:
            self.cut_seconds += time.monotonic() - began

    def _take_again(self) -> list[Task]:
        """Take up who has begun to use CUDA since, or anew, and forget who has ended. Gives those
        whose gates are open."""
        channel = self._shared.job.channel
        channel.settle(self._shared.deadline)
        connected = channel.tasks()
        for task in connected:
            if task not in self.tasks:
                self._join(task)
        for task in self.tasks:
            if task not in connected and has_ended(task):
                self._drop_out(task)
        return [task for task in connected if self._state(task.pid) not in BEHIND_GATE]

    def _join(self, task: Task) -> None:
        self.note(task.pid, Step.AGAIN)
        self._joined.add(task.pid)
        self.tasks = [one for one in self.tasks if one.pid != task.pid] + [task]
        self._shared.link.start()
        self._unless_full(lambda: self._each("export", self._take_blocks, [task]))

    def _close_gate(self, task: Task, seconds: float) -> None:
        low = self.sampler.at_minimum() if self.closes_itself() else None
        left = self.sampler.patience if low else 0.0
        deadline = self._shared.deadline
        limit = min(seconds, deadline - time.monotonic())
        try:
            saver = self._shared.plan.saver
            reply = task.gate(deadline + left, limit, left, low or 0, saver)
        except TaskError as error:
            self._note_waited(error.waited_us * 1e-6)
            raise
        self._note_waited(reply.waited_us * 1e-6)
        if reply.detail:
            self.not_kept[task.pid] = reply.detail
        self.note(task.pid, Step.GATE)
        faults.check(Fault.GATE)

    def _note_waited(self, seconds: float) -> None:
        """The job ran while its low point was waited for: that is no part of the pause."""
        self.waited += seconds
        self.pause_began += seconds
        self._shared.deadline += seconds

    def hand_over(self) -> None:
        """Let every task let go of its memory, or lend it: the ghost has it as well."""
        self._each("hand over", self._hand_over)
        self.settled = True
        self._join_imports()

    def _join_imports(self) -> None:
        shared = self._shared
        self.refuse_outside()
        adopted = shared.table.join_imports(self._by_token())
        if not shared.plan.late:
            shared.import_all(adopted)

    def _by_token(self) -> dict[Token, int]:
        return {(task.hello.token_high, task.hello.token_low): task.pid for task in self.tasks}

    def refuse_outside(self) -> None:
        """Raise SharedOutside where a process that is none of the job's has memory of it, or it of
        one: nobody could bring both back."""
        job, known = self._shared.job, self._by_token()
        found: dict[tuple[int, Token], int | None] = {
            (pid, token): other
            for pid, handover in self._handovers.items()
            for token, other in handover.askers.items()
            if token not in known
        }
        owners = {(block.pid, block.owner) for block in self._shared.table.imports()}
        found |= {(pid, token): owner_of(token) for pid, token in owners if token not in known}
        if not found:
            return
        tree = tree_pids(job.root_pid)
        for (pid, _), other in sorted(found.items()):
            # One of the tree is a task that ends, and lets go.
            if other is not None and other not in tree:
                raise SharedOutside(pid=pid, job=job.name, other=other)

    def _hand_over(self, task: Task) -> None:
        handover = self._handovers[task.pid]
        lends = self._taking(task) is Step.LEND
        message = wire.Message.LEND if lends else wire.Message.HANDOVER
        try:
            reply = task.request(message, self._shared.deadline)
        except TaskError as error:
            # A task that was not told that its memory is safe says only that; we know why.
            raise handover.failure() or error from error
        self.replies[task.pid] = reply
        handover.wait_end(self._shared.deadline)
        faults.check(Fault.HANDOVER)

    def _taking(self, task: Task) -> Step:
        """What HANDOVER does with a task."""
        is_current = task.hello.replay >= IS_CURRENT
        return self._shared.plan.taking if is_current else Step.HAND_OVER

    def host_memory(self) -> dict[int, list[tuple[int, int]]]:
        """What devices may have written of each task's own memory, by process id."""
        return {
            task.pid: ALL_MEMORY
            if task.pid in self._joined
            else self._handovers[task.pid].host_memory()
            for task in self.tasks
        }

    def active(self) -> str:
        """Active parts of blocks, as they go to the ghost."""
        found = [
            by_block(
                active_ranges(self._handovers[task.pid].allocations(), task.live),
                self._shared.table.rows(task.pid),
            )
            for task in self.tasks
        ]
        return pack_parts(np.concatenate(found))

    def active_about(self) -> str:
        """Active parts of blocks while the tasks run, as far as their blocks tell."""
        found = []
        for task in self.tasks:
            rows = self._shared.table.rows(task.pid)
            live = None if task.live_bytes() is None else task.live
            found.append(by_block(active_ranges(rows[:, [1, 2, 1]], live), rows))
        return pack_parts(np.concatenate(found))

    def seclude(self) -> None:
        """Let nobody connect any more: a task that detaches tries to at once."""
        channel = self._shared.job.channel
        channel.stop_listening()
        self._refuse_other_versions()
        strangers = {task.pid for task in channel.tasks()} - {*self.having(*BEHIND_GATE)}
        if strangers:
            self.disturbed = True
            raise Unsettled(f"process {min(strangers)} has begun to use CUDA")

    def has_changed(self) -> bool:
        """True if a process has begun to use the GPU since the gates were closed, or has ended."""
        return self.disturbed or not all(map(serves, self.pids()))

    def stopped(self) -> list[int]:
        """The tree is stopped: gives the tasks without which it cannot be dumped.

        Raises Unsettled, Stranger where those are not all that use the GPU.
        """
        for task in list(self.tasks):
            if not serves(task.pid):
                self._drop_out(task)
        tasks = self.pids()
        for pid in tree_pids(self._shared.job.root_pid):
            if pid not in tasks and device_files(pid):
                self.disturbed = True
                raise Stranger(pid)
        return tasks

    def strip(self) -> None:
        """Let every task end CUDA in itself, or keep what a copy of it needs that has no CUDA."""
        try:
            self._each("strip", self._strip)
        finally:
            self.device_files.let_go()

    def managed_to_host(self) -> None:
        """Have every task's managed memory in the host's, though CUDA stays."""
        self._each("strip", lambda task: holding.to_host(task, self._shared.deadline))

    def _strip(self, task: Task) -> None:
        if self._shared.plan.keeps_cuda:
            self._ask_listed(task, wire.Message.KEEP)
        else:
            # Noted first: a task that has stripped nothing rebuilds nothing.
            self.note(task.pid, Step.STRIP)
            holding.leave(task, self._shared.deadline, self._holders.get(task.pid))
            self.device_files.hold(task.pid)
            self._ask_listed(task, wire.Message.STRIP)
        faults.check(Fault.STRIP)

    def _ask_listed(self, task: Task, request: wire.Message) -> None:
        """Ask it, and let it list its record where the copy goes, if it goes anywhere."""
        target = self._shared.host or self._shared.writer
        with listed(None if target is None else target.record(task.pid)) as fds:
            task.request(request, self._shared.deadline, fds=fds)

    def detach(self) -> None:
        """Let every task close its sockets, so that the engine and CRIU find none."""
        self._each("detach", self._detach)
        self._shared.job.channel.forget()

    def _detach(self, task: Task) -> None:
        task.detach(self._shared.deadline)
        faults.check(Fault.DETACH)

    # The way back. Every step of it is tried twice: its failure would cost the job.

    def map_back(self) -> None:
        """See BringUp."""
        for handover in self._handovers.values():
            handover.close()  # nobody is told any more that the memory is safe
        super().map_back()

    def reopen(self) -> None:
        """Open the gates that were closed, to close them again: with OPEN a task lets go of its
        channel, and exports anew. Communicators that are ended stay so."""
        if renewal.with_communicators(self.tasks, nccl.ENDED):
            self.open_gates()
        else:
            self.open()
        again = [task for task in self.tasks if self._state(task.pid) is TaskState.CONNECTED]
        self._unless_full(lambda: self._each("export", self._take_blocks, again))

    def close(self) -> None:
        """Let go of what the tasks and this side hold for the checkpoint."""
        self.sampler.close()
        self.device_files.wait_freed()
        for handover in self._handovers.values():
            handover.close()
        for holder in self._holders.values():
            holder.close()
        for task in self.tasks:
            if self._state(task.pid) is TaskState.EXPORTED and task.connected():
                self._drop(task)

    def _drop(self, task: Task) -> None:
        """Let a task forget the channel of an export that no handover followed."""
        try:
            task.request(wire.Message.DROP, time.monotonic() + HELLO_SECONDS)
        except TaskError as error:
            log.warning("%s", error)
