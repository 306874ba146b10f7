"""The verbs that need no running job: inspect, verify, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowgpu.cli.common import json_option, say, show_json

image_argument = click.argument(
    "image", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@click.command()
@image_argument
@click.option("--record", is_flag=True, help="List the CUDA objects that a restore makes again")
@json_option
def inspect(image: Path, record: bool, as_json: bool) -> None:
    """Show what the image DIR holds"""
    from flowgpu.image import inspect as inspector
    from flowgpu.image import job_file

    def read(part: Path) -> Any:
        found = inspector.record(part) if record else inspector.summary(part)
        return {"image": str(part), "record": found} if record and as_json else found

    show = _show_record if record else _show
    if not job_file.is_nodes_image(image):
        found = read(image)
        show_json(found) if as_json else show(found)
        return
    parts = {part.name: read(part) for part in job_file.parts_here(image)}
    if as_json:
        show_json({"image": str(image), "nodes": parts})
        return
    for name, found in parts.items():
        say(f"{name}:")
        show(found)


KIND_WIDTH = 15  # of the longest kind of object, "primary context"


def _show_record(record: list[dict[str, Any]]) -> None:
    from flowgpu.render import one_line

    for process in record:
        say(f"process {process['pid']}: {len(process['objects'])} objects")
        for row in process["objects"]:
            facts = [f"{name} {_plain(row[name])}" for name in row if name not in _IN_THE_CALL]
            told = [_call(row), *facts]
            line = f"  {row['kind']:{KIND_WIDTH}}  {row.get('handle', ''):14}  {', '.join(told)}"
            say(one_line(line))
            for change in row.get("set", ()):
                say(one_line(f"  {'':{KIND_WIDTH}}  {'':14}  {_call(change)}"))


_IN_THE_CALL = ("kind", "serial", "handle", "call", "values", "set")


def _call(row: dict[str, Any]) -> str:
    """The call as it stands in a program, without where the driver puts the handle."""
    if "call" not in row:
        return "made with what it is a part of"
    return f"{row['call']}({', '.join(_plain(value) for value in row['values'])})"


def _plain(value: Any) -> str:
    """A value of a row: lists in brackets, names as they are."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return f"[{', '.join(_plain(one) for one in value)}]"
    return str(value)


def _show(summary: dict[str, Any]) -> None:
    from flowgpu.image import inspect as inspector
    from flowgpu.render import funnel, outline, size

    stages = inspector.stages(summary)
    for line in outline({k: v for k, v in summary.items() if not k.startswith("gpu_bytes_")}):
        say(line)
    if summary["gpus"]:
        if linked := summary["gpu_bytes_linked"]:
            say(f"{size(linked)} of extents are shared with earlier images")
        if replicated := summary["gpu_bytes_replicated"]:
            say(f"{size(replicated)} are not stored again, because another GPU has them too")
        funnel(stages)


@click.command()
@image_argument
@json_option
def verify(image: Path, as_json: bool) -> None:
    """Check every byte of the image DIR against its digests"""
    from flowgpu.image import job_file, reader
    from flowgpu.render import Progress, one_line, size

    parts = job_file.parts_here(image) if job_file.is_nodes_image(image) else [image]
    with Progress() as progress:
        total = sum(reader.verify(part, progress=progress) for part in parts)
    if as_json:
        show_json({"image": str(image), "bytes": total, "ok": True})
    else:
        say(f"{one_line(str(image))}: {size(total)} are what was written")


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check whether this machine can checkpoint and restore"""
    from flowgpu import doctor as examination

    checks = examination.checks()
    if as_json:
        show_json(examination.as_json(checks))
    else:
        examination.render(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0
