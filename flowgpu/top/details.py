"""What is told of one job or one store, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from flowgpu.render import age, one_line, seconds, size
from flowgpu.report.source import STEP_NAMES
from flowgpu.timeline import COORDINATOR, JOB, PAUSED, Operation
from flowgpu.top.looks import NONE, ImageRow, Seen, StoreLook

BAR = 30
"""Letters of the longest bar."""
MOST_IMAGES = 50
"""The newest are shown."""
HEAD = "bold"


def of_job(job: Seen, operation: Operation | None, images: Sequence[ImageRow], now: float) -> Text:
    """A job, what was done to it last, and its images, the oldest first."""
    record, counts = job.record, job.counts
    amount, where = job.memory
    lines = [
        ("job", f"{record.name} ({record.id})"),
        ("command", " ".join(record.command)),
        ("folder", record.cwd),
        ("state", f"{job.state.removesuffix(' !')}, begun {age(now - record.created)} ago"),
        ("GPU", f"{record.gpu}, engine {record.engine}"),
        ("memory", f"{size(amount)} of the {where}" if where else NONE),
    ]
    if record.nodes > 1:
        lines.append(("node", f"{record.node} of {record.nodes}"))
    if record.host_bytes and where != "host":
        lines.append(("host memory", size(record.host_bytes)))
    done, failed = counts.checkpoints["done"], counts.checkpoints["failed"]
    lines.append(("checkpoints", f"{done} done, {failed} failed"))
    if job.saving is not None:
        wait = job.until_next(now)
        due = "" if wait is None else f", next in {age(wait)}" if wait else ", next now"
        lines.append(("saved to", f"{job.saving.store}{due}"))
    if record.image:
        lines.append(("image", record.image))
    if record.trouble:
        lines.append(("trouble", record.trouble))
    text = Text()
    for name, words in lines:
        text.append(f"{name:12}", HEAD).append(f"{one_line(words)}\n")
    if job.status is not None and job.status.total:
        status = job.status
        text.append(f"{status.phase:12}", HEAD)
        text.append(f"{size(status.done)} of {size(status.total)}\n")
    for part in (_processes(job), _operation(operation, now), images_of(images, now)):
        if part:
            text.append("\n").append_text(part)
    return text


def _processes(job: Seen) -> Text:
    """Its ranks, where it has several, among them."""
    text = Text()
    if job.status is None or not job.status.tasks:
        return text
    text.append(f"{'PROCESS':>10} {'GPU MEMORY':>12} {'ALLOCATIONS':>12}\n", HEAD)
    for task in job.status.tasks:
        text.append(f"{task.pid:>10} {size(task.bytes):>12} {task.allocations:>12}\n")
    return text


def _operation(operation: Operation | None, now: float) -> Text:
    text = Text()
    if operation is None:
        return text
    line = operation.timeline
    ended = age(now - line.began - line.seconds)
    text.append(f"newest {operation.kind}", HEAD)
    text.append(f": {seconds(line.seconds)}, {ended} ago")
    if (pause := operation.result.get("pause_seconds")) is not None:
        text.append(f", paused {seconds(float(pause))}")
    text.append("\n")
    if operation.error:
        text.append(f"{one_line(operation.error)}\n", "red")
    return text.append_text(_bars(operation))


def _bars(operation: Operation) -> Text:
    """A bar for each step, full for its part in the pause."""
    line = operation.timeline
    pauses = line.find(JOB, PAUSED)
    found: dict[str, tuple[float, float]] = {}
    for span in line.spans:
        if span.track != COORDINATOR:
            continue
        paused = sum(
            max(min(span.end, pause.end) - max(span.begin, pause.begin), 0.0) for pause in pauses
        )
        name = STEP_NAMES.get(span.name, span.name)
        whole, part = found.get(name, (0.0, 0.0))
        found[name] = whole + span.seconds, part + paused
    text = Text()
    longest = max((whole for whole, _ in found.values()), default=0.0)
    for name, (whole, part) in found.items():
        letters = max(round(BAR * whole / longest), 1) if longest else 1
        full = round(letters * part / whole) if whole else 0
        text.append(f"{one_line(name):>24} {seconds(whole):>8} ")
        text.append("█" * full, "yellow").append("░" * (letters - full)).append("\n")
    if pauses:
        text.append(f"{'':34}").append("█", "yellow").append(" while the job stands still\n")
    return text


def images_of(images: Sequence[ImageRow], now: float) -> Text:
    """A line for each, the newest first."""
    text = Text()
    if not images:
        return text
    text.append(f"{'IMAGE':24} {'AGE':>8} {'SIZE':>9} {'PAUSE':>8}  JOB\n", HEAD)
    for row in reversed(images[-MOST_IMAGES:]):
        if row.error:
            text.append(f"{one_line(row.name):24} {one_line(row.error)}\n", "red")
            continue
        ago = age(now - row.created) if row.created else NONE
        text.append(f"{row.name:24} {ago:>8} {size(row.bytes):>9} {seconds(row.pause):>8}")
        text.append(f"  {one_line(row.job)}\n")
    if len(images) > MOST_IMAGES:
        text.append(f"and {len(images) - MOST_IMAGES} older ones\n")
    return text


def of_store(store: StoreLook, now: float) -> Text:
    """A store and its images."""
    text = Text()
    for name, words in _facts(store):
        text.append(f"{name:12}", HEAD).append(f"{one_line(words)}\n")
    images = images_of(store.images, now)
    return text.append("\n").append_text(images) if images else text


def _facts(store: StoreLook) -> Iterator[tuple[str, str]]:
    yield "store", str(store.path)
    if store.error:
        yield "error", store.error
    if (facts := store.facts) is not None:
        yield "used", size(facts.used)
        yield "free", f"{size(facts.available)} of {size(facts.capacity)}"
        yield "images", f"{facts.whole} whole, {facts.damaged} damaged"
