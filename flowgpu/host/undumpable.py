"""What CRIU is known not to dump, found in /proc while the job runs.

CRIU names it too, but once it has frozen the job. It is also left to it where the kernel does not
tell: Unix sockets of another network namespace, or of a kernel without sock_diag(7).
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

from flowgpu.host import probes, settings, unix_sockets
from flowgpu.host.proctree import PROC, fd_targets, is_headless, thread_ids

# Anonymous inodes of which CRIU 4.2 has an image (criu/files.c, dump_one_file).
DUMPED = {"bpf-map", "eventfd", "eventpoll", "fanotify", "inotify", "pidfd"}
DUMPED |= {"signalfd", "timerfd"}
# Character devices likewise: memory devices, terminals and their two ends.
DUMPED_MAJORS = {1, 4, 5, *range(128, 144)}
TUN = (10, 200)
DUMPED_DEVICES = {TUN, (10, 235)}  # /dev/net/tun, /dev/autofs
# Socket protocols, as the kernel names them, that CRIU 4.2 was seen to fail at.
UNDUMPED_PROTOCOLS = {"MPTCP", "MPTCPv6", "AF_VSOCK", "XDP"}
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
# Clocks of timers that wake a sleeping machine: CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM.
ALARM_CLOCKS = {"8", "9"}
MQUEUE_MAGIC = 0x19800202
"""`f_type` of a file system of message queues, from linux/magic.h."""
# The engine takes these out of the process, or the plugin out of the dump (native/criu_plugin).
GPU_DEVICES = "/dev/nvidia"
SCHED_DEADLINE = 6
EPOLL, EPOLL_SLOT = "anon_inode:[eventpoll]", struct.Struct("=III")  # kcmp_epoll_slot
DELETED = " (deleted)"
LONGEST_DELETED = 237
"""Bytes of a deleted file's name: CRIU adds up to 18 to it when it makes the file again."""
RECHECK_SECONDS = 0.05

Held = list[tuple[int, int, str]]  # process, descriptor, and what /proc names it


def undumpable(pids: Iterable[int]) -> str:
    """What one of these processes holds, with its descriptor and process id; empty if none is.

    The first is the root of the others.
    """
    pids = list(pids)
    for pid in pids:
        if what := _process(pid, pids[0]):
            return f"{what} (process {pid})"
    if what := strange_session(pids):
        return what
    held = _held(pids)
    masters = set(_masters(held))

    for pid, fd, target in held:
        with suppress(OSError):  # closed by now
            what = _undumpable(target, PROC / str(pid) / "fd" / str(fd))
            if target.startswith("/dev/pts/") and target not in masters:
                what = what or f"{target}, the terminal of a process outside the job,"
            if what:
                return f"{what} as fd {fd} (process {pid})"
    return _lasting(lambda: _escaped(_held(pids)))


def _lasting(look: Callable[[], dict[Any, str]]) -> str:
    """What two looks find: processes are not at rest."""
    if found := look():
        time.sleep(RECHECK_SECONDS)
        found = {key: what for key, what in look().items() if key in found}
    return next(iter(found.values()), "")


def _headless(pid: int) -> dict[Any, str]:
    return {pid: "a first thread that has ended before others"} if is_headless(pid) else {}


def _escaped(held: Held) -> dict[Any, str]:
    """Epolls with files that are not open where CRIU looks for them: in the first process that has
    the epoll."""
    found: dict[Any, str] = {}
    epolls = [(pid, fd) for pid, fd, target in held if target == EPOLL]
    for number, (pid, fd) in enumerate(epolls):
        for closed, inode in _closed(pid, fd):
            earlier = (
                settings.is_shared(other, pid, settings.KCMP_FILE, one, fd)
                for other, one in epolls[:number]
            )
            if not any(earlier):
                what = f"an epoll as fd {fd} (process {pid}), which watches descriptor {closed}"
                found[pid, fd, closed, inode] = f"{what}, closed there and open elsewhere"
    return found


def _closed(pid: int, epoll: int) -> Iterator[tuple[int, str]]:
    """Files that an epoll of a process watches and the process has not open: the descriptor by
    which it had each, and the inode."""
    seen: Counter[int] = Counter()
    with suppress(OSError):  # closed by now
        info = (PROC / str(pid) / "fdinfo" / str(epoll)).read_text()
        targets = dict(fd_targets(pid))  # later: none that it watches is missing
        for found in re.finditer(r"^tfd: *(\d+) .* ino:([0-9a-f]+)", info, re.MULTILINE):
            fd, inode = int(found[1]), found[2]
            slot = ctypes.create_string_buffer(EPOLL_SLOT.pack(epoll, fd, seen[fd]))
            seen[fd] += 1
            if targets.get(fd) == f"socket:[{int(inode, 16)}]":
                continue
            fds = sorted(targets, key=lambda one: one != fd)  # most have the same number still
            if all(settings.is_apart(pid, pid, settings.KCMP_EPOLL_TFD, n, slot) for n in fds):
                yield fd, inode


