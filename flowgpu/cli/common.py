"""What the verbs share: where output goes, the --json option and how a running job is found."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeVar

import click

from flowgpu.errors import CoordinatorGone, UnknownJob
from flowgpu.jobs import LIVE_STATES, Job, Registry, is_name
from flowgpu.options import CheckpointOptions
from flowgpu.render import printable
from flowgpu.vocabulary import (
    COMMUNICATORS_CHOICES,
    ENGINE_CHOICES,
    GHOST_CHOICES,
    GPU_CHOICES,
    MODE_CHOICES,
    REDUCTIONS,
    TCP_CHOICES,
)

Command = TypeVar("Command", bound=Callable[..., Any])


ACTIONS = {
    "pause-and-dump": "the checkpoint",
    "suspend": "the suspension",
    "resume": "the resume",
}
"""What is asked for with each verb, in words."""


def say(text: str, file: TextIO | None = None) -> None:
    """Print what a command was asked for.

    Not by click.echo, which writes to a stream without letters for it in an encoding of its own.
    """
    print(printable(text), file=file or sys.stdout, flush=True)


def note(text: str) -> None:
    """Tell the user something on standard error."""
    say(text, sys.stderr)


def note_not_kept(result: Mapping[str, Any]) -> None:
    """Tell what a job restored from the image of this report is going to miss."""
    from flowgpu.render import one_line

    for text in result.get("not_kept", ()):  # not known to coordinators of older jobs
        note(f"flowgpu: not in the image: {one_line(text)}")


def show_json(data: object) -> None:
    """Print the one JSON value of a command run with --json."""
    say(json.dumps(data))


def job_names(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """For the shell's completion."""
    names = {job.name for job in Registry().all()}
    return sorted(name for name in names if name.startswith(begun))


job_argument = click.argument("job", shell_complete=job_names)


