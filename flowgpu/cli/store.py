"""The verbs of repeated checkpoints: checkpoint, and store for what they leave."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

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
)
from flowgpu.errors import (
    Busy,
    CheckpointFailed,
    CheckpointTimeout,
    CoordinatorReplaced,
    FlowError,
    JobEnded,
    NotEnoughDisk,
    OutputUnusable,
    UnknownJob,
)
from flowgpu.jobs import Job, Registry
from flowgpu.options import CheckpointOptions
from flowgpu.vocabulary import MODE_CHOICES

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

store_argument = click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.command()
@job_argument
@click.option(
    "--store",
    "folder",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, resolve_path=True, file_okay=False),
    help="Add the images to DIR; each restores by itself, and shares with the one before what has "
    "not changed in memory",
)
@click.option(
    "--every",
    required=True,
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Begin one checkpoint each SECONDS, the first at once",
)
@click.option(
    "--keep", metavar="N", type=click.IntRange(min=1), help="Remove all images but the newest N"
)
@click.option("--count", metavar="N", type=click.IntRange(min=1), help="End after N images")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Give one checkpoint up after SECONDS of preparation (at least 5) or of pause  "
    "[default: 120, 60]",
)
@click.option(
    "--mode",
    type=click.Choice(MODE_CHOICES),
    default="any",
    show_default=True,
    help="Let the job go on once what it may change is copied (cow), once its bytes are out "
    "(stop), or as soon as can be (any)",
)
@dump_options
@json_option
def checkpoint(
    job: str,
    folder: Path,
    every: float,
    keep: int | None,
    count: int | None,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write image after image of JOB while it runs

    Ends with the job. With --json there is a line for each image.
    """
    from flowgpu.image.store import Store

    registry = Registry()
    record = find_live(registry, job)
    store = Store(folder)
    asked = partial(CheckpointOptions, leave_running=True, timeout=timeout, **options)
    written = 0
    with store.adding(f"job {record.name!r}"):
        for name in store.clean():
            note(f"flowgpu: removed {name}, which was never completed")
        for _ in _turns(registry, record, every):
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


def _turns(registry: Registry, record: Job, every: float) -> Iterator[None]:
    """Once at the begin of each period, until the job has ended; periods missed are left out."""
    began = time.monotonic()
    turn = 0
    while True:
        yield
        turn = max(turn + 1, math.ceil((time.monotonic() - began) / every))
        while (left := began + turn * every - time.monotonic()) > 0:
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
    from flowgpu.image.reader import Image

    usage = found.usage(name)
    row = {"name": name, "job": "-", "created": "-", "error": None}
    try:
        manifest = Image(found.path / name).manifest
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
