"""The way back of tasks that wait behind closed gates: CUDA, their memory, their program.

A checkpoint goes it after a failure or with a job that runs on, a restore and a takeover always.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

from coordinator import faults, holding, renewal
from coordinator.blocks import Block, send_blocks
from coordinator.communicators import open_all
from coordinator.reach import let_run
from coordinator.session import Session
from coordinator.task_state import BEHIND_GATE, WAY_BACK, Step, TaskState
from coordinator.task_state import next as next_state
from coordinator.tasks import IS_CURRENT, Task, TaskError, is_cut, unless_ended
from flowgpu import wire
from flowgpu.timeline import of_task
from flowgpu.wire import Fault

log = logging.getLogger(__name__)


class BringUp:
    """Tasks, and how far each is out of CUDA (task_state.py). One that ends wants nothing back."""

    def __init__(self, session: Session, again: float = 0.0) -> None:
        """`again`: seconds for a second try of a step that has failed. Without them, only that is
        tried again which failed by the end of a connection."""
        self._session = session
        self.again = again
        self.tasks: list[Task] = []
        self.keeping: holding.Keeping = lambda: nullcontext(False)
        self._states: dict[int, TaskState] = {}

    @property
    def deadline(self) -> float:
        """When the step that is under way has to be done, by time.monotonic."""
        return self._session.deadline

    def pids(self) -> list[int]:
        """Process ids of the tasks."""
        return sorted(task.pid for task in self.tasks)

    def expect(self, pids: Iterable[int], state: TaskState) -> None:
        """Bring these processes back as well, which need not have connected yet."""
        self._states |= dict.fromkeys(pids, state)

    def having(self, *states: TaskState) -> list[int]:
        """Process ids of those that have one of these states."""
        return sorted(pid for pid, state in self._states.items() if state in states)

    def note(self, pid: int, step: Step) -> None:
        """Note what was done with a task."""
        self._states[pid] = next_state(self._state(pid), step)

    def _state(self, pid: int) -> TaskState:
        return self._states.get(pid, TaskState.CONNECTED)

    def rebuild(self, visible: Mapping[int, str] | None = None) -> None:
        """Let the tasks that have ended CUDA in themselves have it again, without their memory.

        `visible`: of those that are to see other GPUs from now on, the UUIDs by commas.
        """

        def remake(task: Task) -> None:
            uuids = (visible or {}).get(task.pid, "")
            packet = wire.Rebuild(uuids).pack() if uuids else None
            task.request(wire.Message.REBUILD, self.deadline, packet=packet)
            holding.come(task, self.deadline, self.keeping)

        self._bring(Step.REBUILD, remake)

    def map_early(self) -> None:
        """Let the tasks that know how map their memory while its bytes are still to come.

        `map_back` has to follow, when all of them are there.
        """
        to_come = wire.MapbackBytes.TO_COME
        give = partial(self._give_blocks, their_bytes=to_come)
        self._bring(Step.MAP, give, lambda task: task.hello.replay >= IS_CURRENT)

    def map_back(self) -> None:
        """Give the tasks that may have let go of their memory all of it back."""
        self._bring(Step.MAP_BACK, partial(self._give_blocks, their_bytes=wire.MapbackBytes.THERE))

    def _give_blocks(self, task: Task, their_bytes: wire.MapbackBytes) -> None:
        blocks = self._session.table.of(task.pid)
        lacks = () if self._state(task.pid) is TaskState.MAPPED else blocks
        found = map_back(task, lacks, self.deadline, their_bytes)
        # None: the program is in exit(), its driver has shut down, and its memory is wanted no
        # more.
        if found not in (0, len(blocks)):
            raise RuntimeError(f"task {task.pid} mapped {found} of {len(blocks)} blocks")

    def open(self) -> None:
        """Let the tasks call the driver again, and NCCL: communicators that were ended are made
        anew before."""
        self.open_gates()
        elsewhere = self._session.job.ids_elsewhere
        renewal.bring_back(self.tasks, self._at_once, self.deadline, elsewhere)
        open_all({task.pid: task.nccl for task in self.tasks if task.nccl is not None})

    def open_gates(self) -> None:
        """Let the tasks call the driver again."""
        self._bring(Step.OPEN, lambda task: open_gate(task, self.deadline))

    def _at_once(self, name: str, action: Callable[[Task], None], tasks: Sequence[Task]) -> None:
        """Do it for all of these."""

        def act(task: Task) -> None:
            with self._session.timeline.span(of_task(task.pid), name):
                action(task)

        each(tasks, lambda task: unless_ended(task, act))

    def _bring(
        self,
        step: Step,
        action: Callable[[Task], None],
        can: Callable[[Task], bool] = lambda task: True,
    ) -> None:
        """Do it for every task whose state it is for, and that can."""
        try:
            self._once(step, action, can)
        except Exception as error:
            if self.again:
                self._session.deadline = time.monotonic() + self.again
            elif not is_cut(error):
                raise
            log.warning("tried again: %s", error)
            self._once(step, action, can)

    def _once(
        self, step: Step, action: Callable[[Task], None], can: Callable[[Task], bool]
    ) -> None:
        def act(task: Task) -> None:
            with self._session.timeline.span(of_task(task.pid), step.value):
                action(task)
            self.note(task.pid, step)

        with let_run(self.having(*BEHIND_GATE)):
            self._reconnect()
            wanted = [task for task in self.tasks if self._state(task.pid) in WAY_BACK[step]]
            each(list(filter(can, wanted)), lambda task: unless_ended(task, act))

    def _reconnect(self) -> None:
        """Wait for those whose connection has ended, with DETACH or without, or is to come."""
        known = {task.pid: task for task in self.tasks}
        waiting = self.having(*BEHIND_GATE)
        if new := [pid for pid in waiting if pid not in known]:
            self.tasks += self._session.job.channel.wait_resumed(new, self.deadline)
        old = [known[pid] for pid in waiting if pid in known]
        cut = [task for task in old if not task.connected()]
        each(cut, lambda task: unless_ended(task, self._wait_again))

    def _wait_again(self, old: Task) -> None:
        (task,) = self._session.job.channel.wait_again([old], self.deadline)
        self.tasks[self.tasks.index(old)] = task
        if not task.hello.resumed:
            # It had let go of nothing, and so has opened its gate by itself.
            self.note(task.pid, Step.AGAIN)


def each(tasks: Sequence[Task], action: Callable[[Task], object]) -> None:
    """Run `action` for all tasks at once.

    Every one runs to its end, then the first failure is raised.
    """
    if len(tasks) == 1:
        action(tasks[0])
        return
    with ThreadPoolExecutor(max_workers=max(len(tasks), 1)) as pool:
        futures = [pool.submit(action, task) for task in tasks]
    for future in futures:
        future.result()


def map_back(
    task: Task, blocks: Sequence[Block], deadline: float, their_bytes: wire.MapbackBytes
) -> int:
    """Give a task blocks: it maps each at its address. Gives how many it has then.

    Raises TaskError, OSError.
    """
    faults.check(Fault.MAPBACK)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    packet = wire.packet(wire.Message.MAPBACK, count=their_bytes)
    failures: list[OSError] = []

    def send() -> None:
        try:
            send_blocks(ours, blocks, deadline)
        except OSError as error:
            failures.append(error)

    with ours:
        sender = threading.Thread(target=send, name=f"mapback-{task.pid}")
        try:
            with theirs:
                sender.start()
                fds = [theirs.fileno()]
                reply = task.request(wire.Message.MAPBACK, deadline, packet=packet, fds=fds)
        except TaskError:
            # The task may have the channel open, and the sender wait for it to read on.
            ours.shutdown(socket.SHUT_RDWR)
            raise
        finally:
            sender.join()
    if failures:
        raise failures[0]
    return reply.blocks


def open_gate(task: Task, deadline: float) -> None:
    """Let a task call the driver again. Raises TaskError."""
    task.request(wire.Message.OPEN, deadline)
