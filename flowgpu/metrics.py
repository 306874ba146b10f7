"""What a monitor is told of jobs and stores, in Prometheus' text format.

A coordinator counts what it does in `counts.json` of its job's folder. So what is counted is still
there after a restart of the coordinator, and after a restore of the job on this machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgpu.jobs import (
    CHECKPOINTING,
    DUMPED,
    EXITED,
    LOST,
    RESTORING,
    RUNNING,
    STARTING,
    SUSPENDED,
    Registry,
    replace_note,
)
from flowgpu.vocabulary import GPU_STAGES

if TYPE_CHECKING:
    from flowgpu.image.store import Store

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends, in seconds, of those in which pauses are counted."""
STATES = (STARTING, RUNNING, CHECKPOINTING, RESTORING, SUSPENDED, DUMPED, EXITED, LOST)
KINDS = (*GPU_STAGES, "linked", "cpu", "image")
RESULTS = ("done", "failed")


@dataclass
class Pauses:
    """A histogram: how many fell in each bucket and beyond the last, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        place = next((i for i, most in enumerate(BUCKETS) if seconds <= most), len(BUCKETS))
        self.counts[place] += 1
        self.sum += seconds


@dataclass
class Counts:
    """What the coordinators of one job have done."""

    checkpoints: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    restores: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    pauses: dict[str, Pauses] = field(default_factory=dict)
    """Pauses by the engine."""
    last_success: float = 0.0
    """When the newest image was complete, in seconds since 1970; 0: there is none."""
    last_pause: float = 0.0
    """Seconds for which it stopped the job."""
    restore_seconds: float = 0.0
    """Seconds that the newest restore took."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the newest image, by KINDS."""

    def dumped(self, report: Mapping[str, Any]) -> None:
        """Count a checkpoint by its report."""
        self.checkpoints["done"] += 1
        self.pauses.setdefault(report["engine"], Pauses()).add(report["pause_seconds"])
        self.last_success, self.last_pause = time.time(), report["pause_seconds"]
        names = {kind: f"gpu_bytes_{kind}" for kind in (*GPU_STAGES, "linked")}
        names |= {"cpu": "cpu_bytes", "image": "image_bytes"}
        self.sizes = {kind: int(report[name]) for kind, name in names.items()}

    def restored(self, report: Mapping[str, Any]) -> None:
        """Count a restore by its report."""
        self.restores["done"] += 1
        self.restore_seconds = report["restore_seconds"]

    def add(self, other: Counts) -> None:
        """Count as well what another has; the newest image is that of whichever had the newer."""
        for result in RESULTS:
            self.checkpoints[result] += other.checkpoints[result]
            self.restores[result] += other.restores[result]
        for engine, found in other.pauses.items():
            own = self.pauses.setdefault(engine, Pauses())
            own.counts = [a + b for a, b in zip(own.counts, found.counts, strict=True)]
            own.sum += found.sum
        if other.last_success >= self.last_success:
            self.last_success, self.sizes = other.last_success, other.sizes
            self.last_pause = other.last_pause
        self.restore_seconds = other.restore_seconds or self.restore_seconds

    @staticmethod
    def read(path: Path) -> Counts:
        """What `write` wrote; nothing counted where that cannot be read."""
        try:
            data = json.loads(path.read_text())
            pauses = {
                str(engine): Pauses([int(n) for n in found["counts"]], float(found["sum"]))
                for engine, found in data["pauses"].items()
            }
            found = Counts(
                checkpoints={result: int(data["checkpoints"][result]) for result in RESULTS},
                restores={result: int(data["restores"][result]) for result in RESULTS},
                pauses={e: p for e, p in pauses.items() if len(p.counts) == len(BUCKETS) + 1},
                last_success=float(data["last_success"]),
                last_pause=float(data.get("last_pause", 0.0)),  # earlier versions noted none
                restore_seconds=float(data["restore_seconds"]),
                sizes={str(kind): int(size) for kind, size in data["sizes"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Counts()
        return found

    def write(self, path: Path) -> None:
        """Write what `read` reads."""
        replace_note(path, json.dumps(asdict(self)))


@contextlib.contextmanager
def counting(path: Path) -> Iterator[Counts]:
    """Change what is counted in a file."""
    counts = Counts.read(path)
    yield counts
    counts.write(path)


@dataclass(frozen=True)
class Sample:
    """One number of a family, with what is behind the family's name, and labels."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True)
class Family:
    """Samples of one name."""

    name: str
    kind: str  # counter, gauge or histogram
    help: str
    samples: Sequence[Sample]


def text(families: Iterable[Family]) -> str:
    """The metrics in Prometheus's text format, version 0.0.4."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escape(v)}"' for name, v in sample.labels.items())
            shown = f"{{{labels}}}" if labels else ""
            lines.append(f"{family.name}{sample.suffix}{shown} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _escape(value: str) -> str:
    value = value.encode(errors="backslashreplace").decode()
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return repr(value) if value % 1 else f"{value:.0f}"


def of_jobs(registry: Registry) -> list[Family]:
    """Metrics of the jobs of this runtime folder; jobs of one name count as one."""
    records = registry.all()
    counted: dict[str, Counts] = {}
    for record in records:
        counts = Counts.read(registry.dir(record.id).counts)
        counted.setdefault(record.name, Counts()).add(counts)
    live = {record.name: record for record in records if record.live}
    states = dict.fromkeys(STATES, 0)
    for record in records:
        states[record.shown_state] += 1

    def of_each(name: str) -> dict[str, str]:
        return {"job_name": name}

    def results(which: str) -> list[Sample]:
        return [
            Sample(number, of_each(name) | {"result": result})
            for name, counts in counted.items()
            for result, number in getattr(counts, which).items()
        ]

    of_live = {name: counts for name, counts in counted.items() if name in live}
    return [
        Family(
            "flowgpu_jobs",
            "gauge",
            "Jobs by state, as flowgpu ps --all shows them.",
            [Sample(number, {"state": state}) for state, number in states.items()],
        ),
        Family(
            "flowgpu_job_trouble",
            "gauge",
            "1 where the coordinator of a running job could not do something, see flowgpu ps.",
            [Sample(bool(record.trouble), of_each(name)) for name, record in live.items()],
        ),
        Family(
            "flowgpu_checkpoint_operations_total",
            "counter",
            "Checkpoints, by their result.",
            results("checkpoints"),
        ),
        Family(
            "flowgpu_checkpoint_pause_seconds",
            "histogram",
            "Time for which a checkpoint stopped the job.",
            [
                sample
                for name, counts in counted.items()
                for engine, pauses in counts.pauses.items()
                for sample in _histogram(pauses, of_each(name) | {"engine": engine})
            ],
        ),
        Family(
            "flowgpu_checkpoint_last_success_timestamp_seconds",
            "gauge",
            "When the newest image of a running job was complete.",
            [
                Sample(counts.last_success, of_each(name))
                for name, counts in of_live.items()
                if counts.last_success
            ],
        ),
        Family(
            "flowgpu_image_size_bytes",
            "gauge",
            "Newest image of a running job: GPU data after each reduction, CPU pages, the image.",
            [
                Sample(size, of_each(name) | {"kind": kind})
                for name, counts in of_live.items()
                for kind, size in counts.sizes.items()
                if kind in KINDS
            ],
        ),
        Family(
            "flowgpu_restore_operations_total",
            "counter",
            "Restores, by their result.",
            results("restores"),
        ),
        Family(
            "flowgpu_restore_seconds",
            "gauge",
            "Time that the newest restore of a running job took.",
            [
                Sample(counts.restore_seconds, of_each(name))
                for name, counts in of_live.items()
                if counts.restore_seconds
            ],
        ),
    ]


def _histogram(pauses: Pauses, labels: dict[str, str]) -> Iterator[Sample]:
    total = 0
    for most, number in zip((*BUCKETS, math.inf), pauses.counts, strict=True):
        total += number
        yield Sample(total, labels | {"le": _number(most)}, "_bucket")
    yield Sample(pauses.sum, labels, "_sum")
    yield Sample(total, labels, "_count")


@dataclass
class StoreFacts:
    """What is said of one store."""

    used: int = 0
    capacity: int = 0
    available: int = 0
    whole: int = 0
    damaged: int = 0
    newest: dict[str, float] = field(default_factory=dict)
    """When the newest image of each job was complete."""


def of_stores(stores: Mapping[str, Store]) -> list[Family]:
    """Metrics of stores, by the names that they are to have. A store that cannot be read says
    so."""
    found: dict[str, StoreFacts] = {}
    for name, store in stores.items():
        with contextlib.suppress(OSError):
            found[name] = look(store)

    def gauge(name: str, said: str, samples: Sequence[Sample]) -> Family:
        return Family(f"flowgpu_store_{name}", "gauge", said, samples)

    def each(name: str, said: str) -> Family:
        what = name.removesuffix("_bytes")
        return gauge(name, said, [Sample(getattr(f, what), {"store": s}) for s, f in found.items()])

    return [
        gauge(
            "readable",
            "1 where the folder of a store can be read.",
            [Sample(name in found, {"store": name}) for name in stores],
        ),
        each("capacity_bytes", "Size of the file system on which a store lies."),
        each("available_bytes", "What is free there."),
        each("used_bytes", "What the files of a store take on the disk, shared ones once."),
        gauge(
            "images",
            "Images that open, and damaged ones.",
            [
                Sample(getattr(one, state), {"store": name, "state": state})
                for name, one in found.items()
                for state in ("whole", "damaged")
            ],
        ),
        gauge(
            "last_success_timestamp_seconds",
            "When the newest image of a job in a store was complete.",
            [
                Sample(when, {"store": name, "job_name": job})
                for name, one in found.items()
                for job, when in one.newest.items()
            ],
        ),
    ]


def look(store: Store) -> StoreFacts:
    """What there is to say of a store. Raises OSError where it cannot be read."""
    from datetime import datetime

    from flowgpu.errors import FlowError

    system = os.statvfs(store.path)
    found = StoreFacts(
        used=_used(store.path),
        capacity=system.f_blocks * system.f_frsize,
        available=system.f_bavail * system.f_frsize,
    )
    try:
        names = store.names()
        found.damaged = len(store.damaged())
    except FlowError as error:
        raise OSError(str(error)) from error
    for name in names:
        try:
            manifest = store.manifest(name)
        except FlowError:
            found.damaged += 1
            continue
        found.whole += 1
        with contextlib.suppress(ValueError):
            created = datetime.fromisoformat(manifest.created)
            found.newest[manifest.job.name] = created.timestamp()
    return found


def _used(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    sizes: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(path, name))
                sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())
