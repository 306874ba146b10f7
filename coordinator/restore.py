"""Bring a job back from its image: CRIU restores the tree while the ghost fills fresh device
memory.

Nothing of the image is changed. Whatever fails, what was restored so far is killed, files of the
job that were cut back are made whole again, and one error says why.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coordinator import faults, places
from coordinator.bringup import BringUp
from coordinator.control_state import UNMOVED, ControlState, Moved, engines
from coordinator.cut_files import CutFiles
from coordinator.gathering import Gathering, gathering
from coordinator.ghost_client import GhostError
from coordinator.ghost_commands import Extent
from coordinator.job_files import find_grown, look, named
from coordinator.memory_files import Putting
from coordinator.process import kill_tree, limit_processes, refuse_taken
from coordinator.records import is_same
from coordinator.refill import Refill, Saved
from coordinator.session import GhostLink, Progress, RunningJob, Session
from coordinator.task_state import TaskState
from coordinator.tasks import TaskError
from flowgpu import nodes, timeline, wire
from flowgpu.errors import (
    CutLeft,
    FileMissing,
    FlowError,
    GpuMismatch,
    ImageDamaged,
    InternalError,
    MissingCapability,
    NoCodeForGpu,
    RestoreFailed,
    is_internal,
    words_of,
)
from flowgpu.host import (
    addresses,
    affinity,
    criu_images,
    criu_sockets,
    criu_view,
    probes,
    processor,
    stops,
    tcp,
)
from flowgpu.host.criu import Criu
from flowgpu.host.criu_view import View
from flowgpu.host.hold import Held
from flowgpu.host.proctree import same_path, send, task_socket, tree_pids
from flowgpu.host.settings import Restorer
from flowgpu.host.tcp_queues import SendQueues
from flowgpu.image import layout
from flowgpu.image import manifest as m
from flowgpu.image.compression import plain_criu
from flowgpu.image.reader import Image
from flowgpu.jobs import JobDir
from flowgpu.launch import criu_plugins
from flowgpu.nodes import Membership
from flowgpu.options import RestoreOptions
from flowgpu.timeline import COORDINATOR, CRIU, Recorder
from flowgpu.wire import Fault

log = logging.getLogger(__name__)

LIMITS = {"fill": 3600.0, "criu": 120.0, "engine": 120.0, "mapback": 120.0}
"""The phases, with the seconds that each may take. `fill` and `criu` begin at once; `mapback` is
what follows all others."""
# Beyond the fill: a thread that is held may have a lock that the one that runs is waiting for.
HELD_SECONDS = 5.0
SPANS = {"criu": (CRIU, "restore"), "ghost": (COORDINATOR, "make memory")}
"""What the timeline calls phases of the report, where that is another name."""
TCP_SECONDS = 65.0  # an address of a closed connection is kept for 60
MOVED_IN_PART = (
    "the driver moves no process that sees only some of the machine's GPUs (CUDA_VISIBLE_DEVICES) "
    "to another of them; the image restores on {own}, one of the engine replay on any"
)


class Restore:
    """One restore; `run` once."""

    def __init__(
        self,
        job: RunningJob,
        image: Path,
        *,
        stdout: int,
        stderr: int,
        options: RestoreOptions,
        before_resume: Callable[[], None] | None = None,
        progress: Progress | None = None,
        together: Callable[[str, Any], Sequence[Any]] | None = None,
        member: Membership | None = None,
    ) -> None:
        """`stdout` and `stderr`: write ends of the job's new pipes, the caller's to close.

        `together`: for a job of several nodes, waits until all have come to the place of that name,
        and gives what the others have said there. `member`: which of them this is.
        """
        self._job = job
        self._path = image
        self._ends = {"stdout": stdout, "stderr": stderr}
        self._options = options
        self._cut_files = CutFiles(image, job.name)
        self._memory_files: Putting | None = None
        self._before_resume = before_resume or (lambda: None)
        self._together = together
        self._member = member
        self._report = progress or (lambda phase, done, total: None)
        self.timeline = Recorder()
        self._link = GhostLink(job.start_ghost, job.keep_ghost, self.timeline)
        self._session = Session(job, self._link, timeline=self.timeline)
        self._table = self._session.table
        self._engines = engines(self._session)
        self._tasks = BringUp(self._session)
        self._held: list[Held] = []
        self._are_held = False
        self._exchanging = threading.Lock()  # while managed memory needs those that are held
        self._tasks.keeping = self._keeping
        self._stopped: list[int] = []  # processes, before the dump
        self._folders: list[Path] = []  # that were made for sockets of the job
        self._places: list[Path] = []
        self._refill: Refill | None = None
        self._rebuilding: Future[None] | None = None  # where that has begun beside the fill
        self._seconds: dict[str, float] = {}
        self._under_way: list[str] = []  # of what is timed, the newest last
        self._filled: dict[str, float] = {}
        self._not_set: list[str] = []  # what the job had of the kernel and this machine refuses
        self._image: Image | None = None
        self._criu_dir = image / layout.CRIU_DIR
        self._moves: addresses.Moves = {}  # of all nodes
        self._own_moves: dict[str, str] = {}

    @property
    def _manifest(self) -> m.Manifest:
        return self._opened.manifest

    @property
    def _opened(self) -> Image:
        if self._image is None:
            raise RuntimeError("the image is not open")
        return self._image

    @property
    def _engine(self) -> ControlState:
        replays = self._manifest.engine == "replay"
        return self._engines[wire.Engine.REPLAY if replays else wire.Engine.NATIVE]

    @property
    def _pids(self) -> list[int]:
        return [task.pid for task in self._manifest.tasks]

    def run(self) -> dict[str, Any]:
        """Do it. Gives the report; raises a FlowError, with nothing left behind."""
        began, notes = time.monotonic(), JobDir(self._job.directory).timeline
        try:
            self._image = Image(self._path)
            self._check_machine()
            places = _places(self._job)
            with plain_criu(self._image, places, self._job.name, self._on("unpack")) as criu_dir:
                self._criu_dir = criu_dir
                if criu_dir != self._opened.criu_dir:
                    unpacked = time.monotonic()
                    self._seconds["unpack"] = unpacked - began
                    self.timeline.add(COORDINATOR, "unpack", began, unpacked)
                self._restore_both_sides()
            self._resume()
        except Exception as error:
            log.exception("restore")
            with self.timeline.span(COORDINATOR, "undo"):
                left = self._undo()
            told = self._with_files(self._explain(error), left)
            timeline.note(notes, "restore", self.timeline, {}, str(told))
            raise told from error
        self._link.quit()
        self._table.close()
        report = {
            "job": self._job.name,
            "restore_seconds": time.monotonic() - began,
            "phases": self._seconds,
            **self._filled,
            "not_set": self._not_set,
            "addresses": self._own_moves,
            **self._cut_files.report(),
        }
        if self._memory_files is not None:
            self._memory_files.keep()
            report |= self._memory_files.report()
        timeline.note(notes, "restore", self.timeline, report, "")
        return report

    def _check_machine(self) -> None:
        """The cheap checks: whatever is wrong here is said before anything is started."""
        manifest = self._manifest
        if manifest.gpu not in ("none", self._job.gpu):
            raise GpuMismatch(image=f"a GPU of kind {manifest.gpu}", here=self._job.gpu)
        if not probes.capabilities() & probes.CHECKPOINT_RIGHTS:
            raise MissingCapability(action="CRIU's restore", capability="CAP_SYS_ADMIN")
        if not probes.may_restore_bounding_set():
            raise MissingCapability(action="CRIU's restore", capability="CAP_SETPCAP")
        refuse_taken(manifest.pids)
        # CRIU compares sizes and build ids of mapped files, not what is in them.
        for library in manifest.libraries:
            if not is_same(library):
                raise FileMissing(path=library.path)

    def _restore_both_sides(self) -> None:
        opened: Future[Refill | None] = Future()
        with ThreadPoolExecutor(max_workers=4) as pool:
            criu = pool.submit(Criu.locate)
            folder = self._job.directory / "criu-view"
            needed = bool(self._manifest.inherited)
            view = pool.submit(criu_view.make, self._criu_dir, folder, needed=needed)
            created = pool.submit(self._create_memory, opened)
            filled = pool.submit(lambda: self._fill_memory(created.result()))
            try:
                self._restore_processes(criu, view)
                # Not when the blocks are made: CUDA is put back beside that as well.
                made = opened.result()
                if made is not None:
                    self._session.deadline = time.monotonic() + self._begin("engine")
                    if not made.full and self._hold():
                        self._rebuild_beside(created, filled)
            except BaseException:
                # The other side ends by the death of the ghost, and quickly.
                self._link.kill()
                raise
            finally:
                if not view.exception() and (cut := view.result()):
                    cut.remove()
                shutil.rmtree(self._changed_dir, ignore_errors=True)
            filled.result()
        if made is not None and made.full:
            # The memory that it has filled is ours by its descriptors; its contexts are in the way.
            self._link.drop()

    def _begin(self, phase: str) -> float:
        """Seconds that the phase may take which begins now."""
        log.info("restore: %s", phase)
        return faults.begin(phase, LIMITS[phase])

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Note what it takes, under this name of the report, and show that it is waited for."""
        began = time.monotonic()
        self._under_way.append(name)
        self._report(name, 0, 0)
        with self.timeline.span(*SPANS.get(name, (COORDINATOR, name))):
            yield
        self._seconds[name] = time.monotonic() - began
        self._under_way.remove(name)
        if self._under_way:
            self._report(self._under_way[-1], 0, 0)

    # CPU side

    def _restore_processes(self, criu: Future[Criu], view: Future[View | None]) -> None:
        with self._timed("verify"):
            self._opened.verify("cpu", self._on("verify"))
        limit = self._begin("criu")
        with self._timed("criu"):
            self._run_criu(criu, view, limit)
        limit_processes(criu_images.limits(self._criu_dir))
        self._check_runtime_dir()
        tree = tree_pids(self._job.root_pid)
        if self._moves:
            addresses.tell(tree, self._moves)
        restorer = Restorer(self._manifest.settings)
        restorer.run(tree)
        self._not_set += restorer.failed
        stops.forget_all(tree, self._stopped)

    def _run_criu(self, criu: Future[Criu], view: Future[View | None], limit: float) -> None:
        files = self._memory_files = Putting(self._opened, self._job.name)
        files.put()
        # The sizes are sure now, and nothing of the job is there yet that writes.
        cut = self._options.files == "truncate"
        known = self._manifest.open_files
        own = self._choose_addresses()
        others: Sequence[Any] = ()
        if self._together:
            # What this node's processes read may be what another one's have written, and it cuts.
            self._cut_files.cut(look(self._criu_dir, known, cut=cut, besides=files.made)[0])
            others = self._together("files", own)
        self._move_hosts(addresses.agree(*own, others))
        queues = SendQueues(self._criu_dir)
        if queues:
            queues.leave_out(self._changeable())
        self._show_changes(view.result())
        grown = find_grown(self._criu_dir, known, self._job.name, cut=cut, besides=files.made)
        self._cut_files.cut(grown)
        faults.check(Fault.CRIU_RESTORE)
        self._make_folders()
        self._stopped = criu_images.stopped_pids(self._criu_dir)
        hangs = faults.fires(Fault.CRIU_HANG)
        amx = self._may_use_amx()
        # Its part for AMX is of no particular version of CRIU's.
        plugins = criu_plugins() if amx else None
        pipes = {self._manifest.pipes[name]: end for name, end in self._ends.items()}
        with self._gathering(queues) as gathered, ThreadPoolExecutor(max_workers=1) as pool:
            filled = pool.submit(files.fill)
            self._job.root_pid = criu.result().restore(
                self._criu_dir,
                inherit_fds=pipes,
                leave_stopped=True,
                plugins=criu.result().plugins() if self._manifest.live else plugins,
                amx=amx,
                work_dir=self._job.directory,
                timeout=faults.HANG_SECONDS if hangs else limit,
                view=view.result(),
                script=gathered.script if gathered else None,
                environment=gathered.environment if gathered else None,
                on_started=lambda run: os.kill(run.pid, signal.SIGSTOP) if hangs else None,
            )
            filled.result()

    def _gathering(self, queues: SendQueues) -> contextlib.AbstractContextManager[Gathering | None]:
        together = self._together if self._member and self._member.connected else None
        if not together and not queues:
            return contextlib.nullcontext()
        root = criu_images.pids(self._criu_dir)[0]

        def wait() -> None:
            if together:
                together("sockets", None)
            try:
                queues.put_back(tree_pids(root))
            except OSError as error:
                raise RestoreFailed(job=self._job.name, reason=words_of(error)) from error

        return gathering(self._job.directory / "together", wait)

    @property
    def _changed_dir(self) -> Path:
        return self._job.directory / "criu-changed"

    def _changeable(self) -> Path:
        """A folder of links to the images, which CRIU reads from now on in their place."""
        if self._criu_dir != self._changed_dir:
            criu_images.linked(self._criu_dir, self._changed_dir)
            self._criu_dir = self._changed_dir
        return self._criu_dir

    def _show_changes(self, view: View | None) -> None:
        """Let the view have them too."""
        if view is not None and self._criu_dir == self._changed_dir:
            for path in self._criu_dir.iterdir():
                if not path.is_symlink():
                    (view.path / path.name).unlink()
                    (view.path / path.name).symlink_to(path)

    def _choose_addresses(self) -> tuple[str, dict[str, str]]:
        """By which address others reach this host, and what it gives for those of the image's.

        Raises RestoreFailed.
        """
        leader = self._member.leader if self._member else ""
        path = addresses.own_toward(leader and nodes.address(leader)[0])
        used = criu_sockets.local_hosts(self._criu_dir)
        alone = self._member is None
        given, untold = self._options.addresses, ""
        try:
            now = addresses.here(path)
        except OSError as error:  # a sandbox may forbid AF_NETLINK
            now, untold = [], words_of(error)
            log.warning("the addresses of this machine are not known: %s", untold)
        choice = addresses.choose(self._manifest.addresses, used, now, path, alone, given)
        lacking, none = choice.lacking, "this machine none for it"
        if untold:
            lacking = [host for host in used if host not in (choice.moves.get(host), *given)]
            none = f"this machine does not tell which it has instead ({untold})"
        for host in lacking:
            words = f"its sockets have the address {host}, and {none}"
            reason = f"{words}; --address {host}=NEW gives one"
            raise RestoreFailed(job=self._job.name, reason=reason)
        for host in given.keys() & choice.moves.keys():
            if not addresses.is_ours(given[host]):
                reason = f"--address {host}={given[host]}: this machine has not that address"
                raise RestoreFailed(job=self._job.name, reason=reason)
        return path, choice.moves

    def _move_hosts(self, agreed: addresses.Agreement) -> None:
        """Let CRIU read sockets that have this host's addresses, and those of the other nodes.

        Raises RestoreFailed.
        """
        if words := criu_sockets.leads_to(self._criu_dir, agreed.unclear):
            reason = f"its TCP connection from {words} leads to a node that had an address of this"
            raise RestoreFailed(job=self._job.name, reason=f"{reason} one, and has another now")
        self._own_moves = {
            known: now
            for known, now in agreed.own.items()
            if known != now or addresses.is_loopback(now)
        }
        changed = addresses.moved(agreed.moves)
        if not changed:
            return
        log.info("addresses: %s", ", ".join(f"{one} is {now}" for one, now in changed.items()))
        self._moves = agreed.moves
        criu_sockets.move_hosts(self._changeable(), agreed.moves)

    def _make_folders(self) -> None:
        """A job that ran on after its dump may have ended and removed its temporary folders.

        CRIU makes the sockets in them, not the folders. Raises RestoreFailed.
        """
        bound, outside = criu_sockets.socket_paths(self._criu_dir)
        for path in outside:
            if not path.is_socket():
                reason = f"it sends to the socket {path} of a process outside, and none is there"
                raise RestoreFailed(job=self._job.name, reason=reason)
        if reason := tcp.hindered(self._criu_dir, TCP_SECONDS):
            raise RestoreFailed(job=self._job.name, reason=reason)
        for folder in {path.parent for path in bound}:
            self._folders += [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(0o700, parents=True, exist_ok=True)
        self._places = places.make(self._manifest.settings, self._criu_dir)

    def _remove_folders(self) -> None:
        """In them is only what the job has made, which is gone."""
        places.remove(self._places)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _check_runtime_dir(self) -> None:
        """Raises RestoreFailed where tasks look for their coordinator in another runtime folder."""
        ours = JobDir(self._job.directory).task_socket
        for pid in self._pids:
            theirs = task_socket(pid)
            if theirs and not same_path(theirs, ours):
                base = theirs.parents[2]  # of jobs/<id>/task.sock
                reason = (
                    f"it was run with the runtime folder {base}, where its processes look for "
                    f"their coordinator; FLOWGPU_RUNTIME_DIR={base} restores it"
                )
                raise RestoreFailed(job=self._job.name, reason=reason)

    def _may_use_amx(self) -> bool:
        """True if tasks get the permission, which is not in the image, nor in /proc of a process.

        A process that had it had no smaller signal stack than this, since the kernel checks.
        """
        if processor.AMX not in self._manifest.cpu_features or processor.lacking([processor.AMX]):
            return False
        smallest = criu_images.smallest_signal_stack(self._criu_dir)
        return smallest is None or smallest >= processor.signal_frame_bytes()

    def _on(self, phase: str) -> Callable[[Any], None]:
        return lambda event: self._report(phase, event["done"], event["total"])

    # GPU side

    def _create_memory(self, opened: Future[Refill | None]) -> Refill | None:
        """Make the blocks; None where no process uses CUDA. `opened`: before they are made."""
        try:
            return self._make_blocks(opened)
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
            raise

    def _make_blocks(self, opened: Future[Refill | None]) -> Refill | None:
        if not self._manifest.tasks:
            opened.set_result(None)
            return None
        with self._timed("ghost"):
            refill = self._refill = Refill(
                self._session,
                self._engine,
                self._saved(),
                time.monotonic() + self._begin("fill"),
                self._report,
                poison=self._options.poison,
            )
            refill.open()
            opened.set_result(refill)
            refill.create()
        return refill

    def _saved(self) -> Saved:
        image, manifest = self._opened, self._manifest
        return Saved(
            manifest.gpus,
            manifest.imports,
            manifest.peers,
            self._pids,
            manifest.counts.gpu_bytes_reserved,
            self._path,
            [
                Extent(
                    str(image.extent_data(i)),
                    str(image.extent_digests(i)),
                    one.slots,
                    image.frames(i),
                )
                for i, one in enumerate(image.extents)
            ],
            {gpu.index: _text(image.gpu_chunks(gpu.index)) for gpu in manifest.gpus},
        )

    def _fill_memory(self, made: Refill | None) -> None:
        if made is not None:
            with self._timed("copy"):
                self._filled = made.fill()

    def _moved(self) -> Moved:
        return self._refill.moved() if self._refill else UNMOVED

    # Together again

    def _hold(self) -> bool:
        """Hold all threads but those that put CUDA back; False where that cannot be.

        So nothing of the job runs before its memory is checked.
        """
        # What ends the driver of a live task's copy needs the driver's own threads.
        if self._manifest.live:
            return False
        pids = self._pids
        try:
            threads = self._engine.threads(pids, self._session.deadline)
            for pid, thread in zip(pids, threads, strict=True):
                self._held.append(Held(pid, thread))
        except (GhostError, OSError) as error:
            log.warning("CUDA is put back when the memory is there: %s", error)
            return False
        self._are_held = True
        return True

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[bool]:
        with self._exchanging:
            yield self._are_held

    def _rebuild_beside(self, created: Future[Refill | None], filled: Future[None]) -> None:
        """Put CUDA back beside the fill, and let the tasks map what is still being filled."""

        def rebuild() -> None:
            self._rebuild()
            if self._engine.code is wire.Engine.REPLAY:
                created.result()
                self._session.deadline = time.monotonic() + LIMITS["mapback"]
                with self._timed("mapback"):
                    self._tasks.map_early()

        pool = ThreadPoolExecutor(max_workers=1)
        rebuilding = self._rebuilding = pool.submit(rebuild)
        pool.shutdown(wait=False)
        futures.wait([rebuilding, filled], return_when=futures.FIRST_COMPLETED)
        if filled.done():
            filled.result()
        if futures.wait([rebuilding], HELD_SECONDS).done:
            rebuilding.result()
        else:
            log.warning("the threads are let go before CUDA is back")

    def _rebuild(self) -> None:
        with self._timed("engine"):
            faults.check(Fault.REBUILD)
            self._tasks.expect(self._pids, TaskState.STRIPPED)
            self._engine.rebuild(self._tasks, self._moved())

    def _resume(self) -> None:
        limit = self._begin("mapback")
        if self._together:
            self._together("all", None)
        self._before_resume()
        self._session.deadline = time.monotonic() + limit
        tree = tree_pids(self._job.root_pid)
        affinity.bind(self._manifest.affinities, tree)
        with self._exchanging:
            for held in self._held:
                held.release()
            self._are_held = False
        # No signal for those that were stopped: who was held may have let them go on by now.
        send(signal.SIGCONT, (pid for pid in tree if pid not in self._stopped))
        if not self._pids:
            return
        if self._rebuilding is None:
            self._rebuild()
        else:
            self._rebuilding.result()
        # One that has ended by now is an end like any other: its parent sees it, the job goes on.
        if not self._tasks.having(TaskState.MAPPED):
            with self._timed("mapback"):
                self._tasks.map_back()
        with self._timed("open"):
            self._tasks.map_back()
            self._tasks.open()

    # Failure

    def _undo(self) -> list[str]:
        """Gives the files that could not be made whole again."""
        left: list[str] = []
        with contextlib.ExitStack() as stack:  # each whatever becomes of the others
            if (files := self._memory_files) is not None:
                stack.callback(lambda: left.extend(files.put_back()))
            stack.callback(lambda: left.extend(self._cut_files.put_back()))
            stack.callback(self._remove_folders)
            stack.callback(self._table.close)
            if self._rebuilding is not None:
                # It reads the table until it notes that there is no task any more.
                stack.callback(futures.wait, [self._rebuilding], HELD_SECONDS)
            stack.callback(self._link.kill)
            stack.callback(self._end_tree)
        return left

    def _end_tree(self) -> None:
        for held in self._held:
            held.kill()
        if self._job.root_pid:
            kill_tree(self._job.root_pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._job.root_pid, 0)
            self._job.root_pid = 0

    def _with_files(self, error: FlowError, left: Sequence[str]) -> FlowError:
        """The error, or one that names these files of the job as well."""
        if not left:
            return error
        return CutLeft(
            job=self._job.name,
            reason=str(error).rstrip("."),
            files=named(left),
            folder=self._cut_files.folder,
        )

    def _explain(self, error: Exception) -> FlowError:
        if isinstance(error, FlowError):
            return error
        if isinstance(error, GhostError) and error.kind in ("DAMAGED", "SHORT"):
            return ImageDamaged(path=self._path, reason=str(error))
        if self._is_moved_in_part(error):
            own = ", ".join(gpu.uuid for gpu in self._manifest.gpus)
            return RestoreFailed(job=self._job.name, reason=MOVED_IN_PART.format(own=own))
        if isinstance(error, TaskError) and "CUDA_ERROR_NO_BINARY_FOR_GPU" in error.detail:
            return NoCodeForGpu(
                job=self._job.name,
                image=", ".join(
                    _model(gpu.name, gpu.compute_capability) for gpu in self._manifest.gpus
                ),
                here=", ".join(_model(gpu.name, gpu.capability) for gpu in self._link.gpus),
                reason=error.detail,
            )
        if is_internal(error):
            action = f"the restore of job {self._job.name!r}"
            return InternalError(action=action, error=words_of(error))
        return RestoreFailed(job=self._job.name, reason=words_of(error))

    def _is_moved_in_part(self, error: Exception) -> bool:
        """True if the driver refuses memory on the GPU that it has moved a process to.

        It does so where the process sees only some of the machine's GPUs
        (docs/design/hardware-notes.md).
        """
        if not isinstance(error, TaskError) or error.request is not wire.Message.MAPBACK:
            return False
        refused = "CUDA_ERROR_NOT_INITIALIZED" in error.detail
        return refused and self._manifest.engine == "native" and self._moved() is not UNMOVED


def _places(job: RunningJob) -> list[Path]:
    """Where unpacked files may go for a moment: beside the job's, which may have little room."""
    return [place for place in (job.directory, Path("/dev/shm")) if place.is_dir()]


def _model(name: str, capability: str) -> str:
    return f"{name} (compute capability {capability})"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
