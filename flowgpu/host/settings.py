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
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

from flowgpu.host import inject, probes, sockets
from flowgpu.host.inject import Caller
from flowgpu.host.proctree import thread_ids
from flowgpu.image.manifest import Setting

log = logging.getLogger(__name__)

PROC = Path("/proc")
# asm/unistd_64.h
CHDIR, UMASK, PERSONALITY, PRCTL, MBIND = 80, 95, 135, 157, 237
SET_MEMPOLICY, GET_MEMPOLICY = 238, 239
KEYCTL, IOPRIO_SET, IOPRIO_GET, UNSHARE, KCMP = 250, 251, 252, 272, 312
# linux/prctl.h
SET_TSC, GET_TSC, SET_TIMERSLACK, GET_TIMERSLACK, MCE_KILL = 26, 25, 29, 30, 33
SET_THP_DISABLE, GET_THP_DISABLE, SET_SPECULATION = 41, 42, 53
SET_IO_FLUSHER, SET_MDWE, GET_MDWE, SET_MEMORY_MERGE, GET_MEMORY_MERGE = 57, 65, 66, 67, 68
# Flags of /proc/PID/stat (linux/sched.h): a choice about machine checks, that it is to be early,
# and the two of PR_SET_IO_FLUSHER.
MCE_PROCESS, MCE_EARLY, IO_FLUSHER = 0x80, 0x08000000, 0x00180000
# linux/mempolicy.h
MPOL_F_ADDR, MPOL_MF_MOVE = 2, 2
# Modes in their order, as /proc/PID/numa_maps names them.
POLICIES = ["default", "prefer", "bind", "interleave", "local", "prefer (many)"]
POLICIES += ["weighted interleave"]
POLICY_FLAGS = {1 << 15: "static", 1 << 14: "relative", 1 << 13: "balancing"}
MOST_NODES = 1024
# linux/keyctl.h
SESSION_KEYRING, PROCESS_KEYRING, THREAD_KEYRING = -3, -2, -1
KEY_ID, KEY_JOIN, KEY_SETPERM, KEY_DESCRIBE, KEY_READ = 0, 1, 5, 6, 11
KEY_USR_SEARCH = 0x00080000
WHO_PROCESS, IO_CLASS_SHIFT = 1, 13
CLONE_FS = 0x200
KCMP_FILE, KCMP_FILES, KCMP_FS, KCMP_EPOLL_TFD = 0, 2, 3, 7
TIMER_SLACK, COREDUMP_FILTER = 50_000, 0x33
"""What a process has that has chosen nothing."""
# PR_SET_SPECULATION_CTRL sets these: lines of /proc/PID/status, and words that a program has set.
SPECULATION = {"Speculation_Store_Bypass": 0, "SpeculationIndirectBranch": 1}
RESTRICTED = {"thread mitigated": 4, "thread force mitigated": 8}
RESTRICTED |= {"conditional disabled": 4, "conditional force disabled": 8}
FIFO, WATCHED_FOLDER = "fifo", "watched_folder"
"""Kinds that are no thread's: coordinator/places.py."""
NO_POLICY = (0,)
SECURITY = {"mdwe", "speculation", "session_keyring", "tsc"}
"""Without these nothing of a job runs again."""
STOP_SECONDS = 10.0
FIRST_BYTES = 64
MOST_NAME = 512
"""Bytes of a description of a keyring."""
# What the first thread is asked with prctl(2), and which answer CRIU gives a restored process too.
_GETTERS = (
    ("mdwe", GET_MDWE, 0),
    ("memory_merge", GET_MEMORY_MERGE, 0),
    ("thp_disable", GET_THP_DISABLE, 1),
)


