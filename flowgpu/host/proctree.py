"""What /proc says about a job's process tree: its processes, their states and outside pipes."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import stat
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PROC = Path("/proc")
EXITING = 0x4
"""A flag of /proc/PID/stat (PF_EXITING of linux/sched.h)."""


@dataclass(frozen=True)
class ExternalPipe:
    """A pipe of which the tree holds only one end, so that the other is held outside.

    `key` names it to `Criu.restore(inherit_fds=...)`; `direction` is the tree's end, so the fd to
    hand over there is of the same direction. `holders` are (pid, fd) pairs.
    """

    inode: int
    direction: Literal["read", "write"]
    holders: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """CRIU's name of the pipe."""
        return f"pipe:[{self.inode}]"


def tree_pids(root: int) -> list[int]:
    """Process ids of the tree, parents before their children; empty when its root is gone."""
    found = [root] if thread_ids(root) else []
    for pid in found:
        found += children(pid)
    return found


def children(pid: int) -> list[int]:
    """Children of all threads of a process, without a look at the machine's other processes."""
    found: list[int] = []
    for thread in thread_ids(pid):
        with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb", 0) as file:
            found += map(int, file.read().split())
    return found


def end_before_others(pid: int) -> None:
    """Have the kernel end this helper, and not the job, where memory runs out (proc(5),
    oom_score_adj): the job outlives its end, and a command that fails gives back what it took."""
    with suppress(OSError):  # it has ended
        Path(PROC, str(pid), "oom_score_adj").write_text("1000")


def how_ended(code: int) -> str:
    """Words for how a helper with that return code has ended."""
    if code >= 0:
        return f"ended with status {code}"
    memory = ", as where memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{memory}"


def pids_of_job(folder: Path, socket: Path) -> list[int]:
    """Processes that belong to a job without a coordinator: their environment names its socket, or
    they are a CRIU that works in its folder."""
    found = []
    for pid in _all_pids():
        if pid == os.getpid():
            continue
        words = arguments(pid)
        at_work = "--work-dir" in words and str(folder) in words
        theirs = task_socket(pid)
        if at_work or (theirs and same_path(theirs, socket)):
            found.append(pid)
    return found


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def ids_in_use(ids: Iterable[int]) -> list[int]:
    """The process and thread ids among `ids` that the kernel gives to nobody else.

    /proc shows less: an id stays in use while it is that of a session or process group. Since Linux
    6.15 it also stays so for some milliseconds after the parent has heard of the thread's end.
    """
    found, ends = [], os.pipe()
    try:
        for number in ids:
            with suppress(ProcessLookupError):
                fcntl.fcntl(ends[0], fcntl.F_SETOWN, number)
                found.append(number)
    finally:
        for end in ends:
            os.close(end)
    return found


def task_states(pid: int) -> dict[int, str]:
    """State letter of every thread of a process; empty when it is gone."""
    found = {thread: thread_state(pid, thread) for thread in thread_ids(pid)}
    return {thread: state for thread, state in found.items() if state}


def thread_state(pid: int, thread: int) -> str:
    """State letter of a thread; empty when it is gone."""
    with (
        suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{pid}/task/{thread}/stat", "rb", 0) as file,
    ):
        # The name before the state is in brackets and may hold anything, brackets too.
        return file.read().rpartition(b")")[2].split()[0].decode()
    return ""


def is_dead(pid: int) -> bool:
    """True if a process is gone, or waits for its parent to hear of its end."""
    return set(task_states(pid).values()) <= set("ZX")


def is_headless(pid: int) -> bool:
    """True if the first thread of a process has ended, and another one that is not ending has
    not."""
    for thread in thread_ids(pid) if thread_state(pid, pid) in ("Z", "X") else ():
        with suppress(OSError, IndexError, ValueError):  # it is gone
            about = (PROC / str(pid) / "task" / str(thread) / "stat").read_bytes()
            state, *fields = about.rpartition(b")")[2].split()
            if state not in (b"Z", b"X") and not int(fields[5]) & EXITING:
                return True
    return False


def is_stopped(pid: int) -> bool:
    """True if every thread of a process is stopped."""
    return thread_state(pid, pid) == "T" and set(task_states(pid).values()) == {"T"}


