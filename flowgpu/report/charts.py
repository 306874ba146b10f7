"""The charts of a report: where the time went, when each did what, what of the bytes was stored,
how fast they moved, and the pauses of a store's images."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowgpu.render import rate, seconds, size
from flowgpu.report.source import STEP_NAMES, Movement, Row, Series
from flowgpu.report.svg import BAR, LABELS, LETTER, ROW, VALUES, WIDTH, Drawing, ticks
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, MOVE, PAUSED, Span, Timeline

PLOT = WIDTH - LABELS - VALUES
TOLD = 60
"""Spans that are read to who cannot see the chart; the table has all."""
MOST_TASKS = 12
"""So many tasks have a row each."""
SMALL = 0.01
"""Part of the time below which requests to the ghost share a row."""
LEFT_OUT = {
    "active": "not in use",
    "nonzero": "zeros",
    "distinct": "equal to other chunks",
    "stored": "in earlier images, or stored once",
}
"""Why a stage of the GPU's data has less than the one before."""
KINDS = {JOB: "job", COORDINATOR: "own", GHOST: "ghost", CRIU: "criu"}
NAMES = STEP_NAMES | {"cut": "wait for other ranks", "pack": "pack"}
"""Names of the coordinator's spans; the two that are added here lie within others."""
COLOURS = 6
"""Colours for the jobs of one chart; jobs beyond that share the last."""


def where_it_went(steps: Sequence[tuple[str, float]], key: str) -> str:
    """One bar a step, with its part of the whole."""
    whole = sum(taken for _, taken in steps)
    told = "; ".join(f"{name} {seconds(taken)}" for name, taken in steps)
    drawing = Drawing(key, "Where the pause went", told)
    for name, taken in steps:
        part = f"{seconds(taken)}, {taken / whole:.0%}"
        y = drawing.row(name, part)
        drawing.bar(LABELS, y, PLOT * taken / steps[0][1], BAR, "still", f"{name}: {part}")
    return drawing.html()


def gantt(timeline: Timeline, key: str, begin: float = 0.0, end: float = math.inf) -> str:
    """A row for each step, along one axis of time; what lies in the pause is shaded.

    The axis reaches from `begin` to `end`, if those are given.
    """
    end = min(end, max(timeline.seconds, 1e-6))
    spans = [span for span in timeline.spans if span.begin < end and span.end > begin]
    told = "; ".join(
        f"{span.track} {span.name} from {seconds(span.begin)} for {seconds(span.seconds)}"
        for span in spans[:TOLD]
    )
    drawing = Drawing(key, "When each did what", told)
    axis = Axis(begin, end)
    top = drawing.height
    drawing.height += ROW
    for track, rows in _rows(spans, end - begin):
        drawing.heading(track)
        for name, those in rows:
            _gantt_row(drawing, name, those, axis)
    below = Drawing(key, "", "")
    for since in ticks(end - begin):
        x = axis.x(begin + since)
        below.line(x, top + ROW - 6, x, drawing.height, "grid")
        below.label(x + 3, top + BAR - 3, seconds(since) if since else "0", "tick")
    for span in timeline.find(JOB, PAUSED):
        tip = f"paused for {seconds(span.seconds)}"
        x, width = axis.place(span)
        below.bar(x, top + ROW - 6, width, drawing.height - top - ROW + 6, "pause", tip)
    drawing.under(below)
    return drawing.html()


@dataclass(frozen=True)
class Axis:
    """The time that a Gantt chart shows."""

    begin: float
    end: float

    def x(self, moment: float) -> float:
        inside = min(max(moment, self.begin), self.end)
        return LABELS + PLOT * (inside - self.begin) / (self.end - self.begin)

    def place(self, span: Span) -> tuple[float, float]:
        """Left end and width of a span."""
        return self.x(span.begin), self.x(span.end) - self.x(span.begin)


def _gantt_row(drawing: Drawing, name: str, spans: Sequence[Span], axis: Axis) -> None:
    moved = sum(span.bytes for span in spans)
    value = seconds(sum(span.seconds for span in spans))
    y = drawing.row(name, f"{value}, {size(moved)}" if moved else value)
    for span in spans:
        kind = KINDS.get(span.track, "task")
        if (span.track, span.name) == (JOB, PAUSED):
            kind = "still"
        tip = f"{span.name}: {seconds(span.seconds)} from {seconds(span.begin)} on"
        x, width = axis.place(span)
        drawing.bar(x, y, width, BAR, kind, tip)


def _rows(
    spans: Sequence[Span], whole: float
) -> Iterable[tuple[str, list[tuple[str, list[Span]]]]]:
    """Tracks with their rows; tasks have a row each, and short requests to the ghost one."""
    tracks: dict[str, dict[str, list[Span]]] = {}
    tasks: dict[str, list[Span]] = {}
    for span in spans:
        if span.track not in KINDS:
            tasks.setdefault(span.track, []).append(span)
            continue
        tracks.setdefault(span.track, {}).setdefault(_row_name(span), []).append(span)
    if GHOST in tracks:
        tracks[GHOST] = _join_small(tracks[GHOST], whole * SMALL)
    for track in (JOB, COORDINATOR, GHOST, CRIU):
        if track in tracks:
            yield track, list(tracks[track].items())
    if tasks:
        longest = sorted(tasks.items(), key=lambda item: -sum(s.seconds for s in item[1]))
        rows = sorted(longest[:MOST_TASKS], key=lambda item: item[1][0].begin)
        more = [span for _, those in longest[MOST_TASKS:] for span in those]
        if more:
            rows.append((f"{len(longest) - MOST_TASKS} tasks more", more))
        yield "tasks", rows