class Survey:
    """What the processes of a stopped tree have that a restore has to put back."""

    def __init__(self) -> None:
        self.not_kept: list[str] = []
        """What else they have, in words with the process."""
        self._found: dict[tuple[str, tuple[int, ...], str], set[int]] = {}
        self._doubtful: dict[int, set[int]] = {}  # process -> threads that are to be asked
        self._policies: dict[int, list[tuple[int, int, str]]] = {}  # process -> start, end, text
        self._texts: dict[int, str] = {}  # thread -> the policy of its first mapping
        self._merges: dict[int, bool] = {}
        self._slackless: set[int] = set()  # threads whose timer slack /proc does not tell
        self._of_sockets: sockets.Look | None = None
        self._keyring = _own_keyring()

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All that was found, for the manifest."""
        of_threads = (
            Setting(kind, values, text, tuple(sorted(threads)))
            for (kind, values, text), threads in sorted(self._found.items())
        )
        return (*of_threads, *(self._of_sockets.settings if self._of_sockets else ()))

    def look(self, pids: Sequence[int]) -> None:
        """Read /proc. CRIU may be at work in the processes."""
        for pid in pids:
            try:
                self._look_at(pid)
            except (FileNotFoundError, ProcessLookupError):
                pass  # it was killed
            except OSError as error:
                self.not_kept.append(f"process {pid}: what CRIU forgets of it ({error})")
        self._of_sockets = sockets.Look(pids)
        self.not_kept += self._of_sockets.not_kept

    def settle(self) -> None:
        """Look again at what CRIU has changed for its work. It has ended, and they stand still."""
        if self._of_sockets:
            self._of_sockets.settle()

    def _look_at(self, pid: int) -> None:
        folder = PROC / str(pid)
        filtered = int((folder / "coredump_filter").read_text() or "33", 16)
        if filtered != COREDUMP_FILTER:
            self._add(pid, "coredump_filter", filtered)
        self._policies[pid] = list(_policies(folder))
        with suppress(OSError):  # of Linux 6.1
            text = (folder / "ksm_stat").read_text()
            if found := re.search(r"^ksm_merge_any: (\w+)$", text, re.MULTILINE):
                self._merges[pid] = found[1] == "yes"
        doubtful = self._doubtful.setdefault(pid, {pid})
        for thread in thread_ids(pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                self._look_at_thread(pid, thread)
                self._texts[thread] = _first_policy(thread)
                if self._texts[thread] != "default":
                    doubtful.add(thread)

    def _look_at_thread(self, pid: int, thread: int) -> None:
        folder = PROC / str(pid) / "task" / str(thread)
        flags = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[6])
        if flags & MCE_PROCESS:
            self._add(thread, "machine_checks", int(bool(flags & MCE_EARLY)))
        if flags & IO_FLUSHER == IO_FLUSHER:
            self._add(thread, "io_flusher", 1)
        if personality := int((folder / "personality").read_text(), 16):
            self._add(thread, "personality", personality)
        try:
            self._add_slack(thread, int((PROC / str(thread) / "timerslack_ns").read_text()))
        except PermissionError:  # without CAP_SYS_NICE
            self._slackless.add(thread)
        priority = probes.libc().syscall(IOPRIO_GET, WHO_PROCESS, thread)
        if priority >> IO_CLASS_SHIFT > 0:
            self._add(thread, "io_priority", priority)
        status = (folder / "status").read_text(errors="replace")
        for name, which in SPECULATION.items():
            state = re.search(rf"^{name}:\t(.*)$", status, re.MULTILINE)
            if state and state[1] in RESTRICTED:
                self._add(thread, "speculation", which, RESTRICTED[state[1]])
        if is_apart(pid, thread, KCMP_FS):
            umask = re.search(r"^Umask:\t(\d+)$", status, re.MULTILINE)
            self._add(
                thread, "folder", int(umask[1], 8) if umask else 0, text=os.readlink(folder / "cwd")
            )

    def _add_slack(self, thread: int, slack: int) -> None:
        if slack not in (-1, 0, TIMER_SLACK):  # a thread of a real-time policy has none
            self._add(thread, "timer_slack", slack)

    def others(self, pid: int) -> set[int]:
        """Threads of the process to be asked besides its first one, which is asked before them."""
        return self._doubtful.get(pid, {pid}) - {pid}

    def ask(self, pid: int, caller: Caller) -> None:
        """Ask a thread of that process. Raises OSError where it can make no call."""
        thread = caller.thread
        policy = _policy(caller)
        if policy != NO_POLICY:
            self._add(thread, "policy", *policy)
        keyring = _try(caller, KEYCTL, KEY_ID, SESSION_KEYRING, 0)
        own_keyring = keyring not in (self._keyring, -1)
        if own_keyring:
            permissions, name = _keyring_of(caller, keyring)
            self._add(thread, "session_keyring", keyring, permissions, text=name)
        if tsc := _forbidden_tsc(caller):
            self._add(thread, "tsc", tsc)
        if thread in self._slackless:
            self._add_slack(thread, _try(caller, PRCTL, GET_TIMERSLACK, 0, 0, 0, 0))
        if thread != pid:
            return
        self._take_over(pid, policy)
        if own_keyring or tsc:
            self._doubtful[pid] = set(thread_ids(pid))
        self._note_keys(pid, caller, own_keyring)
        for kind, number, kept in _GETTERS:
            known = self._merges.get(pid) if kind == "memory_merge" else None
            value = int(known) if known is not None else _try(caller, PRCTL, number, 0, 0, 0, 0)
            if value > 0 and value != kept:
                self._add(pid, kind, value)
        usual = ("default", _policy_text(policy))
        for start, end, text in self._policies.get(pid, ()):
            if text not in usual and (own := _policy(caller, start)) != NO_POLICY:
                self._add(pid, "mapping_policy", start, end, *own)

    def _take_over(self, pid: int, policy: tuple[int, ...]) -> None:
        """What threads show as the first one does, as those that it has made do, need no question:
        where it was started by numactl(8), they are all."""
        text = _policy_text(policy)
        for thread in self.others(pid):
            if self._texts.get(thread) == text:
                self._add(thread, "policy", *policy)
                self._doubtful[pid].discard(thread)

    def _note_keys(self, pid: int, caller: Caller, own_session: bool) -> None:
        names = {"process": PROCESS_KEYRING, "first thread's": THREAD_KEYRING}
        if own_session:
            names["session"] = SESSION_KEYRING
        for name, keyring in names.items():
            if (size := _try(caller, KEYCTL, KEY_READ, keyring, 0, 0)) > 0:
                keys = f"{size // 4} keys" if size > 4 else "a key"
                self.not_kept.append(f"process {pid}: {keys} in its {name} keyring")

    def _add(self, thread: int, kind: str, *values: int, text: str = "") -> None:
        self._found.setdefault((kind, values, text), set()).add(thread)


class Restorer:
    """Gives stopped processes of a restored tree what they had."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self.failed: list[str] = []
        """What this machine does not take, in words."""
        self._wanted: dict[int, list[Setting]] = {}
        self._sockets: list[Setting] = []
        self._keyrings: list[Setting] = []
        # The last of all, because it forbids.
        for setting in sorted(settings, key=lambda one: one.kind == "mdwe"):
            if setting.kind in sockets.KINDS:
                self._sockets.append(setting)
            elif setting.kind in (FIFO, WATCHED_FOLDER):
                continue  # it was there before CRIU
            elif setting.kind == "session_keyring":
                self._keyrings.append(setting)
            else:
                for thread in setting.threads:
                    self._wanted.setdefault(thread, []).append(setting)

    def run(self, pids: Sequence[int]) -> None:
        """Do it. Raises OSError where something of SECURITY is not taken, or a process is gone."""
        for setting in self._keyrings:
            self._join(setting, pids)
        for _, caller in callers(pids, self._wanted):
            for setting in self._wanted[caller.thread]:
                self._put(caller, setting)
        self.failed += sockets.put_back(self._sockets)

    def _put(self, caller: Caller, setting: Setting) -> None:
        try:
            if setting.kind not in _SETTERS:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            _SETTERS[setting.kind](caller, setting)
        except OSError as error:
            reason = f"{setting.kind} ({os.strerror(error.errno or errno.EIO)})"
            if setting.kind in SECURITY:
                raise OSError(f"thread {caller.thread}: {reason}") from error
            self.failed.append(f"thread {caller.thread}: {reason}")

    def _join(self, setting: Setting, pids: Sequence[int]) -> None:
        """Make a session keyring for all of its threads, which find it by its name meanwhile."""
        number, permissions = setting.values
        made: tuple[int, int] | None = None  # its number, and the first thread
        for _, caller in callers(pids, setting.threads):
            with caller.memory(os.fsencode(setting.text) + b"\0") as name:
                keyring = caller.call(KEYCTL, KEY_JOIN, name.at)
            if made is None:
                made = keyring, caller.thread
                caller.call(KEYCTL, KEY_SETPERM, keyring, permissions | KEY_USR_SEARCH)
            elif keyring != made[0]:
                raise OSError(errno.ENOKEY, f"the session keyring {number} is not found again")
        for _, caller in callers(pids, [made[1]] if made else []):
            caller.call(KEYCTL, KEY_SETPERM, made[0] if made else 0, permissions)


