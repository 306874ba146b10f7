"""Check whether this machine can checkpoint and restore, and say how to mend what it lacks."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from flowgpu import launch
from flowgpu.errors import CriuMissing, NotBuilt
from flowgpu.host import probes
from flowgpu.host.criu import Criu

Status = Literal["ok", "warn", "fail"]
THP = Path("/sys/kernel/mm/transparent_hugepage")
MINIMUM_OPEN_FILES = 4096
NATIVE_ENGINE_RELEASE = 570


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    `fail` means that a checkpoint or restore cannot work here, `warn` that something is slower or
    not available. `meaning` says what it is good for, `mend` what to do; empty when ok.
    """

    name: str
    status: Status
    found: str
    meaning: str
    mend: str = ""


def checks() -> list[Check]:
    """All checks, in the order in which they matter."""
    groups: Sequence[Callable[[], Iterator[Check]]] = (
        check_driver,
        check_criu,
        check_capabilities,
        check_kernel,
        check_memory,
        check_libraries,
    )
    return [check for group in groups for check in group()]


def as_json(found: Sequence[Check]) -> dict[str, Any]:
    """JSON-ready form: the worst status, and every check."""
    worst = next((s for s in ("fail", "warn") if any(c.status == s for c in found)), "ok")
    return {"status": worst, "checks": [asdict(check) for check in found]}


