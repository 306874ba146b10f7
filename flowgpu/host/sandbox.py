"""Find threads in a Landlock sandbox that this process is not in, while they run.

    python -m flowgpu.host.sandbox PID...   # prints [[process, thread], ...], and those not asked

The kernel tells nobody of a Landlock domain. But a thread in one may not look at a process outside
of it: get_robust_list(2) of a decoy, a process of the same user without rights, fails with EPERM,
and else with EFAULT, because it is given no memory. So each thread is interrupted, makes that call,
and goes on as if nothing had been: a call that the interruption ended is made again.

This is a process of its own, because a thread whose tracer is killed in that moment is lost.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flowgpu.host import inject, probes, ptrace
from flowgpu.host.proctree import PROC, status_numbers, thread_ids, thread_state

# asm/unistd_64.h
GET_ROBUST_LIST, LANDLOCK_CREATE_RULESET = 274, 444
CAPSET = 126
CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
ERESTARTNOHAND = 514
# Calls that end with EINTR after an interruption without a signal (signal(7)): read, the waits of
# System V, sockets with a time limit, asynchronous I/O, signals and epoll.
ENDED = {0, 42, 43, 45, 47, 65, 128, 208, 220, 232, 281, 288, 299, 333, 441}
STOP_SECONDS = 0.2
"""For a thread to stop; one that waits in vfork(2) or for a disk may not."""
MOST_SECONDS = 20.0
ANSWER_SECONDS = 60.0
"""For a search, with all that it may have to wait for on a busy machine."""
COMMAND = (sys.executable, "-P", "-S", "-X", "utf8", "-m", "flowgpu.host.sandbox")


class Search:
    """Looks for sandboxes in these processes, beside whatever else is done."""

    def __init__(self, pids: Sequence[int]) -> None:
        suspects = [pid for pid in pids if _is_suspect(pid)] if is_supported() else []
        self._suspects = suspects
        self._process = None
        if suspects:
            # In a session of its own no signal for ours ends it at work.
            self._process = subprocess.Popen(
                [*COMMAND, *map(str, suspects)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )

    def result(self) -> tuple[tuple[int, int] | None, list[str]]:
        """A process and a thread of it that is in a sandbox, None if there is none; and in words
        what could not be found out.

        Raises TimeoutError after ANSWER_SECONDS: the search goes on by itself then.
        """
        if self._process is None:
            return None, []
        try:
            text, _ = self._process.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self.close(0.0)
            why = f"the search for Landlock sandboxes took more than {ANSWER_SECONDS:.0f} s"
            raise TimeoutError(f"{why}{self._asked(self._process.pid)}") from None
        if self._process.returncode != 0:
            raise RuntimeError(f"{COMMAND[-1]} ended with status {self._process.returncode}")
        answer = json.loads(text)
        unknown = [
            f"process {pid}: a Landlock sandbox, if thread {thread} is in one ({reason})"
            for pid, thread, reason in answer["unknown"]
        ]
        return next(((pid, thread) for pid, thread in answer["found"]), None), unknown

    def close(self, seconds: float = ANSWER_SECONDS) -> None:
        """Wait for its end, so long at most: it is not killed at work. A second call does
        nothing."""
        if self._process is not None and self._process.stdout and not self._process.stdout.closed:
            self._process.stdout.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)

    def _asked(self, search: int) -> str:
        """In words, whom the search asks now."""
        for pid in self._suspects:
            for thread in thread_ids(pid):
                if status_numbers(thread, "TracerPid") == [search]:
                    return f": it waits for thread {thread} of process {pid}"
        return ""


def _is_suspect(pid: int) -> bool:
    """True if the process may be in a sandbox.

    Only a process with CAP_SYS_ADMIN or with NoNewPrivs may enter one. A process that this one has
    started has CAP_SYS_ADMIN only if this one has it.
    """
    if "CAP_SYS_ADMIN" in probes.capabilities():
        return True
    for thread in thread_ids(pid):
        with suppress(OSError):
            text = (PROC / str(pid) / "task" / str(thread) / "status").read_text(errors="replace")
            if "\nNoNewPrivs:\t1\n" in text:
                return True
    return False


def is_supported() -> bool:
    """True if the kernel of this machine has Landlock."""
    version_flag = 1
    return bool(probes.libc().syscall(LANDLOCK_CREATE_RULESET, None, 0, version_flag) > 0)


class Decoys:
    """Processes without rights, one of each user and group, that end with this one."""

    def __init__(self) -> None:
        self._pids: dict[tuple[int, int], int] = {}

    def of(self, user: int, group: int) -> int:
        """Its process id. Raises OSError."""
        if (user, group) not in self._pids:
            self._pids[user, group] = self._start(user, group)
        return self._pids[user, group]

    def _start(self, user: int, group: int) -> int:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with suppress(OSError):
                libc = probes.libc()
                if (os.getuid(), os.getgid()) != (user, group):
                    os.setresgid(group, group, group)
                    os.setresuid(user, user, user)
                # Another user's would be forgotten.
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
                if libc.syscall(CAPSET, header, (ctypes.c_uint32 * 6)()) == 0:
                    # What was changed had made it nobody's to look at.
                    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
                    os.write(write, b"x")
                    signal.pause()
            os._exit(1)
        os.close(write)
        with open(read, "rb") as ready:
            if not ready.read(1):
                raise PermissionError(errno.EPERM, f"no decoy of user {user}")
        return pid

    def end(self) -> None:
        """End all."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def is_sandboxed(pid: int, thread: int, decoys: Decoys) -> bool:
    """True if the thread is in a sandbox. Raises OSError where that cannot be found out."""
    folder = PROC / str(pid) / "task" / str(thread)
    decoys.of(*_ids(_status(folder)))  # made while the thread runs, since that takes a while
    ptrace.ptrace(ptrace.SEIZE, thread)
    _interrupt(thread)
    try:
        # Until it stands still it may execute another program, which has its vDSO elsewhere.
        status = _status(folder)
        decoy = decoys.of(*_ids(status))
        instruction = inject.syscall_instruction(pid, (PROC / str(pid) / "maps").read_bytes())
        filtered = "\nSeccomp:\t0\n" not in status
        with inject.calling(thread, lambda: instruction, filtered=filtered) as caller:
            try:
                caller.call(GET_ROBUST_LIST, decoy, 0, 0)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EFAULT):
                    raise
                return error.errno == errno.EPERM
            raise OSError(f"get_robust_list of thread {thread} succeeded")
    finally:
        # What becomes of a call that was interrupted is decided where a signal is looked for.
        with suppress(OSError):
            _interrupt(thread, resume=True)
            _make_again(thread)
        with suppress(OSError):
            ptrace.ptrace(ptrace.DETACH, thread)


