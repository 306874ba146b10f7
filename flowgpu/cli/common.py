"""What the verbs share: where output goes, the --json option and how a running job is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from flowgpu.errors import CoordinatorGone, UnknownJob
from flowgpu.jobs import LIVE_STATES, Job, Registry, is_name

Command = TypeVar("Command", bound=Callable[..., Any])


def note(text: str) -> None:
    """Tell the user something on standard error."""
    click.echo(text, err=True)


def show_json(data: object) -> None:
    """Print the one JSON value of a command run with --json."""
    click.echo(json.dumps(data))


def json_option(command: Command) -> Command:
    """Give `command` the option --json, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON value")(command)


def name_option(command: Command) -> Command:
    """Give `command` the option --name."""
    option = click.option(
        "--name", metavar="NAME", callback=_check_name, help="Call the job NAME in other commands"
    )
    return option(command)


def ghost_option(default: str | None, shown: str) -> Callable[[Command], Command]:
    """Give a command the option --ghost."""
    return click.option(
        "--ghost",
        type=click.Choice(["auto", "cold", "warm"]),
        default=default,
        help="Start the ghost for each checkpoint: beside the job or, on a full GPU, once it has "
        "left it (auto), always beside it (cold); or keep one from the start (warm), which takes "
        "about 600 MiB of each GPU  "
        f"[default: {shown}]",
    )


def _check_name(
    _context: click.Context, _parameter: click.Parameter, name: str | None
) -> str | None:
    if name is not None and not is_name(name):
        raise click.BadParameter(
            f"{name!r} is not a name: use 1 to 64 letters, digits, '_', '.' or '-'"
        )
    return name


def find_live(registry: Registry, key: str) -> Job:
    """The running job called `key`.

    Raises UnknownJob for one that has ended, CoordinatorGone for a lost one.
    """
    job = registry.find(key)
    if job.state not in LIVE_STATES:
        raise UnknownJob(job=key)
    if not job.live:
        raise CoordinatorGone(job=job.name)
    return job