def _row_name(span: Span) -> str:
    if (span.track, span.name) == (GHOST, MOVE):
        return "move the bytes"
    return NAMES.get(span.name, span.name) if span.track == COORDINATOR else span.name


def _join_small(rows: dict[str, list[Span]], small: float) -> dict[str, list[Span]]:
    kept = {
        name: spans
        for name, spans in rows.items()
        if sum(span.seconds for span in spans) >= small or any(span.bytes for span in spans)
    }
    rest = [span for name, spans in rows.items() if name not in kept for span in spans]
    return kept | ({"short requests": rest} if rest else {})


def durations(phases: Sequence[tuple[str, float]], key: str) -> str:
    """What each phase took, of an image that does not know when."""
    told = "; ".join(f"{name} {seconds(taken)}" for name, taken in phases)
    drawing = Drawing(key, "What each phase took", told)
    longest = max((taken for _, taken in phases), default=0.0) or 1.0
    for name, taken in phases:
        y = drawing.row(name, seconds(taken))
        tip = f"{name}: {seconds(taken)}"
        drawing.bar(LABELS, y, PLOT * taken / longest, BAR, "own", tip)
    return drawing.html()


def funnel(stages: Sequence[tuple[str, int]], key: str) -> str:
    """Bytes of GPU memory that are left after each reduction."""
    whole = max(stages[0][1], 1)
    told = "; ".join(f"{name} {size(amount)}" for name, amount in stages)
    drawing = Drawing(key, "GPU memory, from reserved to stored", told)
    before = stages[0][1]
    for name, amount in stages:
        y = drawing.row(name, f"{size(amount)}, {amount / whole:.1%}")
        width = PLOT * min(amount, whole) / whole
        drawing.bar(LABELS, y, width, BAR, "bytes", f"{name}: {size(amount)}")
        if before > amount:
            gone = PLOT * min(before, whole) / whole - width
            why = f"{size(before - amount)} {LEFT_OUT[name]}"
            drawing.bar(LABELS + width, y, gone, BAR, "gone", why)
            room = gone > LETTER * len(why) + 8
            x = LABELS + width + 6 + (0 if room else gone)
            if room or PLOT - width - gone > LETTER * len(why) + 12:
                drawing.label(x, y + BAR - 3, why, "note")
        before = amount
    return drawing.html()


def speeds(movements: Sequence[Movement], key: str) -> str:
    """How fast bytes moved; where it is known, an outlined bar is the limit."""
    told = "; ".join(_speed(one) for one in movements)
    drawing = Drawing(key, "How fast the bytes moved, beside the limit", told)
    rates = [one.bytes / one.seconds for one in movements]
    fastest = max([*rates, *(one.limit for one in movements), 1.0])
    for one, achieved in zip(movements, rates, strict=True):
        y = drawing.row(one.what, f"{rate(achieved)}, {size(one.bytes)}")
        drawing.bar(LABELS, y, PLOT * achieved / fastest, BAR, "own", _speed(one))
        if one.limit:
            value = f"{rate(one.limit)}, {achieved / one.limit:.0%} of it"
            y = drawing.row("its limit", value)
            drawing.bar(LABELS, y, PLOT * one.limit / fastest, BAR, "limit", one.source)
        else:
            drawing.label(LABELS, drawing.height + BAR - 3, f"limit {one.source}", "note")
            drawing.height += ROW
    return drawing.html()


def _speed(one: Movement) -> str:
    known = f", limit {rate(one.limit)} ({one.source})" if one.limit else f", limit {one.source}"
    return f"{one.what}: {size(one.bytes)} at {rate(one.bytes / one.seconds)}{known}"


def pauses(series: Series, key: str) -> str:
    """The pause of each image over the time at which it was taken, a line for each job."""
    rows = series.rows
    jobs = sorted({row.job for row in rows})
    first, last = min(row.created for row in rows), max(row.created for row in rows)
    span = max((last - first).total_seconds(), 1.0)
    most = max(max(row.pause for row in rows), 1e-6)
    told = "; ".join(f"{row.name} {seconds(row.pause)}" for row in rows[-TOLD:])
    drawing = Drawing(key, "Pause of each image over time", told)
    top, height = drawing.height + 6, 200.0
    width = WIDTH - LABELS - 30

    def at(row: Row) -> tuple[float, float]:
        since = (row.created - first).total_seconds()
        return LABELS + width * since / span, top + height - height * row.pause / most

    for value in ticks(most, 5):
        y = top + height - height * value / most
        drawing.line(LABELS, y, LABELS + width, y, "grid")
        drawing.label(LABELS - 10, y + 4, seconds(value) if value else "0", "tick", end=True)
    for number, job in enumerate(jobs):
        points = [row for row in rows if row.job == job]
        colour = f"job{min(number, COLOURS - 1)}"
        drawing.path([at(row) for row in points], f"curve {colour}")
        for row in points:
            tip = f"{row.name}, {job}: paused {seconds(row.pause)}, {size(row.own)} of its own"
            drawing.dot(*at(row), f"dot {colour}", tip)
        if len(jobs) > 1:
            drawing.label(8, top + 14 + 18 * number, job, f"legend {colour}")
    drawing.height = top + height + 18
    drawing.label(LABELS, drawing.height, f"{first:%Y-%m-%d %H:%M:%S}", "tick")
    if last > first:
        drawing.label(LABELS + width, drawing.height, f"{last:%Y-%m-%d %H:%M:%S}", "tick", end=True)
    drawing.height += 4
    return drawing.html()
