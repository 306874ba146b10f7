"""The manifest of an image: dataclasses, their JSON form, and the checks that make it whole."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any, NoReturn

from flowgpu import codec
from flowgpu.errors import ImageDamaged, ImageVersion
from flowgpu.image import layout
from flowgpu.vocabulary import (
    ENGINE_CHOICES,
    ENGINES,
    GHOST_CHOICES,
    GHOSTS,
    GPU_KINDS,
    REDUCTIONS,
)

JOB_CHOICES = {"ghost": (*GHOST_CHOICES, "cold"), "engine": ENGINE_CHOICES}
"""Fields of `job` that are there only where they are not the first of these; earlier versions
offered `cold`."""

LEFT_RUNNING = ("stall", "freeze", "hold", "drain")
"""Keys of `left_running`."""
OPTIONAL: dict[str, Any] = {
    "engine_reason": "",
    "live": False,
    "mode": "",
    "rung": "",
    "left_running": {},
    "addresses": [],
    "cpu_features": [],
    "affinities": [],
    "settings": [],
    "not_kept": [],
    "open_files": [],
    "memory_files": [],
    "links": [],
    "imports": [],
    "peers": [],
    "inherited": [],
}
"""Fields that are there only where they are something else, as older readers refuse them."""

OLD_OPEN_FILE = {"path", "bytes"}
"""All that images had of an open file at first."""

FIRST_LINE = f'{{"format": "{layout.FORMAT}",\n'
LATER_LISTS = {"packed": layout.PACKED_VERSION, "assembled": layout.SHARED_VERSION}
"""Fields of lists, and the version from which on they are there."""

SHOWN = 200
"""Letters that a message shows of what an image says."""

LAST_LINE = '"manifest_digest": "{}"}}\n'


@dataclass(frozen=True)
class Job:
    """What was run, and how; `id` is the key of its runtime folder, which its environment holds."""

    id: str
    name: str
    command: tuple[str, ...]
    cwd: str
    ghost: str = GHOST_CHOICES[0]  # when it is to be started
    engine: str = ENGINE_CHOICES[0]  # what the tasks are prepared for


@dataclass(frozen=True)
class Host:
    """Where the image was taken: host name, kernel release, machine as uname(2) has them."""

    name: str
    kernel: str
    machine: str


@dataclass(frozen=True)
class Address:
    """An address of that machine, and the interface that had it."""

    interface: str
    host: str


@dataclass(frozen=True)
class Task:
    """A process of the job that uses CUDA."""

    pid: int
    allocations: int
    allocation_bytes: int


@dataclass(frozen=True)
class Block:
    """Memory at `address` of task number `task`; it is at `offset` of the GPU's logical data.

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
    """One GPU and its blocks, which are its logical data of `data_bytes` bytes.

    `index` numbers the GPUs of the image from 0.
    """

    index: int
    name: str
    uuid: str
    memory_bytes: int
    compute_capability: str
    driver: str
    data_bytes: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Peer:
    """How GPU `gpu` reaches the memory of GPU `other`, where the job's processes share memory."""

    gpu: int
    other: int
    access: int
    atomics: int
    rank: int
    """Rank of the link's speed, as the driver tells it; the lower, the faster."""


@dataclass(frozen=True)
class Import:
    """What task number `task` has at `address` is block `block` of task number `owner`, and its own
    block `id`."""

    task: int
    id: int
    address: int
    device: int
    owner: int
    block: int


@dataclass(frozen=True)
class Library:
    """A library of FlowGPU that was preloaded into the job."""

    path: str
    digest: str


@dataclass(frozen=True)
class Counts:
    """Bytes: of GPU data after each reduction, and of the image's files but the manifest.

    A reduction that was not in use leaves the number before it; `gpu_bytes_stored` is always what
    gpu*.data have, without link*.data.
    """

    gpu_bytes_reserved: int
    gpu_bytes_active: int
    gpu_bytes_nonzero: int
    gpu_bytes_distinct: int
    gpu_bytes_stored: int
    cpu_bytes: int
    image_bytes: int
    allocations: int


@dataclass(frozen=True)
class Extent:
    """A data file made of slots of a chunk each; its digests file is in `files`."""

    file: str
    bytes: int

    @property
    def slots(self) -> int:
        """How many."""
        return layout.chunk_count(self.bytes)