def thread_ids(pid: int) -> list[int]:
    """Threads of a process; empty when it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(name) for name in os.listdir(PROC / str(pid) / "task")]
    return []


def arguments(pid: int) -> list[str]:
    """Arguments that a live process was started with; empty when it is gone."""
    words = os.fsdecode(_of(pid, "cmdline"))
    return words.split("\0") if words else []


def task_socket(pid: int) -> Path | None:
    """Where a live process looks for its coordinator, by the environment it was started with."""
    for variable in _of(pid, "environ").split(b"\0"):
        name, _, path = variable.partition(b"=")
        if name == b"FLOWGPU_SOCKET" and path:
            return Path(os.fsdecode(path))
    return None


def same_path(one: Path, other: Path) -> bool:
    """True if both paths lead to one place, also where one was read under another locale."""
    return os.path.realpath(os.fsencode(one)) == os.path.realpath(os.fsencode(other))


def _of(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return (PROC / str(pid) / name).read_bytes()
    return b""


@dataclass(frozen=True)
class Ids:
    """Real, effective, saved and file system ids of a process, of its user and of its group."""

    users: tuple[int, ...]
    groups: tuple[int, ...]


def ids(pid: int) -> Ids | None:
    """Ids of a live process; None when it is gone."""
    with suppress(OSError):
        text = (PROC / str(pid) / "status").read_text(errors="replace")
        found = dict(re.findall(r"^([UG]id):\t(.*)$", text, re.MULTILINE))
        return Ids(*(tuple(map(int, found[name].split())) for name in ("Uid", "Gid")))
    return None


def stopped_pids(root: int) -> set[int]:
    """Processes of the tree of which every thread is stopped."""
    return set(filter(is_stopped, tree_pids(root)))


def resume_tree(root: int, *, keep_stopped: Container[int] = ()) -> None:
    """Let every process of the tree run on, as if it had never been stopped.

    Those in `keep_stopped` are stopped instead: they were before.
    """
    pids = tree_pids(root)
    # These are stopped first, because a process that runs on may want another to go on.
    send(signal.SIGSTOP, (pid for pid in pids if pid in keep_stopped))
    # Children first: a parent may wait for one that is stopped (WUNTRACED).
    send(signal.SIGCONT, (pid for pid in reversed(pids) if pid not in keep_stopped))


def send(signal_number: int, pids: Iterable[int]) -> None:
    """Send a signal to those of these processes that there are."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def outside_session(root: int) -> bool:
    """True when the session leader of the root is not in the tree: CRIU calls it a shell job."""
    return os.getsid(root) not in tree_pids(root)


def external_pipes(root: int) -> list[ExternalPipe]:
    """Pipes that connect the tree to processes outside, by inode.

    A pipe is taken for external when the tree holds it only for reading or only for writing, and
    somebody has its other end.
    """
    holders: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for pid in tree_pids(root):
        with suppress(FileNotFoundError, ProcessLookupError):
            for link in (PROC / str(pid) / "fd").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    found = re.fullmatch(r"pipe:\[(\d+)\]", os.readlink(link))
                    if found:
                        ends = holders.setdefault(int(found[1]), {})
                        for end in _ends(pid, int(link.name)):
                            ends.setdefault(end, []).append((pid, int(link.name)))
    return [
        ExternalPipe(inode, "read" if "read" in ends else "write", tuple(next(iter(ends.values()))))
        for inode, ends in sorted(holders.items())
        if len(ends) == 1 and _has_other_end(*next(iter(ends.values()))[0])
    ]


def _has_other_end(pid: int, fd: int) -> bool:
    """False when nobody, in whichever PID namespace, has the other end of a pipe."""
    with suppress(OSError):
        reads = _ends(pid, fd) == ("read",)
        flags = (os.O_RDONLY if reads else os.O_WRONLY) | os.O_NONBLOCK | os.O_CLOEXEC
        same = os.open(PROC / str(pid) / "fd" / str(fd), flags)
        try:
            poll = select.poll()
            poll.register(same, 0)
            return not poll.poll(0)  # the kernel says POLLHUP to readers, POLLERR to writers
        finally:
            os.close(same)
    return True


def _ends(pid: int, fd: int) -> tuple[str, ...]:
    """Which ends of a pipe the fd is."""
    ends = {os.O_RDONLY: ("read",), os.O_WRONLY: ("write",)}
    return ends.get(fd_access(pid, fd), ("read", "write"))


