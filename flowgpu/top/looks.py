"""What there is to see of jobs and stores, from records, notes and coordinators' answers.

Nothing here draws, and nothing is written. A job may end, and its folder go away, at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from flowgpu import saving, timeline
from flowgpu.errors import FlowError
from flowgpu.host.proctree import tree_pids
from flowgpu.image.store import Store
from flowgpu.jobs import (
    CHECKPOINTING,
    DUMPED,
    EXITED,
    RESTORING,
    RUNNING,
    SUSPENDED,
    Job,
    Registry,
    is_process,
)
from flowgpu.metrics import Counts, StoreFacts, look
from flowgpu.render import age, seconds, size
from flowgpu.saving import Saving
from flowgpu.timeline import Operation
from flowgpu.top.asking import Status, Statuses

ASKED = (RUNNING, CHECKPOINTING, RESTORING, SUSPENDED)
"""States of jobs whose coordinator is asked. A start is its command's own."""
DOING = {"a checkpoint": "dump", "a suspension": "suspend", "a resume": "resume"}
"""What a coordinator is doing, in a word."""
NONE = "-"


@dataclass(frozen=True)
class Seen:
    """One job at one moment."""

    record: Job
    status: Status | None
    """None: its coordinator does not say."""
    processes: int
    counts: Counts
    saving: Saving | None

    @property
    def state(self) -> str:
        """Its state, or the step of what is done to it, and how much of that is done."""
        state, status = self.record.shown_state, self.status
        if state == EXITED and self.record.exit_code is not None:
            return f"{state} ({self.record.exit_code})"
        verb = DOING.get(status.doing) if status else None
        verb = "restore" if state == RESTORING else verb
        if verb and status and status.phase and self.record.live:
            part = f" {min(status.done / status.total, 1):.0%}" if status.total else ""
            return f"{verb} {status.phase}{part}"
        return f"{state} !" if self.record.trouble else state

    @property
    def memory(self) -> tuple[int, str]:
        """Bytes of the GPUs' memory that it has, or had when it was suspended, and where."""
        if self.record.shown_state == SUSPENDED:
            return self.record.host_bytes, "host"
        return (self.status.bytes, "GPU") if self.status and self.record.live else (0, "")

    def since_image(self, now: float) -> float | None:
        """Seconds since its newest image was complete."""
        return now - self.counts.last_success if self.counts.last_success else None

    def until_next(self, now: float) -> float | None:
        """Seconds until the next image is begun, where one is due."""
        due = self.saving.next if self.saving and self.record.live else None
        return None if due is None else max(due - now, 0.0)


@dataclass(frozen=True)
class Column:
    """One of the table of jobs."""

    title: str
    width: int
    """Letters; of a column without a limit, the fewest."""
    text: Callable[[Seen, float], str]
    """By the job and the time."""
    key: Callable[[Seen, float], Any]
    """What it is sorted by."""
    right: bool = False
    wanted: Callable[[Sequence[Seen]], bool] = lambda jobs: True


def _or_none(value: float | None, words: Callable[[float], str]) -> str:
    return NONE if value is None else words(value)


def _last(value: float | None) -> float:
    return float("inf") if value is None else value


def _memory(job: Seen, _now: float) -> str:
    amount, where = job.memory
    return f"{size(amount)} {where}" if where else NONE


def _processes(job: Seen, _now: float) -> str:
    if not job.processes:
        return NONE
    return f"{len(job.status.tasks) if job.status else '?'}/{job.processes}"


NAME = Column("NAME", 8, lambda job, _: job.record.name, lambda job, _: job.record.name)
COMMAND = Column(
    "COMMAND",
    12,
    lambda job, _: " ".join(job.record.command),
    lambda job, _: job.record.command,
)
COLUMNS = (
    NAME,
    Column(
        "NODE",
        4,
        lambda job, _: f"{job.record.node}/{job.record.nodes}",
        lambda job, _: (job.record.name, job.record.node),
        wanted=lambda jobs: any(job.record.nodes > 1 for job in jobs),
    ),
    Column("STATE", 18, lambda job, _: job.state, lambda job, _: job.state),
    Column("MEMORY", 13, _memory, lambda job, _: -job.memory[0], right=True),
    Column("PROCS", 5, _processes, lambda job, _: -job.processes, right=True),
    Column(
        "IMAGE",
        7,
        lambda job, now: _or_none(job.since_image(now), age),
        lambda job, now: _last(job.since_image(now)),
        right=True,
    ),
    Column(
        "PAUSE",
        7,
        lambda job, _: seconds(job.counts.last_pause) if job.counts.last_pause else NONE,
        lambda job, _: -job.counts.last_pause,
        right=True,
    ),
    Column(
        "NEXT",
        7,
        lambda job, now: _or_none(job.until_next(now), lambda wait: age(wait) if wait else "now"),
        lambda job, now: _last(job.until_next(now)),
        right=True,
    ),
)
"""Without COMMAND, for which a narrow terminal has no room."""
AGE = Column(
    "AGE",
    7,
    lambda job, now: age(now - job.record.created),
    lambda job, now: now - job.record.created,
    right=True,
)
"""For wide terminals as well."""
GAP = 1
"""Letters between two columns."""


