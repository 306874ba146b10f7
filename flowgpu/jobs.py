"""Job directories, what `flowgpu ps` lists and how a job is found by its name.

Files of `<runtime dir>/jobs/<id>/` (0700; files 0600, owned by the user who started the job):

=================  ============================================================
`job.json`         the `Job` record, replaced atomically
`task.sock`        the tasks of the job connect here (wire.h)
`entrance`         locks of processes that begin to use the GPU
                   (native/intercept/entrance.h)
`control.sock`     clients connect here (flowgpu/client.py)
`output.log`       both output streams as they came, the newest part
`output.streams`   which bytes of it are of which stream (flowgpu/output_log.py)
`coordinator.log`  what the coordinator has to say
`counts.json`      what it has done so far (flowgpu/metrics.py); a restore goes on counting
`timeline.json`    what was done to it last, step by step (flowgpu/timeline.py)
`saving.json`      who saves it again and again, and when next (flowgpu/saving.py)
`parked.json`      a suspended job: what it has in memory of the host (coordinator/parked.py)
=================  ============================================================

The launcher creates the directory, with itself as the job's coordinator; the coordinator puts its
own process in its place when it starts, and its keeper's beside it, which brings another when that
one is killed (coordinator/keeper.py). The coordinator writes the record from then on. A job is
*lost* when both are gone while the record says that the job lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowgpu.errors import AmbiguousJob, JobExists, RuntimeDirUnsafe, UnknownJob
from flowgpu.host.proctree import is_headless

STARTING = "starting"
RUNNING = "running"
CHECKPOINTING = "checkpointing"
RESTORING = "restoring"
SUSPENDED = "suspended"
DUMPED = "dumped"
EXITED = "exited"
LOST = "lost"  # never written: what a live state reads as when coordinator and keeper are gone

LIVE_STATES = (STARTING, RUNNING, CHECKPOINTING, RESTORING, SUSPENDED)

ENTRANCE = "entrance"  # beside task.sock

KEEP_FINISHED_SECONDS = 24 * 3600.0
ID_BYTES = 6
# sun_path holds 108 bytes with its NUL; the longest socket name in a job directory is control.sock.
LONGEST_BASE = 107 - len(f"/jobs/{'0' * 2 * ID_BYTES}/control.sock")

_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclasses.dataclass
class Job:
    """One job as its job.json has it. Times are seconds since 1970; a pid of 0 means none."""

    id: str
    name: str
    command: list[str]
    cwd: str
    gpu: str
    coordinator_pid: int = 0
    coordinator_start: int = 0  # clock ticks since boot: tells a reused pid from the coordinator
    keeper_pid: int = 0
    keeper_start: int = 0
    root_pid: int = 0
    root_start: int = 0
    created: float = 0.0
    number: int = 0  # counts the jobs made here: tells the newest one, whatever the clock says
    finished: float | None = None
    state: str = STARTING
    exit_code: int | None = None
    image: str | None = None
    store: str | None = None  # where `flowgpu run --store` keeps its images
    ghost: str = "auto"  # vocabulary.GhostChoice
    engine: str = "auto"  # vocabulary.EngineChoice
    node: int = 0
    nodes: int = 1  # of the job; the other ones have records of their own
    host_bytes: int = 0  # of the host's memory, that have or had the GPU memory of a suspended job
    trouble: str = ""  # what its coordinator could not do, and what is lost by that
    # What a coordinator that takes the job over wants to know of the one before.
    restored: dict[str, Any] | None = None  # the report of the restore
    dump: dict[str, Any] | None = None  # the checkpoint under way (coordinator/takeover.py)
    # What checkpoints that left it running have cost, the newest last (flowgpu/frequency.py).
    costs: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # Process id and start of each that the driver will not checkpoint any more.
    spoilt: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    @property
    def live(self) -> bool:
        """The job's coordinator is there, or its keeper, and the job has not ended."""
        there = is_process(self.coordinator_pid, self.coordinator_start) or self.kept
        return self.state in LIVE_STATES and there

    @property
    def kept(self) -> bool:
        """Another coordinator comes when the job's is killed."""
        return is_process(self.keeper_pid, self.keeper_start)

    @property
    def shown_state(self) -> str:
        """The state a user sees: that of the record, or `lost`."""
        return LOST if self.state in LIVE_STATES and not self.live else self.state

    def as_json(self) -> dict[str, Any]:
        """The record as `flowgpu ps --json` shows it: key `state` is `shown_state`."""
        data = dataclasses.asdict(self)
        del data["restored"], data["dump"], data["costs"], data["spoilt"]
        data["state"] = self.shown_state
        return data


def start_time(pid: int) -> int:
    """Start of process `pid` in clock ticks since boot (proc(5), field 22); 0 if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    state, *rest = text.rpartition(")")[2].split()
    return 0 if state in "ZX" and not is_headless(pid) else int(rest[18])


def uptime() -> float:
    """Seconds since boot, by the clock of `start_time`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def is_process(pid: int, start: int) -> bool:
    """True if process `pid` lives, is no zombie and is the one that started at `start` ticks."""
    return pid > 0 and start > 0 and start_time(pid) == start


