"""The verbs that write and read images of jobs: pause-and-dump, restore."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowgpu.cli.common import (
    ask_dump,
    dump_options,
    export_spans,
    find_live,
    ghost_option,
    job_argument,
    json_option,
    name_option,
    node_options,
    note_not_kept,
    say,
    show_json,
    timeout_option,
)
from flowgpu.jobs import Registry
from flowgpu.nodes import LauncherPlace, Membership, place_of
from flowgpu.options import CheckpointOptions, RestoreOptions
from flowgpu.vocabulary import FILES_CHOICES, FilesChoice, GhostChoice

if TYPE_CHECKING:
    from flowgpu.image.job_file import JobFile
    from flowgpu.image.manifest import Manifest
    from flowgpu.ranks import Ranks

MOST_CUT = 20
"""Files that the report of a restore names one by one; index.json beside the parts has all."""


@click.command("pause-and-dump")
@job_argument
@click.option(
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Write the image to DIR, which must be absent or empty",
)
@click.option("--leave-running", is_flag=True, help="Let the job go on instead of ending it")
@timeout_option
@dump_options
@json_option
def pause_and_dump(
    job: str,
    output: Path,
    leave_running: bool,
    timeout: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write an image of JOB and end it"""
    from flowgpu import start

    registry = Registry()
    record = find_live(registry, job)
    asked = CheckpointOptions(output, leave_running, timeout, **options)
    result = ask_dump(registry, record, asked)
    if not leave_running:
        # The next command may be a restore on this machine.
        start.wait_ended(registry, record)
    show_json(result) if as_json else print_dump(result)


def print_dump(result: dict[str, Any]) -> None:
    """What a checkpoint did, in a few lines."""
    from flowgpu.render import one_line, seconds, size

    phases = ", ".join(f"{name} {seconds(value)}" for name, value in result["phases"].items())
    say(f"dumped {result['job']} to {one_line(result['image'])}")
    frozen = result.get("freeze_seconds")
    of_it = "" if frozen is None else f" ({seconds(frozen)} of it without its CPU side)"
    total = seconds(result["total_seconds"])
    say(f"paused {seconds(result['pause_seconds'])}{of_it} of {total}")
    say(f"phases {phases}")
    if reason := result.get("engine_reason"):  # not known to coordinators of older jobs
        kept = ", tasks kept CUDA" if result.get("live") else ""
        say(f"engine {result['engine']}: {reason}{kept}")
    if result["gpu_bytes_reserved"]:
        replicas = result.get("gpu_bytes_replicated")  # not known to coordinators of older jobs
        once = f", {size(replicas)} once for several GPUs" if replicas else ""
        say(
            f"GPU    {size(result['gpu_bytes_reserved'])} reserved, "
            f"{size(result['gpu_bytes_active'])} active, "
            f"{size(result['gpu_bytes_stored'])} stored{once}"
        )
    say(f"CPU    {size(result['cpu_bytes'])}")
    say(f"image  {size(result['image_bytes'])}")
    note_not_kept(result)


def _check_addresses(
    _context: click.Context, _parameter: click.Parameter, given: Sequence[str]
) -> dict[str, str]:
    found = {}
    for words in given:
        old, _, new = words.partition("=")
        try:
            pair = [ipaddress.ip_address(host) for host in (old, new)]
        except ValueError as error:
            raise click.BadParameter(f"{words!r} is not OLD=NEW: {error}.") from None
        if pair[0].version != pair[1].version:
            raise click.BadParameter(f"{words!r} is an address of IPv4 and one of IPv6.")
        found[str(pair[0])] = str(pair[1])
    return found


