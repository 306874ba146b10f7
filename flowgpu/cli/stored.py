"""`flowgpu run --store` and `--from`: one command line that starts a job, or goes on with it from
an image."""

from __future__ import annotations

import os
import signal
import time
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
    from flowgpu.nodes import Membership
    from flowgpu.series import Series

Command = TypeVar("Command", bound=Callable[..., Any])

ASIDE_SECONDS = 10.0
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


def run_stored(
    asked: Stored,
    name: str | None,
    words: list[str],
    begin: Start,
    member: Membership | None = None,
) -> int:
    """Go on with the job of this name from its store, or `begin` it. Gives the exit code.

    The store of a job of several nodes is a folder that they share. Node 0 looks after it.
    """
    from flowgpu.errors import StoreHasJob, StoreUnusable
    from flowgpu.image.store import Store

    assert asked.store
    if name is None:
        raise click.UsageError("--store needs --name, by which the job is known each time")
    if not asked.store.is_dir():
        raise StoreUnusable(path=asked.store, reason="there is no such folder")
    store = Store(asked.store / name)
    leads = member is None or member.node == 0
    with store.adding(f"job {name!r}") if leads else store.following():
        for left in store.clean() if leads else ():
            note(f"flowgpu: removed {left}, which was never completed")
        if store.has_ended():
            if not asked.resume:
                raise StoreHasJob(path=store.path, job=name, reason="it has ended well")
            note(f"flowgpu: {name} has ended well before ({store.path}), and is not run again")
            return 0
        if not asked.resume and (store.names() or store.damaged()):
            raise StoreHasJob(path=store.path, job=name, reason="--resume was not given")
        return _run(asked, name, words, store, begin, member)


def has_ended(asked: Stored, name: str | None) -> bool:
    """True if the job is not run again because it has ended well."""
    from flowgpu.image.store import Store

    if asked.store is None or name is None or not asked.resume:
        return False
    return Store(asked.store / name).has_ended()


def _run(
    asked: Stored,
    name: str,
    words: list[str],
    store: Store,
    begin: Start,
    member: Membership | None,
) -> int:
    from flowgpu.errors import NoGoodImage
    from flowgpu.jobs import DUMPED
    from flowgpu.render import one_line
    from flowgpu.series import Series

    leads = member is None or member.node == 0
    series = Series(
        store,
        period=period_of(asked.every, asked.failures_per_hour) if leads else None,
        keep=asked.keep or KEEP,
        signals=asked.on_signal,
        say=note,
        report=note_not_kept,
    )
    if series.told:
        note(f"flowgpu: {name} was told to go before it began: its store is as it was")
        return asked.dumped_exit
    ended = _restore(name, words, store, series, member)
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
    if code == 0 and leads:
        try:
            store.end()
        except OSError as error:
            note(f"flowgpu: {store.path} has no note that {name} has ended: {error.strerror}")
    return code


def _restore(
    name: str, words: list[str], store: Store, series: Series, member: Membership | None
) -> tuple[Job, int] | None:
    """Restore the newest image that is whole, until the job ends; None if there is none."""
    from flowgpu.errors import ImageDamaged, NodeFailed, StoreHasJob

    while names := store.names():
        path = store.path / names[-1]
        try:
            part, own, saved = _part(path, member)
            if other := _other_command(words, saved):
                raise StoreHasJob(path=store.path, job=name, reason=f"they are of {other}")
            return _restore_image(name, path, part, saved, series, own)
        except ImageDamaged as error:
            note(f"flowgpu: {error}")
            note(f"flowgpu: it is set aside as {store.set_aside(path.name)}")
        except NodeFailed as error:
            # A node that finds its part damaged sets the image of all nodes aside.
            until = time.monotonic() + ASIDE_SECONDS
            while not store.is_damaged(path.name):
                if time.monotonic() >= until:
                    raise
                time.sleep(ASIDE_SECONDS / 100)
            note(f"flowgpu: {error}")
    return None


def run_from(
    image: Path,
    name: str | None,
    words: list[str],
    series: Series | None,
    member: Membership | None = None,
) -> tuple[Job, int]:
    """Begin as an image of the same command, until the job ends. Raises UsageError, FlowError."""
    part, own, saved = _part(image, member)
    if other := _other_command(words, saved):
        raise click.UsageError(f"--from {image} is of {other}")
    return _restore_image(name or saved.job.name, image, part, saved, series, own)


def _part(image: Path, member: Membership | None) -> tuple[Path, Membership | None, Manifest]:
    """The part of an image that this node restores, which node it is then, and what it has.

    Raises ImageDamaged, UsageError.
    """
    from flowgpu import start
    from flowgpu.cli.checkpoint import member_of

    node, leader = (member.node, member.leader) if member else (None, None)
    part, own = member_of(image, node, leader)
    if (own.count if own else 1) != (member.count if member else 1):
        raise click.UsageError(f"{image} is of {own.count if own else 1} nodes")
    return part, own, start.saved(part)


def _restore_image(
    name: str,
    image: Path,
    part: Path,
    saved: Manifest,
    series: Series | None,
    member: Membership | None,
) -> tuple[Job, int]:
    from flowgpu import start
    from flowgpu.cli.checkpoint import reporter
    from flowgpu.moved import find_here
    from flowgpu.options import RestoreOptions
    from flowgpu.render import Progress, one_line

    _end_lost(saved.job.id)
    start.check_processor(saved)
    if saved.tasks:
        start.check_address_space()
    note(f"flowgpu: {name} goes on from {image}")
    if not os.access(saved.job.cwd, os.X_OK) and find_here(Path(saved.job.cwd)):
        note(f"flowgpu: it finds this folder at {one_line(saved.job.cwd)}, where it was before")
    with Progress() as progress:
        return start.restore(
            part,
            saved,
            name=name,
            driver=start.driver_for_saved(saved),
            detach=False,
            progress=progress,
            report=reporter(False, False, progress.close),
            options=RestoreOptions(),
            series=series,
            member=member,
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
