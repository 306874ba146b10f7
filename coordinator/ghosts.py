"""A ghost that is there before it is needed.

That of a restore is started first of all. A suspended job has one ready for its resume, without a
context unless its own contexts stay too. A resumed job has one for its next suspension, without a
context.

With `flowgpu run --ghost warm` there is always one, with a context, the chunk kernels and their
scratch memory on each GPU of the job. So a checkpoint needs no device memory that the job may have
taken by then. A thread beside the job sees to that, outside of checkpoints and restores; a ghost
that died is started again.

Ownership: a ghost that was taken is its session's, until `keep` has given it back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from coordinator import ghost_commands as commands
from coordinator.device import Gpu
from coordinator.ghost_client import Ghost, GhostError
from coordinator.session import GhostLink, has_room, wanted_gpus
from coordinator.tasks import TaskChannel, TaskError

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
AGAIN_SECONDS = 10.0
"""After a failure, until the next try: what failed now will fail again at once."""
WARM_SECONDS = 60.0
RESET_SECONDS = 30.0
ASK_SECONDS = 5.0


class Ghosts:
    """Has at most one ready."""

    def __init__(
        self,
        start: Callable[[], Ghost],
        channel: TaskChannel,
        *,
        warm: bool,
        first: Ghost | None = None,
    ) -> None:
        """`start` makes one. `warm`: there is always one, with contexts. `first`: one that is there
        already."""
        self._new = start
        self._channel = channel
        self._keeps_warm = warm
        self._lock = threading.Lock()  # held while the ghost is asked for anything
        self._ghost = first
        self._warm: set[int] = set()
        self._gpus: Sequence[Gpu] = ()  # empty: it was not asked yet
        self._lent = False
        self._rests = False
        self._next_try = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="warm-ghost")

    def begin(self) -> None:
        """Start the thread, for a job that has a warm one."""
        if self._keeps_warm:
            self._thread.start()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Leave GPUs and ghosts to a checkpoint or restore; waits for what is under way."""
        with self._lock:
            self._lent = True
        try:
            yield
        finally:
            with self._lock:
                self._lent = False

    def start(self) -> Ghost:
        """The one that is ready, or a new one, for a session. Raises GhostError."""
        with self._lock:
            return self._take()

    def _take(self) -> Ghost:
        ghost, self._ghost, self._warm, self._gpus = self._ghost, None, set(), ()
        if ghost is None or ghost.alive():
            return ghost or self._new()
        ghost.kill()
        return self._new()

    def keep(self, ghost: Ghost, stays: bool) -> bool:
        """Take a ghost over that a session is done with. False: it is of no more use.

        `stays`: with its contexts, also where the job has none that is always warm.
        """
        with self._lock:
            unwanted = not (self._keeps_warm or stays)
            if unwanted or self._closing.is_set() or self._rests or self._ghost:
                return False
            try:
                ghost.ask(commands.Reset(), time.monotonic() + RESET_SECONDS)
                machine = ghost.ask(commands.Hello(), time.monotonic() + RESET_SECONDS)
            except GhostError as error:
                log.warning("the ghost cannot be used again: %s", error)
                return False
            self._ghost, self._gpus, self._warm = ghost, machine.gpus, set(machine.warm)
            return True

    def prepare(self, rests: bool) -> None:
        """Have one with the driver initialised, which takes half a second, but no context.
        `rests`: as of `rest`."""
        self.rest(rests)
        with self._lock:
            if self._ghost is not None or (self._keeps_warm and not rests):
                return
            try:
                self._ghost = self._new()
                self._ghost.submit(commands.Hello())
            except GhostError as error:
                log.warning("no ghost is ready, the next session starts one: %s", error)

    def rest(self, rests: bool) -> None:
        """Say whether the job has given its GPUs back: then there is no warm one, as it would hold
        them."""
        with self._lock:
            self._rests = rests
            if rests and self._warm:
                self._end()

    def restored(self) -> None:
        """The first one is not needed any more, unless it is to be a warm one."""
        if not self._keeps_warm:
            self._end()

    def close(self) -> None:
        """End the thread and the ghost."""
        self._closing.set()
        if self._keeps_warm:
            self._thread.join()
        self._end()

    def _end(self) -> None:
        if self._ghost is not None and self._warm:
            self._ghost.quit()
        elif self._ghost is not None:
            self._ghost.kill()  # which may be at its start still
        self._ghost, self._warm = None, set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            with self._lock:
                if self._lent or self._rests or time.monotonic() < self._next_try:
                    continue
                try:
                    self._tend()
                except (GhostError, TaskError, OSError) as error:
                    log.warning("no warm ghost for now, checkpoints start one: %s", error)
                    self._next_try = time.monotonic() + AGAIN_SECONDS

    def _tend(self) -> None:
        if self._ghost is None or not self._gpus or not self._ghost.alive():
            self._replace()
        ghost = self._ghost
        tasks = self._channel.tasks()
        missing = wanted_gpus(tasks) - self._warm
        missing &= {gpu.ordinal for gpu in self._gpus}
        if ghost is None or not missing:
            return
        if not has_room(tasks, self._gpus, time.monotonic() + ASK_SECONDS):
            # A context that does not fit would take memory away from the job while it tries.
            raise GhostError("the job has taken the device memory")
        ghost.ask(commands.Warm(tuple(sorted(missing))), time.monotonic() + WARM_SECONDS)
        self._warm |= missing
        log.info("the warm ghost %d has contexts on GPUs %s", ghost.pid, sorted(self._warm))

    def _replace(self) -> None:
        link = GhostLink(self._take)
        link.start()
        self._ghost, self._gpus, self._warm = link.ghost, link.gpus, link.warm
