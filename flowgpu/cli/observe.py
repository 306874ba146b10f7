"""The verbs by which people and monitors look at checkpoints: report, trace, metrics."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowgpu.cli.common import say
from flowgpu.errors import OutputUnusable
from flowgpu.jobs import Registry, user_umask

if TYPE_CHECKING:
    from flowgpu.report.source import Series, Shown

subject_argument = click.argument("subject", metavar="IMAGE|STORE|JOB")


def _found(subject: str) -> Shown | Series:
    from flowgpu.report.source import NothingToShow, find

    try:
        return find(subject, Registry())
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
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report to FILE",
)
def report(subject: str, output: Path) -> None:
    """Draw where the time and the bytes of a checkpoint went

    One HTML file, for a browser or a printer: of an image, of a store's images, or of the newest
    checkpoint or restore of a job.
    """
    from flowgpu.report.page import page

    _write(output, page(_found(subject)))
    say(f"wrote {output}")
