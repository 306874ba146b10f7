"""The verbs that give a job's GPU back while the job stays: suspend, resume, swap."""

from __future__ import annotations

import time
from typing import Any

import click

from flowgpu.cli.common import (
    ask,
    engine_option,
    find_live,
    job_argument,
    job_names,
    json_option,
    note,
    say,
    show_json,
    timeout_option,
)
from flowgpu.errors import FlowError, NotSuspended, Suspended
from flowgpu.jobs import SUSPENDED, Registry
from flowgpu.options import SuspendOptions
from flowgpu.render import one_line, seconds, size
from flowgpu.vocabulary import EngineChoice

keep_context_option = click.option(
    "--keep-context",
    is_flag=True,
    help="Leave CUDA's contexts where they are (some 500 MiB a process) and FlowGPU's (600 a GPU), "
    "for a faster resume",
)
drop_option = click.option(
    "--drop",
    is_flag=True,
    help="Free the host's memory, in the place of keeping it for the next suspension",
)


@click.command()
@job_argument
@keep_context_option
@timeout_option
@engine_option(
    "Take CUDA out of the processes by the driver's own checkpoint (native) or by each "
    "process itself (replay); auto replays where it can"
)
@json_option
def suspend(
    job: str, keep_context: bool, timeout: float | None, engine: EngineChoice, as_json: bool
) -> None:
    """Give JOB's GPUs back, and keep its processes

    Its GPU memory moves to memory of this machine. Threads that do not use the GPU run on; those
    that do wait for `flowgpu resume`.
    """
    result = _suspend(job, SuspendOptions(keep_context, timeout, engine))
    if as_json:
        show_json(result)
    else:
        print_suspended(result)


@click.command()
@job_argument
@drop_option
@json_option
def resume(job: str, drop: bool, as_json: bool) -> None:
    """Let the suspended JOB use its GPUs again"""
    result = _resume(job, drop)
    if as_json:
        show_json(result)
    else:
        print_resumed(result)


@click.command()
@click.argument("out", shell_complete=job_names)
@click.argument("into", metavar="IN", shell_complete=job_names)
@keep_context_option
@drop_option
@json_option
def swap(out: str, into: str, keep_context: bool, drop: bool, as_json: bool) -> None:
    """Suspend the job OUT and resume the job IN

    Where IN cannot be resumed, OUT is resumed again.
    """
    registry = Registry()
    going, coming = find_live(registry, out), find_live(registry, into)
    if going.state == SUSPENDED:
        raise Suspended(job=going.name, action="suspended again")
    if coming.state != SUSPENDED:
        raise NotSuspended(job=coming.name)
    began = time.monotonic()
    left = _suspend(going.id, SuspendOptions(keep_context))
    try:
        found = _resume(coming.id, drop)
    except FlowError:
        note(f"flowgpu: {going.name} is resumed, as {coming.name} cannot be")
        _resume(going.id, drop)
        raise
    taken = time.monotonic() - began
    if as_json:
        show_json({"out": left, "in": found, "swap_seconds": taken})
    else:
        print_suspended(left)
        print_resumed(found)
        say(f"swapped in {seconds(taken)}")


def _suspend(job: str, options: SuspendOptions) -> dict[str, Any]:
    registry = Registry()
    return ask(registry, find_live(registry, job), "suspend", **options.to_fields())


def _resume(job: str, drop: bool) -> dict[str, Any]:
    registry = Registry()
    return ask(registry, find_live(registry, job), "resume", drop=drop)


def print_suspended(result: dict[str, Any]) -> None:
    """What a suspension did, in a few lines."""
    total = seconds(result["total_seconds"])
    say(f"suspended {result['job']} in {seconds(result['suspend_seconds'])} of {total}")
    say(f"phases {_phases(result)}")
    kept = "CUDA's contexts stay" if result["keeps_context"] else f"engine {result['engine']}"
    say(f"GPU    {size(result['gpu_bytes_freed'])} given back, {kept}")
    say(f"host   {size(result['host_bytes'])}")
    for text in result["not_kept"]:
        note(f"flowgpu: not kept: {one_line(text)}")


def print_resumed(result: dict[str, Any]) -> None:
    """What a resume did, in a few lines."""
    say(f"resumed {result['job']} in {seconds(result['resume_seconds'])}")
    say(f"phases {_phases(result)}")
    if result["host_bytes"]:
        say(f"host   {size(result['host_bytes'])} kept for the next suspension")


def _phases(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {seconds(value)}" for name, value in result["phases"].items())