def callers(pids: Iterable[int], threads: Container[int]) -> Iterator[tuple[int, Caller]]:
    """The `threads` of the stopped processes, each with its process. A thread can make calls while
    it is the current one."""
    for pid in pids:
        if not (wanted := [thread for thread in sorted(thread_ids(pid)) if thread in threads]):
            continue
        # CRIU sends the signal that stops one and lets it go: it may not have had the time.
        inject.wait_stopped(pid, time.monotonic() + STOP_SECONDS)
        folder = PROC / str(pid)
        instruction = inject.syscall_instruction(pid, (folder / "maps").read_bytes())
        filtered = "\nSeccomp:\t0\n" not in (folder / "status").read_text(errors="replace")
        with inject.seized(pid, wanted):
            for thread in wanted:
                with inject.calling(thread, partial(int, instruction), filtered=filtered) as caller:
                    yield pid, caller


def _prctl(option: int, *before: int) -> Callable[[Caller, Setting], object]:
    """Sets the values of a setting, after these arguments."""

    def put(caller: Caller, setting: Setting) -> None:
        arguments = (option, *before, *setting.values)
        caller.call(PRCTL, *arguments, *[0] * (5 - len(arguments)))

    return put


def _put_policy(caller: Caller, setting: Setting) -> None:
    mode, *nodes = setting.values
    with caller.memory(_node_mask(nodes)) as mask:
        caller.call(SET_MEMPOLICY, mode, mask.at if nodes else 0, MOST_NODES + 1 if nodes else 0)


