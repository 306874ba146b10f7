"""What CRIU or the driver could not save of a job: looked for while it runs, refused by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from coordinator.process import alive, orphans, other_client
from coordinator.session import RunningJob
from flowgpu.errors import CriuUnsupported, MissingCapability, Unsupported
from flowgpu.host import mps, probes, tcp
from flowgpu.host.criu import Criu
from flowgpu.host.proctree import (
    ExternalPipe,
    external_pipes,
    ids,
    memory_sizes,
    status_numbers,
    tree_pids,
)
from flowgpu.host.sandbox import Search
from flowgpu.host.undumpable import is_32_bit, outside_socket
from flowgpu.jobs import JobDir
from flowgpu.launch import emulator_socket
from flowgpu.vocabulary import TcpChoice

PIPE_LOOKS, PIPE_RECHECK_SECONDS = 5, 0.02
STRAY_SECONDS, LOOK_SECONDS = 1.0, 0.005

Found = TypeVar("Found")


def wait_for_strays(job: RunningJob) -> None:
    """An orphan is none of the tree. One that soon ends needs no refusal."""
    deadline = time.monotonic() + STRAY_SECONDS
    lasting = set(strays(job))
    while lasting and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        lasting &= set(strays(job))
    refuse_strays(lasting)


def refuse_strays(found: Collection[int]) -> None:
    """Raises Unsupported where there are any."""
    if found:
        name = f"process {min(found)}, which has left the job's process tree"
        raise Unsupported(name=f"{name} (with a shell as its first process it stays in it)")


def strays(job: RunningJob) -> list[int]:
    """Processes that the job has made and that are in nobody's dump."""
    tree = tree_pids(job.root_pid)
    return [p for p in orphans(job.keeper) if p not in tree and alive(p)]


def refuse_sandboxes(search: Search) -> list[str]:
    """A restored job would be free of them. Gives in words which processes nobody knows of.

    Raises TimeoutError.
    """
    sandboxed, unknown = search.result()
    if sandboxed:
        name = "a Landlock sandbox (process {}, thread {})".format(*sandboxed)
        raise Unsupported(name=name)
    return unknown


def refuse_32_bit(job: RunningJob, criu: Criu) -> None:
    """CRIU may be built without, or the kernel."""
    found = next(filter(is_32_bit, tree_pids(job.root_pid)), None)
    if found is not None and not criu.has_feature("compat_cr"):
        raise CriuUnsupported(action="dump", what=f"a 32-bit program (process {found})")


def refuse_without_rights() -> None:
    """CRIU says so as well, but in the pause."""
    if not probes.capabilities() & probes.CHECKPOINT_RIGHTS:
        rights = " or ".join(sorted(probes.CHECKPOINT_RIGHTS, reverse=True))
        raise MissingCapability(action="CRIU's dump", capability=rights)


def refuse_other_users(job: RunningJob) -> None:
    """CRIU asks for the limits of each process, and the kernel for a right or the same user."""
    if "CAP_SYS_RESOURCE" in probes.capabilities():
        return
    for pid in tree_pids(job.root_pid):
        found = ids(pid)
        if found and {*found.users[:3]} != {os.getuid()}:
            what = f"process {pid} of another user ({found.users[0]})"
        elif found and {*found.groups[:3]} != {os.getgid()}:
            what = f"process {pid} of another group ({found.groups[0]})"
        else:
            continue
        raise MissingCapability(action=f"CRIU's dump of {what}", capability="CAP_SYS_RESOURCE")


def refuse_other_clients(pids: Iterable[int]) -> None:
    """The driver's checkpoint leaves their devices open, and they do not work after it."""
    for pid in pids:
        if library := other_client(pid):
            raise Unsupported(name=f"{library} beside CUDA (process {pid})")


def refuse_connections(job: RunningJob, connections: Collection[int]) -> bool:
    """Refuse connections to processes outside the job. `connections`: inodes of ours to its
    tasks. True if a process is a client of the Multi-Process Service."""
    task_socket = os.fsencode(JobDir(job.directory).task_socket)
    device = os.fsencode(emulator_socket(Path("/")))
    service = mps.ends()
    clients = False

    def is_ours(peer: int, path: bytes) -> bool:
        nonlocal clients
        if peer in service:
            clients = True  # the driver has connected it, and lets go of it before the dump
            return True
        return peer in connections or path == task_socket or path.endswith(device)

    if held := outside_socket(lambda: tree_pids(job.root_pid), is_ours):
        raise CriuUnsupported(action="dump", what=held)
    refuse_pipes(job, but=service)
    return clients


def refuse_tcp(
    job: RunningJob,
    choice: TcpChoice,
    looks: int = PIPE_LOOKS,
    elsewhere: tcp.Elsewhere = tcp.NOWHERE,
) -> tcp.Found:
    """Refuse connections to processes outside, unless they are to be closed. Gives what is there.

    `elsewhere`: what other nodes of the job have.
    """
    found = tcp.Found([], {}, [], [], [])

    def outside() -> dict[int, tcp.Connection]:
        nonlocal found
        found = tcp.look(tree_pids(job.root_pid))
        return {end.row.inode: end for end in found.outside if not elsewhere.may_have(end)}

    strangers = _lasting(outside, looks)
    if found.ends and "CAP_NET_ADMIN" not in probes.capabilities():
        raise MissingCapability(action="keeping TCP connections", capability="CAP_NET_ADMIN")
    if strangers and choice == "job":
        kind = "a TCP connection to a process outside (`--tcp close` closes it in the image)"
        raise CriuUnsupported(action="dump", what=f"{kind} {strangers[min(strangers)]}")
    return found


def refuse_pipes(
    job: RunningJob, looks: int = PIPE_LOOKS, but: Collection[int] = frozenset()
) -> None:
    """Refuse pipes to processes outside the job, but those with these inodes."""
    own = {*job.pipes.values(), *but}

    def outside() -> dict[int, ExternalPipe]:
        return {p.inode: p for p in external_pipes(job.root_pid) if p.inode not in own}

    if found := _lasting(outside, looks):
        pid, fd = found[min(found)].holders[0]
        raise Unsupported(
            name=f"a pipe to a process outside the job (process {pid}, descriptor {fd})"
        )


def _lasting(look: Callable[[], dict[int, Found]], looks: int) -> dict[int, Found]:
    """What all looks find. Listing the descriptors of live processes is no snapshot: what is being
    closed, or what a new process has, can look as if its other end were elsewhere."""
    found = look()
    for _ in range(looks - 1):
        if not found:
            break
        time.sleep(PIPE_RECHECK_SECONDS)
        found = {inode: one for inode, one in look().items() if inode in found}
    return found


def most_saved(pids: Sequence[int], *, look: bool = False) -> int:
    """The most bytes that an image has of the memory of processes.

    What forked processes have in common counts for each of them, or for fewer where it `look`s:
    the kernel walks over all their pages then.
    """
    return sum(_most_saved(pid, pids if look else ()) for pid in pids)


def _most_saved(pid: int, parents: Sequence[int]) -> int:
    """That of a process, with only its part of what is common if its parent is one of these."""
    table, names = "status", ("RssAnon", "RssShmem", "VmSwap")
    if not set(parents).isdisjoint(status_numbers(pid, "PPid")):
        table, names = "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")
    sizes = memory_sizes(pid, table)
    return sum(sizes.get(name, 0) for name in names)