@dataclass(frozen=True)
class FileEntry:
    """A file other than an extent and the manifest."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class OpenFile:
    """A file that the job was able to write to, as it was at the dump; its times in nanoseconds.

    `digest` is of all its `bytes`, and empty where there was no time for it. Images from before
    all this was kept have 0 for the inode and the times, and only files that were appended to.
    """

    path: str
    bytes: int
    inode: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    digest: str = ""


@dataclass(frozen=True)
class MemoryFile:
    """A file that is memory of the job: all of its names, and the image's file with its bytes.

    `runs` are where in the file they belong: offset and number of bytes of each; the rest are
    holes. `mapped`: a process had it mapped shared and for writing, else it was open for writing.
    """

    paths: tuple[str, ...]
    data: str
    bytes: int
    runs: tuple[tuple[int, ...], ...]
    mode: int
    user: int
    group: int
    modified_ns: int  # since 1970
    folder_mode: int
    folder_user: int
    folder_group: int
    mapped: bool


@dataclass(frozen=True)
class Link:
    """A name that CRIU wants to find: that of a file which is at `of`, and was opened as another
    name that is gone."""

    path: str
    of: str
    opened: str


@dataclass(frozen=True)
class Affinity:
    """Threads that were bound to the processors of these numbers."""

    cpus: tuple[int, ...]
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What threads had of the kernel and CRIU does not keep; settings.py has the kinds."""

    kind: str
    values: tuple[int, ...]
    text: str
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A listed file of zstd frames, of these sizes, and what it stands for: bytes and digest.

    The digest of an extent is empty: its slots have their own.
    """

    file: str
    bytes: int
    digest: str
    frames: tuple[int, ...]

    @property
    def plain(self) -> str:
        """Path of the file that was packed."""
        return self.file.removesuffix(layout.packed(""))


@dataclass(frozen=True)
class Inherited:
    """Bytes of the pages that a process has in common with its parent, whose file has them."""

    process: int
    bytes: int


@dataclass(frozen=True)
class Assembled:
    """A file that is not there: its page table says where its pages are. Bytes, digest of it."""

    file: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about an image but its bytes. Times are seconds, `created` is ISO 8601 in UTC.

    Extents are those of the GPUs, in order, then those shared with earlier images. An image of
    version 1 reads as if its data files were extents that store everything. `packed` is there from
    version 3 on, `assembled` in version 4 only.
    """

    version: int = layout.VERSION
    created: str
    flowgpu: str
    criu: str
    engine: str
    engine_reason: str = ""  # why this one; empty where there was no choice
    live: bool = False  # tasks were dumped with CUDA, of which the image has nothing
    mode: str = ""  # in which the job was left running, and the rung of what makes it stand still
    rung: str = ""
    left_running: dict[str, float] = field(default_factory=dict)  # seconds that it took, by what
    gpu: str
    job: Job
    host: Host
    addresses: tuple[Address, ...] = ()  # the first leads to the leader, or outside
    cpu_features: tuple[str, ...] = ()  # by which programs may have chosen their code
    affinities: tuple[Affinity, ...] = ()
    settings: tuple[Setting, ...] = ()
    not_kept: tuple[str, ...] = ()  # what a restored job has lost, in words
    root_pid: int
    pids: tuple[int, ...]
    pipes: dict[str, str]
    tasks: tuple[Task, ...]
    gpus: tuple[Gpu, ...]
    imports: tuple[Import, ...] = ()
    peers: tuple[Peer, ...] = ()
    extents: tuple[Extent, ...]
    reductions: tuple[str, ...]
    ghost: str
    libraries: tuple[Library, ...]
    counts: Counts
    phases: dict[str, float]
    pause_seconds: float
    total_seconds: float
    files: tuple[FileEntry, ...]
    open_files: tuple[OpenFile, ...] = ()
    memory_files: tuple[MemoryFile, ...] = ()
    links: tuple[Link, ...] = ()
    inherited: tuple[Inherited, ...] = ()
    packed: tuple[Packed, ...] = ()
    assembled: tuple[Assembled, ...] = ()

    @property
    def page_sources(self) -> tuple[str, ...]:
        """Files that the rows of page tables name: that of this checkpoint, and linked ones."""
        listed = {entry.path for entry in self.files}
        links = takewhile(listed.__contains__, map(layout.pages_link, count()))
        return (layout.PAGES_DATA, *links) if self.assembled else ()

    @property
    def inherited_bytes(self) -> int:
        """Bytes of pages that processes have in common with their parents."""
        return sum(one.bytes for one in self.inherited)

    @property
    def linked_bytes(self) -> int:
        """Bytes of the extents that earlier images have as well."""
        return sum(extent.bytes for extent in self.extents[len(self.gpus) :])

    @property
    def linked_page_bytes(self) -> int:
        """Bytes of the files of CPU memory that earlier images have as well."""
        links = set(self.page_sources[1:])
        return sum(entry.bytes for entry in self.files if entry.path in links)

    def to_bytes(self) -> bytes:
        """The file's bytes: one field a line, the digest of all before it in the last."""
        fields, job = dict(vars(self)), vars(self.job)
        usual = [name for name, choices in JOB_CHOICES.items() if job[name] == choices[0]]
        fields["job"] = {k: v for k, v in job.items() if k not in usual}
        for name in OPTIONAL:
            if not fields[name]:
                del fields[name]
        for name, version in LATER_LISTS.items():
            if self.version < version:
                del fields[name]
        # Thousands of blocks are written in the pause: json walks them faster than we could.
        lines = [f"{json.dumps(k)}: {json.dumps(v, default=vars)},\n" for k, v in fields.items()]
        body = (FIRST_LINE + "".join(lines)).encode()
        return body + LAST_LINE.format(layout.digest(body).hex()).encode()

    @staticmethod
    def load(image: Path) -> Manifest:
        """The manifest of an image. Raises ImageDamaged, ImageVersion."""
        try:
            with open(layout.open_regular(image / layout.MANIFEST), "rb") as file:
                data = file.read(layout.MOST_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            raise _damaged(image, "missing, so this is no image, or no whole one") from None
        except OSError as error:
            raise _damaged(image, error.strerror or str(error)) from None
        if len(data) > layout.MOST_MANIFEST_BYTES:
            raise _damaged(image, f"it has more than {layout.MOST_MANIFEST_BYTES} bytes")
        return Manifest.from_bytes(data, image)

    @staticmethod
    def from_bytes(data: bytes, image: Path) -> Manifest:
        """Read what `to_bytes` wrote. Raises ImageDamaged, ImageVersion."""
        _check_digest(data, image)
        try:
            fields = json.loads(
                data, object_pairs_hook=codec.unique_keys, parse_constant=_no_constant
            )
            version = fields["version"]
            del fields["format"], fields["manifest_digest"]
            for name, usual in OPTIONAL.items():
                fields.setdefault(name, usual)
            for name, choices in JOB_CHOICES.items():
                fields["job"].setdefault(name, choices[0])
            for file in fields["open_files"]:
                if file.keys() == OLD_OPEN_FILE:
                    file.update(inode=0, mtime_ns=0, ctime_ns=0, digest="")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(image, str(error)) from None
        supported = " and ".join(map(str, layout.READABLE))
        if type(version) is not int or version not in layout.READABLE:
            raise ImageVersion(path=image, found=_short(version), supported=supported)
        try:
            manifest = _decode(fields, version)
            check(manifest)
        except codec.UnknownField as unknown:
            found = f"{version} with an unknown field {_short(unknown)}"
            raise ImageVersion(path=image, found=found, supported=supported) from None
        except ValueError as error:
            raise _damaged(image, str(error)) from None
        return manifest


def _decode(fields: dict[str, Any], version: int) -> Manifest:
    for name, since in LATER_LISTS.items():
        if version < since:
            if name in fields:
                raise codec.UnknownField(f"manifest.{name}")
            fields[name] = []
    return _decode_1(fields) if version == 1 else codec.decode(Manifest, fields)


_LATER_FIELDS: dict[str, Any] = {"extents": [], "reductions": [], "ghost": "none"}
_LATER_COUNTS = {"gpu_bytes_nonzero": 0, "gpu_bytes_distinct": 0}


def _decode_1(fields: dict[str, Any]) -> Manifest:
    """The manifest of an image of version 1, which has every chunk in its data files."""
    counts = fields.get("counts")
    if later := sorted(fields.keys() & _LATER_FIELDS):
        raise codec.UnknownField(f"manifest.{later[0]}")
    if isinstance(counts, dict):
        if later := sorted(counts.keys() & _LATER_COUNTS):
            raise codec.UnknownField(f"manifest.counts.{later[0]}")
        counts |= _LATER_COUNTS
    found = codec.decode(Manifest, fields | _LATER_FIELDS)
    active = found.counts.gpu_bytes_active
    return replace(
        found,
        extents=tuple(Extent(layout.gpu_data(gpu.index), gpu.data_bytes) for gpu in found.gpus),
        ghost="cold" if found.tasks else "none",
        counts=replace(found.counts, gpu_bytes_nonzero=active, gpu_bytes_distinct=active),
    )


def check(manifest: Manifest) -> None:
    """Raise ValueError unless the parts of the manifest fit one another."""
    _require(manifest.engine in ENGINES, f"engine {manifest.engine!r}")
    _require(manifest.engine == "replay" or not manifest.live, f"live with {manifest.engine}")
    _require(set(manifest.left_running) <= set(LEFT_RUNNING), "left_running")
    for name, choices in JOB_CHOICES.items():
        choice = getattr(manifest.job, name)
        _require(choice in choices, f"job.{name} {choice!r}")
    _require(manifest.gpu in GPU_KINDS, f"gpu {manifest.gpu!r}")
    for one in manifest.addresses:
        ipaddress.ip_address(one.host)
    _check_processes(manifest)
    for index, gpu in enumerate(manifest.gpus):
        _require(gpu.index == index, f"GPU number {gpu.index}")
        _check_blocks(gpu, len(manifest.tasks))
    _check_imports(manifest)
    _check_peers(manifest)
    sizes = _check_files(manifest)
    _check_open_files(manifest)
    _check_memory_files(manifest, sizes)
    for setting in manifest.settings:
        fits = bool(setting.threads) and all(0 < n <= layout.MOST_PID for n in setting.threads)
        _require(fits and bool(setting.values), f"the setting {setting.kind!r}")
    _check_extents(manifest, sizes)
    _check_packed(manifest, sizes)
    _check_assembled(manifest, sizes)
    if manifest.version > 1:
        _check_reductions(manifest, sizes)


def _check_processes(manifest: Manifest) -> None:
    pids, tasks = manifest.pids, [task.pid for task in manifest.tasks]
    _require(manifest.root_pid in pids, f"root pid {manifest.root_pid}")
    _require(all(0 < pid <= layout.MOST_PID for pid in pids), "a process id out of range")
    _require(len(set(pids)) == len(pids), "a process id twice")
    # A restore traces these processes, and ends them when it fails: they must be its own.
    _require(set(tasks) <= set(pids), "a task that is no process of the job")
    _require(len(set(tasks)) == len(tasks), "a task twice")
    streams = sorted(manifest.pipes)
    _require(streams == ["stderr", "stdout"], f"pipes {streams}")
    heirs = [one.process for one in manifest.inherited]
    _require(set(heirs) <= set(pids) and len(set(heirs)) == len(heirs), f"heirs {heirs}")
    whole = all(one.bytes and one.bytes % layout.PAGE_BYTES == 0 for one in manifest.inherited)
    _require(whole, "inherited bytes that are no pages")
    for name in manifest.pipes.values():
        _require(re.fullmatch(r"pipe:\[[0-9]+\]", name) is not None, f"pipe {name!r}")


def _check_files(manifest: Manifest) -> dict[str, int]:
    """Sizes of the listed files by path."""
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    _require(len(sizes) == len(manifest.files), "a file that is listed twice")
    for path in sizes:
        _require(layout.is_safe_path(path), f"path {path!r}")
        _require(path != layout.MANIFEST, "a manifest that lists itself")
    return sizes


def _check_open_files(manifest: Manifest) -> None:
    paths = [file.path for file in manifest.open_files]
    _require(len(set(paths)) == len(paths), "a file of the job's twice")
    for path in paths:
        _require(path.startswith("/"), f"{path!r} as a file of the job's")


def _check_memory_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    paths = [path for entry in manifest.memory_files for path in entry.paths]
    _require(len(set(paths)) == len(paths), "a file in memory twice")
    for index, entry in enumerate(manifest.memory_files):
        _require(entry.data == layout.memory_data(index), f"{entry.data} as a file in memory")
        _require(bool(entry.paths), f"{entry.data} without a path")
        _require(max(entry.mode, entry.folder_mode) <= 0o7777, f"the mode of {entry.data}")
        _require(all(len(run) == 2 for run in entry.runs), f"runs of {entry.data}")
        ends = [0, *(offset + length for offset, length in entry.runs)]
        ordered = all(run[0] >= end for run, end in zip(entry.runs, ends, strict=False))
        _require(ordered and ends[-1] <= entry.bytes, f"runs of {entry.data}")
        held = sum(length for _, length in entry.runs)
        _require(sizes.get(entry.data) == held, f"{entry.data} with {sizes.get(entry.data)} bytes")
    for link in manifest.links:
        paths += [link.path, link.of, link.opened]
    for path in paths:
        _require(path.startswith("/"), f"{path!r} as a file of the job's")


def _check_extents(manifest: Manifest, sizes: dict[str, int]) -> None:
    own, extents = len(manifest.gpus), manifest.extents
    _require(own <= len(extents) <= layout.MOST_EXTENTS, f"{len(extents)} extents")
    for index, extent in enumerate(extents):
        name = layout.gpu_data(index) if index < own else layout.link_data(index - own)
        _require(extent.file == name, f"extent {extent.file!r}")
        _require(name not in sizes, f"{name} as a file")
        expected = extent.slots * layout.DIGEST_BYTES
        digests = layout.digests_of(name)
        _require(sizes.get(digests) == expected, f"{digests} with {sizes.get(digests)} bytes")


def _check_packed(manifest: Manifest, sizes: dict[str, int]) -> None:
    names = [entry.file for entry in manifest.packed]
    extents = {extent.file: extent.bytes for extent in manifest.extents}
    _require(names == sorted(set(names)), "packed files out of order")
    for entry in manifest.packed:
        name, frames = entry.file, entry.frames
        fits = entry.plain.startswith(f"{layout.CRIU_DIR}/") or entry.plain in extents
        _require(fits and name == layout.packed(entry.plain), f"{name} as a packed file")
        whole = extents.get(entry.plain, entry.bytes)
        _require(entry.bytes == whole, f"{name} for {entry.bytes} bytes of {whole}")
        _require(entry.plain not in sizes, f"{entry.plain} beside {name}")
        _require(entry.bytes > 0, f"nothing in {name}")
        _require(len(frames) == -(-entry.bytes // layout.FRAME_BYTES), f"{len(frames)} frames")
        _require(all(0 < size <= 2 * layout.FRAME_BYTES for size in frames), "a frame's size")
        _require(sizes.get(name) == sum(frames), f"{name} with {sizes.get(name)} bytes")


def _check_assembled(manifest: Manifest, sizes: dict[str, int]) -> None:
    names = [entry.file for entry in manifest.assembled]
    _require(names == sorted(set(names)), "assembled files out of order")
    expected = {*map(layout.page_table, names), *manifest.page_sources}
    found = {path for path in sizes if path.startswith("pages")}
    _require(found == expected, f"{min(found ^ expected, default='')} of shared pages")
    for name in manifest.page_sources:
        _require(sizes[name] % layout.PAGE_BYTES == 0, f"{name} of {sizes[name]} bytes")
    for entry in manifest.assembled:
        _require(layout.is_pages(entry.file), f"{entry.file} as an assembled file")
        taken = entry.file in sizes or layout.packed(entry.file) in sizes
        _require(not taken, f"{entry.file}, and a table for it")
        pages, rest = divmod(entry.bytes, layout.PAGE_BYTES)
        _require(pages > 0 and rest == 0, f"{entry.file} of {entry.bytes} bytes")
        size = sizes[layout.page_table(entry.file)]
        fits = size % layout.ROW_BYTES == 0 and 0 < size <= pages * layout.ROW_BYTES
        _require(fits, f"a table of {size} bytes for {pages} pages")


def version_of(packed: Sequence[Packed], assembled: Sequence[Assembled]) -> int:
    """The format version of a new image with these."""
    if assembled:
        return layout.SHARED_VERSION
    return layout.PACKED_VERSION if packed else layout.VERSION


def _check_reductions(manifest: Manifest, sizes: dict[str, int]) -> None:
    """What version 2 asks for beyond version 1."""
    expected = version_of(manifest.packed, manifest.assembled)
    _require(manifest.version == expected, f"version {manifest.version}")
    _require(manifest.ghost in GHOSTS, f"ghost {manifest.ghost!r}")
    for extent in manifest.extents:
        _require(extent.bytes % layout.CHUNK_BYTES == 0, f"{extent.file} of {extent.bytes} bytes")
    for gpu in manifest.gpus:
        aligned = all(block.bytes % layout.CHUNK_BYTES == 0 for block in gpu.blocks)
        _require(aligned, f"a block of GPU {gpu.index} that is no number of chunks")
        count = layout.chunk_count(gpu.data_bytes)
        _require(count <= layout.MOST_CHUNKS, f"{count} chunks of GPU {gpu.index}")
        table = layout.gpu_chunks(gpu.index)
        size = sizes.get(table, -1)
        fits = size % layout.ROW_BYTES == 0 and 0 <= size <= count * layout.ROW_BYTES
        _require(fits, f"{table} with {size} bytes")
    known = [name for name in REDUCTIONS if name in manifest.reductions]
    _require(list(manifest.reductions) == known, f"reductions {list(manifest.reductions)}")
    _check_counts(manifest)


def _check_counts(manifest: Manifest) -> None:
    counts = manifest.counts
    falling: Sequence[int] = (
        counts.gpu_bytes_reserved,
        counts.gpu_bytes_active,
        counts.gpu_bytes_nonzero,
        counts.gpu_bytes_distinct,
    )
    _require(list(falling) == sorted(falling, reverse=True), f"growing counts {falling}")
    own = sum(extent.bytes for extent in manifest.extents[: len(manifest.gpus)])
    _require(counts.gpu_bytes_stored == own, f"{counts.gpu_bytes_stored} bytes stored of {own}")


def _check_blocks(gpu: Gpu, tasks: int) -> None:
    end = 0
    for block in gpu.blocks:
        _require(block.task < tasks, f"task number {block.task}")
        _require(block.device < 1 << 32, f"device {block.device}")
        _require(block.address + block.bytes <= 1 << 64, f"a block at {block.address:#x}")
        _require(block.bytes > 0 and block.offset == end, f"block {block.id} of GPU {gpu.index}")
        end += block.bytes
    _require(end == gpu.data_bytes, f"data of {gpu.data_bytes} bytes for blocks of {end}")
    by_address = sorted(gpu.blocks, key=lambda block: (block.task, block.address))
    for first, second in pairwise(by_address):
        apart = first.task != second.task or first.address + first.bytes <= second.address
        _require(apart, f"blocks {first.id} and {second.id} at one address")


def _check_imports(manifest: Manifest) -> None:
    sizes = {(block.task, block.id): block.bytes for gpu in manifest.gpus for block in gpu.blocks}
    ranges = [(b.task, b.address, b.bytes) for gpu in manifest.gpus for b in gpu.blocks]
    known = set(sizes)
    for one in manifest.imports:
        name = f"import {one.id} of task number {one.task}"
        size = sizes.get((one.owner, one.block))
        _require(one.task < len(manifest.tasks) and (one.task, one.id) not in known, name)
        known.add((one.task, one.id))
        if size is None:
            raise ValueError(f"it has {name} of a block that is not there, which does not fit")
        _require(one.address + size <= 1 << 64 and one.device < 1 << 32, name)
        ranges.append((one.task, one.address, size))
    if manifest.imports:
        for first, second in pairwise(sorted(ranges)):
            apart = first[0] != second[0] or first[1] + first[2] <= second[1]
            _require(apart, f"memory at {second[1]:#x} of task number {second[0]} twice")


def _check_peers(manifest: Manifest) -> None:
    numbers = range(len(manifest.gpus))
    pairs = [(one.gpu, one.other) for one in manifest.peers]
    whole = sorted(pairs) == [(a, b) for a in numbers for b in numbers if a != b]
    _require(whole or not pairs, "how its GPUs reach each other")


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
    return ImageDamaged(path=image, reason=f"{layout.MANIFEST}: {_short(reason)}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
