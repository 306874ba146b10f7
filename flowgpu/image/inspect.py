"""What an image holds, as data for people and programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowgpu.errors import ImageDamaged, RecordMissing
from flowgpu.image import chunks, layout
from flowgpu.image.chunks import ChunkTable, Kind
from flowgpu.image.manifest import LEFT_RUNNING, Gpu
from flowgpu.image.reader import Image
from flowgpu.vocabulary import GPU_STAGES


def summary(path: Path) -> dict[str, Any]:
    """JSON-ready description of an image; opens it, without verifying its bytes.

    Raises ImageDamaged, ImageVersion.
    """
    image = Image(path)
    manifest = image.manifest
    counts = manifest.counts
    tables = [image.chunk_table(gpu.index) for gpu in manifest.gpus]
    return {
        "image": str(path),
        "version": manifest.version,
        "created": manifest.created,
        "flowgpu": manifest.flowgpu,
        "criu": manifest.criu,
        "engine": manifest.engine,
        "engine_reason": manifest.engine_reason or None,
        "live": manifest.live,
        "mode": manifest.mode or None,
        "rung": manifest.rung or None,
        **{f"{what}_seconds": manifest.left_running.get(what) for what in LEFT_RUNNING},
        "gpu": manifest.gpu,
        "job": {
            "id": manifest.job.id,
            "name": manifest.job.name,
            "command": list(manifest.job.command),
            "cwd": manifest.job.cwd,
            "ghost": manifest.job.ghost,
            "engine": manifest.job.engine,
        },
        "host": {"name": manifest.host.name, "kernel": manifest.host.kernel},
        "cpu_features": list(manifest.cpu_features),
        "not_kept": list(manifest.not_kept),
        "processes": len(manifest.pids),
        "gpu_bytes_reserved": counts.gpu_bytes_reserved,
        "gpu_bytes_active": counts.gpu_bytes_active,
        "gpu_bytes_nonzero": counts.gpu_bytes_nonzero,
        "gpu_bytes_distinct": counts.gpu_bytes_distinct,
        "gpu_bytes_stored": counts.gpu_bytes_stored,
        "gpu_bytes_linked": manifest.linked_bytes,
        "gpu_bytes_replicated": chunks.replicated(tables) * layout.CHUNK_BYTES,
        "reductions": list(manifest.reductions),
        "ghost": manifest.ghost,
        "cpu_bytes": counts.cpu_bytes,
        "cpu_bytes_linked": manifest.linked_page_bytes,
        "cpu_bytes_inherited": manifest.inherited_bytes,
        "image_bytes": counts.image_bytes,
        "allocations": counts.allocations,
        "tasks": [
            {"pid": task.pid, "allocations": task.allocations, "bytes": task.allocation_bytes}
            for task in manifest.tasks
        ],
        "gpus": [
            _gpu(gpu, table, len(tables)) for gpu, table in zip(manifest.gpus, tables, strict=True)
        ],
        "extents": [
            {"file": extent.file, "bytes": extent.bytes, "linked": number >= len(manifest.gpus)}
            for number, extent in enumerate(manifest.extents)
        ],
        "packed": [
            {"file": entry.file, "bytes": sum(entry.frames), "plain_bytes": entry.bytes}
            for entry in manifest.packed
        ],
        "pause_seconds": manifest.pause_seconds,
        "total_seconds": manifest.total_seconds,
        "phases": {f"{name}_seconds": value for name, value in manifest.phases.items()},
        "files": len(manifest.files) + len(manifest.extents) + 1,
    }


def record(path: Path) -> list[dict[str, Any]]:
    """JSON-ready list of the CUDA objects of each process of an image, in the order in which they
    are made again.

    Raises ImageDamaged, ImageVersion, RecordMissing.
    """
    image = Image(path)
    found = []
    for task in image.manifest.tasks:
        name = layout.record(task.pid)
        data = image.read_small(name)
        if data is None:
            continue
        try:
            objects = [json.loads(line) for line in data.splitlines()]
        except ValueError as error:
            raise ImageDamaged(path=path, reason=f"{name}: {error}") from None
        found.append({"pid": task.pid, "objects": objects})
    if not found:
        engine = image.manifest.engine
        reason = "it has no process with a GPU" if not image.manifest.tasks else f"engine {engine}"
        raise RecordMissing(path=path, reason=reason)
    return found


def stages(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(name, bytes) of GPU data after each reduction, of a summary or a checkpoint's report."""
    return [(stage, data[f"gpu_bytes_{stage}"]) for stage in GPU_STAGES]


def _gpu(gpu: Gpu, table: ChunkTable, gpus: int) -> dict[str, Any]:
    rows = table.rows
    shared = rows["kind"] == Kind.SHARED
    own = rows["extent"] == gpu.index

    def size(which: Any) -> int:
        return int(rows["count"][which].sum(dtype="u8")) * layout.CHUNK_BYTES

    return {
        "index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_bytes": gpu.memory_bytes,
        "compute_capability": gpu.compute_capability,
        "driver": gpu.driver,
        "blocks": len(gpu.blocks),
        "data_bytes": gpu.data_bytes,
        # Where its chunks are; the last three are not stored again.
        "inactive_bytes": size(rows["kind"] == Kind.INACTIVE),
        "zero_bytes": size(rows["kind"] == Kind.ZERO),
        "stored_bytes": size(rows["kind"] == Kind.STORED),
        "same_gpu_bytes": size(shared & own),
        "other_gpu_bytes": size(shared & ~own & (rows["extent"] < gpus)),
        "linked_bytes": size(shared & (rows["extent"] >= gpus)),
    }
