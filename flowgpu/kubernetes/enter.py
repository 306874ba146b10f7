"""Runs a program in a container, with the rights of the container's first process and no more.

    python -m flowgpu.kubernetes.enter PID PROGRAM ARGUMENT...

The program is the container's own, so it is not trusted: nsenter(1) would start it with all that
the agent may do. Here it has the user, groups, capabilities and variables of the process PID.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from flowgpu.host.proctree import status_numbers

# linux/prctl.h, linux/capability.h
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ, PR_CAPBSET_DROP = 23, 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
CAPABILITY_VERSION_3 = 0x20080522
NAMESPACES = ("ipc", "uts", "net", "pid", "cgroup", "mnt")
NOT_FOUND, ENDED = 253, 254
"""Exit codes, which no error of FlowGPU has."""

_libc = ctypes.CDLL(None, use_errno=True)


class Process:
    """What a process of a container has, read before anything of this one is changed."""

    def __init__(self, pid: int) -> None:
        """Raises OSError, also where it has ended."""
        proc = Path(f"/proc/{pid}")
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        self.spaces = [os.open(proc / "ns" / name, os.O_RDONLY) for name in NAMESPACES]
        self.root, self.cwd = os.open(proc / "root", flags), os.open(proc / "cwd", flags)
        variables = (proc / "environ").read_bytes().split(b"\0")
        self.environ = dict(one.split(b"=", 1) for one in variables if b"=" in one)
        numbers = {name: status_numbers(pid, name) for name in ("Uid", "Gid", "Groups")}
        self.bounding, *_ = status_numbers(pid, "CapBnd", 16) or [0]
        self.bare = any(status_numbers(pid, "NoNewPrivs"))
        if not numbers["Uid"] or not numbers["Gid"]:
            raise ProcessLookupError(f"process {pid} has ended")
        self.uid, self.gid = numbers["Uid"][1], numbers["Gid"][1]
        self.groups = numbers["Groups"]


def main(words: list[str]) -> int:
    pid, *command = words
    try:
        process = Process(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return ENDED
    _prctl(PR_SET_DUMPABLE, 0)  # nobody inside looks into this process before it is one of them
    for space in process.spaces:
        if _libc.setns(space, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    os.fchdir(process.root)
    os.chroot(".")
    os.fchdir(process.cwd)
    child = os.fork()  # only a child is in the other PID namespace
    if child == 0:
        _become(process)
        _execute(command, process.environ)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def _become(process: Process) -> None:
    for number in range(_last_capability() + 1):
        if not process.bounding >> number & 1:
            _prctl(PR_CAPBSET_DROP, number)
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    os.setgroups(process.groups)
    os.setresgid(process.gid, process.gid, process.gid)
    os.setresuid(process.uid, process.uid, process.uid)
    _limit(process.bounding if process.uid == 0 else 0)
    if process.bare:
        _prctl(PR_SET_NO_NEW_PRIVS, 1)


def _limit(capabilities: int) -> None:
    """Have these at most, and let a program inherit none but by its user."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    low, high = capabilities & 0xFFFFFFFF, capabilities >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    if _libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _last_capability() -> int:
    number = 0
    while _libc.prctl(PR_CAPBSET_READ, number, 0, 0, 0) >= 0:
        number += 1
    return number - 1


def _execute(command: list[str], environ: dict[bytes, bytes]) -> NoReturn:
    program = shutil.which(command[0], path=os.fsdecode(environ.get(b"PATH", b"/usr/bin:/bin")))
    if program is None:
        print(f"{command[0]}: not found", file=sys.stderr, flush=True)
        os._exit(NOT_FOUND)
    os.execve(program, command, environ)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
