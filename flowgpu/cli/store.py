"""The verbs of checkpoints of running jobs: checkpoint, advise, and store for what they leave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from flowgpu.cli.checkpoint import print_dump
from flowgpu.cli.common import (
    ask_dump,
    dump_options,
    find_live,
    job_argument,
    json_option,
    note,
    note_not_kept,
    say,
    show_json,
    timeout_option,
)
from flowgpu.cli.periods import every_option, failures_option, period_of
from flowgpu.errors import (
    Busy,
    CheckpointFailed,
    CheckpointTimeout,
    CoordinatorReplaced,
    FlowError,
    JobEnded,
    NotEnoughDisk,
    NothingMeasured,
    OutputUnusable,
    UnknownJob,
)
from flowgpu.frequency import HOUR, Between, Costs
from flowgpu.jobs import Job, Registry
from flowgpu.options import CheckpointOptions

if TYPE_CHECKING:
    from flowgpu.image.store import Store

LOOK_SECONDS = 0.5  # between two looks whether the job still runs
PASSING = (
    Busy,
    CheckpointFailed,
    CheckpointTimeout,
    CoordinatorReplaced,
    NotEnoughDisk,
    OutputUnusable,
)
"""Errors that the next checkpoint may not meet: the job runs on, and so does the command."""

BAR = 40
"""Letters of the longest bar."""


store_argument = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.command()
@job_argument
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Write one image to DIR, absent or empty",
)
@click.option(
    "--store",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, resolve_path=True, file_okay=False),
    help="Add image after image to DIR, each whole, of what has changed",
)
@every_option("Begin one each SECONDS, or so that the least is lost (auto), the first at once")
@failures_option("How often one GPU fails, for auto", required=False)
@click.option("--keep", metavar="N", type=click.IntRange(min=1), help="Remove all but the newest N")
@click.option("--count", metavar="N", type=click.IntRange(min=1), help="End after N images")
@timeout_option
@dump_options
@json_option
def checkpoint(
    job: str,
    output: Path | None,
    folder: Path | None,
    every: float | Literal["auto"] | None,
    failures_per_hour: float | None,
    keep: int | None,
    count: int | None,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write an image of JOB, or image after image, while it runs

    A series ends with the job. With --json it prints a line for each image.
    """
    from flowgpu.image.store import Store

    def asked(image: Path, base: Path | None = None) -> CheckpointOptions:
        return CheckpointOptions(image, leave_running=True, timeout=timeout, base=base, **options)

    registry = Registry()
    if output is not None and folder is None:
        series = {"--every": every, "--keep": keep, "--count": count}
        given = [name for name, value in series.items() if value is not None]
        _require(not given, f"{' and '.join(given)} need --store.")
        result = ask_dump(registry, find_live(registry, job), asked(output))
        show_json(result) if as_json else print_dump(result)
        return
    if output is not None or folder is None:
        raise click.UsageError("Give either --output or --store.")
    period = period_of(every, failures_per_hour)
    if period is None:
        raise click.UsageError("--store needs --every.")
    record = find_live(registry, job)
    between = period(registry.dir(record.id))
    store = Store(folder)
    written = 0
    with store.adding(f"job {record.name!r}"):
        for name in store.clean():
            note(f"flowgpu: removed {name}, which was never completed")
        for _ in _turns(registry, record, store, between):
            try:
                result = _add(registry, record, store, asked)
            except PASSING as error:
                note(f"flowgpu: no image this time: {error}")
                continue
            except JobEnded:
                break
            result["removed"] = store.keep(record.id, keep) if keep else []
            _show(result, as_json)
            written += 1
            if written == count:
                return
    note(f"flowgpu: {record.name} has ended")


def _require(fits: bool, said: str) -> None:
    if not fits:
        raise click.UsageError(said)


def _turns(registry: Registry, record: Job, store: Store, between: Between) -> Iterator[None]:
    """Once at the begin of each period, until the job has ended."""
    from flowgpu import saving

    began = time.monotonic()
    saving.note(registry.dir(record.id), store.path, 0.0)
    while True:
        yield
        began += between(time.monotonic() - began)
        saving.note(registry.dir(record.id), store.path, max(began - time.monotonic(), 0.0))
        while (left := began - time.monotonic()) > 0:
            if not _lives(registry, record):
                return
            time.sleep(min(left, LOOK_SECONDS))
        if not _lives(registry, record):
            return


def _lives(registry: Registry, record: Job) -> bool:
    try:
        find_live(registry, record.id)
    except UnknownJob:
        return False
    return True


def _add(
    registry: Registry, record: Job, store: Store, asked: Callable[..., CheckpointOptions]
) -> dict[str, Any]:
    """Ask for one image, and give the report."""
    options = asked(store.next_image(), base=store.newest(record.id))
    return ask_dump(registry, record, options)


