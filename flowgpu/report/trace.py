"""Timelines as JSON that Perfetto and chrome://tracing open (the Trace Event Format).

Each of coordinator, ghost, CRIU and tasks is a process there. Spans that overlap and do not lie
within each other are of different threads, as the format wants it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgpu import timeline
from flowgpu.errors import FlowError
from flowgpu.image import layout
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Registry
from flowgpu.render import one_line
from flowgpu.report.source import NothingToShow
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, Span, Timeline

Event = dict[str, Any]

MICRO = 1e6
ROUNDING = 1e-9
"""In seconds: equal times, each a sum, may differ by less than this."""
ORDER = (JOB, COORDINATOR, GHOST, CRIU)
CRIU_LOG = "dump.log"
LONGEST_LOG = 256 << 20

_STEP = re.compile(r"\((\d+\.\d+)\) Dumping task \(pid: (\d+) comm: (.*)\)$")
_TIME = re.compile(r"\((\d+\.\d+)\) ")


@dataclass(frozen=True)
class Source:
    """A timeline and whose it is."""

    job: str
    name: str
    timeline: Timeline
    bytes: int = 0
    """Size of the image."""


@dataclass
class _Process:
    """What is shown as a process: its spans, each in the lane that has room for it."""

    number: int
    lanes: list[list[float]] = field(default_factory=list)
    """Ends of the spans that are open in each, the innermost last."""

    def place(self, begin: float, end: float) -> int:
        """Number of the lane that a span gets, whose begin is not before those of others."""
        for number, ends in enumerate(self.lanes):
            while ends and ends[-1] <= begin + ROUNDING:
                ends.pop()
            if not ends or end <= ends[-1] + ROUNDING:
                ends.append(min([end, *ends[-1:]]))
                return number
        self.lanes.append([end])
        return len(self.lanes) - 1


def find(subject: str, registry: Registry) -> list[Source]:
    """The timelines of an image, of a store's images or of what was done to a job last.

    Raises NothingToShow, UnknownJob, ImageDamaged.
    """
    path = Path(subject)
    found: list[Source | None]
    if (path / layout.MANIFEST).exists():
        found = [of_image(path)]
    elif path.is_dir():
        found = list(_of_store(Store(path)))
    else:
        record = registry.find(subject)
        operation = timeline.read(registry.dir(record.id).timeline)
        found = []
        if operation is not None:
            found = [Source(record.name, operation.kind, operation.timeline)]
    sources = [one for one in found if one is not None]
    if not sources:
        raise NothingToShow(f"{subject} has no times: nothing says when a step began")
    return sources


def of_image(path: Path) -> Source | None:
    """The timeline of an image, with what CRIU's log says. Raises ImageDamaged, ImageVersion."""
    image = Image(path)
    found = timeline.of_image(image)
    if found is None:
        return None
    steps = [step for dump in found.find(CRIU, "dump") for step in _criu_steps(image, dump)]
    spans = (*found.spans, *steps)
    line = Timeline(found.began, spans, found.limits, found.left_out)
    return Source(image.manifest.job.name, path.name, line, image.manifest.counts.image_bytes)


def _of_store(store: Store) -> Iterator[Source | None]:
    for name in store.names():
        try:
            yield of_image(store.path / name)
        except FlowError:
            continue  # `flowgpu store verify` names it


def _criu_steps(image: Image, dump: Span) -> list[Span]:
    """What CRIU did meanwhile, by its log: a span for each process.

    The log begins when CRIU has started. So it is laid to the end of the dump.
    """
    try:
        with open(layout.open_regular(image.criu_dir / CRIU_LOG), "rb") as file:
            lines = file.read(LONGEST_LOG).decode(errors="replace").splitlines()
    except OSError:
        return []
    begins = [(float(m[1]), f"{m[3]} ({m[2]})") for m in map(_STEP.match, lines) if m]
    last = next((float(m[1]) for m in map(_TIME.match, reversed(lines)) if m), 0.0)
    shift = max(dump.end - last, dump.begin)
    ends = [*(begin for begin, _ in begins[1:]), last]
    return [
        Span(CRIU, name, min(begin + shift, dump.end), min(end + shift, dump.end))
        for (begin, name), end in zip(begins, ends, strict=True)
        if end >= begin
    ]


def events(sources: Sequence[Source]) -> dict[str, Any]:
    """The whole file. Times are microseconds from the first timeline's begin."""
    first = min(source.timeline.began for source in sources)
    jobs = list(dict.fromkeys(source.job for source in sources))
    processes: dict[tuple[str, str], _Process] = {}
    found: list[Event] = []
    for source, span, begin in _in_order(sources, first):
        process = processes.setdefault((source.job, span.track), _Process(len(processes) + 1))
        arguments: Event = {"image": one_line(source.name)}
        if span.bytes:
            arguments |= {"bytes": span.bytes, "bytes_per_second": round(span.rate)}
        found.append(
            {
                "ph": "X",
                "name": one_line(span.name) or "?",
                "cat": "flowgpu",
                "pid": process.number,
                "tid": process.place(begin, begin + span.seconds),
                "ts": begin * MICRO,
                "dur": span.seconds * MICRO,
                "args": arguments,
            }
        )
    for source in sources:
        if source.bytes:
            process = processes.setdefault((source.job, JOB), _Process(len(processes) + 1))
            end = source.timeline.began - first + source.timeline.seconds
            found.append(
                {
                    "ph": "C",
                    "name": "image bytes",
                    "pid": process.number,
                    "ts": end * MICRO,
                    "args": {"image": source.bytes},
                }
            )
    return {
        "traceEvents": [*_names(processes, jobs), *found],
        "displayTimeUnit": "ms",
        "otherData": {"began": first, "jobs": [one_line(job) for job in jobs]},
    }


def _in_order(sources: Sequence[Source], first: float) -> list[tuple[Source, Span, float]]:
    """Spans with their begin since `first`; those around others before these."""
    found = [
        (source, span, span.begin + (source.timeline.began - first))
        for source in sources
        for span in source.timeline.spans
    ]
    return sorted(found, key=lambda one: (one[2], -one[1].seconds))


def _names(processes: dict[tuple[str, str], _Process], jobs: Sequence[str]) -> Iterable[Event]:
    for (job, track), process in processes.items():
        whose = f" of {one_line(job)}" if len(jobs) > 1 else ""
        name = f"{one_line(track)}{whose}"
        order = ORDER.index(track) if track in ORDER else len(ORDER)
        order += jobs.index(job) * (len(ORDER) + 1)
        yield _meta(process.number, 0, "process_name", name=name)
        yield _meta(process.number, 0, "process_sort_index", sort_index=order)
        for lane in range(len(process.lanes)):
            label = name if lane == 0 else f"{name}, at the same time"
            yield _meta(process.number, lane, "thread_name", name=label)


def _meta(pid: int, tid: int, what: str, **arguments: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": arguments}
