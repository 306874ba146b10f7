"""What a report and a trace show: of an image, a store, or what was done to a job last."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from flowgpu import timeline
from flowgpu.errors import FlowError
from flowgpu.image import layout
from flowgpu.image.manifest import Manifest
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Registry
from flowgpu.render import seconds, size
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, MOVE, PAUSED, Span, Timeline
from flowgpu.vocabulary import GPU_STAGES

STEP_NAMES = {
    "prepare": "prepare",
    "gate": "stop at the gate",
    "handover": "take the GPU memory over",
    "strip": "end CUDA",
    "capture": "capture the processes",
    "park": "let the GPU memory go",
    "commit": "commit the image",
    "kill": "end the job",
    "wake": "put CUDA back",
    "mapback": "give the memory back",
    "open": "open the gate",
}
"""What a reader who has never met FlowGPU is told of a phase."""
COPY, CPU = "copy GPU memory", "write CPU memory (CRIU)"
REST = "rest of the capture"

MEASURED_BYTES = 32 << 20
MEASURED_TIMES = 4


class NothingToShow(Exception):
    """There is no image, and nothing was done to the job; the text says of what."""


@dataclass(frozen=True)
class Movement:
    """Bytes that were moved, in how many seconds, and what bounds that."""

    what: str
    bytes: int
    seconds: float
    limit: float
    """Bytes a second; 0: not known."""
    source: str
    """What the limit is and who says so, or why it is not known."""


@dataclass(frozen=True)
class Shown:
    """One checkpoint, restore, suspension or resume."""

    title: str
    kind: str  # as of timeline.Operation
    facts: Sequence[tuple[str, str]]
    timeline: Timeline | None
    """None: the image is from before there was one."""
    phases: Mapping[str, float]
    pause: float | None
    total: float
    stages: Sequence[tuple[str, int]] = ()
    linked: int = 0
    movements: Sequence[Movement] = ()
    error: str = ""


@dataclass(frozen=True)
class Row:
    """One image of a store."""

    name: str
    job: str
    created: datetime
    pause: float
    total: float
    bytes: int
    own: int


@dataclass(frozen=True)
class Series:
    """The images of a store, the oldest first."""

    title: str
    rows: Sequence[Row]
    damaged: Sequence[tuple[str, str]]
    newest: Shown | None
    """The newest image that opens."""


@dataclass
class Memory:
    """How fast this machine copies memory, measured once and only where it is asked for."""

    rate: float = field(default=0.0, init=False)

    def measured(self) -> float:
        """Bytes a second, by as many threads as there are processors, at most eight."""
        if not self.rate:
            self.rate = _copy_rate(min(len(os.sched_getaffinity(0)), 8))
        return self.rate


def find(subject: str, registry: Registry) -> Shown | Series:
    """What the words IMAGE, STORE or JOB name. Raises NothingToShow, UnknownJob, ImageDamaged."""
    path = Path(subject)
    if (path / layout.MANIFEST).exists():
        return of_image(path)
    if path.is_dir():
        return of_store(path)
    return of_job(subject, registry)


def of_image(path: Path) -> Shown:
    """The checkpoint that an image was taken in. Raises ImageDamaged, ImageVersion."""
    image = Image(path)
    manifest, counts = image.manifest, image.manifest.counts
    found = timeline.of_image(image)
    facts = [
        ("job", manifest.job.name),
        ("command", " ".join(manifest.job.command)),
        ("taken", manifest.created),
        ("machine", f"{manifest.host.name}, Linux {manifest.host.kernel}"),
        ("GPU", ", ".join(gpu.name for gpu in manifest.gpus) or "none"),
        ("engine", ": ".join(filter(None, (manifest.engine, manifest.engine_reason)))),
        ("the job", _went_on(manifest)),
        ("CPU memory", size(counts.cpu_bytes)),
        ("image", size(counts.image_bytes)),
    ]
    gpu = bool(counts.gpu_bytes_reserved)
    return Shown(
        title=path.resolve().name,
        kind="checkpoint",
        facts=facts,
        timeline=found,
        phases=manifest.phases,
        pause=manifest.pause_seconds,
        total=manifest.total_seconds,
        stages=[(s, getattr(counts, f"gpu_bytes_{s}")) for s in GPU_STAGES] if gpu else (),
        linked=manifest.linked_bytes,
        movements=_movements(found, manifest),
    )


def of_job(key: str, registry: Registry) -> Shown:
    """What was done to a job last. Raises UnknownJob, NothingToShow."""
    record = registry.find(key)
    operation = timeline.read(registry.dir(record.id).timeline)
    if operation is None:
        raise NothingToShow(f"job {record.name!r} has had no checkpoint and no restore")
    result = operation.result
    facts = [
        ("job", f"{record.name} ({record.id})"),
        ("command", " ".join(record.command)),
        ("begun", _utc(operation.timeline.began).strftime("%Y-%m-%dT%H:%M:%SZ")),
        ("image", str(result.get("image") or record.image or "none")),
        ("GPU", record.gpu),
    ]
    reserved = int(result.get("gpu_bytes_reserved", 0))
    return Shown(
        title=f"{operation.kind} of {record.name}",
        kind=operation.kind,
        facts=facts,
        timeline=operation.timeline,
        phases=result.get("phases", {}),
        pause=result.get("pause_seconds", result.get("suspend_seconds")),
        total=operation.timeline.seconds,
        stages=[(s, int(result[f"gpu_bytes_{s}"])) for s in GPU_STAGES] if reserved else (),
        linked=int(result.get("gpu_bytes_linked", 0)),
        movements=_gpu_movements(operation.timeline, record.gpu, ""),
        error=operation.error,
    )


def of_store(path: Path) -> Series:
    """All images of a store. Raises NothingToShow where there is none."""
    store = Store(path)
    rows, damaged = [], []
    for name in store.names():
        try:
            manifest = store.manifest(name)
        except FlowError as error:
            damaged.append((name, str(error)))
            continue
        usage = store.usage(name)
        created = datetime.fromisoformat(manifest.created)
        pause, total = manifest.pause_seconds, manifest.total_seconds
        job = manifest.job.name
        rows.append(Row(name, job, created, pause, total, usage.total, usage.own))
    if not rows and not damaged:
        raise NothingToShow(f"the folder {path} is no image, and has none")
    newest = of_image(path / rows[-1].name) if rows else None
    return Series(path.resolve().name, rows, damaged, newest)


def where_the_pause_went(shown: Shown) -> list[tuple[str, float]]:
    """(step, seconds) of the pause, the longest first.

    While the coordinator captures, CRIU works, and where it has ended the copy is waited for.
    """
    line = shown.timeline
    if line is None:
        return []
    found: dict[str, float] = {}
    for pause in line.find(JOB, PAUSED):
        for span in line.spans:
            if span.track != COORDINATOR or span.name not in STEP_NAMES:
                continue
            begin, end = max(span.begin, pause.begin), min(span.end, pause.end)
            for name, busy in _waited_for(line, span):
                if (until := min(busy.end, end)) > begin:
                    found[name] = found.get(name, 0.0) + until - begin
                    begin = until
            if end > begin:
                name = REST if span.name == "capture" else STEP_NAMES[span.name]
                found[name] = found.get(name, 0.0) + end - begin
    return sorted(found.items(), key=lambda step: -step[1])


def _waited_for(line: Timeline, phase: Span) -> list[tuple[str, Span]]:
    """What the coordinator waits for in a phase, in this order."""
    if phase.name not in ("capture", "park"):
        return []
    dumps, moves = line.find(CRIU, "dump"), line.find(GHOST, MOVE)
    return [*((CPU, one) for one in dumps), *((COPY, one) for one in moves)]


def _movements(found: Timeline | None, manifest: Manifest) -> list[Movement]:
    if found is None:
        return []
    here = manifest.host.name
    movements = _gpu_movements(found, manifest.gpu, here)
    dumps = found.find(CRIU, "dump")
    if dumps and manifest.rung != "early-pages":
        taken = sum(span.seconds for span in dumps)
        limit, source = _memory_limit(here)
        what = "CPU memory, by CRIU"
        movements.append(Movement(what, manifest.counts.cpu_bytes, taken, limit, source))
    return movements


def _gpu_movements(found: Timeline, gpu: str, host: str) -> list[Movement]:
    moves = [span for span in found.find(GHOST, MOVE) if span.bytes]
    if not moves:
        return []
    if found.limits:
        limit = sum(one.bytes_per_second for one in found.limits)
        source = "; ".join(f"{one.gpu}: {one.what}, says {one.source}" for one in found.limits)
    elif gpu == "emulated":
        limit, source = _memory_limit(host or os.uname().nodename)
        source = f"the emulated GPU is memory of the host: {source}"
    else:
        limit, source = 0.0, "not known: the kernel does not tell the GPU's PCIe link"
    taken = sum(span.seconds for span in moves)
    return [Movement("GPU memory, by the ghost", sum(s.bytes for s in moves), taken, limit, source)]


_memory = Memory()


def _memory_limit(host: str) -> tuple[float, str]:
    here = os.uname().nodename
    if host != here:
        return 0.0, f"not known: {host} is another machine than the one of this report"
    return _memory.measured(), "as fast as this machine copies memory, measured for this report"


def _copy_rate(threads: int) -> float:
    """Bytes a second that so many threads copy together, the best of a few times."""
    pairs = [
        (np.ones(MEASURED_BYTES, np.uint8), np.zeros(MEASURED_BYTES, np.uint8))
        for _ in range(threads)
    ]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(MEASURED_TIMES):
            began = perf_counter()
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))
            best = max(best, threads * MEASURED_BYTES / (perf_counter() - began))
    return best


def _went_on(manifest: Manifest) -> str:
    if not manifest.left_running:
        return "was ended"
    drain = manifest.left_running.get("drain", 0.0)
    return f"ran on, {seconds(drain)} before its image was complete"


def _utc(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)
