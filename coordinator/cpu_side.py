"""The processes of a job on their way into an image: CRIU's dump, and what is kept beside it.

Every attribute that an undo reads is set as soon as its fact is true (checkpoint.py).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coordinator import faults, obstacles, places
from coordinator.copy_out import CopyOut
from coordinator.ghost_client import GhostError
from coordinator.job_files import written_files
from coordinator.memory_files import Saving
from coordinator.others import Barrier
from coordinator.page_server import Pages
from coordinator.polling import readable
from coordinator.process import kill_tree
from coordinator.records import copy_log
from coordinator.session import Shared
from coordinator.task_group import TaskGroup
from flowgpu.errors import CriuFailed, CriuUnsupported, NotEnoughDisk, RegistersInUse
from flowgpu.host import affinity, criu_images, criu_sockets, tcp, tracking
from flowgpu.host.criu import Criu, CriuRun
from flowgpu.host.proctree import resume_tree, stopped_pids, tree_pids
from flowgpu.host.sandbox import Search
from flowgpu.host.settings import Survey
from flowgpu.host.tracking import Untrackable
from flowgpu.host.undumpable import strange_session
from flowgpu.image.manifest import Affinity, OpenFile, Setting
from flowgpu.jobs import JobDir
from flowgpu.timeline import CRIU, JOB, STOPPED
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.05
SETTLE_SECONDS = 1.0
"""For what was sent to other nodes to come there. Where they do not read it, it stays with us."""
TRACKING_SECONDS = 0.25
"""So long may the tree stand to be tracked."""


class CpuSide:
    """The CPU side of one checkpoint."""

    def __init__(self, shared: Shared, group: TaskGroup, copy: CopyOut) -> None:
        self._shared = shared
        self._job = shared.job
        self._group = group
        self._copy = copy
        self.criu = Criu.locate()
        self.pages = Pages()
        self.files = Saving(shared.job)
        """Files that are the job's memory."""
        self.survey = Survey()
        self._search = Search([])
        self._searched = False
        self.unknown: list[str] = []
        """Processes that are not known to be free of sandboxes, in words."""
        self._tcp = tcp.Found([], {}, [], [], [])
        self.connections: list[tcp.Connection] = []
        """To processes of other nodes."""
        self._stopped_before: set[int] | None = None  # None: the tree runs
        self._stop_began = 0.0
        self.freeze_seconds: float | None = None
        """The time for which the whole tree stood; None: it has not gone on."""
        self.tracking_seconds = 0.0
        """The time for which the tree stood before, so that its pages could be tracked."""
        self.early = False
        """True if pages were copied before the freeze."""
        self.seconds = 0.0
        """Seconds that CRIU took."""
        self.pids: list[int] = []
        """Process ids of the tree that CRIU dumped."""
        self.open_files: tuple[OpenFile, ...] = ()
        self.affinities: tuple[Affinity, ...] = ()
        self._has_places = False
        self.places: tuple[Setting, ...] = ()

    def tree(self) -> list[int]:
        """Process ids of the job's tree."""
        return tree_pids(self._job.root_pid)

    def search(self) -> None:
        """Begin to look for sandboxes, which takes a while."""
        self._search = Search(self.tree())

    def start_pages(self, room: Callable[[], None]) -> None:
        """Have the page server make the files of CRIU's pages, or copy those of the job while it
        runs. `room` raises NotEnoughDisk where there is none for both."""
        self.criu.remember()
        self.pages.why_not_early = self._shared.plan.why_not_early
        tracked = {} if self.pages.why_not_early else self._track(room)
        self.pages.start(self._shared.image.criu_dir, self.tree(), tracked)

    def _track(self, room: Callable[[], None]) -> dict[int, int]:
        """A descriptor of each process by which its writes are seen."""
        self.refuse_sandboxes()  # a process that is looked at cannot be traced by another
        try:
            tree = self.tree()
            room()
            tracking.refuse(tree)
            began = time.monotonic()
            try:
                notes = JobDir(self._job.directory).standstill
                return tracking.descriptors(self._job.root_pid, TRACKING_SECONDS, notes)
            finally:
                self.tracking_seconds = time.monotonic() - began
                self._shared.timeline.add(JOB, STOPPED, began, began + self.tracking_seconds)
        except (Untrackable, NotEnoughDisk) as error:
            log.info("pages are copied in the freeze: %s", error)
            self.pages.why_not_early = str(error)
            return {}

    def refuse_sandboxes(self) -> None:
        """Wait for what was begun with `search`."""
        if not self._searched:
            self.unknown = obstacles.refuse_sandboxes(self._search)
            self._searched = True

    def dump(self) -> None:
        """Stop the tree, and write all of it that is not the GPU's."""
        faults.check(Fault.CRIU_DUMP)
        shared, folder = self._shared, self._shared.image.criu_dir
        server = self.pages.take()
        self.early = self.pages.early
        self._stopped_before = stopped_pids(self._job.root_pid)
        began = self._stop_began = time.monotonic()
        if hangs := faults.fires(Fault.CRIU_HANG):
            shared.deadline = began + faults.HANG_SECONDS
        run = self.criu.start_dump(
            self._job.root_pid,
            folder,
            leave_stopped=True,
            timeout=max(shared.deadline - began, 0.001),
            plugins=self.criu.plugins() if shared.plan.keeps_cuda else None,
            pages=server,
            tasks=self._stopped_tasks,
            notes=JobDir(self._job.directory).standstill,
            survey=self.survey,
            let_go=self._let_go,
        )
        if hangs:
            os.kill(run.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(max_workers=1) as pool:
            saved = pool.submit(self._save_beside)
            try:
                self._watch(run)
                self.seconds = run.wait()
                shared.timeline.add(CRIU, "dump", began, began + self.seconds)
                saved.result()
                self.files.name_links()
            finally:
                self.files.clear()
        self._check_tcp(folder)
        if not self.early:
            self.pages.finish()
        if self._has_places:
            self.places = tuple(places.found(folder, self._job.root_pid))

    def check(self) -> None:
        """Refuse an image that lacks something: the job may run by then."""
        images = self._shared.image.criu_dir
        if used := criu_images.unsaved_registers(images):
            raise RegistersInUse(job=self._job.name, thread=used[0], names=used[1])
        if criu_sockets.lost_sockets(images):
            what = "a Unix socket in which another one waits whose other end is closed"
            raise CriuUnsupported(action="dump", what=what)

    def _save_beside(self) -> None:
        """While CRIU is at work, and nothing of the job runs."""
        self.pids = self.tree()
        self.files.save(self._shared.image.path, self.pids, self._shared.deadline)
        self.affinities = affinity.bound(self.pids)
        self.open_files = written_files(self.files.written(self.pids))
        self._has_places = places.any_held(self.pids)
        output = self._job.output
        output.drain()
        log_path = JobDir(self._job.directory).output_log
        copy_log(log_path, self._shared.image.output_log, output.kept, output.end)

    def _stopped_tasks(self) -> Sequence[int]:
        """The tree is stopped, so who is in it is final. Gives its tasks."""
        strays = obstacles.strays(self._job)
        self._group.disturbed |= bool(strays)
        obstacles.refuse_strays(strays)
        if found := strange_session(self.tree()):
            self._group.disturbed = True
            raise CriuUnsupported(action="dump", what=found)
        self._refuse_tcp_again()
        tcp.note(self._tcp.ends, JobDir(self._job.directory).tcp_notes)
        obstacles.refuse_pipes(self._job, looks=1)
        return self._group.stopped()

    def refuse_tcp(self) -> None:
        """What is on its way between processes that run is soon where an image has it."""
        others, elsewhere = self._shared.others, tcp.NOWHERE
        if not others.alone:
            first = tcp.look(self.tree())
            others.reached(Barrier.LOOK, self._shared.deadline)
            # What was there before all had looked once is in what all have now.
            found = tcp.look(self.tree())
            told = tcp.tell(found, tcp.closed(self._job.root_pid))
            said = others.reached(Barrier.LOOK_AGAIN, self._shared.deadline, told)
            inodes = {end.row.inode for end in first.outside}
            elsewhere = tcp.Elsewhere(said, inodes & {end.row.inode for end in found.outside})
        self._look_at_tcp(obstacles.PIPE_LOOKS, elsewhere)

    def _refuse_tcp_again(self) -> None:
        """The tree is stopped; and so are those of the other nodes once they are waited for."""
        shared, elsewhere = self._shared, tcp.NOWHERE
        if not shared.others.alone:
            shared.others.reached(Barrier.STOPPED, shared.deadline)
            told = tcp.tell(tcp.look(self.tree()), tcp.closed(self._job.root_pid))
            said = shared.others.reached(Barrier.CONNECTED, shared.deadline, told)
            elsewhere = tcp.Elsewhere(said, None)
        self._look_at_tcp(1, elsewhere)
        self.connections = [end for end in self._tcp.outside if elsewhere.has(end)]
        if not shared.others.alone:
            tcp.wait_sent(self.tree()[0], self.connections, SETTLE_SECONDS)
            shared.others.reached(Barrier.SETTLED, shared.deadline)

    def _look_at_tcp(self, looks: int, elsewhere: tcp.Elsewhere) -> None:
        choice = self._shared.plan.options.tcp
        self._tcp = obstacles.refuse_tcp(self._job, choice, looks, elsewhere)
        waiting = [*self._tcp.waiting, *filter(elsewhere.waits, self._tcp.outside)]
        leaving = [*self._tcp.leaving, *filter(elsewhere.leaves, self._tcp.outside)]
        if passing := dataclasses.replace(self._tcp, waiting=waiting, leaving=leaving).passing:
            self._group.disturbed = True
            raise CriuUnsupported(action="dump", what=passing)

    def _check_tcp(self, folder: Path) -> None:
        """Check that no bytes of a connection are lost: CRIU dumps its ends one after the other."""
        others = self._shared.others
        if not self._tcp.ends and others.alone:
            return
        lost = tcp.lost(folder, self._tcp.pairs)
        if not others.alone:
            ours = tcp.streams(folder, self.connections)
            theirs = others.reached(Barrier.CAPTURE, self._shared.deadline, ours)
            lost = lost or tcp.lost_between(ours, theirs)
        if lost:
            self._group.disturbed = True
            raise CriuFailed(action="dump", cause="a TCP connection of the job was not still")
        kept = self._kept_connections()
        criu_sockets.note_as_sent(folder, kept)
        if closed := {end.row.inode for end in self._tcp.outside} - kept:
            criu_sockets.close_connections(folder, closed)

    def _kept_connections(self) -> set[int]:
        """Inodes of those with both ends in the job."""
        return {*self._tcp.pairs, *(end.row.inode for end in self.connections)}

    def _let_go(self, but: Container[int] = ()) -> None:
        tcp.let_go(JobDir(self._job.directory).tcp_notes, but)

    def end(self) -> None:
        """End the tree. Its ends of connections within it are gone with it at once."""
        self._let_go(self._kept_connections())
        kill_tree(self._job.root_pid)

    def _watch(self, run: CriuRun) -> None:
        """Wait until CRIU ends. A ghost or a task that dies meanwhile ends CRIU too."""
        while not readable(run, seconds=WATCH_SECONDS):
            if self._copy.under_way and not self._shared.link.alive:
                run.cancel()
                raise GhostError("the ghost died while CRIU was at work")
            if run.killed_task() or time.monotonic() >= self._shared.deadline:
                return  # run.wait ends it with its own error

    def resume(self) -> None:
        """Let the processes go on that CRIU has left stopped, or is about to stop."""
        if self._stopped_before is not None:
            self._let_go()
            resume_tree(self._job.root_pid, keep_stopped=self._stopped_before)
            ended = time.monotonic()
            self.freeze_seconds = ended - self._stop_began
            self._shared.timeline.add(JOB, STOPPED, self._stop_began, ended)
            self._stopped_before = None

    def close(self) -> None:
        """End what was begun."""
        try:
            self.pages.close()
        finally:
            self._search.close()
