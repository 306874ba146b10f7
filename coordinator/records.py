"""What the manifest of an image says of a job, from what a checkpoint knows."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import flowgpu
from coordinator import faults
from flowgpu import launch, wire
from flowgpu.host import addresses, processor
from flowgpu.image import layout
from flowgpu.image import manifest as m
from flowgpu.image.digests import Meter, ProgressFunction, Unreadable, file_digests
from flowgpu.jobs import JobDir
from flowgpu.output_log import missed

if TYPE_CHECKING:
    from coordinator.copy_out import CopyOut
    from coordinator.cpu_side import CpuSide
    from coordinator.session import RunningJob, Shared
    from coordinator.task_group import TaskGroup
    from flowgpu.image.writer import ImageWriter


@dataclass(frozen=True)
class Times:
    """What a checkpoint has taken so far; all as in the manifest."""

    left_running: Mapping[str, float]
    phases: Mapping[str, float]
    pause_seconds: float
    total_seconds: float


@dataclass(frozen=True)
class GpuSide:
    """What is known of the GPUs' part once their bytes are where they are kept; fields as in the
    manifest."""

    engine: str
    engine_reason: str
    live: bool
    ghost: str
    tasks: tuple[m.Task, ...]
    gpus: tuple[m.Gpu, ...]
    imports: tuple[m.Import, ...]
    peers: tuple[m.Peer, ...]
    reductions: tuple[str, ...]
    gpu_bytes_reserved: int
    gpu_bytes_active: int
    gpu_bytes_nonzero: int
    gpu_bytes_distinct: int
    gpu_bytes_stored: int
    not_kept: tuple[str, ...]
    """What tasks will have lost, in words."""


def gpu_side(
    shared: Shared, group: TaskGroup, copy: CopyOut, foreign_bytes: int, ghost: str
) -> GpuSide:
    """What a checkpoint says of them once its copy is placed."""
    plan, replies = shared.plan, group.replies
    tasks = sorted(replies)
    blocks = sum(block.row.size for block in shared.table.saved())
    return GpuSide(
        engine=plan.engine.name.lower() if tasks else "none",
        engine_reason=plan.reason if tasks else "",
        live=plan.keeps_cuda and bool(tasks),
        ghost=ghost,
        tasks=tuple(_task(pid, replies[pid]) for pid in tasks),
        gpus=tuple(_gpus(shared, copy, tasks)),
        imports=tuple(_imports(shared, tasks)),
        peers=tuple(_peers(shared, group, copy)),
        reductions=tuple(_used(shared, copy)),
        gpu_bytes_reserved=blocks + foreign_bytes,
        gpu_bytes_active=sum(one.active for one in copy.reduced),
        gpu_bytes_nonzero=sum(one.nonzero for one in copy.reduced),
        gpu_bytes_distinct=sum(one.distinct for one in copy.reduced),
        gpu_bytes_stored=copy.stored,
        not_kept=tuple(f"process {pid}: {words}" for pid, words in sorted(group.not_kept.items())),
    )


@dataclass(frozen=True)
class Facts:
    """What a checkpoint has found out by the time its image is sealed."""

    shared: Shared
    gpu: GpuSide
    cpu: CpuSide
    not_kept: Sequence[str]
    mode: str  # these three as in the manifest
    rung: str
    times: Callable[[], Times]
    progress: ProgressFunction  # of the seal
    packed: Sequence[m.Packed]  # of this checkpoint's own files


def write_manifest(facts: Facts) -> m.Manifest:
    """Seal the files of an image and commit it with its manifest."""
    writer, job, cpu, gpu = facts.shared.image, facts.shared.job, facts.cpu, facts.gpu
    faults.check_write(writer.path, faults.IMAGE_WRITE)
    assembled = writer.share_pages()
    _write_timeline(writer, facts)
    files = writer.seal(facts.progress)
    times = facts.times()
    packed = sorted((*facts.packed, *writer.packed_links), key=lambda entry: entry.file)
    system = os.uname()
    manifest = m.Manifest(
        version=m.version_of(packed, assembled),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        flowgpu=flowgpu.__version__,
        criu=".".join(map(str, cpu.criu.version)),
        engine=gpu.engine,
        engine_reason=gpu.engine_reason,
        live=gpu.live,
        mode=facts.mode,
        rung=facts.rung,
        left_running=dict(times.left_running),
        gpu=job.gpu if gpu.tasks else "none",
        job=m.Job(
            id=job.id,
            name=job.name,
            command=tuple(job.command),
            cwd=job.cwd,
            ghost=job.ghost,
            engine=job.engine,
        ),
        host=m.Host(name=system.nodename, kernel=system.release, machine=system.machine),
        addresses=_addresses(job),
        cpu_features=processor.features(),
        affinities=cpu.affinities,
        settings=(*cpu.survey.settings, *cpu.places),
        not_kept=tuple(facts.not_kept),
        root_pid=job.root_pid,
        pids=tuple(cpu.pids),
        pipes={stream: f"pipe:[{inode}]" for stream, inode in job.pipes.items()},
        tasks=gpu.tasks,
        gpus=gpu.gpus,
        imports=gpu.imports,
        peers=gpu.peers,
        extents=writer.extents(),
        reductions=gpu.reductions,
        ghost=gpu.ghost,
        libraries=libraries() if gpu.tasks else (),
        counts=_counts(writer, facts, assembled),
        phases=dict(times.phases),
        pause_seconds=times.pause_seconds,
        total_seconds=times.total_seconds,
        files=files,
        open_files=cpu.open_files,
        memory_files=tuple(cpu.files.files),
        links=tuple(cpu.files.links),
        inherited=cpu.pages.inherited,
        packed=tuple(packed),
        assembled=assembled,
    )
    faults.check_write(writer.path / layout.MANIFEST, faults.IMAGE_WRITE)
    writer.commit(manifest)
    return manifest


def _addresses(job: RunningJob) -> tuple[m.Address, ...]:
    """Those of the host; or where a restore has given the job loopback's, as nodes have them that
    share a host, these alone."""
    try:
        restored = JobDir(job.directory).read().restored or {}
        given = restored.get("addresses", {}).values()
        if own := [host for host in given if addresses.is_loopback(host)]:
            return tuple(m.Address("lo", host) for host in own)
        return tuple(addresses.here(job.path or addresses.own_toward()))
    except (OSError, ValueError):  # a restore knows then what sockets have
        return ()


def _write_timeline(writer: ImageWriter, facts: Facts) -> None:
    """What has not ended by now ends with the checkpoint."""
    data = json.dumps(facts.shared.timeline.to_json()).encode()
    faults.check_write(writer.path / layout.TIMELINE, faults.IMAGE_WRITE)
    with open(writer.path / layout.TIMELINE, "xb", opener=layout.private) as file:
        file.write(data)


def _task(pid: int, reply: wire.Reply) -> m.Task:
    return m.Task(pid=pid, allocations=reply.allocations, allocation_bytes=reply.allocation_bytes)


def _gpus(shared: Shared, copy: CopyOut, tasks: Sequence[int]) -> list[m.Gpu]:
    found = []
    for ordinal, index in sorted(copy.indexes.items(), key=lambda pair: pair[1]):
        gpu = next(gpu for gpu in shared.link.gpus if gpu.ordinal == ordinal)
        own = sorted(
            (block for block in shared.table.saved() if block.gpu == ordinal),
            key=lambda block: block.offset,
        )
        found.append(
            m.Gpu(
                index=index,
                name=gpu.name,
                uuid=gpu.uuid,
                memory_bytes=gpu.memory,
                compute_capability=gpu.capability,
                driver=str(shared.link.driver_version),
                data_bytes=sum(block.row.size for block in own),
                blocks=tuple(
                    m.Block(
                        task=tasks.index(block.pid),
                        id=block.row.id,
                        address=block.row.address,
                        bytes=block.row.size,
                        offset=block.offset,
                        device=block.row.device,
                    )
                    for block in own
                ),
            )
        )
    return found


def _imports(shared: Shared, tasks: Sequence[int]) -> Iterator[m.Import]:
    for block in shared.table.imports():
        if block.of is None:
            raise RuntimeError(f"nobody knows whose block {block.row.id} of task {block.pid} is")
        yield m.Import(
            task=tasks.index(block.pid),
            id=block.row.id,
            address=block.row.address,
            device=block.row.device,
            owner=tasks.index(block.of.pid),
            block=block.of.row.id,
        )


def _peers(shared: Shared, group: TaskGroup, copy: CopyOut) -> Iterator[m.Peer]:
    """Nothing where no memory is shared: such a job does not mind."""
    if not shared.table.imports() and (group.cut is None or shared.plan.rebuilds):
        return
    gpus = {gpu.ordinal: gpu for gpu in shared.link.gpus}
    indexes = copy.indexes
    for ordinal, index in indexes.items():
        for other, number in indexes.items():
            if other != ordinal:
                yield m.Peer(gpu=index, other=number, **gpus[ordinal].peers[other])


@functools.cache
def libraries() -> tuple[m.Library, ...]:
    """What is loaded into tasks, as it was found first: a build may have replaced it since."""
    found = launch.task_libraries()
    return tuple(m.Library(path=str(path), digest=_digest(path)) for path in found)


def is_same(library: m.Library) -> bool:
    """True if the library of an image is there with the bytes that it had."""
    try:
        return _digest(Path(library.path)) == library.digest
    except (OSError, Unreadable):
        return False


def _digest(path: Path) -> str:
    size = path.stat().st_size
    return file_digests([(path, size)], Meter("libraries", size, None))[0]


def _used(shared: Shared, copy: CopyOut) -> list[str]:
    """The reductions that every GPU has used."""
    asked = shared.plan.options.reductions
    return [name for name in asked if all(name in one.reductions for one in copy.reduced)]


def _counts(writer: ImageWriter, facts: Facts, assembled: Sequence[m.Assembled]) -> m.Counts:
    gpu = facts.gpu
    return m.Counts(
        gpu_bytes_reserved=gpu.gpu_bytes_reserved,
        gpu_bytes_active=gpu.gpu_bytes_active,
        gpu_bytes_nonzero=gpu.gpu_bytes_nonzero,
        gpu_bytes_distinct=gpu.gpu_bytes_distinct,
        gpu_bytes_stored=gpu.gpu_bytes_stored,
        cpu_bytes=sum(path.stat().st_size for path in writer.criu_dir.glob("pages-*.img"))
        + sum(entry.bytes for entry in facts.packed if not layout.is_extent(entry.plain))
        + sum(entry.bytes for entry in assembled),
        image_bytes=writer.image_bytes(),
        allocations=sum(task.allocations for task in gpu.tasks),
    )


def copy_log(source: Path, target: Path, start: int, end: int) -> None:
    """Copy the output log from `start` to `end`: what came later is not the checkpoint's."""
    faults.check_write(target, faults.IMAGE_WRITE)
    with open(source, "rb") as before, open(target, "xb") as after:
        if start:
            after.write(missed(start))
        before.seek(start)
        left = end - start
        while left > 0 and (data := before.read(min(left, 1 << 20))):
            after.write(data)
            left -= len(data)