def fd_access(pid: int, fd: int) -> int:
    """O_RDONLY, O_WRONLY or O_RDWR: fdinfo shows the flags of an fd in octal. Raises OSError."""
    info = (PROC / str(pid) / "fdinfo" / str(fd)).read_text()
    flags = int(re.search(r"^flags:\s*([0-7]+)", info, re.MULTILINE)[1], 8)  # type: ignore[index]
    return flags & os.O_ACCMODE


def fd_target(pid: int, fd: int) -> str | None:
    """What an fd of a live process refers to, as /proc names it, or None."""
    with suppress(OSError):
        return os.readlink(f"{PROC}/{pid}/fd/{fd}")
    return None


def fd_of(pid: int, target: str) -> int | None:
    """First fd of a live process that refers to `target`, or None."""
    return next((fd for fd, found in fd_targets(pid) if found == target), None)


def user_of(target: str) -> int:
    """A process with an fd that refers to `target`; 0: none, or none that is ours to read."""
    return next((pid for pid in _all_pids() if fd_of(pid, target) is not None), 0)


def status_numbers(pid: int, name: str, base: int = 10) -> list[int]:
    """Numbers of a line of /proc/PID/status; none where the process has ended."""
    with suppress(OSError):
        for line in Path(f"{PROC}/{pid}/status").read_text(errors="replace").splitlines():
            key, _, values = line.partition(":")
            if key == name:
                return [int(value, base) for value in values.split()]
    return []


def memory_sizes(pid: int, table: str = "status") -> dict[str, int]:
    """Bytes by name in this table of /proc/PID; empty when the process is gone."""
    with suppress(OSError):
        text = Path(f"{PROC}/{pid}/{table}").read_text(errors="replace")
        found = re.findall(r"^(\w+):\s*(\d+) kB$", text, re.MULTILINE)
        return {name: int(size) << 10 for name, size in found}
    return {}


def inner_pid(pid: int) -> int:
    """The id that a process has in its own PID namespace; 0 where it has ended."""
    return next(reversed(status_numbers(pid, "NSpid")), 0)


def fd_targets(pid: int) -> Iterator[tuple[int, str]]:
    """Fds of a live process, and what they refer to; none when it is gone or not ours to read."""
    try:
        fds = sorted(map(int, os.listdir(PROC / str(pid) / "fd")))
    except OSError:
        return
    for fd in fds:
        if (target := fd_target(pid, fd)) is not None:
            yield fd, target


def file_users(
    files: Collection[tuple[int, int]], besides: Container[int] = ()
) -> dict[tuple[int, int], str]:
    """Who can write to one of these files (device, inode) or has it mapped, but this process and
    those `besides`.

    Gives words with the process id, by file. Processes that we may not read are left out.
    """
    found: dict[tuple[int, int], str] = {}
    for pid in _all_pids() if files else ():
        if pid == os.getpid() or pid in besides:
            continue
        for fd, target in fd_targets(pid):
            with suppress(OSError):  # closed by now
                if target.startswith("/"):
                    status = (PROC / str(pid) / "fd" / str(fd)).stat()
                    file = (status.st_dev, status.st_ino)
                    if file in files and "write" in _ends(pid, fd):
                        found.setdefault(file, f"process {pid} has it open for writing")
        for file in _mapped_files(pid).intersection(files):
            found.setdefault(file, f"process {pid} has it mapped")
    return found


def _mapped_files(pid: int) -> set[tuple[int, int]]:
    """Files (device, inode) that a live process has mapped; none when it is not ours to read."""
    found = set()
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
            _, _, _, device, inode, *_ = line.split(maxsplit=5)
            if inode != "0":
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    return found


def mapped_for_writing(pid: int) -> set[str]:
    """Paths of files that a process has mapped shared and writes to, or may after mprotect(2)."""
    found = set()
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_bytes().splitlines():
            span, rights, _, _, _, *path = line.split(maxsplit=5)
            if rights.endswith(b"s") and path and path[0].startswith(b"/"):
                low, high = (int(part, 16) for part in span.split(b"-"))
                # The rights of this link are those with which the file was opened.
                link = PROC / str(pid) / "map_files" / f"{low:x}-{high:x}"
                if b"w" in rights or link.lstat().st_mode & stat.S_IWUSR:
                    found.add(os.fsdecode(path[0].replace(b"\\012", b"\n")))
    return found


def mapping_at(pid: int, address: int) -> str | None:
    """Name of what is mapped at the address in a live process, or None."""
    with suppress(OSError):
        for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
            span, *_, name = line.split(maxsplit=5)
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address < high:
                return name
    return None