def _put_mapping_policy(caller: Caller, setting: Setting) -> None:
    start, end, mode, *nodes = setting.values
    with caller.memory(_node_mask(nodes)) as mask:
        at, bits = (mask.at, MOST_NODES + 1) if nodes else (0, 0)
        caller.call(MBIND, start, end - start, mode, at, bits, MPOL_MF_MOVE)


def _put_folder(caller: Caller, setting: Setting) -> None:
    caller.call(UNSHARE, CLONE_FS)
    with caller.memory(os.fsencode(setting.text) + b"\0") as path:
        caller.call(CHDIR, path.at)
    caller.call(UMASK, setting.values[0])


def _put_coredump_filter(caller: Caller, setting: Setting) -> None:
    (PROC / str(caller.thread) / "coredump_filter").write_text(f"{setting.values[0]:#x}")


_SETTERS: dict[str, Callable[[Caller, Setting], object]] = {
    "coredump_filter": _put_coredump_filter,
    "folder": _put_folder,
    "io_flusher": _prctl(SET_IO_FLUSHER),
    "io_priority": lambda caller, s: caller.call(IOPRIO_SET, WHO_PROCESS, 0, *s.values),
    "machine_checks": _prctl(MCE_KILL, 1),
    "mapping_policy": _put_mapping_policy,
    "mdwe": _prctl(SET_MDWE),
    "memory_merge": _prctl(SET_MEMORY_MERGE),
    "personality": lambda caller, s: caller.call(PERSONALITY, *s.values),
    "policy": _put_policy,
    "speculation": _prctl(SET_SPECULATION),
    "thp_disable": lambda caller, s: caller.call(PRCTL, SET_THP_DISABLE, 1, s.values[0] & ~1, 0, 0),
    "timer_slack": _prctl(SET_TIMERSLACK),
    "tsc": _prctl(SET_TSC),
}


def is_apart(one: int, other: int, kind: int, *which: ctypes._CData | int) -> bool:
    """True if the kernel says that two threads do not share a resource, a KCMP_* of this module.

    `which` of each, where they have several (kcmp(2)).
    """
    return bool(probes.libc().syscall(KCMP, one, other, kind, *(which or (0, 0))) > 0)


