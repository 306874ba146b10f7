"""When each step of what is done to a job began and ended, as the coordinator saw it: a checkpoint,
a restore, a suspension or a resume.

An image has that of its checkpoint as `timeline.json`. The folder of a job has the newest one, with
what became of that.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgpu.codec import MOST_SECONDS
from flowgpu.errors import ImageDamaged
from flowgpu.image import layout
from flowgpu.jobs import replace_note

if TYPE_CHECKING:
    from flowgpu.image.reader import Image

MOST_SPANS = 4096
"""Later spans are not noted. A task has about eight, and a batch of blocks one."""
DIGITS = 6
"""Decimal places of a second that are kept."""

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading one that is not whole raises."""

JOB, COORDINATOR, GHOST, CRIU = "job", "coordinator", "ghost", "criu"
"""Tracks: what the job did, and who did what to it. Those of tasks have the process id as well."""
PAUSED, STOPPED = "paused", "stopped"
"""Spans of the job: its gates were closed, its processes were stopped."""
MOVE = "move"
"""The ghost's span in which it moves bytes between GPUs and files."""


def of_task(pid: int) -> str:
    """The track of a task."""
    return f"task {pid}"


@dataclass(frozen=True)
class Span:
    """What `track` did from `begin` to `end`, in seconds since the timeline began."""

    track: str
    name: str
    begin: float
    end: float
    bytes: int = 0
    """Bytes that the step moved; 0: none, or nobody knows."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def rate(self) -> float:
        """Bytes a second; 0: not known."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Limit:
    """Bytes a second that a GPU's link to the host carries at most, what it is, who says so."""

    gpu: str
    bytes_per_second: float
    what: str
    source: str


@dataclass(frozen=True)
class Timeline:
    """All spans; `began` in seconds since 1970."""

    began: float
    spans: tuple[Span, ...]
    limits: tuple[Limit, ...] = ()
    left_out: int = 0
    """Spans that were too many to be noted."""

    @property
    def seconds(self) -> float:
        """Seconds until the last span ends."""
        return max((span.end for span in self.spans), default=0.0)

    def find(self, track: str, name: str) -> list[Span]:
        """The spans of that name."""
        return [one for one in self.spans if (one.track, one.name) == (track, name)]

    @staticmethod
    def from_json(data: Any, end: float) -> Timeline:
        """The timeline that a recorder wrote. A span that had not ended by then ends at `end`.

        Raises one of UNREADABLE.
        """
        spans = []
        for track, name, begin, until, size in data["spans"]:
            last = max(float(end), float(begin)) if until is None else float(until)
            if not 0 <= float(begin) <= last <= MOST_SECONDS:
                raise ValueError(f"the span {name!r} ends before it begins")
            spans.append(Span(str(track), str(name), float(begin), last, int(size)))
        limits = tuple(
            Limit(str(gpu), float(rate), str(what), str(source))
            for gpu, rate, what, source in data["limits"]
        )
        return Timeline(float(data["began"]), tuple(spans), limits, int(data["left_out"]))


class Recorder:
    """Notes spans while they happen, from any thread."""

    def __init__(self, began: float | None = None) -> None:
        """`began`: time.monotonic where the timeline begins; now, without it."""
        now = time.monotonic()
        self._origin = now if began is None else began
        self._began = time.time() - (now - self._origin)
        self._spans: list[Open] = []
        self._left_out = 0
        self.limits: tuple[Limit, ...] = ()

    def begin(self, track: str, name: str, began: float | None = None) -> Open:
        """A span that has begun, now or then (time.monotonic), and is ended by `end`."""
        span = Open(track, name, time.monotonic() if began is None else began)
        if len(self._spans) < MOST_SPANS:
            self._spans.append(span)
        else:
            self._left_out += 1
        return span

    def add(self, track: str, name: str, began: float, ended: float, size: int = 0) -> None:
        """A span that is over; times of time.monotonic."""
        self.begin(track, name, began).end(size, ended)

    @contextlib.contextmanager
    def span(self, track: str, name: str) -> Iterator[Open]:
        """What is done meanwhile, also where it fails."""
        span = self.begin(track, name)
        try:
            yield span
        finally:
            span.end()

    def until(self, future: Future[Any], track: str, name: str) -> None:
        """A span from now until `future` is done."""
        span = self.begin(track, name)
        future.add_done_callback(lambda _: span.end())

    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._origin

    def to_json(self) -> dict[str, Any]:
        """What `Timeline.from_json` reads. The order is that of the begins."""

        def since(moment: float | None) -> float | None:
            return None if moment is None else round(max(moment - self._origin, 0.0), DIGITS)

        spans = sorted(self._spans, key=lambda span: span.began)
        rows = [[s.track, s.name, since(s.began), since(s.ended), s.size] for s in spans]
        limits = [list(vars(limit).values()) for limit in self.limits]
        return {
            "began": round(self._began, DIGITS),
            "spans": rows,
            "limits": limits,
            "left_out": self._left_out,
        }


class Open:
    """A span, over or not."""

    def __init__(self, track: str, name: str, began: float) -> None:
        self.track, self.name, self.began = track, name, began
        self.ended: float | None = None
        self.size = 0

    @property
    def seconds(self) -> float:
        """Those of a span that is over."""
        return (self.ended or self.began) - self.began

    def end(self, size: int = 0, ended: float | None = None) -> None:
        """It ends, now or then, and has moved so many bytes. The first end counts."""
        if self.ended is None:
            self.size, self.ended = size, time.monotonic() if ended is None else ended


def of_image(image: Image) -> Timeline | None:
    """The timeline of an image; None: an earlier version wrote none. Raises ImageDamaged.

    It was written before the image was sealed, so the span of the sealing had not ended by then.
    """
    data = image.read_small(layout.TIMELINE)
    if data is None:
        return None
    try:
        return Timeline.from_json(json.loads(data), image.manifest.total_seconds)
    except UNREADABLE as error:
        raise ImageDamaged(path=image.path, reason=f"{layout.TIMELINE}: {error}") from None


@dataclass(frozen=True)
class Operation:
    """What was done to a job last: its report, or the error, and its timeline."""

    kind: str
    """`checkpoint`, `restore`, `suspension` or `resume`."""
    result: Mapping[str, Any]
    error: str
    timeline: Timeline


def note(path: Path, kind: str, recorder: Recorder, result: Mapping[str, Any], error: str) -> None:
    """Write what `read` reads."""
    data = {"kind": kind, "result": dict(result), "error": error, "seconds": recorder.elapsed()}
    replace_note(path, json.dumps(data | {"timeline": recorder.to_json()}))


def read(path: Path) -> Operation | None:
    """The newest operation of a job; None where there is none that can be read."""
    try:
        data = json.loads(path.read_text())
        timeline = Timeline.from_json(data["timeline"], data["seconds"])
        return Operation(str(data["kind"]), dict(data["result"]), str(data["error"]), timeline)
    except (OSError, *UNREADABLE):
        return None
