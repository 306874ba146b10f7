"""`job.json`, by which the images of a job's nodes are one image.

An image of several nodes is a folder with one image for each node, `node-0`, `node-1` and so on,
and `job.json`, which names them by digest. Nodes that keep images on disks of their own have each
its own part, and `job.json`. The parts are an image from the moment on that `job.json` is there:
its leader writes it last, in the file `job.partial-EPOCH`, and renames that. Who takes that file
away first decides otherwise (coordinator/epoch.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgpu.errors import ImageDamaged, ImageVersion
from flowgpu.image import layout
from flowgpu.nodes import address

FORMAT, VERSION = "flowgpu-nodes", 1
JOB_FILE = "job.json"
MOST_JOB_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Part:
    """The image of one node."""

    node: int
    digest: str
    """That is the digest of its manifest, which has those of all other files."""
    connections: int = 0
    """TCP connections to processes of other nodes."""

    @property
    def folder(self) -> str:
        """Its name beside `job.json`."""
        return part_name(self.node)


@dataclasses.dataclass(frozen=True)
class JobFile:
    """What `job.json` says."""

    epoch: str
    job: str
    leader: str
    key: str
    """The secret by which the nodes find each other at a restore."""
    parts: tuple[Part, ...]

    def to_json(self) -> str:
        """The text of the file."""
        data = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def load(cls, image: Path) -> JobFile:
        """Read that of an image. Raises ImageDamaged, ImageVersion."""
        path = image / JOB_FILE
        try:
            with open(layout.open_regular(path), "rb") as file:
                data = json.loads(file.read(MOST_JOB_BYTES))
            if data["format"] != FORMAT:
                raise ValueError("it is of something else")
            if data["version"] != VERSION:
                raise ImageVersion(path=image, found=data["version"], supported=str(VERSION))
            return cls._checked(data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ImageDamaged(path=path, reason=f"{JOB_FILE}: {error}") from error

    @classmethod
    def _checked(cls, data: Mapping[str, Any]) -> JobFile:
        parts = tuple(
            Part(int(one["node"]), str(one["digest"]), int(one["connections"]))
            for one in data["parts"]
        )
        if [part.node for part in parts] != [*range(len(parts))] or len(parts) < 2:
            raise ValueError("its parts are not those of all nodes")
        texts = {name: str(data[name]) for name in ("epoch", "job", "leader", "key")}
        address(texts["leader"])
        return cls(parts=parts, **texts)


def part_name(node: int) -> str:
    """The folder with the image of a node."""
    return f"node-{node}"


def mark_name(epoch: str) -> str:
    """The file that becomes `job.json`, unless it is taken away."""
    return f"job.partial-{epoch}"


def part_digest(part: Path) -> str:
    """That of the image of a node. Raises OSError."""
    with open(layout.open_regular(part / layout.MANIFEST), "rb") as file:
        return layout.digest(file.read(layout.MOST_MANIFEST_BYTES + 1)).hex()


def is_nodes_image(image: Path) -> bool:
    """True if a folder is, or was to be, an image of several nodes."""
    return (image / JOB_FILE).exists() or (
        not (image / layout.MANIFEST).exists() and bool(nodes_here(image))
    )


def of_part(image: Path) -> tuple[Path, int] | None:
    """The image of all nodes of which this folder is the part of one, and which node's."""
    found = re.fullmatch(r"node-(0|[1-9][0-9]{0,4})", image.name)
    whole = image.parent
    marks = (JOB_FILE, mark_name("*"))
    if found is None or not any(any(whole.glob(mark)) for mark in marks):
        return None
    return whole, int(found[1])


def parts_here(image: Path) -> list[Path]:
    """The parts of an image that are in this folder. Raises ImageDamaged, ImageVersion."""
    job = JobFile.load(image)
    here = set(nodes_here(image))
    if not here:
        raise ImageDamaged(path=image, reason="it has no node's part")
    check_parts(image, job, min(here))
    return [image / part.folder for part in job.parts if part.node in here]


def nodes_here(image: Path) -> list[int]:
    """The nodes whose images are in a folder."""
    found = (re.fullmatch(r"node-(0|[1-9][0-9]{0,4})", path.name) for path in image.iterdir())
    return sorted(int(match[1]) for match in found if match)


def check_parts(image: Path, job: JobFile, node: int) -> Path:
    """Raise ImageDamaged unless the parts that are here are those of `job.json`; gives the node's.

    On a disk of its own a node has no other part than its own.
    """
    for part in job.parts:
        folder = image / part.folder
        if part.node != node and not folder.exists():
            continue
        try:
            found = part_digest(folder)
        except OSError as error:
            raise ImageDamaged(path=folder, reason=error.strerror or str(error)) from error
        if found != part.digest:
            reason = f"{layout.MANIFEST} is not the one that {JOB_FILE} names"
            raise ImageDamaged(path=folder, reason=reason)
    return image / part_name(node)


def sync_rename(before: Path, after: Path) -> None:
    """Rename a file that is on the disk, and have that there too. Raises OSError."""
    os.rename(before, after)
    layout.sync(after.parent)