def _process(pid: int, root: int) -> str:
    """What of a process itself CRIU does not dump, or not so that it can be restored."""
    if what := _lasting(lambda: _headless(pid)):
        return what
    for thread in thread_ids(pid):
        for kind in NAMESPACES:
            # One is dumped in a tree, and in none of these two that is not ours; threads' are lost.
            tree = "self" if kind in ("mnt", "user") else root
            with suppress(OSError):  # a kernel without it, or it has ended
                if _namespace(f"{pid}/task/{thread}", kind) != _namespace(tree, kind):
                    return f"a namespace of its own ({kind}), thread {thread},"
    if what := _shared_or_not(pid, root):
        return what
    with suppress(OSError):
        maps = (PROC / str(pid) / "maps").read_text(errors="replace")
        if "/secretmem" in maps and re.search(r" /secretmem( \(deleted\))?$", maps, re.MULTILINE):
            return "secret memory (memfd_secret)"
        if " /SYSV" in maps and _namespace(pid, "ipc") == _namespace("self", "ipc"):
            return "shared memory of System V (shmget)"
    with suppress(OSError):  # it has ended
        status = (PROC / str(pid) / "status").read_text(errors="replace")
        if tracer := re.search(r"^TracerPid:\t([1-9]\d*)$", status, re.MULTILINE):
            return f"an attached debugger or tracer, process {tracer[1]},"
        for thread in thread_ids(pid):
            policy = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
            if policy == SCHED_DEADLINE:
                return f"the scheduling policy SCHED_DEADLINE, thread {thread},"
    return ""


def _shared_or_not(pid: int, root: int) -> str:
    """What a process shares that threads share, and what its threads have apart."""
    with suppress(OSError, IndexError):  # it has ended
        about = (PROC / str(pid) / "stat").read_bytes()  # the name in it may be no text
        parent = int(about.rpartition(b")")[2].split()[1])
        if pid != root and settings.is_shared(pid, parent, settings.KCMP_FS):
            return f"a working folder (CLONE_FS) that it shares with process {parent}"
    apart: list[int] = []
    for thread in thread_ids(pid):
        with suppress(OSError):
            apart_files = settings.is_apart(pid, thread, settings.KCMP_FILES)
            # One that is ending has none any more.
            if apart_files and all(_fds_of(pid, one) for one in (pid, thread)):
                return f"a table of descriptors of its own (CLONE_FILES), thread {thread},"
            if settings.is_apart(pid, thread, settings.KCMP_FS):
                folder = PROC / str(pid) / "task" / str(thread)
                if os.readlink(folder / "root") != os.readlink(PROC / str(pid) / "root"):
                    return f"a root folder of its own, thread {thread},"
                if os.readlink(folder / "cwd").endswith(DELETED):
                    return f"a deleted working folder of its own, thread {thread},"
                apart.append(thread)
    for one, other in combinations(apart, 2):
        if settings.is_shared(one, other, settings.KCMP_FS):
            return f"a working folder apart (CLONE_FS), threads {one} and {other},"
    return ""


def strange_session(pids: Iterable[int]) -> str:
    """A session that CRIU cannot make again for who has it; for these processes, the root first.

    It makes a process below the leader of its session, or of a parent with the same one. A
    subreaper within the job, as `tini -s` is, takes over processes of other sessions. The root may
    be one: its children are made below a process that ends (native/pages/criu_memory.cpp).
    """
    pids = list(pids)
    parents: dict[int, tuple[int, int]] = {}  # and sessions, of each process
    for pid in pids:
        with suppress(OSError, IndexError):  # it has ended
            about = (PROC / str(pid) / "stat").read_bytes()  # the name in it may be no text
            fields = about.rpartition(b")")[2].split()
            parents[pid] = int(fields[1]), int(fields[3])
    for pid, (parent, session) in parents.items():
        if parent == pids[0]:
            continue
        above, inherited = parent, parents.get(parent, (0, session))[1]
        while session not in (inherited, pid, above) and above in parents:
            above = parents[above][0]
        if above not in parents and parent in parents:
            return f"a session that none of its parents has, through a subreaper (process {pid})"
    return ""


def _fds_of(pid: int, thread: int) -> list[str]:
    return os.listdir(PROC / str(pid) / "task" / str(thread) / "fd")


def is_32_bit(pid: int) -> bool:
    """True if the process runs a program of 32 bits, as its file says."""
    with suppress(OSError), (PROC / str(pid) / "exe").open("rb") as program:
        return program.read(5) == b"\x7fELF\x01"
    return False


def outside_socket(pids: Callable[[], Iterable[int]], ours: Callable[[int, bytes], bool]) -> str:
    """A Unix socket of one of the processes whose other end none of them holds, as above.

    `ours`: whether a connection is one of FlowGPU's own, by the inode of the other end and the path
    that its server is bound to. Where descriptors wait in sockets here, one of them may be that
    end: then it is left to CRIU, which looks at them.
    """
    suspects: set[str] = set()
    # A socket that is being closed can look as if its other end were elsewhere, but not twice.
    for _ in range(2):
        held = _held(pids())
        found = {
            target: f"one end of a Unix socket as fd {fd} (process {pid}), its other end "
            f"{os.fsdecode(path) or 'outside the job'}"
            for pid, fd, target, peer, path in _connected_outside(held)
            if not ours(peer, path)
        }
        if lasting := suspects & set(found):
            return "" if _carry_descriptors(held) else found[min(lasting)]
        suspects = set(found)
        if not suspects:
            break
        time.sleep(RECHECK_SECONDS)
    return ""


