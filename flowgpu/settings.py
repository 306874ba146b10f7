"""What the kernel keeps of processes and threads, CRIU does not, and FlowGPU puts back.

At a dump /proc is read while CRIU is at work. It tells of most threads that they have nothing of
their own. The others, and the first thread of each process, are asked by system calls of theirs
when CRIU has ended (inject.py). At a restore the calls that set it are theirs too, before anything
of the job runs.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flowgpu import inject, probes
from flowgpu.image.manifest import Setting
from flowgpu.inject import Caller
from flowgpu.proctree import thread_ids

log = logging.getLogger(__name__)

PROC = Path("/proc")
# asm/unistd_64.h
CHDIR, UMASK, PERSONALITY, PRCTL, MBIND, SET_MEMPOLICY, GET_MEMPOLICY = 80, 95, 135, 157, 237, 238, 239
KEYCTL, IOPRIO_SET, IOPRIO_GET, UNSHARE, KCMP = 250, 251, 252, 272, 312
# linux/prctl.h
SET_TSC, GET_TSC, SET_TIMERSLACK, MCE_KILL = 26, 25, 29, 33
SET_THP_DISABLE, GET_THP_DISABLE, SET_SPECULATION, GET_SPECULATION = 41, 42, 53, 52
SET_IO_FLUSHER, SET_MDWE, GET_MDWE, SET_MEMORY_MERGE, GET_MEMORY_MERGE = 57, 65, 66, 67, 68
# Flags of /proc/PID/stat (linux/sched.h): a choice about machine checks, that it is to be early,
# and the two of PR_SET_IO_FLUSHER.
MCE_PROCESS, MCE_EARLY, IO_FLUSHER = 0x80, 0x08000000, 0x00180000
# linux/mempolicy.h
MPOL_F_ADDR, MPOL_MF_MOVE = 2, 2
POLICIES = ("default", "prefer", "bind", "interleave", "local", "prefer (many)", "weighted interleave")
POLICY_FLAGS = {1 << 15: "static", 1 << 14: "relative", 1 << 13: "balancing"}
MOST_NODES = 1024
# linux/keyctl.h
SESSION_KEYRING, PROCESS_KEYRING, THREAD_KEYRING = -3, -2, -1
KEY_ID, KEY_JOIN, KEY_SETPERM, KEY_DESCRIBE, KEY_READ = 0, 1, 5, 6, 11
KEY_USR_SEARCH = 0x00080000
WHO_PROCESS, IO_CLASS_SHIFT = 1, 13
CLONE_FS = 0x200
KCMP_FS = 3
TIMER_SLACK, COREDUMP_FILTER = 50_000, 0x33
"""What a process has that has chosen nothing."""
# Of PR_SET_SPECULATION_CTRL: lines of /proc/PID/status, and words of those that a program set.
SPECULATION = {"Speculation_Store_Bypass": 0, "SpeculationIndirectBranch": 1}
RESTRICTED = {"thread mitigated": 4, "thread force mitigated": 8}
RESTRICTED |= {"conditional disabled": 4, "conditional force disabled": 8}
SECURITY = {"mdwe", "speculation", "session_keyring", "tsc"}
"""Without these nothing of a job runs again."""
MOST_PATH = 4096


class Survey:
    """What the processes of a stopped tree have that a restore has to put back."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.not_kept: list[str] = []
        """What else they have, in words with the process."""
        self._pids = pids
        self._found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        self._doubtful: dict[int, set[int]] = {}  # process -> threads that are to be asked
        self._policies: dict[int, str] = {}  # process -> its lines of numa_maps
        self._merges: dict[int, bool] = {}
        self._keyring = _own_keyring()

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All that was found, for the manifest."""
        return tuple(
            Setting(kind, values, text, tuple(sorted(threads)))
            for (kind, values, text), threads in sorted(self._found.items())
        )

    def look(self) -> None:
        """Read /proc. CRIU may be at work in the processes."""
        for pid in self._pids:
            with suppress(OSError):  # it was killed
                self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        folder = PROC / str(pid)
        filtered = int((folder / "coredump_filter").read_text() or "33", 16)
        if filtered != COREDUMP_FILTER:
            self._add(pid, "coredump_filter", filtered)
        self._policies[pid] = (folder / "numa_maps").read_text(errors="replace")
        with suppress(OSError):  # of Linux 6.1
            found = re.search(r"^ksm_merge_any: (\w+)$", (folder / "ksm_stat").read_text(), re.M)
            if found:
                self._merges[pid] = found[1] == "yes"
        doubtful = self._doubtful.setdefault(pid, {pid})
        for thread in thread_ids(pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                if self._look_at_thread(pid, thread):
                    doubtful.add(thread)

    def _look_at_thread(self, pid: int, thread: int) -> bool:
        """Whether it is to be asked."""
        folder = PROC / str(pid) / "task" / str(thread)
        flags = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[6])
        if flags & MCE_PROCESS:
            self._add(thread, "machine_checks", int(bool(flags & MCE_EARLY)))
        if flags & IO_FLUSHER == IO_FLUSHER:
            self._add(thread, "io_flusher", 1)
        if personality := int((folder / "personality").read_text(), 16):
            self._add(thread, "personality", personality)
        with suppress(PermissionError):  # without CAP_SYS_NICE
            slack = int((PROC / str(thread) / "timerslack_ns").read_text())
            # A thread of a real-time policy has none.
            if slack not in (0, TIMER_SLACK):
                self._add(thread, "timer_slack", slack)
        priority = probes.libc().syscall(IOPRIO_GET, WHO_PROCESS, thread)
        if priority >> IO_CLASS_SHIFT > 0:
            self._add(thread, "io_priority", priority)
        status = (folder / "status").read_text(errors="replace")
        for name, which in SPECULATION.items():
            state = re.search(rf"^{name}:\t(.*)$", status, re.MULTILINE)
            if state and state[1] in RESTRICTED:
                self._add(thread, "speculation", which, RESTRICTED[state[1]])
        if thread != pid and has_own_folder(pid, thread):
            umask = re.search(r"^Umask:\t(\d+)$", status, re.MULTILINE)
            text = os.readlink(folder / "cwd")
            self._add(thread, "folder", int(umask[1], 8) if umask else 0, text=text)
        with open(PROC / str(thread) / "numa_maps", "rb", 0) as file:
            # So short a read is answered with the first mapping alone.
            return file.read(32).split()[1:2] not in ([b"default"], [])

    def others(self, pid: int) -> set[int]:
        """Threads of the process to be asked besides its first one, which is asked before them."""
        return self._doubtful.get(pid, {pid}) - {pid}

    def ask(self, pid: int, caller: Caller) -> None:
        """Ask a thread of that process. Raises OSError where it can make no call."""
        thread = caller.thread
        policy = _policy(caller) if thread in self._doubtful.get(pid, ()) else ()
        if policy and policy != (0,):
            self._add(thread, "policy", *policy)
        keyring = _try(caller, KEYCTL, KEY_ID, SESSION_KEYRING, 0)
        if keyring not in (self._keyring, -1):
            self._add(thread, "session_keyring", keyring, text=_keyring_name(caller, keyring))
        if tsc := _is_forbidden_tsc(caller):
            self._add(thread, "tsc", tsc)
        if thread != pid:
            return
        if keyring not in (self._keyring, -1) or tsc:
            self._doubtful[pid] |= set(thread_ids(pid))
        self._note_keys(pid, caller, keyring)
        for kind, number, kept in (
            ("mdwe", GET_MDWE, ()),
            ("thp_disable", GET_THP_DISABLE, (1,)),
            ("memory_merge", GET_MEMORY_MERGE, ()),
        ):
            known = self._merges.get(pid) if kind == "memory_merge" else None
            value = int(known) if known is not None else _try(caller, PRCTL, number, 0, 0, 0, 0)
            if value > 0 and value not in kept:
                self._add(pid, kind, value)
        for start, end in _mappings(self._policies.get(pid, ""), policy):
            own = _policy(caller, start)
            if own != (0,):
                self._add(pid, "mapping_policy", start, end, *own)

    def _note_keys(self, pid: int, caller: Caller, session: int) -> None:
        names = {PROCESS_KEYRING: "process", THREAD_KEYRING: "first thread"}
        if session not in (self._keyring, -1):
            names[SESSION_KEYRING] = "session"
        for keyring, name in names.items():
            size = _try(caller, KEYCTL, KEY_READ, keyring, 0, 0)
            if size > 0:
                self.not_kept.append(f"process {pid}: {size // 4} keys in its {name} keyring")

    def _add(self, thread: int, kind: str, *values: int, text: str = "") -> None:
        self._found.setdefault((kind, values, text), []).append(thread)


def put_back(settings: Iterable[Setting], pids: Iterable[int]) -> list[str]:
    """Give stopped processes of a restored tree what they had. What this machine does not take is
    given in words; raises OSError where that is one of SECURITY."""
    wanted: dict[int, list[Setting]] = {}
    for setting in sorted(settings, key=lambda one: one.kind == "mdwe"):  # the last: it forbids
        for thread in setting.threads:
            wanted.setdefault(thread, []).append(setting)
    failed: list[str] = []
    for pid in pids:
        if threads := wanted.keys() & set(thread_ids(pid)):
            failed += _put_back(pid, {thread: wanted[thread] for thread in sorted(threads)})
    return failed


def _put_back(pid: int, wanted: dict[int, list[Setting]]) -> Iterator[str]:
    folder = PROC / str(pid)
    instruction = inject.syscall_instruction(pid, (folder / "maps").read_bytes())
    filtered = "\nSeccomp:\t0\n" not in (folder / "status").read_text(errors="replace")
    keyrings = _Keyrings()
    with inject.seized(pid, wanted):
        for thread, settings in wanted.items():
            with inject.calling(thread, lambda: instruction, filtered=filtered) as caller:
                for one in settings:
                    try:
                        _SETTERS[one.kind](caller, one, keyrings)
                    except OSError as error:
                        if one.kind in SECURITY:
                            raise OSError(error.errno, f"{one.kind}: {error.strerror}") from error
                        log.warning("%s of thread %d: %s", one.kind, thread, error)
                        yield f"thread {thread}: {one.kind} ({os.strerror(error.errno or 0)})"
            if one.kind == "mdwe":
                pass
        keyrings.close()
