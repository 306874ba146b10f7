"""Ask the kernel and the driver what they can do. Nothing here changes the machine.

System call and ioctl numbers are those of x86-64 (asm/unistd_64.h, linux/fs.h).
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

SYS_USERFAULTFD = 323
SYS_MEMBARRIER = 324
SYS_IO_URING_SETUP = 425
MEMBARRIER_CMD_PRIVATE_EXPEDITED = 1 << 3
PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg)
PAGE_IS_PRESENT = 1 << 3

CAPABILITIES = {
    "CAP_SETPCAP": 8,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_SYS_TIME": 25,
    "CAP_CHECKPOINT_RESTORE": 40,
}
CHECKPOINT_RIGHTS = {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"}
"""CRIU does nothing without one of these."""

# Runs apart: initialising the driver must not happen in the process that asks, and must not
# outlast it. cuInit makes no context.
DRIVER_PROBE = """
import ctypes, json, sys
cuda = ctypes.CDLL(sys.argv[1])
version = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(version))
answer = {"cuda": version.value, "checkpoint": hasattr(cuda, "cuCheckpointProcessLock"),
          "init": cuda.cuInit(0), "gpus": []}
count = ctypes.c_int()
if answer["init"] == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
    for number in range(count.value):
        name, size, device = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), number)
        cuda.cuDeviceGetName(name, 256, device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        answer["gpus"].append([name.value.decode(), size.value])
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class DriverAnswer:
    """What a CUDA driver says about itself. `error` is empty when all went well."""

    cuda: str = ""
    release: str = ""
    has_checkpoint_api: bool = False
    gpus: list[tuple[str, int]] = field(default_factory=list)
    error: str = ""


def libc() -> ctypes.CDLL:
    """The C library, with errno kept."""
    return ctypes.CDLL(None, use_errno=True)


def driver(libcuda: Path, timeout: float = 60.0) -> DriverAnswer:
    """Ask the driver in a process of its own, without the intercept library."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["FLOWGPU_SOCKET"] = ""  # in a job it would be handed that one's
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", DRIVER_PROBE, str(libcuda)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return DriverAnswer(error=f"no answer within {timeout:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return DriverAnswer(error=lines[-1] if lines else f"ended with {done.returncode}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return DriverAnswer(
        cuda=f"{answer['cuda'] // 1000}.{answer['cuda'] % 1000 // 10}",
        release=driver_release(),
        has_checkpoint_api=answer["checkpoint"],
        gpus=[(name, size) for name, size in answer["gpus"]],
        error=f"cuInit returns {answer['init']}" if answer["init"] else "",
    )


def driver_release(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Release of the kernel module, like `580.159.04`, or an empty string."""
    with suppress(OSError):
        for word in path.read_text().split():
            if word.count(".") >= 1 and word.replace(".", "").isdigit():
                return word
    return ""


def capabilities() -> set[str]:
    """The CAPABILITIES that this process has in effect."""
    mask = _capability_mask("CapEff")
    return {name for name, bit in CAPABILITIES.items() if mask >> bit & 1}


def bounding_set_is_full() -> bool:
    """True if programs that this process starts may be granted any capability."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    return _capability_mask("CapBnd") == (1 << last + 1) - 1


def may_restore_bounding_set() -> bool:
    """CRIU takes away what a job's lacks, and waits for ever where it may not."""
    return bounding_set_is_full() or "CAP_SETPCAP" in capabilities()


def _capability_mask(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1], 16)
    return 0


def userfaultfd() -> bool:
    """True when this process may catch page faults of its own memory."""
    fd = libc().syscall(SYS_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        return False
    os.close(fd)
    return True


def membarrier() -> bool:
    """True when the kernel offers the private expedited barrier."""
    commands = libc().syscall(SYS_MEMBARRIER, 0, 0, 0)
    return commands > 0 and bool(commands & MEMBARRIER_CMD_PRIVATE_EXPEDITED)


def pagemap_scan() -> bool:
    """True when /proc/self/pagemap answers PAGEMAP_SCAN (Linux 6.7)."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        anchor = ctypes.c_char.from_buffer(page)
        start = ctypes.addressof(anchor)
        regions = ctypes.create_string_buffer(24)
        argument = ctypes.create_string_buffer(
            # size flags start end walk_end vec vec_len max_pages, then four category masks
            struct.pack(
                "<12Q",
                *(96, 0, start, start + mmap.PAGESIZE, 0, ctypes.addressof(regions), 1, 0),
                *(0, PAGE_IS_PRESENT, 0, PAGE_IS_PRESENT),
            ),
            96,
        )
        try:
            with open("/proc/self/pagemap", "rb") as pagemap:
                return int(libc().ioctl(pagemap.fileno(), PAGEMAP_SCAN, argument)) == 1
        except OSError:
            return False
        finally:
            del anchor


def memfd() -> bool:
    """True when memory files can be made."""
    try:
        os.close(os.memfd_create("flowgpu-doctor"))
    except OSError:
        return False
    return True


def io_uring() -> str:
    """Empty when this process may make a ring, else why not."""
    fd = libc().syscall(SYS_IO_URING_SETUP, 2, ctypes.create_string_buffer(120))
    if fd >= 0:
        os.close(fd)
        return ""
    return errno.errorcode.get(ctypes.get_errno(), "refused")


def ptrace_scope() -> int:
    """Yama's restriction of ptrace; 0 when there is none."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except OSError:
        return 0


def chosen(setting: Path) -> str:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    try:
        text = setting.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