def _carry_descriptors(held: Held) -> bool:
    """True if descriptors wait in one of these sockets."""
    for pid, fd, target in held:
        with suppress(OSError):  # closed by now
            link = PROC / str(pid) / "fd" / str(fd)
            if target.startswith("socket:") and _info(link, "scm_fds") not in ("", "0"):
                return True
    return False


def _connected_outside(held: Held) -> Iterator[tuple[int, int, str, int, bytes]]:
    """Connected sockets whose peers are held by nobody here, with these and their paths."""
    own = {target for _, _, target in held if target.startswith("socket:")}
    with suppress(OSError):  # the kernel does not tell
        peers = unix_sockets.peers() if own else {}
        here = _namespace("self", "net")
        for pid, fd, target in held:
            inode = re.fullmatch(r"socket:\[(\d+)\]", target)
            peer, path = peers.get(int(inode[1]), (0, b"")) if inode else (0, b"")
            if peer and f"socket:[{peer}]" not in own:
                with suppress(OSError):  # it has ended
                    if _namespace(pid, "net") == here:
                        yield pid, fd, target, peer, path


def _held(pids: Iterable[int]) -> Held:
    return [(pid, fd, target) for pid in pids for fd, target in fd_targets(pid)]


def _masters(held: Held) -> Iterator[str]:
    """Terminals of which these descriptors are the other end."""
    for pid, fd, target in held:
        if target in ("/dev/ptmx", "/dev/pts/ptmx"):
            with suppress(OSError):
                yield f"/dev/pts/{_info(PROC / str(pid) / 'fd' / str(fd), 'tty-index')}"
                yield target


def _undumpable(target: str, link: Path) -> str:
    if anonymous := re.fullmatch(r"anon_inode:\[?([^\]]*)\]?", target):
        kind = anonymous[1]
        # Reading one takes one of its count, which CRIU forgets; Linux 6.5 tells.
        if kind == "eventfd" and _info(link, "eventfd-semaphore") == "1":
            return "an eventfd semaphore (EFD_SEMAPHORE)"
        if kind == "timerfd" and _info(link, "clockid") in ALARM_CLOCKS:
            return "a timerfd of a clock that wakes the machine"
        article = "an" if kind == "io_uring" else "a"
        return "" if kind in DUMPED else f"{article} {kind}"
    if target.startswith("pipe:"):
        return "a pipe of packets (O_DIRECT)" if int(_info(link, "flags"), 8) & os.O_DIRECT else ""
    if target.startswith("socket:"):
        protocol = os.getxattr(link, "system.sockprotoname").rstrip(b"\0").decode()
        return f"a socket of the protocol {protocol}" if protocol in UNDUMPED_PROTOCOLS else ""
    if target.startswith(GPU_DEVICES):
        return ""
    name = os.path.basename(target.removesuffix(DELETED))
    if target.endswith(DELETED) and len(os.fsencode(name)) > LONGEST_DELETED:
        return f"a deleted file with a name of more than {LONGEST_DELETED} bytes"
    if target.startswith("/") and _is_hidden_queue(target, link):
        return f"the message queue {target}"
    found = link.stat()
    device = os.major(found.st_rdev), os.minor(found.st_rdev)
    dumped = device[0] in DUMPED_MAJORS or device in DUMPED_DEVICES
    if device == TUN and os.readlink(link.parents[1] / "ns" / "net") == _namespace("self", "net"):
        dumped = False  # such are dumped with a network of the job's own
    return target if stat.S_ISCHR(found.st_mode) and not dumped else ""


def _is_hidden_queue(target: str, link: Path) -> bool:
    """True for a message queue from `mq_open`, whose file system no process sees mounted."""
    found = ctypes.create_string_buffer(256)  # struct statfs, which begins with a long f_type
    if os.path.dirname(target) != "/" or probes.libc().statfs(os.fsencode(link), found) != 0:
        return False
    if ctypes.c_long.from_buffer(found).value != MQUEUE_MAGIC:
        return False
    mounts = (link.parents[1] / "mountinfo").read_text(errors="replace").splitlines()
    return _info(link, "mnt_id") not in {mount.split()[0] for mount in mounts}


def _info(link: Path, key: str) -> str:
    """What the kernel tells of a descriptor, `/proc/PID/fd/FD`, by this name; empty if nothing."""
    info = (link.parents[1] / "fdinfo" / link.name).read_text()
    found = re.search(rf"^{key}:\s*(\S+)$", info, re.MULTILINE)
    return found[1] if found else ""


def _namespace(pid: int | str, kind: str) -> str:
    """Name of a namespace of a process, or of a thread, `PID/task/TID`."""
    return os.readlink(PROC / str(pid) / "ns" / kind)