def _show(result: dict[str, Any], as_json: bool) -> None:
    from flowgpu.render import seconds, size

    if as_json:
        show_json(result)
        return
    line = f"{Path(result['image']).name}  paused {seconds(result['pause_seconds'])}"
    if result["gpu_bytes_reserved"]:
        active, stored = result["gpu_bytes_active"], result["gpu_bytes_stored"]
        line += f"  GPU {size(stored)} stored of {size(active)} active"
    say(f"{line}  CPU {size(result['cpu_bytes'])}")
    note_not_kept(result)
    for name in result["removed"]:
        say(f"removed {name}")


@click.command()
@job_argument
@failures_option("How often one GPU fails", required=True)
@json_option
def advise(job: str, failures_per_hour: float, as_json: bool) -> None:
    """Show how often to checkpoint JOB

    From what its checkpoints while it ran, and the last restore, have taken.
    """
    from flowgpu.render import seconds, table

    registry = Registry()
    record = registry.find(job)
    costs = Costs.of(record.costs, record.restored)
    if costs is None:
        raise NothingMeasured(job=record.name)
    best = costs.best(failures_per_hour)
    curve = [
        (interval, *costs.lost(interval, failures_per_hour))
        for interval in costs.curve(failures_per_hour)
    ]
    if as_json:
        rows = [
            {"interval_seconds": interval, "stopped": stopped, "failures": redone}
            for interval, stopped, redone in curve
        ]
        show_json({"job": record.name, **vars(costs), "best_seconds": best, "curve": rows})
        return
    restore = "was not measured" if costs.restore is None else f"took {seconds(costs.restore)}"
    say(
        f"A checkpoint stops {record.name} for {seconds(costs.stall)}, and its image is complete "
        f"{seconds(costs.drain)} later (medians of {costs.checkpoints}). A restore {restore}."
    )
    say(f"best: one each {seconds(best)}, {HOUR / best:.0f} an hour")
    widest = max(stopped + redone for _, stopped, redone in curve)
    cells = [
        (
            seconds(interval),
            f"{HOUR / interval:.0f}",
            f"{stopped:.2%}",
            f"{redone:.2%}",
            f"{stopped + redone:.2%}",
            "#" * round(BAR * (stopped + redone) / widest) + (" best" if interval == best else ""),
        )
        for interval, stopped, redone in curve
    ]
    table(("EVERY", "AN HOUR", "STOPPED", "FAILURES", "LOST", ""), cells)


@click.group()
def store() -> None:
    """Look after the images of repeated checkpoints"""


@store.command("ls")
@store_argument
@json_option
def list_images(folder: Path, as_json: bool) -> None:
    """List the images in DIR, the oldest first

    Removing an image frees what OWN says; the rest is shared with others.
    """
    from flowgpu.image.store import Store
    from flowgpu.render import size, table

    found = Store(folder)
    rows = [_describe(found, name) for name in found.names()]
    if as_json:
        show_json(rows)
        return
    cells = [
        (row["name"], row["job"], row["created"], size(row["bytes"]), size(row["own_bytes"]))
        for row in rows
    ]
    table(("IMAGE", "JOB", "CREATED", "SIZE", "OWN"), cells)


def _describe(found: Store, name: str) -> dict[str, Any]:
    usage = found.usage(name)
    row = {"name": name, "job": "-", "created": "-", "error": None}
    try:
        manifest = found.manifest(name)
        row |= {"job": manifest.job.name, "created": manifest.created}
    except FlowError as error:
        row |= {"job": "(damaged)", "error": str(error)}
    return row | {"bytes": usage.total, "own_bytes": usage.own}


@store.command("rm")
@store_argument
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True)
def remove(folder: Path, images: tuple[str, ...]) -> None:
    """Remove images from DIR; those that share with them stay whole"""
    from flowgpu.image.store import Store

    found = Store(folder)
    known = found.names()
    if strange := [name for name in images if name not in known]:
        raise click.BadParameter(f"{folder} has no image {strange[0]!r}", param_hint="IMAGE")
    for name in images:
        found.remove(name)
        say(f"removed {name}")


@store.command("verify")
@store_argument
@json_option
def verify(folder: Path, as_json: bool) -> int:
    """Check every byte of all images in DIR, what they share only once"""
    from flowgpu.image.store import Store
    from flowgpu.render import Progress

    with Progress() as progress:
        found = Store(folder).verify(progress)
    if as_json:
        rows = [
            {"name": name, "ok": error is None, "error": str(error) if error else None}
            for name, error in found.items()
        ]
        show_json(rows)
    else:
        for name, error in found.items():
            say(f"{name}: {error or 'whole'}")
    return next((error.exit_code for error in found.values() if error), 0)
