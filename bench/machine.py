"""What the numbers were measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from flowgpu import __version__
from flowgpu.errors import CriuMissing
from flowgpu.host import probes
from flowgpu.host.criu import Criu

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cuda-bindings", "torch", "transformers", "numpy")


def facts() -> dict[str, Any]:
    """Processor, memory, kernel and versions; the GPU's own come from rates.py."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory("MemTotal"),
        "kernel": platform.release(),
        "driver": probes.driver_release() or None,
        "python": platform.python_version(),
        "flowgpu": __version__,
        "criu": _criu(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def heading(kind: str, command: str) -> dict[str, Any]:
    """What a document of results of this kind begins with: when, how and on what it was made."""
    return {
        "kind": kind,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "commit": commit(),
        "machine": facts(),
    }


def keep_row(document: dict[str, Any], row: dict[str, Any], shown: str, out: Path | None) -> None:
    """Add a row to the document, show it, and write all so far, where that is asked for: a call
    that is cut off has it then."""
    document["rows"].append(row)
    print(shown, flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(document, indent=1))


def of_module(module: str) -> str:
    """The command that this process is, by its module."""
    return " ".join([f"python -m {module}", *sys.argv[1:]])


def commit() -> str | None:
    """The commit of this checkout, with `+` behind it if files differ from it; None without git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("FLOWGPU_COMMIT")


class Mapping(NamedTuple):
    """A line of /proc/self/maps; `path` is empty where it has none."""

    start: int
    end: int
    mode: str
    offset: int
    path: str


def mappings() -> list[Mapping]:
    """Mappings of this process, by address."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, mode, offset, _, _, *path = line.split(None, 5)
        start, end = (int(word, 16) for word in where.split("-"))
        found.append(Mapping(start, end, mode, int(offset, 16), path[0] if path else ""))
    return found


def memory(key: str) -> int:
    """Bytes that /proc/meminfo has for `key`."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) << 10
    raise KeyError(key)


def wait_for_memory(wanted: int, seconds: float = 60.0) -> None:
    """Wait until `wanted` bytes are available: freeing a large image goes on behind its removal."""
    deadline = time.monotonic() + seconds
    while memory("MemAvailable") < wanted and time.monotonic() < deadline:
        time.sleep(0.1)


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _criu() -> str | None:
    """The version; None on a machine without CRIU, which only runs kernels."""
    with suppress(CriuMissing):
        return ".".join(map(str, Criu.locate().version))
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
