"""Images of one running job, taken into its store: periodic ones, and the last one at a signal."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType

from flowgpu import saving, start
from flowgpu.client import Event
from flowgpu.errors import (
    ENDING,
    Busy,
    CoordinatorGone,
    CoordinatorReplaced,
    FlowError,
    InternalError,
    JobEnded,
    words_of,
)
from flowgpu.frequency import Period
from flowgpu.image.store import Store
from flowgpu.jobs import Job, JobDir
from flowgpu.options import CheckpointOptions

ENDED = 0  # no signal has this number
RETRY_SECONDS = 0.2


class Series:
    """Takes images of the job that `of` is entered for, in a thread beside it.

    Signals are heard from the moment on that this is made: one that comes before the job runs is
    carried out as soon as it does. Who started this may have blocked them until now.
    """

    def __init__(
        self,
        store: Store,
        *,
        period: Period | None,
        keep: int,
        signals: Collection[int],
        say: Callable[[str], None],
        report: Callable[[Event], None],
    ) -> None:
        """`period`: of images that leave the job running. `signals` dump it away.

        `say` gets what did not work, and `report` what each image has.
        """
        self.signals = signals
        self._store, self._period, self._keep = store, period, keep
        self._say, self._report = say, report
        # Its `put` may interrupt itself, as handlers of two signals do.
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._said = ""
        for signum in signals:
            signal.signal(signum, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._told.put(signum)

    @property
    def folder(self) -> str:
        """Where the images are."""
        return str(self._store.path)

    @property
    def told(self) -> bool:
        """A signal has come that is not carried out yet."""
        return not self._told.empty()

    @contextlib.contextmanager
    def of(self, directory: JobDir) -> Iterator[None]:
        """While entered, the job of this folder runs."""
        thread = threading.Thread(target=self._take, args=[directory, directory.read()])
        thread.start()
        try:
            yield
        finally:
            self._told.put(ENDED)
            thread.join()

    def _take(self, directory: JobDir, job: Job) -> None:
        between = self._period and self._period(directory)
        due = time.monotonic() + between(0.0) if between else math.inf
        while True:
            left = None if between is None else max(due - time.monotonic(), 0.0)
            saving.note(directory, self._store.path, left)
            try:
                told = self._told.get(timeout=left)
            except queue.Empty:
                self._add(directory, job)
                due += between(time.monotonic() - due) if between else math.inf
                continue
            if told == ENDED:
                return
            self._dump(directory, job, signal.Signals(told).name)

    def _add(self, directory: JobDir, job: Job) -> None:
        try:
            self._image(directory, job, leave_running=True)
            self._trim(job)
            self._said = ""
        except (CoordinatorGone, JobEnded):
            return
        except FlowError as error:
            if isinstance(error, Busy) and error.fields["action"] == ENDING:
                return
            if str(error) != self._said:  # not again and again
                self._said = str(error)
                self._say(f"flowgpu: no image this time: {error}")

    def _dump(self, directory: JobDir, job: Job, told: str) -> None:
        while True:
            try:
                self._image(directory, job, leave_running=False)
                self._trim(job)
                return
            except (Busy, CoordinatorReplaced):
                time.sleep(RETRY_SECONDS)
            except (CoordinatorGone, JobEnded):
                return
            except FlowError as error:
                self._say(f"flowgpu: {told}: {job.name} was not dumped, and goes on: {error}")
                return

    def _trim(self, job: Job) -> None:
        try:
            self._store.keep(job.id, self._keep)
        except (OSError, FlowError) as error:
            self._say(f"flowgpu: older images of {job.name} stay: {words_of(error)}")

    def _image(self, directory: JobDir, job: Job, *, leave_running: bool) -> None:
        try:
            self._store.check_held()
            output, base = self._store.next_image(), self._store.newest(job.id)
            options = CheckpointOptions(output, leave_running=leave_running, base=base)
            self._report(start.dump(directory, job, options))
        except FlowError:
            raise
        except Exception as error:
            raise InternalError(action="an image of the job", error=words_of(error)) from error
