"""A pod's processes on this node, and `flowgpu` run in its containers (`enter.py`).

A container's processes are those of its control group, whose path has the pod's uid and then the
container's id: `…/kubepods-pod<uid>.slice/cri-containerd-<id>.scope` or `…/pod<uid>/<id>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowgpu.errors import FlowError, all_errors
from flowgpu.host.probes import libc
from flowgpu.jobs import LIVE_STATES, start_time
from flowgpu.kubernetes import enter

PROC = Path("/proc")
SYS_OPENAT2, RESOLVE_IN_ROOT = 437, 0x10  # linux/openat2.h


class Failed(Exception):
    """No image was taken: `reason` is a word for programs, and the message for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Job:
    """What `flowgpu ps` says of a job in a container."""

    name: str
    state: str
    store: str | None


def container_id(cgroups: str, uid: str) -> str | None:
    """Id of the container of pod `uid` that a process of this /proc/PID/cgroup is in."""
    for line in cgroups.splitlines():
        parts = line.split(":", 2)[-1].split("/")
        for pod, scope in pairwise(parts):
            if uid in pod.replace("_", "-") and "conmon" not in scope:
                return scope.removesuffix(".scope").rpartition("-")[2]
    return None


def first_processes(uid: str, proc: Path = PROC) -> dict[str, int]:
    """The process that each container of the pod was started with, by the container's id."""
    first: dict[str, tuple[int, int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found = container_id((entry / "cgroup").read_text(), uid)
                began, pid = start_time(int(entry.name)), int(entry.name)
                if found and began:  # else it has ended
                    first[found] = min(first.get(found, (began, pid)), (began, pid))
    return {one: pid for one, (_, pid) in first.items()}


def container_ids(pod: Mapping[str, Any]) -> dict[str, str]:
    """Names of the pod's running containers -> their ids."""
    found = pod.get("status", {}).get("containerStatuses", ())
    return {
        one["name"]: one["containerID"].partition("://")[2]
        for one in found
        if one.get("containerID") and "running" in one.get("state", {})
    }


def _open_below(root: Path, folder: str) -> int:
    """A folder as processes with this root find it: no link in it leads out. Raises OSError."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    at = os.open(root, flags)
    try:
        how = struct.pack("QQQ", flags, 0, RESOLVE_IN_ROOT)
        fd = int(libc().syscall(SYS_OPENAT2, at, os.fsencode(folder), how, len(how)))
        if fd < 0:
            raise OSError(error := ctypes.get_errno(), os.strerror(error), folder)
        return fd
    finally:
        os.close(at)


class Container:
    """One container of a pod, as long as its first process is there."""

    def __init__(self, name: str, first: int) -> None:
        self.name = name
        self._first = first

    async def jobs(self) -> list[Job]:
        """Raises Failed."""
        rows = json.loads(await self._flowgpu("ps", "--json"))
        return [
            Job(row["name"], row["state"], row.get("store"))
            for row in rows
            if row["state"] in LIVE_STATES
        ]

    def open(self, folder: str) -> int:
        """Descriptor of a folder in it, which outlives the container. Raises Failed."""
        try:
            return _open_below(PROC / str(self._first) / "root", folder)
        except OSError as error:
            raise Failed(
                "StoreUnusable", f"container {self.name} has no folder {folder}: {error.strerror}"
            ) from error

    async def dump(self, job: Job, image: str, *, stop: bool, timeout: float | None) -> None:
        """Write an image of the job. Raises Failed."""
        verb = "pause-and-dump" if stop else "checkpoint"
        limit = ["--timeout", str(timeout)] if timeout else []
        await self._flowgpu(verb, job.name, "--output", image, *limit)

    async def _flowgpu(self, *arguments: str) -> str:
        if not self._has_our_users():
            words = f"container {self.name} has ended, or has a user namespace of its own"
            raise Failed("ContainerUnusable", words)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", enter.__name__, str(self._first), "flowgpu", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        out, err = await process.communicate()
        if process.returncode:
            raise self._failure(process.returncode, err.decode(errors="replace"))
        return out.decode(errors="replace")

    def _has_our_users(self) -> bool:
        with contextlib.suppress(OSError):
            return os.readlink(PROC / str(self._first) / "ns/user") == os.readlink(
                "/proc/self/ns/user"
            )
        return False

    def _failure(self, code: int, said: str) -> Failed:
        if code == enter.ENDED:
            return Failed("ContainerEnded", f"container {self.name} has ended")
        if code == enter.NOT_FOUND:
            return Failed("NoFlowGPU", f"container {self.name} has no program flowgpu in its PATH")
        lines = [line for line in said.splitlines() if line and not line.startswith("hint:")]
        words = lines[-1].removeprefix("Error: ") if lines else f"flowgpu ended with {code}"
        return Failed(error_name(code), words)


def error_name(code: int) -> str:
    """The class of FlowGPU's errors with this exit code."""
    return next((cls.__name__ for cls in all_errors() if cls.exit_code == code), FlowError.__name__)