def is_shared(one: int, other: int, kind: int, *which: ctypes._CData | int) -> bool:
    """True if the kernel says that two threads share the resource."""
    return bool(probes.libc().syscall(KCMP, one, other, kind, *(which or (0, 0))) == 0)


def _policy(caller: Caller, address: int = 0) -> tuple[int, ...]:
    """Mode, with its flags, and nodes of a thread's memory policy, or of the mapping there."""
    size = 8 + (MOST_NODES + 64) // 8
    with caller.memory(bytes(size)) as memory:
        flags = MPOL_F_ADDR if address else 0
        # Without NUMA there is no such call, and no policy.
        _try(caller, GET_MEMPOLICY, memory.at, memory.at + 8, MOST_NODES + 1, address, flags)
        data = memory.read()
    bits = int.from_bytes(data[8:], "little")
    nodes = (node for node in range(bits.bit_length()) if bits >> node & 1)
    return int.from_bytes(data[:4], "little"), *nodes


def _node_mask(nodes: Iterable[int]) -> bytes:
    return sum(1 << node for node in nodes).to_bytes((MOST_NODES + 64) // 8, "little")


def _policies(folder: Path) -> Iterator[tuple[int, int, str]]:
    """Mappings of a process, the text of their policy with each, which is the thread's where the
    mapping has none of its own."""
    maps = (folder / "maps").read_text(errors="replace")
    ends = dict(re.findall(r"^(\w+)-(\w+) ", maps, re.MULTILINE))
    policy = re.compile(r"^(\w+) ((?:prefer \(many\)|weighted interleave)?\S*)", re.MULTILINE)
    with suppress(FileNotFoundError):  # a kernel without NUMA
        for start, text in policy.findall((folder / "numa_maps").read_text(errors="replace")):
            if start in ends:
                yield int(start, 16), int(ends[start], 16), text


def _first_policy(thread: int) -> str:
    """The policy of its first mapping as /proc has it, the thread's if that has none of its own;
    empty if there is no room for it."""
    with suppress(FileNotFoundError), open(PROC / str(thread) / "numa_maps", "rb", 0) as file:
        # The kernel answers so short a read with the first mapping alone.
        words = file.read(FIRST_BYTES).decode(errors="replace").split(" ")
        return words[1] if len(words) > 2 else ""
    return "default"


def _policy_text(policy: tuple[int, ...]) -> str:
    """The policy in the words of numa_maps."""
    mode, *nodes = policy
    flags = [name for bit, name in POLICY_FLAGS.items() if mode & bit]
    mode &= ~sum(POLICY_FLAGS)
    text = POLICIES[mode] if mode < len(POLICIES) else "unknown"
    if flags:
        text += "=" + "|".join(flags)
    runs = [
        [node for _, node in run]
        for _, run in groupby(enumerate(sorted(nodes)), lambda pair: pair[1] - pair[0])
    ]
    listed = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{text}:{listed}" if listed else text


def _forbidden_tsc(caller: Caller) -> int:
    """What PR_SET_TSC was given, where that is not usual, else 0."""
    with caller.memory(bytes(8)) as memory:
        _try(caller, PRCTL, GET_TSC, memory.at, 0, 0, 0)
        found = int.from_bytes(memory.read()[:4], "little")
    return found if found > 1 else 0


def _keyring_of(caller: Caller, keyring: int) -> tuple[int, str]:
    """Permissions and name of a keyring."""
    with caller.memory(bytes(MOST_NAME)) as memory:
        caller.call(KEYCTL, KEY_DESCRIBE, keyring, memory.at, MOST_NAME)
        text = os.fsdecode(memory.read().split(b"\0")[0])
    _, _, _, permissions, name = text.split(";", 4)
    return int(permissions, 16), name


def _own_keyring() -> int:
    return int(probes.libc().syscall(KEYCTL, KEY_ID, SESSION_KEYRING, 0))


def _try(caller: Caller, number: int, *arguments: int) -> int:
    """What the call returns; -1 where it fails: there is no such thing."""
    with suppress(OSError):
        return caller.call(number, *arguments)
    return -1