@click.command()
@click.argument(
    "image", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@name_option("--name")
@node_options
@click.option("--detach", is_flag=True, help="Return as soon as the job runs again")
@ghost_option(None, "as it was run with")
@click.option(
    "--poison",
    is_flag=True,
    help="Fill the GPU memory that was not in use with a pattern, so that a program that reads it "
    "shows (for debugging)",
)
@click.option(
    "--files",
    type=click.Choice(FILES_CHOICES),
    default="truncate",
    show_default=True,
    help="Where files that the job was writing to have grown since: cut them back, and keep what "
    "is cut beside the image (truncate), or restore nothing (refuse)",
)
@click.option(
    "--processor",
    type=click.Choice(["same", "any"]),
    default="same",
    show_default=True,
    help="Restore only where the processor has all that programs of the image may use (same), or "
    "anywhere (any)",
)
@click.option(
    "--address",
    "addresses",
    metavar="OLD=NEW",
    multiple=True,
    callback=_check_addresses,
    help="Address of this machine for one that the machine of the image had, in place of what is "
    "found by itself; may be given more than once",
)
@json_option
def restore(
    image: Path,
    name: str | None,
    node: int | None,
    leader: str | None,
    detach: bool,
    ghost: GhostChoice | None,
    poison: bool,
    files: FilesChoice,
    processor: str,
    addresses: dict[str, str],
    as_json: bool,
) -> int:
    """Bring the job in the image DIR back

    Without --detach its output and exit code become those of this command, as with `flowgpu run`,
    and the report goes to standard error.
    """
    from flowgpu import start
    from flowgpu.cli.jobs import report_end
    from flowgpu.render import Progress

    image, member = member_of(image.resolve(), node, leader)
    saved = start.saved(image)
    ranks = ranks_of(name or saved.job.name, saved)
    if ranks and not ranks.hosts:
        return ranks.wait_as_guest(None)
    if processor == "same":
        start.check_processor(saved)
    if saved.tasks:
        start.check_address_space()  # the ghost would find none
    driver = start.driver_for_saved(saved)
    with ranks.hosting() if ranks else nullcontext(), Progress() as progress:
        job, code = start.restore(
            image,
            saved,
            name=name,
            driver=driver,
            detach=detach,
            progress=progress,
            report=reporter(detach, as_json, progress.close),
            ghost=ghost,
            options=RestoreOptions(poison, files, addresses),
            member=member,
        )
    return report_end(job, code)


def member_of(image: Path, node: int | None, leader: str | None) -> tuple[Path, Membership | None]:
    """The image to restore here, and which node that is of one of several nodes."""
    from flowgpu.image import job_file

    if node is None and (found := job_file.of_part(image)):
        image, node = found
    if not job_file.is_nodes_image(image):
        if node is not None or leader is not None:
            raise click.UsageError("--node and --leader are for images of several nodes.")
        return image, None
    job = job_file.JobFile.load(image)
    place = _place_here(job, node)
    if node is None:
        node = place.node if place else _node_here(image)
    if node >= len(job.parts):
        last = len(job.parts) - 1
        raise click.UsageError(f"of {last + 1} nodes the last is --node {last}.")
    own = job_file.check_parts(image, job, node)
    connected = any(part.connections for part in job.parts)
    leader = leader or (place and place.leader) or job.leader
    return own, Membership(len(job.parts), node, leader, job.key, job.epoch, connected)


def ranks_of(name: str, saved: Manifest) -> Ranks | None:
    """Those of the node, where a launcher has started one command for each again."""
    from flowgpu.ranks import Ranks, is_hosted

    place = place_of(os.environ, name) if is_hosted(saved.job.command) else None
    return Ranks(Registry(), name, place) if place and place.local_count > 1 else None


def _place_here(job: JobFile, node: int | None) -> LauncherPlace | None:
    """Where a launcher of as many nodes has started this. What it says need not make sense where
    the node is known."""
    try:
        place = place_of(os.environ, job.job)
    except ValueError as error:
        if node is not None:
            return None
        raise click.UsageError(f"{error}.") from None
    return place if place and place.nodes == len(job.parts) else None


def _node_here(image: Path) -> int:
    """The node of which alone there is an image here."""
    from flowgpu.image.job_file import nodes_here

    here = nodes_here(image)
    if len(here) != 1:
        raise click.UsageError(f"{image} has the images of nodes {here}: say which by --node K.")
    return here[0]


def _cut_lines(result: dict[str, Any]) -> Iterator[str]:
    """What a restore says of the files that it has cut back."""
    from flowgpu.render import one_line, size

    files = result.get("cut_files", [])  # not known to the coordinators of older jobs
    for file in files[:MOST_CUT]:
        amount, rest = size(file["cut_bytes"]), size(file["bytes"])
        yield f"cut    {one_line(file['path'])} by {amount}, back to {rest}"
    if len(files) > MOST_CUT:
        yield f"cut    {len(files) - MOST_CUT} files more"
    if files:
        yield f"       what was cut is in {result['cut_folder']}"


def reporter(
    detach: bool, as_json: bool, close: Callable[[], None]
) -> Callable[[dict[str, Any]], None]:
    """What shows the result of a restore, on the stream that is not the job's."""

    def report(result: dict[str, Any]) -> None:
        from json import dumps

        from flowgpu.render import one_line, seconds, size

        close()
        phases = ", ".join(f"{name} {seconds(value)}" for name, value in result["phases"].items())
        text = f"restored {result['job']} in {seconds(result['restore_seconds'])}\nphases {phases}"
        if passed := result.get("gpu_bytes_passed"):
            took = seconds(result["passed_seconds"])
            read = size(result["gpu_bytes_read"])
            text += f"\nGPU    {read} read, {size(passed)} passed on between GPUs in {took}"
        text += "".join(f"\n{line}" for line in _cut_lines(result))
        moved = result.get("addresses", {}).items()
        text += "".join(f"\naddress {old} is now {new}" for old, new in moved if old != new)
        text += "".join(f"\nnot set: {one_line(what)}" for what in result.get("not_set", ()))
        if as_json:
            text = dumps(result)
        elif not detach:
            text = "\n".join(f"flowgpu: {line}" for line in text.splitlines())
        say(text, sys.stdout if detach else sys.stderr)
        export_spans(result["job"])

    return report