def columns(jobs: Sequence[Seen], room: int) -> list[tuple[Column, int]]:
    """The columns that are shown in so many letters, with their widths."""
    chosen = [column for column in COLUMNS if column.wanted(jobs)]
    left = room - sum(column.width + GAP for column in chosen)
    longest = max((len(job.record.name) for job in jobs), default=0)
    widths = {column.title: column.width for column in chosen}
    widths[NAME.title] += (more := max(min(longest - NAME.width, left), 0))
    left -= more
    for column in (AGE, COMMAND):
        if left > column.width:
            chosen.append(column)
            widths[column.title] = column.width if column is AGE else left - GAP
            left -= column.width + GAP
    return [(column, widths[column.title]) for column in chosen]


@dataclass(frozen=True)
class ImageRow:
    """One image of a store."""

    name: str
    job: str
    id: str
    created: float
    """In seconds since 1970."""
    bytes: int
    pause: float
    error: str = ""


@dataclass
class StoreLook:
    """A store, and what was last seen of it."""

    path: Path
    facts: StoreFacts | None = None
    images: tuple[ImageRow, ...] = ()
    error: str = ""
    known: dict[str, ImageRow] = field(default_factory=dict)
    """Images never change, so each is read once."""

    def look(self) -> StoreLook:
        """What is there now, beside what is known."""
        store = Store(self.path)
        try:
            self.path.stat()
            facts = look(store)
            names = store.names()
        except (OSError, FlowError) as error:
            words = error.strerror if isinstance(error, OSError) else ""
            return StoreLook(self.path, error=words or str(error))
        known = {name: self.known.get(name) or _image(store, name) for name in names}
        return StoreLook(self.path, facts, tuple(known.values()), "", known)


def _image(store: Store, name: str) -> ImageRow:
    try:
        manifest = store.manifest(name)
    except FlowError as error:
        return ImageRow(name, NONE, "", 0.0, 0, 0.0, str(error))
    created = 0.0
    with suppress(ValueError):
        created = datetime.fromisoformat(manifest.created).timestamp()
    job, counts = manifest.job, manifest.counts
    return ImageRow(name, job.name, job.id, created, counts.image_bytes, manifest.pause_seconds)


class Watch:
    """Looks at all jobs of a runtime folder, and at stores."""

    def __init__(self, registry: Registry, folders: Sequence[Path]) -> None:
        """`folders`: stores, or what `flowgpu run` has as its --store, beside those of the jobs."""
        self._registry, self._folders = registry, folders
        self._statuses = Statuses()
        self._stores: dict[Path, StoreLook] = {}

    def jobs(self, *, ended: bool) -> list[Seen]:
        """The jobs, the oldest first. Raises RuntimeDirUnsafe."""
        records = [
            record
            for record in self._registry.all()
            if ended or record.shown_state not in (EXITED, DUMPED)
        ]
        statuses = self._statuses.look(
            {
                record.id: self._registry.dir(record.id).control_socket
                for record in records
                if record.live and record.state in ASKED
            }
        )
        return [self._seen(record, statuses) for record in records]

    def _seen(self, record: Job, statuses: Mapping[str, Status]) -> Seen:
        directory = self._registry.dir(record.id)
        runs = is_process(record.root_pid, record.root_start)
        return Seen(
            record,
            statuses.get(record.id),
            len(tree_pids(record.root_pid)) if runs else 0,
            Counts.read(directory.counts),
            saving.read(directory),
        )

    def operation(self, job: str) -> Operation | None:
        """What was done to a job last, by its id."""
        return timeline.read(self._registry.dir(job).timeline)

    def stores(self) -> list[StoreLook]:
        """Those that were named, and those that jobs are saved to."""
        named = {place for folder in self._folders for place in _stores_in(folder)}
        notes = (saving.read(self._registry.dir(job.id)) for job in self._registry.all())
        paths = sorted(named | {note.store for note in notes if note is not None})
        before, self._stores = self._stores, {}
        for path in paths:
            self._stores[path] = before.get(path, StoreLook(path)).look()
        return list(self._stores.values())

    def close(self) -> None:
        """Wait for no coordinator any more."""
        self._statuses.close()


def _stores_in(folder: Path) -> list[Path]:
    """The folder, or those in it that have images: `flowgpu run --store` makes one a job."""
    folder = folder.absolute()
    with suppress(OSError, FlowError):
        if not Store(folder).names():
            inner = [path for path in folder.iterdir() if path.is_dir()]
            return [path for path in inner if Store(path).names()] or [folder]
    return [folder]