def runtime_dir() -> Path:
    """$FLOWGPU_RUNTIME_DIR, else /run/flowgpu for root, else a folder of the user's.

    That is flowgpu in $XDG_RUNTIME_DIR or /run/user/UID. `su` and `sudo` may leave the former as
    another user's, and where nobody has logged in, as in containers, the latter is not there.
    """
    chosen = os.environ.get("FLOWGPU_RUNTIME_DIR")
    if chosen:
        return Path(os.path.abspath(chosen))
    user = os.geteuid()
    if user == 0:
        return Path("/run/flowgpu")
    for session in (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"):
        with contextlib.suppress(OSError):
            if session and os.stat(session).st_uid == user:
                return Path(session) / "flowgpu"
    return Path(f"/tmp/flowgpu-{user}")


@functools.cache
def user_umask() -> int:
    """The umask that this process had: from now on what it and its children make is private.

    Not their modes alone: an umask may also take the owner's rights from the modes asked for.
    """
    return os.umask(0o077)


def prepare_runtime_dir(base: Path) -> None:
    """Create `base` for this user alone.

    Raises RuntimeDirUnsafe: it cannot be had, others may write to it, or its path is too long.
    """
    if len(os.fsencode(base)) > LONGEST_BASE:
        raise RuntimeDirUnsafe(path=base, reason=f"the path is longer than {LONGEST_BASE} bytes")
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise RuntimeDirUnsafe(path=base, reason=error.strerror or str(error)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirUnsafe(path=base, reason="it is not a directory")
    if found.st_uid != os.geteuid():
        raise RuntimeDirUnsafe(path=base, reason=f"it belongs to user {found.st_uid}")
    if found.st_mode & 0o022:
        raise RuntimeDirUnsafe(path=base, reason="other users may write to it")


class JobDir:
    """Paths and record of one job directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "job.json"
        self.task_socket = path / "task.sock"
        self.control_socket = path / "control.sock"
        self.output_log = path / "output.log"
        self.output_streams = path / "output.streams"
        self.coordinator_log = path / "coordinator.log"
        self.counts = path / "counts.json"
        self.timeline = path / "timeline.json"
        self.saving = path / "saving.json"
        self.standstill = path / "standstill"
        self.tcp_notes = path / "tcp"
        self.tickets = path / "tickets"
        self.parked = path / "parked.json"
        self.host_copy = path / "host"

    def read(self) -> Job:
        """Read the record. Raises OSError or ValueError if none is there that can be read."""
        data = json.loads(self.record.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"{self.record}: not an object")
        known = {field.name for field in dataclasses.fields(Job)}
        try:
            return Job(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ValueError(f"{self.record}: {error}") from error

    def write(self, job: Job) -> None:
        """Replace the record in one step, so that a reader sees the old or the new one."""
        text = json.dumps(dataclasses.asdict(job))
        temporary = self.path / f".job.json.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as stream:
                stream.write(text)
            os.replace(temporary, self.record)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._overwrite(text):
                raise

    def _overwrite(self, text: str) -> bool:
        """Write the record into the blocks that it has, on a full disk; False if they are too few.

        In one call and never shorter, so that hardly a reader sees a part of it.
        """
        with contextlib.suppress(OSError):
            fd = os.open(self.record, os.O_WRONLY | os.O_CLOEXEC)
            try:
                data = text.encode().ljust(os.fstat(fd).st_size)
                return os.pwrite(fd, data, 0) == len(data)
            finally:
                os.close(fd)
        return False

    def update(self, **changes: Any) -> Job:
        """Write the record with `changes` made to it; the coordinator is the only writer."""
        job = dataclasses.replace(self.read(), **changes)
        self.write(job)
        return job


def replace_note(path: Path, text: str) -> None:
    """Replace a file of a job's folder in one step.

    The job goes on without it, so that a full disk is no failure.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()


class Registry:
    """All jobs of one runtime directory."""

    def __init__(self, base: Path | None = None) -> None:
        self.base = base or runtime_dir()
        self.jobs_dir = self.base / "jobs"

    def dir(self, job_id: str) -> JobDir:
        return JobDir(self.jobs_dir / job_id)

    def all(self) -> list[Job]:
        """Every job there is a record of, oldest first."""
        try:
            names = os.listdir(self.jobs_dir)
        except PermissionError as error:
            raise RuntimeDirUnsafe(path=self.base, reason=error.strerror) from error
        except OSError:
            return []
        jobs = []
        for name in names:
            # A directory without a record is one that another process makes or removes right now.
            with contextlib.suppress(OSError, ValueError):
                if _ID.fullmatch(name):
                    jobs.append(self.dir(name).read())
        # Records of FlowGPU before there was a number have none.
        return sorted(jobs, key=lambda job: (job.number, job.created, job.id))

    def find(self, key: str) -> Job:
        """The job named `key` (a live one, else the newest), else that whose id starts with `key`.

        Raises UnknownJob, or AmbiguousJob if several ids start with `key`.
        """
        jobs = self.all()
        named = [job for job in jobs if job.name == key]
        if named:
            return next((job for job in named if job.live), named[-1])
        matching = [job for job in jobs if key and job.id.startswith(key)]
        if len(matching) > 1:
            raise AmbiguousJob(job=key, ids=", ".join(job.id for job in matching))
        if not matching:
            raise UnknownJob(job=key)
        return matching[0]

    def create(
        self,
        *,
        command: list[str],
        cwd: str,
        gpu: str,
        name: str | None = None,
        job_id: str | None = None,
        image: str | None = None,
        store: str | None = None,
        ghost: str = "auto",
        engine: str = "auto",
        node: int = 0,
        nodes: int = 1,
    ) -> Job:
        """Make the directory of a new job, with this process as its coordinator for now.

        `job_id` is given for a restore: what a finished job of that id left there is removed.
        Raises JobExists if a live job has the name or the id, ValueError for what is no name or id.
        """
        given = name or job_id
        job_id = job_id or _new_id()
        name = name or default_name(command, job_id)
        if not _NAME.fullmatch(name) or not _ID.fullmatch(job_id):
            raise ValueError(f"not a job name or id: {name!r}, {job_id!r}")
        prepare_runtime_dir(self.base)
        with self._usable(), self._locked():
            known = self.all()
            live = [other for other in known if other.live]
            while not given and name in (other.name for other in live):
                job_id = _new_id()  # four digits of it are soon the same
                name = default_name(command, job_id)
            for other in live:
                if other.name == name or other.id == job_id:
                    raise JobExists(job=other.name)
            directory = self.dir(job_id)
            directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            job = Job(
                id=job_id,
                name=name,
                command=list(command),
                cwd=cwd,
                gpu=gpu,
                coordinator_pid=os.getpid(),
                coordinator_start=start_time(os.getpid()),
                created=time.time(),
                number=max((other.number for other in known), default=0) + 1,
                state=STARTING if image is None else RESTORING,
                image=image,
                store=store,
                ghost=ghost,
                engine=engine,
                node=node,
                nodes=nodes,
            )
            # First, so that there is a record whoever is killed here.
            directory.write(job)
            for left in directory.path.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                elif left not in (directory.record, directory.counts):
                    left.unlink()
        return job

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """What is written meanwhile has room, or the error says where not."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise RuntimeDirUnsafe(path=self.base, reason=reason) from error

    def prune(self, older_than: float = 0.0) -> list[Job]:
        """Forget jobs that ended `older_than` seconds ago, lost ones when nothing of them runs."""
        removed: list[Job] = []
        if not self.all():
            return removed
        with self._locked():
            for job in self.all():
                if job.live or is_process(job.root_pid, job.root_start):
                    continue
                if self._ended_ago(job) >= older_than:
                    shutil.rmtree(self.dir(job.id).path, ignore_errors=True)
                    removed.append(job)
        return removed

    def _ended_ago(self, job: Job) -> float:
        """Seconds since a job has ended, at most those since its coordinator began.

        Those do not depend on the clock, which may have been put forward. They are negative for a
        coordinator from before the machine's last start, and some other number for some of those.
        """
        shown = time.time() - (job.finished or self._written(job))
        began_ago = uptime() - job.coordinator_start / os.sysconf("SC_CLK_TCK")
        return min(shown, began_ago) if began_ago >= 0 else shown

    def _written(self, job: Job) -> float:
        try:
            return self.dir(job.id).record.stat().st_mtime
        except OSError:
            return job.created

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the registry: two jobs of one name must not both find it free."""
        fd = os.open(self.base / "registry.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def is_name(text: str) -> bool:
    """True if `text` can be the name of a job: letters, digits, `_`, `.` and `-`, 64 at most."""
    return _NAME.fullmatch(text) is not None


def is_id(text: str) -> bool:
    """True if `text` can be the id of a job."""
    return _ID.fullmatch(text) is not None


def _new_id() -> str:
    return secrets.token_hex(ID_BYTES)


def default_name(command: list[str], job_id: str) -> str:
    """A readable name for a job without one: its program or script and the start of its id."""
    program = command[0] if command else "job"
    if re.match(r"python[0-9.]*$", os.path.basename(program)):
        program = next((word for word in command[1:] if word.endswith(".py")), program)
    stem = re.sub(r"[^A-Za-z0-9_.-]", "", os.path.basename(program).removesuffix(".py"))
    return f"{stem.lstrip('_.-')[:48] or 'job'}-{job_id[:4]}"
