"""Processes of a job: starting the root, what belongs to its tree, and ending all of it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from coordinator.keeper import END
from coordinator.polling import readable
from flowgpu.errors import PidTaken
from flowgpu.host import proctree
from flowgpu.host.proctree import fd_targets, tree_pids
from flowgpu.jobs import start_time
from flowgpu.launch import find_program, fitted_env, is_shell
from flowgpu.launch import program as native_program
from flowgpu.ranks import is_hosted

log = logging.getLogger(__name__)

NO_LIMIT = 1 << 64
"""Python's RLIM_INFINITY is -1, the kernel's and the images' is this less one."""


def start_root(
    command: list[str],
    env: dict[str, str],
    cwd: str,
    stdin: str | None,
    stdout: int,
    stderr: int,
    umask: int,
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start the root task in a session of its own. Raises OSError, NotBuilt.

    A shell becomes the parent of orphans below it, as the first process of a container is: what its
    script leaves in the background stays in the job's tree. So does the host of several ranks.
    Other programs might take an orphan for one of their own children.
    """
    words = command
    if program := find_program(command[0], env, cwd):
        env, unfit = fitted_env(env, program)
        if unfit:
            log.warning("%s runs without FlowGPU's libraries: %s", program, unfit)
        if is_shell(program) or is_hosted(command):
            path = command[0] if os.path.dirname(command[0]) else program  # a script is told it
            words = [str(native_program("flowgpu-subreaper")), path, *command]
    with open(stdin or os.devnull, "rb") as source:
        return subprocess.Popen(
            words,
            env=env,
            cwd=cwd,
            stdin=source,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            umask=umask,
            pass_fds=descriptors,
        )


def alive(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    return start_time(pid) != 0


UNHEARD_SECONDS = 30.0
"""Within which an init hears of an orphan's end: some look only now and then, others never."""


def refuse_taken(pids: Iterable[int]) -> None:
    """Raise PidTaken for a process id that is in use.

    A process that has ended has its id until its parent has heard of it.
    """
    deadline = time.monotonic() + UNHEARD_SECONDS
    for pid in pids:
        while state := proctree.thread_state(pid, pid):
            if state != "Z" or time.monotonic() >= deadline:
                raise PidTaken(pid=pid)
            time.sleep(0.01)


SERVICE_THREAD = "flowgpu"


def service_threads(pid: int) -> list[int]:
    """Threads of a process with the name of that which answers us."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process ends while it is looked at
        for path in Path(f"/proc/{pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):
                name = path.read_text(errors="replace").strip()
                if name == SERVICE_THREAD and path.parent.name != str(pid):
                    found.append(int(path.parent.name))
    return found


def serves(pid: int) -> bool:
    """True if the process lives and has the thread that answers us: its program may be another."""
    return alive(pid) and bool(service_threads(pid))


def limit_processes(limits: Mapping[int, Sequence[tuple[int, int]]]) -> None:
    """Give restored processes the soft limits that they had, under hard ones that are lower here.

    CRIU may not raise a hard limit without CAP_SYS_RESOURCE, and then sets neither.
    """
    for pid, rows in limits.items():
        for number, (soft, hard) in enumerate(rows):
            with contextlib.suppress(OSError, ValueError):
                most = resource.prlimit(pid, number)[1] % NO_LIMIT
                if most < hard:
                    log.warning("limit %d of process %d is %d, and was %d", number, pid, most, hard)
                    resource.prlimit(pid, number, (min(soft, most), most))


EMULATED_DEVICE = "flowgpu-emud"


def children(parent: int) -> list[int]:
    """Pids of a process's children, of all its threads, but this process.

    Without the emulated GPU's daemon: the first task that needs one starts it, so it comes to us
    as an orphan, but it serves other jobs too and ends by itself.
    """
    found = proctree.children(parent)
    return [pid for pid in found if pid != os.getpid() and _program(pid) != EMULATED_DEVICE]


def own_children(keeper: int) -> list[int]:
    """Children of this process and of the job's keeper, which has those of earlier
    coordinators."""
    return children(os.getpid()) + children(keeper)


def orphans(keeper: int) -> list[int]:
    """The children that are the job's: helpers of ours are in our session."""
    found = []
    for pid in own_children(keeper):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) != os.getsid(0):
                found.append(pid)
    return found


class OwnRoot:
    """The end of a root that is this process's child."""

    def __init__(self, pid: int) -> None:
        self._pidfd = os.pidfd_open(pid)

    def code(self, seconds: float) -> int | None:
        """Its exit code, 128 + N after signal N; None while it runs, after `seconds`."""
        if not readable(self._pidfd, seconds=seconds):
            return None  # and one that is traced would be found by waitid as well
        found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status + (0 if found.si_code == os.CLD_EXITED else 128)


class AdoptedRoot:
    """The end of a root that is the child of the job's keeper."""

    def __init__(self, pid: int, ends: int) -> None:
        self._pid = pid
        self._ends = ends

    def code(self, seconds: float) -> int | None:
        """The code that `OwnRoot.code` gives. Raises EOFError when the root has ended and nobody
        knows how."""
        gone = not alive(self._pid)
        if readable(self._ends, seconds=seconds):
            # The keeper's writes are whole ENDs.
            data = os.read(self._ends, 512 * END.size)
            for pid, status in END.iter_unpack(data):
                if pid == self._pid:
                    code = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
            if data:
                return None
            time.sleep(seconds)  # there is no keeper any more
        if gone:
            raise EOFError
        return None


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def holds_device(pid: int) -> bool:
    """True if a device of the driver, or of the emulated one, is mapped in the process."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return "/dev/nvidia" in maps or "flowgpu-emu-device" in maps
    return False


def device_files(pid: int) -> bool:
    """True if a process has a file of the driver's open or mapped."""
    opened = any(target.startswith("/dev/nvidia") for _, target in fd_targets(pid))
    return opened or holds_device(pid)


# Libraries of the driver that open devices for themselves once they are used, and that programs
# load then: video, images, graphics. NVML is looked after by the driver, or by our library.
_OTHER_CLIENTS = re.compile(
    r"/(lib(?:nvcuvid|nvidia-(?:encode|opticalflow|glcore|eglcore)))\.so", re.ASCII
)


def other_client(pid: int) -> str:
    """A library in the process that holds a GPU besides CUDA; empty if there is none."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        if found := _OTHER_CLIENTS.search(maps):
            return found[1]
    return ""


def reap(pids: Iterable[int]) -> None:
    """Collect those of these children that have ended."""
    for pid in pids:
        if not alive(pid):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_tree(root: int, seconds: float = 10.0) -> None:
    """SIGKILL the tree of `root`; wait until none of it runs and all ids but the root's are free.

    A restore wants the ids again, and an init that never reaps would keep them taken. The root's
    exit status is left to whoever waits for it.
    """
    deadline = time.monotonic() + seconds
    pids = tree_pids(root)  # parents first: none is to see its children end and act on it
    while left := [p for p in pids if alive(p) or (p != root and Path(f"/proc/{p}").exists())]:
        for pid in left:
            # A process may have forked since the list was made.
            pids += [new for new in tree_pids(pid) if new not in pids]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(pid for pid in left if pid != root)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {left[0]} does not end")
        time.sleep(0.001)