def json_option(command: Command) -> Command:
    """Give `command` the option --json, as the argument `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON value")(command)


def name_option(*names: str) -> Callable[[Command], Command]:
    """Give a command the option --name, under these names."""
    return click.option(
        *names, metavar="NAME", callback=check_name, help="Call the job NAME in other commands"
    )


def node_options(command: Command) -> Command:
    """Give a command --node and --leader."""
    node = click.option(
        "--node", metavar="K", type=click.IntRange(min=0), help="Be the node K, from 0 on"
    )
    leader = click.option(
        "--leader",
        metavar="HOST:PORT",
        callback=_check_leader,
        help="Where node 0 listens for the others",
    )
    return node(leader(command))


def _check_leader(
    _context: click.Context, _parameter: click.Parameter, leader: str | None
) -> str | None:
    from flowgpu.nodes import address

    if leader is not None:
        try:
            address(leader)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
    return leader


def name_argument(command: Command) -> Command:
    """Give `command` the argument NAME, of a job that need not be there."""
    return click.argument("name", callback=check_name, shell_complete=job_names)(command)


def gpu_option(command: Command) -> Command:
    """Give a command the option --gpu."""
    return click.option(
        "--gpu",
        type=click.Choice(GPU_CHOICES),
        default="auto",
        show_default=True,
        help="Choose the driver",
    )(command)


def ghost_option(default: str | None, shown: str) -> Callable[[Command], Command]:
    """Give a command the option --ghost."""
    return click.option(
        "--ghost",
        type=click.Choice(GHOST_CHOICES),
        default=default,
        help="Start the ghost for each checkpoint, on a full GPU once the job has left it (auto); "
        "or with the job, for 600 MiB of each GPU (warm)  "
        f"[default: {shown}]",
    )


def engine_option(what: str) -> Callable[[Command], Command]:
    """Give a command the option --engine."""
    return click.option(
        "--engine",
        type=click.Choice(ENGINE_CHOICES),
        default="auto",
        show_default=True,
        help=what,
    )


def timeout_option(command: Command) -> Command:
    """Give `command` the option --timeout."""
    option = click.option(
        "--timeout",
        metavar="SECONDS",
        type=click.FloatRange(min=0, min_open=True),
        help="Give up after SECONDS of preparation (at least 5) or pause  [default: 120, 60]",
    )
    return option(command)


def dump_options(command: Command) -> Command:
    """Give a command those of CheckpointOptions that are the same for each image."""
    engine = engine_option(
        "Save CUDA's state by the driver's own checkpoint (native) or by each process itself "
        "(replay); auto replays where it can"
    )
    mode = click.option(
        "--mode",
        type=click.Choice(MODE_CHOICES),
        default="any",
        show_default=True,
        help="While it stands still, copy on the GPU (cow), what a copy before lacks (recopy), or "
        "all (stop); any takes cow or stop",
    )
    wait_minimum = click.option(
        "--wait-minimum",
        metavar="SECONDS",
        type=click.FloatRange(min=0),
        default=CheckpointOptions.wait_minimum,
        help="Wait at most SECONDS, or a longer step, for its least memory [default: 0.5]",
    )
    compress = click.option(
        "--compress",
        is_flag=True,
        help="Pack GPU data and memory where that pays; lengthens the pause of a job that ends",
    )
    without = click.option(
        "--without",
        multiple=True,
        metavar="REDUCTION",
        type=click.Choice(REDUCTIONS),
        help="Store memory not in use (active), zeros (zero) or copies (dedup) too; repeatable",
    )
    tcp = click.option(
        "--tcp",
        type=click.Choice(TCP_CHOICES),
        default="job",
        show_default=True,
        help="Refuse a job with TCP connections to processes outside (job), or close those in the "
        "image (close)",
    )
    communicators = click.option(
        "--communicators",
        type=click.Choice(COMMUNICATORS_CHOICES),
        default="keep",
        show_default=True,
        help="End NCCL's and make them anew (rebuild), for GPUs joined otherwise",
    )
    return mode(engine(wait_minimum(compress(without(tcp(communicators(command)))))))


def check_name(
    _context: click.Context, _parameter: click.Parameter, name: str | None
) -> str | None:
    """Callback of an option that is the name of a job."""
    if name is not None and not is_name(name):
        raise click.BadParameter(
            f"{name!r} is not a name: use 1 to 64 letters, digits, '_', '.' or '-'"
        )
    return name


def parse_signal(text: str, hint: str) -> int:
    """`TERM`, `SIGTERM` or `15` as a number. Raises BadParameter."""
    try:
        if text.isdigit():
            return signal.Signals(int(text))
        return signal.Signals["SIG" + text.upper().removeprefix("SIG")]
    except (KeyError, ValueError):
        raise click.BadParameter(f"{text!r} is no signal", param_hint=hint) from None


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


def ask_dump(registry: Registry, record: Job, options: CheckpointOptions) -> dict[str, Any]:
    """Ask for a checkpoint of a running job, and give the report."""
    return ask(registry, record, "pause-and-dump", **options.to_fields())


def ask(registry: Registry, record: Job, verb: str, **fields: Any) -> dict[str, Any]:
    """Ask a job's coordinator for what takes a while, and give the report."""
    from flowgpu import start
    from flowgpu.render import Progress

    began = time.time()
    with Progress() as progress:
        try:
            return start.ask(registry.dir(record.id), record, verb, progress, **fields)
        except KeyboardInterrupt:
            progress.close()
            note(f"flowgpu: {ACTIONS[verb]} of {record.name} goes on without this command")
            raise
        finally:
            progress.close()
            export_spans(record.id, began)


def export_spans(job: str, since: float = 0.0) -> None:
    """Give the steps of what was done to a job last to OpenTelemetry, if that is asked for."""
    if any(name.startswith("OTEL_") for name in os.environ):
        from flowgpu import spans

        registry = Registry()
        if reason := spans.export(registry, registry.find(job), since):
            note(f"flowgpu: no spans were exported: {reason}")
