"""`flowgpu run --store` and `--from`: one command line that starts a job, or goes on with it from
an image."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from flowgpu.cli.common import note, note_not_kept, parse_signal
from flowgpu.cli.periods import Every, every_option, failures_option, period_of
from flowgpu.errors import DUMPED_EXIT

if TYPE_CHECKING:
    from flowgpu.image.manifest import Manifest
    from flowgpu.image.store import Store
    from flowgpu.jobs import Job
    from flowgpu.series import Series

Command = TypeVar("Command", bound=Callable[..., Any])

NEVER_HEARD = (signal.SIGKILL, signal.SIGSTOP)
Start = Callable[["Series"], "tuple[Job, int]"]


class Stored(NamedTuple):
    """What `flowgpu run` is asked for beside a job: options with the names of its fields."""

    store: Path | None
    resume: bool
    fresh_if_damaged: bool
    every: Every
    failures_per_hour: float | None
    keep: int | None
    on_signal: tuple[int, ...]
    dumped_exit: int


def stored_options(command: Command) -> Command:
    """Give a command the options of Stored, and `origin`."""
    options = (
        click.option(
            "--store",
            metavar="DIR",
            type=click.Path(path_type=Path, resolve_path=True),
            help="Keep images of the job in DIR/NAME",
        ),
        click.option(
            "--resume",
            is_flag=True,
            help="Restore the newest whole image there, if any",
        ),
        click.option(
            "--from",
            "origin",
            metavar="IMAGE",
            callback=lambda _context, _parameter, text: Path(text).absolute() if text else None,
            help="Restore IMAGE, where the store has none",
        ),
        click.option(
            "--fresh-if-damaged",
            is_flag=True,
            help="Start anew where all images are damaged",
        ),
        every_option("Write an image each SECONDS, or as often as loses the least (auto)"),
        failures_option("How often one GPU fails, for auto", required=False),
        click.option(
            "--keep",
            metavar="N",
            type=click.IntRange(min=1),
            help=f"Remove all images but the newest N  [default: {KEEP}]",
        ),
        click.option(
            "--on-signal",
            metavar="SIGNAL=dump",
            multiple=True,
            callback=lambda _context, _parameter, values: tuple(map(_dumping, values)),
            help="Dump the job away at SIGNAL; repeatable",
        ),
        click.option(
            "--dumped-exit",
            metavar="N",
            type=click.IntRange(0, 255),
            default=DUMPED_EXIT,
            help=f"Exit with N if it was dumped away  [default: {DUMPED_EXIT}]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


KEEP = 2
"""Images: one more than is restored, for the case that it is damaged."""


def _dumping(text: str) -> int:
    name, _, action = text.partition("=")
    hint = "--on-signal"
    if action != "dump":
        raise click.BadParameter(f"{text!r} is not SIGNAL=dump", param_hint=hint)
    signum = parse_signal(name, hint)
    if signum in NEVER_HEARD:
        raise click.BadParameter(f"{name!r} cannot be heard", param_hint=hint)
    return signum


def run_stored(asked: Stored, name: str | None, words: list[str], begin: Start) -> int:
    """Go on with the job of this name from its store, or `begin` it. Gives the exit code."""
    from flowgpu.errors import StoreHasJob, StoreUnusable
    from flowgpu.image.store import Store

    assert asked.store
    if name is None:
        raise click.UsageError("--store needs --name, by which the job is known each time")
    if not asked.store.is_dir():
        raise StoreUnusable(path=asked.store, reason="there is no such folder")
    store = Store(asked.store / name)
    with store.adding(f"job {name!r}"):
        for left in store.clean():
            note(f"flowgpu: removed {left}, which was never completed")
        if store.has_ended():
            if not asked.resume:
                raise StoreHasJob(path=store.path, job=name, reason="it has ended well")
            note(f"flowgpu: {name} has ended well before ({store.path}), and is not run again")
            return 0
        if not asked.resume and (store.names() or store.damaged()):
            raise StoreHasJob(path=store.path, job=name, reason="--resume was not given")
        return _run(asked, name, words, store, begin)


def _run(asked: Stored, name: str, words: list[str], store: Store, begin: Start) -> int:
    from flowgpu.errors import NoGoodImage
    from flowgpu.jobs import DUMPED
    from flowgpu.render import one_line
    from flowgpu.series import Series

    series = Series(
        store,
        period=period_of(asked.every, asked.failures_per_hour),
        keep=asked.keep or KEEP,
        signals=asked.on_signal,
        say=note,
        report=note_not_kept,
    )
    if series.told:
        note(f"flowgpu: {name} was told to go before it began: its store is as it was")
        return asked.dumped_exit
    ended = _restore(name, words, store, series)
    if ended is None:
        damaged = store.damaged()
        if damaged and not asked.fresh_if_damaged:
            raise NoGoodImage(job=name, path=store.path, reason=f"{', '.join(damaged)}")
        note(f"flowgpu: {store.path} has no image to go on from: {name} starts")
        ended = begin(series)
    job, code = ended
    if job.state == DUMPED:
        image = one_line(job.image or "-")
        note(f"flowgpu: {name} was dumped to {image}; the same command goes on from it")
        return asked.dumped_exit
    if code == 0:
        try:
            store.end()
        except OSError as error:
            note(f"flowgpu: {store.path} has no note that {name} has ended: {error.strerror}")
    return code


def _restore(name: str, words: list[str], store: Store, series: Series) -> tuple[Job, int] | None:
    """Restore the newest image that is whole, until the job ends; None if there is none."""
    from flowgpu import start
    from flowgpu.errors import ImageDamaged, StoreHasJob

    for image in reversed(store.names()):
        try:
            path = store.path / image
            saved = start.saved(path)
            if other := _other_command(words, saved):
                raise StoreHasJob(path=store.path, job=name, reason=f"they are of {other}")
            return _restore_image(name, path, saved, series)
        except ImageDamaged as error:
            note(f"flowgpu: {error}")
            note(f"flowgpu: it is set aside as {store.set_aside(image)}")
    return None


def run_from(
    image: Path, name: str | None, words: list[str], series: Series | None
) -> tuple[Job, int]:
    """Begin as an image of the same command, until the job ends. Raises UsageError, FlowError."""
    from flowgpu import start

    saved = start.saved(image)
    if other := _other_command(words, saved):
        raise click.UsageError(f"--from {image} is of {other}")
    return _restore_image(name or saved.job.name, image, saved, series)


def _restore_image(
    name: str, path: Path, saved: Manifest, series: Series | None
) -> tuple[Job, int]:
    from flowgpu import start
    from flowgpu.cli.checkpoint import reporter
    from flowgpu.moved import find_here
    from flowgpu.options import RestoreOptions
    from flowgpu.render import Progress, one_line

    _end_lost(saved.job.id)
    start.wait_reaped(saved.pids)
    start.check_processor(saved)
    if saved.tasks:
        start.check_address_space()
    note(f"flowgpu: {name} goes on from {path}")
    if not os.access(saved.job.cwd, os.X_OK) and find_here(Path(saved.job.cwd)):
        note(f"flowgpu: it finds this folder at {one_line(saved.job.cwd)}, where it was before")
    with Progress() as progress:
        return start.restore(
            path,
            saved,
            name=name,
            driver=start.driver_for_saved(saved),
            detach=False,
            progress=progress,
            report=reporter(False, False, progress.close),
            options=RestoreOptions(),
            series=series,
        )


def _other_command(words: list[str], saved: Manifest) -> str:
    """By which other words the job of an image was started; empty if by these."""
    from flowgpu.render import one_line

    # What starts a program for a service manager stands before them (flowgpu/inherited.py).
    same = list(saved.job.command[-len(words) :]) == words
    return "" if same else f"another command: {one_line(' '.join(saved.job.command))}"


def _end_lost(job_id: str) -> None:
    """End what still runs of the job, of which nobody can take an image any more."""
    from flowgpu import start
    from flowgpu.jobs import LOST, Registry

    registry = Registry()
    for job in registry.all():
        lost = job.id == job_id and job.shown_state == LOST
        if lost and start.kill_lost(registry.dir(job.id), signal.SIGKILL):
            note(f"flowgpu: ended what was left of {job.name}, whose coordinator was killed")
