"""The verbs by which people and monitors look at jobs and checkpoints: report, trace, metrics,
top."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from flowgpu.cli.common import Command, say
from flowgpu.errors import NoTerminal, OutputUnusable, PackageMissing
from flowgpu.jobs import Registry, user_umask

subject_argument = click.argument("subject", metavar="IMAGE|STORE|JOB")


def output_option(what: str) -> Callable[[Command], Command]:
    """Give a command the option --output."""
    return click.option(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Write the {what} to FILE",
    )


def stores_option(help: str) -> Callable[[Command], Command]:
    """Give a command the option --store, as the argument `folders`."""
    return click.option(
        "--store",
        "folders",
        multiple=True,
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        help=help,
    )


@contextmanager
def _something() -> Iterator[None]:
    """Say where there is nothing to show."""
    from flowgpu.report.source import NothingToShow

    try:
        yield
    except NothingToShow as nothing:
        raise click.BadParameter(f"{nothing}.", param_hint="IMAGE|STORE|JOB") from None


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: who reads it sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(0o666 & ~user_umask())  # for a browser or a monitor of somebody else
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OutputUnusable(path=path, reason=error.strerror or str(error)) from error


@click.command()
@subject_argument
@output_option("report")
def report(subject: str, output: Path) -> None:
    """Draw where the time and the bytes of a checkpoint went

    One HTML file, for a browser or a printer: of an image, of a store's images, or of what was done
    to a job last.
    """
    from flowgpu.report.page import page
    from flowgpu.report.source import find

    with _something():
        found = find(subject, Registry())
    _write(output, page(found))
    say(f"wrote {output}")


@click.command()
@subject_argument
@output_option("trace")
def trace(subject: str, output: Path) -> None:
    """Write when each process did what, for Perfetto

    JSON that ui.perfetto.dev and chrome://tracing open: coordinator, ghost, CRIU and tasks, of an
    image, of a store's images, or of what was done to a job last.
    """
    from flowgpu.report.trace import events, find

    with _something():
        found = find(subject, Registry())
    _write(output, json.dumps(events(found)))
    say(f"wrote {output}")


@click.command()
@stores_option("Tell of the store DIR as well; repeatable")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Replace FILE in one step, for node_exporter's textfile collector; else print",
)
def metrics(folders: tuple[Path, ...], output: Path | None) -> None:
    """Print what a monitor wants to know, for Prometheus

    The metrics are those of this user's jobs on this machine, and of stores.
    """
    from flowgpu import metrics as told
    from flowgpu.image.store import Store

    stores: dict[str, Store] = {}
    for folder in folders:
        name = folder.resolve().name
        if name in stores:
            raise click.BadParameter(f"Two stores are called {name!r}.", param_hint="--store")
        stores[name] = Store(folder)
    text = told.text([*told.of_jobs(Registry()), *told.of_stores(stores)])
    if output is None:
        say(text.removesuffix("\n"))
    else:
        _write(output, text)


@click.command()
@stores_option("Show the store DIR as well, or those in DIR; repeatable")
@click.option(
    "--delay",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Look again each SECONDS",
)
def top(folders: tuple[Path, ...], delay: float) -> int:
    """Show jobs and stores on the terminal, again and again

    Enter shows the selected job with its processes, what was done to it last and its
    images. Stores are those that jobs are saved to, and DIR. It only looks, and no job waits for
    it. A state with ! has a trouble, which the details tell. PROCS: those that use CUDA, of all.
    """
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output"), (sys.stderr, "error")):
        if not stream.isatty():
            raise NoTerminal(verb="top", stream=f"its standard {name}")
    try:
        from flowgpu.top.app import Top
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise PackageMissing(verb="top", name="textual") from error
    from flowgpu.top.looks import Watch

    shown = Top(Watch(Registry(), folders), delay)
    shown.run()
    return shown.return_code or 0