def _status(folder: Path) -> str:
    return (folder / "status").read_text(errors="replace")


def _ids(status: str) -> tuple[int, int]:
    """User and group of a thread, by its /proc/PID/task/TID/status."""
    user = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
    group = re.search(r"^Gid:\t(\d+)", status, re.MULTILINE)
    return int(user[1]) if user else 0, int(group[1]) if group else 0


def _interrupt(thread: int, *, resume: bool = False) -> None:
    """Have a traced thread stop. Raises OSError, with a thread that stops as soon as it can."""
    ptrace.ptrace(ptrace.INTERRUPT, thread)
    if resume:
        ptrace.ptrace(ptrace.CONT, thread)
    ptrace.wait_event_stop(thread, time.monotonic() + STOP_SECONDS)


def _make_again(thread: int) -> None:
    """Have the call be made again that has ended by the interruption, unless a signal comes."""
    words = inject.to_words(ptrace.general_registers(thread))
    ended = words[inject.RAX] == inject.ALL_SIGNALS + 1 - errno.EINTR
    if ended and words[inject.ORIG_RAX] in ENDED:
        words[inject.RAX] = inject.ALL_SIGNALS + 1 - ERESTARTNOHAND
        ptrace.set_general_registers(thread, inject.to_bytes(words))


def main(pids: list[int]) -> None:
    """Print what is found, as JSON."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    found, unknown, decoys = [], [], Decoys()
    end = time.monotonic() + MOST_SECONDS
    try:
        for pid in pids:
            for thread in thread_ids(pid):
                try:
                    if time.monotonic() >= end:
                        raise TimeoutError(errno.ETIMEDOUT, "there are too many")
                    if is_sandboxed(pid, thread, decoys):
                        found.append((pid, thread))
                except (ProcessLookupError, FileNotFoundError):
                    continue
                except OSError as error:
                    if thread_state(pid, thread) in "ZX":  # one that ends may not be traced
                        continue
                    unknown.append((pid, thread, str(error)))
    finally:
        decoys.end()
    with suppress(BrokenPipeError):  # the checkpoint has failed meanwhile
        os.write(1, json.dumps({"found": found, "unknown": unknown}).encode())


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
