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
@json_option
def inspect(image: Path, as_json: bool) -> None:
    """Show what the image DIR holds"""
    from flowgpu.image import inspect as inspector
    from flowgpu.image import job_file

    if not job_file.is_nodes_image(image):
        summary = inspector.summary(image)
        show_json(summary) if as_json else _show(summary)
        return
    parts = {part.name: inspector.summary(part) for part in job_file.parts_here(image)}
    if as_json:
        show_json({"image": str(image), "nodes": parts})
        return
    for name, summary in parts.items():
        say(f"{name}:")
        _show(summary)


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
