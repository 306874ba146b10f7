"""The manifest of an image: dataclasses, their JSON form, and the checks that make it whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from flowgpu.errors import ImageDamaged, ImageVersion
from flowgpu.image import codec, layout

ENGINES = ("native", "replay", "none")
GPU_KINDS = ("nvidia", "emulated", "none")
FIRST_LINE = f'{{"format": "{layout.FORMAT}",\n'
LAST_LINE = '"manifest_digest": "{}"}}\n'


@dataclass(frozen=True)
class Job:
    """What was run; `id` is the key of its runtime folder, which its environment holds."""

    id: str
    name: str
    command: tuple[str, ...]
    cwd: str


@dataclass(frozen=True)
class Host:
    """Where the image was taken: host name, kernel release, machine as uname(2) has them."""

    name: str
    kernel: str
    machine: str


@dataclass(frozen=True)
class Task:
    """A process of the job that uses CUDA."""

    pid: int
    allocations: int
    allocation_bytes: int


@dataclass(frozen=True)
class Block:
    """Memory at `address` of task number `task`; its bytes are at `offset` of the GPU's data.

    `device` is the GPU's CUDA ordinal in the task, which need not be its index in the image.
    """

    task: int
    id: int
    address: int
    bytes: int
    offset: int
    device: int


@dataclass(frozen=True)
class Gpu:
    """One GPU and what the image holds of it. `index` numbers the GPUs of the image from 0."""

    index: int
    name: str
    uuid: str
    memory_bytes: int
    compute_capability: str
    driver: str
    data_bytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Library:
    """A library of FlowGPU that was preloaded into the job."""

    path: str
    digest: str


@dataclass(frozen=True)
class Counts:
    """Bytes; `gpu_bytes_stored` of gpu*.data, `image_bytes` of all files but the manifest."""

    gpu_bytes_reserved: int
    gpu_bytes_active: int
    gpu_bytes_stored: int
    cpu_bytes: int
    image_bytes: int
    allocations: int


@dataclass(frozen=True)
class FileEntry:
    """A file other than gpu*.data and the manifest."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Everything about an image but its bytes. Times are seconds, `created` is ISO 8601 in UTC."""

    created: str
    flowgpu: str
    criu: str
    engine: str
    gpu: str
    job: Job
    host: Host
    root_pid: int
    pids: tuple[int, ...]
    pipes: dict[str, str]
    tasks: tuple[Task, ...]
    gpus: tuple[Gpu, ...]
    libraries: tuple[Library, ...]
    counts: Counts
    phases: dict[str, float]
    pause_seconds: float
    total_seconds: float
    files: tuple[FileEntry, ...]

    def to_bytes(self) -> bytes:
        """The file's bytes: one field a line, the digest of all before it in the last."""
        fields = {"version": layout.VERSION, **codec.encode(self)}
        lines = [f"{json.dumps(key)}: {json.dumps(fields[key])},\n" for key in fields]
        body = (FIRST_LINE + "".join(lines)).encode()
        return body + LAST_LINE.format(layout.digest(body).hex()).encode()

    @staticmethod
    def from_bytes(data: bytes, image: Path) -> Manifest:
        """Read what `to_bytes` wrote. Raises ImageDamaged, ImageVersion."""
        _check_digest(data, image)
        try:
            fields = json.loads(
                data, object_pairs_hook=codec.unique_keys, parse_constant=_no_constant
            )
            version = fields.pop("version")
            del fields["format"], fields["manifest_digest"]
        except (ValueError, KeyError, RecursionError) as error:
            raise _damaged(image, str(error)) from None
        if version != layout.VERSION:
            raise ImageVersion(path=image, found=version, supported=layout.VERSION)
        try:
            manifest = codec.decode(Manifest, fields)
            check(manifest)
        except codec.UnknownField as unknown:
            found = f"{version} with an unknown field {unknown}"
            raise ImageVersion(path=image, found=found, supported=layout.VERSION) from None
        except ValueError as error:
            raise _damaged(image, str(error)) from None
        return manifest


def check(manifest: Manifest) -> None:
    """Raise ValueError unless the parts of the manifest fit one another."""
    _require(manifest.engine in ENGINES, f"engine {manifest.engine!r}")
    _require(manifest.gpu in GPU_KINDS, f"gpu {manifest.gpu!r}")
    _require(manifest.root_pid in manifest.pids, f"root pid {manifest.root_pid}")
    paths = [entry.path for entry in manifest.files]
    _require(len(set(paths)) == len(paths), "a file that is listed twice")
    for entry in manifest.files:
        _require(layout.is_safe_path(entry.path), f"path {entry.path!r}")
        _require(entry.path != layout.MANIFEST, "a manifest that lists itself")
    for index, gpu in enumerate(manifest.gpus):
        _require(gpu.index == index, f"GPU number {gpu.index}")
        _require(layout.gpu_data(index) not in paths, f"{layout.gpu_data(index)} as a file")
        _check_blocks(gpu, len(manifest.tasks))
        sizes = [e.bytes for e in manifest.files if e.path == layout.gpu_digests(index)]
        expected = layout.chunk_count(gpu.data_bytes) * layout.DIGEST_BYTES
        _require(sizes == [expected], f"the digests of GPU {index}")


def _check_blocks(gpu: Gpu, tasks: int) -> None:
    end = 0
    for block in gpu.blocks:
        _require(block.task < tasks, f"task number {block.task}")
        _require(block.bytes > 0 and block.offset == end, f"block {block.id} of GPU {gpu.index}")
        end += block.bytes
    _require(end == gpu.data_bytes, f"data of {gpu.data_bytes} bytes for blocks of {end}")
    by_address = sorted(gpu.blocks, key=lambda block: (block.task, block.address))
    for first, second in pairwise(by_address):
        apart = first.task != second.task or first.address + first.bytes <= second.address
        _require(apart, f"blocks {first.id} and {second.id} at one address")


def _check_digest(data: bytes, image: Path) -> None:
    # First and last line are the same in all versions, so that damage is told from a new version.
    last_line_bytes = len(LAST_LINE.format("0" * 2 * layout.DIGEST_BYTES))
    body, last = data[:-last_line_bytes], data[-last_line_bytes:]
    if not body.startswith(FIRST_LINE.encode()):
        raise _damaged(image, "its first line is not that of an image")
    if last != LAST_LINE.format(layout.digest(body).hex()).encode():
        raise _damaged(image, "it does not have its digest")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"it has {what}, which does not fit")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has the number {name}")


def _damaged(image: Path, reason: str) -> ImageDamaged:
    return ImageDamaged(path=image, reason=f"{layout.MANIFEST}: {reason}")
