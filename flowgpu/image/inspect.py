"""What an image holds, as data for people and programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowgpu.image import layout
from flowgpu.image.manifest import Gpu
from flowgpu.image.reader import Image


def summary(path: Path) -> dict[str, Any]:
    """JSON-ready description of an image; opens it, without verifying its bytes.

    Raises ImageDamaged, ImageVersion.
    """
    manifest = Image(path).manifest
    counts = manifest.counts
    return {
        "image": str(path),
        "version": layout.VERSION,
        "created": manifest.created,
        "flowgpu": manifest.flowgpu,
        "criu": manifest.criu,
        "engine": manifest.engine,
        "gpu": manifest.gpu,
        "job": {
            "id": manifest.job.id,
            "name": manifest.job.name,
            "command": list(manifest.job.command),
            "cwd": manifest.job.cwd,
        },
        "host": {"name": manifest.host.name, "kernel": manifest.host.kernel},
        "processes": len(manifest.pids),
        "gpu_bytes_reserved": counts.gpu_bytes_reserved,
        "gpu_bytes_active": counts.gpu_bytes_active,
        "gpu_bytes_stored": counts.gpu_bytes_stored,
        "cpu_bytes": counts.cpu_bytes,
        "image_bytes": counts.image_bytes,
        "allocations": counts.allocations,
        "tasks": [
            {"pid": task.pid, "allocations": task.allocations, "bytes": task.allocation_bytes}
            for task in manifest.tasks
        ],
        "gpus": [_gpu(gpu) for gpu in manifest.gpus],
        "pause_seconds": manifest.pause_seconds,
        "total_seconds": manifest.total_seconds,
        "phases": {f"{name}_seconds": value for name, value in manifest.phases.items()},
        "files": len(manifest.files) + len(manifest.gpus) + 1,
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_bytes": gpu.memory_bytes,
        "compute_capability": gpu.compute_capability,
        "driver": gpu.driver,
        "blocks": len(gpu.blocks),
        "data_bytes": gpu.data_bytes,
    }