def render(found: Sequence[Check], file: TextIO | None = None) -> None:
    """Print a table, then what to do about each check that is not ok."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = file or sys.stdout
    console = Console(file=out, width=None if out.isatty() else 160)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found", "needed for"):
        table.add_column(column, overflow="fold")
    for check in found:
        status = Text(check.status, style=colours[check.status])
        table.add_row(Text(check.name), status, Text(check.found), Text(check.meaning))
    console.print(table)
    for check in found:
        if check.mend:
            console.print(Text.assemble((f"{check.name}: ", colours[check.status]), check.mend))


def _check(good: bool, bad: Status, name: str, found: str, meaning: str, mend: str) -> Check:
    """A check that is ok, or `bad` with its remedy."""
    return Check(name, "ok" if good else bad, found, meaning, "" if good else mend)


def check_driver() -> Iterator[Check]:
    """The NVIDIA driver and its GPUs."""
    libcuda = launch.find_nvidia_libcuda()
    if libcuda is None:
        yield Check(
            "driver",
            "warn",
            "no libcuda.so.1",
            "jobs on a real GPU",
            "Install NVIDIA's driver, or use the emulated GPU.",
        )
        return
    answer = probes.driver(libcuda)
    release = answer.release or "unknown release"
    yield _check(
        not answer.error,
        "fail",
        "driver",
        f"{libcuda.resolve()} ({release}, CUDA {answer.cuda or '?'}){answer.error and ': '}"
        f"{answer.error}",
        "jobs on a real GPU",
        "See that the kernel module is loaded and that this user may open /dev/nvidia*.",
    )
    yield _check(
        bool(answer.gpus),
        "fail",
        "GPUs",
        ", ".join(f"{name} ({size >> 20} MiB)" for name, size in answer.gpus) or "none",
        "jobs on a real GPU",
        "Give the container or user access to a GPU.",
    )
    yield _check(
        answer.has_checkpoint_api,
        "warn",
        "native engine",
        "there" if answer.has_checkpoint_api else "not in this driver",
        "--engine native",
        f"Install driver {NATIVE_ENGINE_RELEASE} or newer; without it, only jobs that the replay "
        "engine can save are checkpointed.",
    )


def check_criu() -> Iterator[Check]:
    """CRIU and its view of the kernel."""
    meaning = "the CPU side of every checkpoint"
    try:
        criu = Criu.locate()
        version = ".".join(map(str, criu.version))
        if os.geteuid() == 0 or probes.capabilities() & probes.CHECKPOINT_RIGHTS:
            criu.check()
        yield Check("CRIU", "ok", f"{version} ({criu.program})", meaning)
    except CriuMissing as error:
        yield Check("CRIU", "fail", str(error.fields["reason"]), meaning, CriuMissing.hint)


def check_capabilities() -> Iterator[Check]:
    """What this process may do to other processes."""
    have = probes.capabilities()
    yield _check(
        bool(have & probes.CHECKPOINT_RIGHTS),
        "fail",
        "checkpoint right",
        ", ".join(sorted(have & probes.CHECKPOINT_RIGHTS)) or "none",
        "CRIU",
        "Run as root, or grant CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE.",
    )
    yield _check(
        "CAP_SYS_PTRACE" in have,
        "fail",
        "trace right",
        "CAP_SYS_PTRACE" if "CAP_SYS_PTRACE" in have else "none",
        "CRIU",
        "Run as root, or grant CAP_SYS_PTRACE.",
    )
    yield _check(
        "CAP_SYS_RESOURCE" in have,
        "warn",
        "limits right",
        "CAP_SYS_RESOURCE" if "CAP_SYS_RESOURCE" in have else "none",
        "jobs with a process of another user",
        "Grant CAP_SYS_RESOURCE, or run all processes of a job as one user.",
    )
    yield _check(
        "CAP_SYS_TIME" in have,
        "fail",
        "clock right",
        "CAP_SYS_TIME" if "CAP_SYS_TIME" in have else "none",
        "restores: a job's own clock goes on",
        "Run as root, or grant CAP_SYS_TIME.",
    )
    yield _check(
        probes.may_restore_bounding_set(),
        "fail",
        "bounding set",
        "full" if probes.bounding_set_is_full() else "not full",
        "restores: where it is not full, CAP_SETPCAP",
        "Run as root, or grant CAP_SETPCAP.",
    )
    scope = probes.ptrace_scope()
    yield _check(
        scope < 3,
        "fail",
        "ptrace scope",
        str(scope),
        "CRIU",
        "Set kernel.yama.ptrace_scope below 3; 3 lasts until the next boot.",
    )
    yield _check(
        "CAP_NET_ADMIN" in have,
        "warn",
        "network right",
        "CAP_NET_ADMIN" if "CAP_NET_ADMIN" in have else "none",
        "jobs with open TCP connections",
        "Grant CAP_NET_ADMIN, or close connections before a checkpoint.",
    )


def check_kernel() -> Iterator[Check]:
    """Kernel features by use, not by version."""
    release = platform.release()
    features: list[tuple[str, bool, Status, str, str]] = [
        ("memfd", probes.memfd(), "fail", "control page", "Use Linux 5.10 or newer."),
        ("membarrier", probes.membarrier(), "fail", "closing the gate", "Allow the system call."),
        (
            "PAGEMAP_SCAN",
            probes.pagemap_scan(),
            "warn",
            "leaving out zero pages",
            "Use Linux 6.7 or newer; dumps are larger without.",
        ),
        (
            "userfaultfd",
            probes.userfaultfd(),
            "warn",
            "on-demand restore",
            "Grant CAP_SYS_PTRACE or set vm.unprivileged_userfaultfd to 1.",
        ),
        (
            "restore with pid",
            os.access("/proc/sys/kernel/ns_last_pid", os.W_OK)
            or bool(probes.capabilities() & {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"}),
            "fail",
            "bringing processes back under their ids",
            "Grant CAP_CHECKPOINT_RESTORE.",
        ),
    ]
    for name, good, bad, meaning, mend in features:
        found = f"there (Linux {release})" if good else f"not here (Linux {release})"
        yield _check(good, bad, name, found, meaning, mend)
    refused = probes.io_uring()
    yield _check(
        not refused,
        "warn",
        "io_uring",
        refused or "allowed",
        "fast image writing",
        "Allow it in the container's profile and set kernel.io_uring_disabled to 0.",
    )


def check_memory() -> Iterator[Check]:
    """Limits and settings that cost speed."""
    huge = probes.chosen(THP / "enabled")
    yield _check(
        huge in ("always", "madvise"),
        "warn",
        "huge pages",
        huge or "none",
        "full speed of pinned memory",
        f"Write madvise to {THP / 'enabled'}.",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    unlimited = locked == resource.RLIM_INFINITY
    yield _check(
        unlimited or os.geteuid() == 0,
        "warn",
        "locked memory",
        "unlimited" if unlimited else f"{locked >> 20} MiB",
        "pinned copy buffers",
        "Raise RLIMIT_MEMLOCK (ulimit -l unlimited).",
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield _check(
        files == resource.RLIM_INFINITY or files >= MINIMUM_OPEN_FILES,
        "warn",
        "open files",
        str(files),
        "one file a GPU allocation",
        f"Raise RLIMIT_NOFILE to {MINIMUM_OPEN_FILES} or more.",
    )
    try:
        space = os.statvfs("/dev/shm")
        free = space.f_bavail * space.f_frsize
    except OSError:
        free = 0
    yield _check(
        free >= 1 << 30,
        "warn",
        "/dev/shm",
        f"{free / 2**30:.1f} GiB free",
        "images in memory, DataLoader workers",
        "Give the container a larger /dev/shm.",
    )


def check_libraries() -> Iterator[Check]:
    """The native libraries of this installation."""
    parts: list[tuple[str, Callable[[], Path], Status, str]] = [
        ("intercept library", launch.intercept_library, "fail", "every job"),
        ("memory stub", launch.memory_stub, "fail", "every job"),
        ("NCCL counts", launch.nccl_counts, "fail", "every job"),
        ("exec hooks", launch.exec_hooks, "fail", "every job"),
        ("emulated driver", launch.emulated_driver, "warn", "--gpu emulated"),
        ("emulated device", launch.emulator_daemon, "warn", "--gpu emulated"),
    ]
    for name, locate, bad, meaning in parts:
        try:
            yield Check(name, "ok", str(locate()), meaning)
        except NotBuilt as error:
            yield Check(name, bad, f"{error.fields['name']} is not built", meaning, NotBuilt.hint)
