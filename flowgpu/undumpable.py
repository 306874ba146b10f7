"""Descriptors that CRIU is known not to dump, found in /proc while the job runs.

CRIU names them too, but once it has frozen the job. It is also left to it where the kernel does not
tell: Unix sockets of another network namespace, or of a kernel without sock_diag(7).
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from flowgpu import unix_sockets
from flowgpu.proctree import PROC, fd_targets, thread_ids

# Anonymous inodes of which CRIU 4.2 has an image (criu/files.c, dump_one_file).
DUMPED = {"bpf-map", "eventfd", "eventpoll", "fanotify", "inotify", "pidfd"}
DUMPED |= {"signalfd", "timerfd"}
# Character devices likewise: memory devices, terminals and their two ends.
DUMPED_MAJORS = {1, 4, 5, *range(128, 144)}
DUMPED_DEVICES = {(10, 200), (10, 235)}  # /dev/net/tun, /dev/autofs
# States of a TCP socket without a connection, as /proc/net/tcp has them: closed, listening.
UNCONNECTED = {"07", "0A"}
# The engine takes these out of the process, or the plugin out of the dump (native/criu_plugin).
GPU_DEVICES = "/dev/nvidia"
TCP = "a connected TCP socket (`--tcp close` closes it in the image)"
SCHED_DEADLINE = 6
DELETED = " (deleted)"
LONGEST_DELETED = 237
"""Bytes of a deleted file's name: CRIU adds up to 18 to it when it makes the file again."""
RECHECK_SECONDS = 0.05

Held = list[tuple[int, int, str]]  # process, descriptor, and what /proc names it


def undumpable(pids: Iterable[int], *, tcp: bool = False) -> str:
    """What one of these processes holds, with its descriptor and process id; empty if none is.

    `tcp`: connected TCP sockets may be dumped, as they are to be closed.
    """
    pids = list(pids)
    for pid in pids:
        if what := _process(pid):
            return f"{what} (process {pid})"
    held = _held(pids)
    masters = set(_masters(held))

    networks: dict[str, set[str]] = {}

    for pid, fd, target in held:
        with suppress(OSError):  # closed by now
            what = _undumpable(target, PROC / str(pid) / "fd" / str(fd))
            if target.startswith("/dev/pts/") and target not in masters:
                what = what or f"{target}, the terminal of a process outside the job,"
            if target.startswith("socket:") and not tcp:
                network = os.readlink(PROC / str(pid) / "ns" / "net")
                if network not in networks:  # its table may be long
                    networks[network] = _connected(pid)
                what = TCP if target in networks[network] else ""
            if what:
                return f"{what} as fd {fd} (process {pid})"
    return ""


def _process(pid: int) -> str:
    """What of a process itself CRIU does not dump, or not so that it can be restored."""
    with suppress(OSError):  # it has ended
        status = (PROC / str(pid) / "status").read_text(errors="replace")
        if tracer := re.search(r"^TracerPid:\t([1-9]\d*)$", status, re.MULTILINE):
            return f"an attached debugger or tracer, process {tracer[1]},"
        for thread in thread_ids(pid):
            policy = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
            if policy == SCHED_DEADLINE:
                return f"the scheduling policy SCHED_DEADLINE, thread {thread},"
    return ""


def outside_socket(pids: Callable[[], Iterable[int]], ours: Callable[[bytes], bool]) -> str:
    """A Unix socket of one of the processes whose other end none of them holds, as above.

    `ours`: whether a connection is one of FlowGPU's own, by the path that its server is bound to.
    """
    suspects: set[str] = set()
    # As of pipes: what is being closed can look as if its other end were elsewhere, but not twice.
    for _ in range(2):
        held = _held(pids())
        found = {
            target: f"one end of a Unix socket as fd {fd} (process {pid}), its other end "
            f"{os.fsdecode(path) or 'outside the job'}"
            for pid, fd, target, path in _connected_outside(held)
            if not ours(path)
        }
        if lasting := suspects & set(found):
            return found[min(lasting)]
        suspects = set(found)
        if not suspects:
            break
        time.sleep(RECHECK_SECONDS)
    return ""


def _connected_outside(held: Held) -> Iterator[tuple[int, int, str, bytes]]:
    """Connected stream sockets whose peers are held by nobody here, with the peers' paths."""
    own = {target for _, _, target in held if target.startswith("socket:")}
    with suppress(OSError):  # the kernel does not tell
        peers = unix_sockets.peers() if own else {}
        here = os.readlink("/proc/self/ns/net")
        for pid, fd, target in held:
            inode = re.fullmatch(r"socket:\[(\d+)\]", target)
            peer, path = peers.get(int(inode[1]), (0, b"")) if inode else (0, b"")
            if peer and f"socket:[{peer}]" not in own:
                with suppress(OSError):  # it has ended
                    if os.readlink(PROC / str(pid) / "ns" / "net") == here:
                        yield pid, fd, target, path


def _held(pids: Iterable[int]) -> Held:
    return [(pid, fd, target) for pid in pids for fd, target in fd_targets(pid)]


def _masters(held: Held) -> Iterator[str]:
    """Terminals of which these descriptors are the other end."""
    for pid, fd, target in held:
        if target in ("/dev/ptmx", "/dev/pts/ptmx"):
            with suppress(OSError):
                info = (PROC / str(pid) / "fdinfo" / str(fd)).read_text()
                yield from (
                    f"/dev/pts/{n}" for n in re.findall(r"^tty-index:\s*(\d+)", info, re.MULTILINE)
                )
                yield target


def _connected(pid: int) -> set[str]:
    """Connected TCP sockets of the process's network, as /proc names descriptors of them."""
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = (PROC / str(pid) / "net" / name).read_text().splitlines()[1:]
            for row in map(str.split, rows):
                if row[3] not in UNCONNECTED:
                    found.add(f"socket:[{row[9]}]")
    return found


def _undumpable(target: str, link: Path) -> str:
    if anonymous := re.fullmatch(r"anon_inode:\[?([^\]]*)\]?", target):
        kind = anonymous[1]
        if kind == "eventfd" and _is_semaphore(link):
            return "an eventfd semaphore (EFD_SEMAPHORE)"
        article = "an" if kind == "io_uring" else "a"
        return "" if kind in DUMPED else f"{article} {kind}"
    if target.startswith(GPU_DEVICES):
        return ""
    name = os.path.basename(target.removesuffix(DELETED))
    if target.endswith(DELETED) and len(os.fsencode(name)) > LONGEST_DELETED:
        return f"a deleted file with a name of more than {LONGEST_DELETED} bytes"
    found = link.stat()
    device = os.major(found.st_rdev), os.minor(found.st_rdev)
    dumped = device[0] in DUMPED_MAJORS or device in DUMPED_DEVICES
    return target if stat.S_ISCHR(found.st_mode) and not dumped else ""


def _is_semaphore(link: Path) -> bool:
    """Whether reading an eventfd takes one of its count, which CRIU forgets; Linux 6.5 tells."""
    info = (link.parents[1] / "fdinfo" / link.name).read_text()
    return re.search(r"^eventfd-semaphore:\s*1$", info, re.MULTILINE) is not None
