"""Read the image files of CRIU, and mend one, as far as we use them (images/*.proto of CRIU 4.2).

A reader of our own, of a few lines: importing protobuf's and pycriu's took longer than all that a
restore reads with them. Tests compare with pycriu.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import stat
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flowgpu.errors import ImageDamaged

MAGIC_BYTES = 8  # two magic numbers, before the messages of a file
_FILE_SHARED = 1 << 7  # of a mapping's status: of a file, and shared
_FILE = _FILE_SHARED | 1 << 6
_IN_PARENT = 1  # flags of a pagemap entry: the page is not in the file
_TIMERFD = 12  # of a file's entry
# The processor's mask XSTATE_BV says which register sets a thread uses. CRIU has a place for these
# bits of it: all sets up to the protection keys.
_SAVED_REGISTERS = 0x2FF
_REGISTER_SETS = {17: "the configuration of AMX tiles", 18: "AMX tiles", 19: "APX registers"}
# This finds the mask behind hundreds of numbers: to read each would take much of a pause.
_VARINT = rb"[\x80-\xff]*[\x00-\x7f]"
_XSTATE = re.compile(
    rb"(?:[\x08\x10\x18\x20\x28\x30\x38\x40\x48\x50\x58]V)*\x6aV\x08(V)".replace(b"V", _VARINT)
)
# Behind the mask and the other sets: what the protection keys allow.
_KEY_RIGHTS = re.compile(rb"(?:[\x10\x18\x20\x28\x30\x38]V)*(?:\x40(V))?".replace(b"V", _VARINT))
_ALIVE = 1  # of a task's state: set when it runs (1) or is stopped (3), not when it is dead (2, 6)
_STOPPED = 3
_PTY = 12  # of a terminal's entry
_CHILD_SUBREAPER = 18  # of a task
_TASK, _ACTIONS = 3, 15  # of a process's entry, and of that of its task


@dataclass(frozen=True)
class DumpStats:
    """Times and sizes of a dump as CRIU counted them."""

    freezing_s: float
    frozen_s: float
    memory_dump_s: float
    memory_write_s: float
    pages_scanned: int
    pages_written: int


@dataclass(frozen=True)
class RestoreStats:
    """Times of a restore as CRIU counted them."""

    forking_s: float
    restore_s: float
    pages_restored: int


class Action(NamedTuple):
    """What a process does at a signal (struct sigaction of the kernel)."""

    handler: int
    flags: int
    restorer: int
    mask: int


GUARD = Action(handler=1 << 12, flags=0x0C000000, restorer=1 << 12, mask=0)
"""What SIGTRAP does while CRIU works (standstill.py); the flags: SA_RESTORER and SA_ONSTACK."""


@dataclass(frozen=True)
class OpenedFile:
    """A regular file that a dumped process had open or mapped.

    `flags` are those of open(2), 0 of what is mapped. CRIU wants the same `size`, in bytes, again,
    unless there is none.
    """

    id: int
    path: str
    flags: int
    size: int | None


@dataclass(frozen=True)
class SavedMapping:
    """A mapping of a dumped process, and how many bytes of it the image has.

    `path` is that of its file; empty where it has none.
    """

    start: int
    end: int
    path: str
    bytes: int


class Message:
    """A protobuf message of an image file: what it has under each number. Raises ImageDamaged."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path = path
        self._numbers: dict[int, list[int]] = {}
        self._data: dict[int, list[bytes]] = {}
        try:
            at = 0
            while at < len(data):
                at = self._field(data, at)
        except LookupError:  # past the end, or of no known kind
            at = -1
        if at != len(data):
            raise ImageDamaged(path=path, reason="not a CRIU image")

    def _field(self, data: bytes, at: int) -> int:
        key, at = _varint(data, at)
        kind, key = key & 7, key >> 3
        if kind == 0:
            value, at = _varint(data, at)
            self._numbers.setdefault(key, []).append(value)
            return at
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[kind]
        self._data.setdefault(key, []).append(data[at : at + size])
        return at + size

    def number(self, key: int) -> int:
        """An integer; 0 when there is none."""
        return self._numbers[key][-1] if key in self._numbers else 0

    def numbers(self, key: int) -> Sequence[int]:
        """Integers of a number that may be there more than once."""
        return self._numbers.get(key, ())

    def text(self, key: int) -> bytes:
        """Bytes; empty when there are none."""
        return self._data[key][-1] if key in self._data else b""

    def message(self, key: int) -> Message | None:
        """A message in this one."""
        return Message(self._path, self._data[key][-1]) if key in self._data else None

    def texts(self, key: int) -> Sequence[bytes]:
        """Bytes of a number that may be there more than once."""
        return self._data.get(key, ())

    def messages(self, key: int) -> Iterator[Message]:
        """Messages in this one, of a number that may be there more than once."""
        return (Message(self._path, data) for data in self.texts(key))

    def __contains__(self, key: int) -> bool:
        return key in self._numbers or key in self._data


def spans(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Number, begin and end of each field of a message."""
    at = 0
    while at < len(data):
        start = at
        key, at = _varint(data, at)
        if key & 7 == 0:
            _, at = _varint(data, at)
        elif key & 7 == 2:
            size, at = _varint(data, at)
            at += size
        else:
            at += {1: 8, 5: 4}[key & 7]
        yield key >> 3, start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise LookupError("a number of more than 64 bits")


def as_varint(value: int) -> bytes:
    """A number as messages have it."""
    low = [value >> shift & 0x7F | 0x80 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*low[:-1], low[-1] & 0x7F])


def messages(path: Path) -> list[Message]:
    """Messages of an image file. Raises ImageDamaged."""
    found = []
    try:
        data = path.read_bytes()
        at = MAGIC_BYTES
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "little")
            if end > len(data):
                break
            found.append(Message(path, data[at + 4 : end]))
            at = end
    except OSError as error:
        raise ImageDamaged(path=path, reason=error.strerror) from error
    if at != len(data) or not found:
        raise ImageDamaged(path=path, reason="it ends within a message")
    return found


def pids(images_dir: Path) -> list[int]:
    """Process ids in the image, the root first."""
    return [entry.number(1) for entry in messages(images_dir / "pstree.img")]


def thread_ids(images_dir: Path) -> list[int]:
    """Ids of all threads in the image, those of the processes among them."""
    found = (re.fullmatch(r"core-(\d+)\.img", name) for name in os.listdir(images_dir))
    return sorted(int(name[1]) for name in found if name)


def living_pids(images_dir: Path) -> list[int]:
    """Process ids of the image without those that were dead and not yet waited for."""
    found = []
    for pid in pids(images_dir):
        task = messages(images_dir / f"core-{pid}.img")[0].message(3)
        if task is not None and task.number(1) & _ALIVE:
            found.append(pid)
    return found


def stopped_pids(images_dir: Path) -> list[int]:
    """Processes that were stopped (SIGSTOP, a terminal's ^Z) before CRIU stopped them all."""
    found = []
    for pid in pids(images_dir):
        task = messages(images_dir / f"core-{pid}.img")[0].message(3)
        if task is not None and task.number(1) == _STOPPED:
            found.append(pid)
    return found


def forget_standstill(
    images_dir: Path, actions: Mapping[int, Action | None], stopped: Container[int]
) -> None:
    """Let the image have of these processes that they ran, but those `stopped` before, and what
    they did at SIGTRAP, where that is known: they had GUARD for CRIU alone. Raises ImageDamaged."""
    for pid, action in actions.items():
        path = images_dir / f"core-{pid}.img"
        if not path.exists():
            continue  # it was dead
        (core,) = messages(path)
        before = task = core.text(_TASK)
        if not task.startswith(bytes([1 << 3, _STOPPED])):
            continue
        if pid not in stopped:
            task = bytes([1 << 3, _ALIVE]) + task[2:]
        if action is not None:
            entry = dict(enumerate(Message(path, task).texts(_ACTIONS), 1))[signal.SIGTRAP]
            if not entry.startswith(_as_entry(GUARD)):
                raise ImageDamaged(path=path, reason="another handler of SIGTRAP")
            changed = _as_entry(action) + entry[len(_as_entry(GUARD)) :]
            task = replaced(task, _ACTIONS, entry, changed)
        data = path.read_bytes()
        whole = replaced(data[MAGIC_BYTES + 4 :], _TASK, before, task)
        path.write_bytes(data[:MAGIC_BYTES] + len(whole).to_bytes(4, "little") + whole)


def _as_entry(action: Action) -> bytes:
    """What CRIU's entry of an action begins with."""
    return b"".join(bytes([n << 3]) + as_varint(word) for n, word in enumerate(action, 1))


def replaced(message: bytes, key: int, old: bytes, new: bytes) -> bytes:
    """The message with another value in the first field of that number that has the old one."""
    before, after = (bytes([key << 3 | 2]) + as_varint(len(v)) + v for v in (old, new))
    return message.replace(before, after, 1)


def limits(images_dir: Path) -> dict[int, list[tuple[int, int]]]:
    """Soft and hard limit of each resource, in the order of their numbers, by process."""
    found = {}
    for pid in living_pids(images_dir):
        task = messages(images_dir / f"core-{pid}.img")[0].message(_TASK)
        rows = task.message(8) if task else None
        if rows is not None:
            found[pid] = [(row.number(1), row.number(2)) for row in rows.messages(1)]
    return found


_NO_KEYS = 0x55555554
"""PKRU where none is taken: all keys but that of other memory forbid access."""


def unsaved_registers(images_dir: Path) -> tuple[int, str] | None:
    """A thread that was using registers of which CRIU has saved nothing, and what they are."""
    for thread in thread_ids(images_dir):
        found = _extended(images_dir, thread)
        left = _varint(found[1], 0)[0] & ~_SAVED_REGISTERS if found else 0
        if left:
            sets = [number for number in range(left.bit_length()) if left >> number & 1]
            return thread, ", ".join(_REGISTER_SETS.get(n, f"state component {n}") for n in sets)
    return None


def with_protection_keys(images_dir: Path) -> list[int]:
    """Processes that use memory protection keys (pkeys(7)), by the register in which they say so.

    CRIU keeps that register, but neither which keys are taken nor the key of any memory.
    """
    found, threads = [], set(thread_ids(images_dir))
    for process in messages(images_dir / "pstree.img"):
        rights = (_key_rights(images_dir, one) for one in threads.intersection(process.numbers(5)))
        if any(right not in (0, _NO_KEYS) for right in rights):
            found.append(process.number(1))
    return found


def _key_rights(images_dir: Path, thread: int) -> int:
    found = _extended(images_dir, thread)
    rights = _KEY_RIGHTS.match(found.string, found.end()) if found else None
    return _varint(rights[1], 0)[0] if rights and rights[1] else 0


def _extended(images_dir: Path, thread: int) -> re.Match[bytes] | None:
    """Where the mask of a thread's register sets ends, which is the match's group."""
    machine = messages(images_dir / f"core-{thread}.img")[0].message(2)
    return _XSTATE.match(machine.text(3)) if machine else None


def smallest_signal_stack(images_dir: Path) -> int | None:
    """Bytes; None if no thread has one."""
    found = []
    for thread in thread_ids(images_dir):
        core = messages(images_dir / f"core-{thread}.img")[0].message(5)
        stack = core.message(7) if core else None
        if stack and stack.number(2):
            found.append(stack.number(2))
    return min(found, default=None)


def adopts_orphans(images_dir: Path) -> bool:
    """True when the root is the parent of orphans below it (PR_SET_CHILD_SUBREAPER)."""
    task = messages(images_dir / f"core-{pids(images_dir)[0]}.img")[0].message(3)
    return task is not None and bool(task.number(_CHILD_SUBREAPER))


def is_shell_job(images_dir: Path) -> bool:
    """True when the session leader of the dumped root is not in the image."""
    tree = messages(images_dir / "pstree.img")
    return tree[0].number(4) not in {entry.number(1) for entry in tree}


def terminals(images_dir: Path) -> set[int]:
    """Numbers of the terminals in the image, as in /dev/pts."""
    path = images_dir / "tty-info.img"
    found = (entry.message(_PTY) for entry in messages(path)) if path.exists() else ()
    return {pty.number(1) for pty in found if pty is not None}


def regular_files(images_dir: Path) -> list[OpenedFile]:
    """Regular files that CRIU opens by their path when the image is restored.

    Without those that it brings itself (deleted ones), or is given; those of /proc, which are of
    processes; and those of a mount namespace of the job's own, where a path means another file.
    """
    found = []
    for file in _named_files(images_dir):
        path = os.fsdecode(file.text(6))
        if stat.S_ISREG(file.number(10) & 0xFFFF) and not path.startswith("/proc/"):
            size = file.number(8) if 8 in file else None
            found.append(OpenedFile(file.number(1), path, file.number(2), size))
    return found


def fifo_paths(images_dir: Path) -> set[Path]:
    """FIFOs that CRIU opens by their path, with the same exceptions."""
    return {
        Path(os.fsdecode(file.text(6)))
        for file in _named_files(images_dir)
        if stat.S_ISFIFO(file.number(10) & 0xFFFF)
    }


def _named_files(images_dir: Path) -> Iterator[Message]:
    """Entries of files that CRIU opens by their path."""
    remapped = _remapped(images_dir)
    for entry in messages(images_dir / "files.img"):
        file = entry.message(3)
        # 7: a mount of the job's own, 9: given from outside
        if file and 7 not in file and not file.number(9) and file.number(1) not in remapped:
            yield file


def _remapped(images_dir: Path) -> set[int]:
    """Ids of files that CRIU opens by another path than theirs."""
    path = images_dir / "remap-fpath.img"
    return {entry.number(1) for entry in messages(path)} if path.exists() else set()


def mapped_for_writing(images_dir: Path) -> set[int]:
    """Ids of files of which a process of the image had a shared mapping that it may write to."""
    found = set()
    for path in images_dir.glob("mm-*.img"):
        for memory in messages(path):
            for area in memory.messages(14):
                writable = area.number(5) & mmap.PROT_WRITE or area.number(10) & os.O_RDWR
                if area.number(7) & _FILE_SHARED and writable:
                    found.add(area.number(4))
    return found


def linked(images_dir: Path, folder: Path) -> None:
    """Make a folder with a link to each file of the images."""
    folder.mkdir(0o700)
    for name in os.listdir(images_dir):
        (folder / name).symlink_to((images_dir / name).absolute())


def watched_paths(images_dir: Path) -> set[Path]:
    """What processes of the image watch with inotify, as far as CRIU finds it by a path."""
    found = set()
    for entry in messages(images_dir / "files.img"):
        if inotify := entry.message(13):
            for watch in inotify.messages(5):
                handle = watch.message(7)
                if handle and 4 in handle:
                    found.add(Path(os.fsdecode(handle.text(4))))
    return found


def rearm_timers(images_dir: Path) -> None:
    """Let periodic timerfds that had expired and were not yet read run on after a restore.

    The kernel starts the next period when such a one is read; until then it says that no time is
    left, and to set that disarms it, which CRIU does. So the image gets a whole period. What has
    expired can be read as before.
    """

    def rearmed(entry: Message, data: bytes) -> bytes:
        timer = entry.message(_TIMERFD)
        return data if timer is None else data + _rearmed(timer, entry.text(_TIMERFD))

    change_entries(images_dir / "files.img", rearmed)


def change_entries(path: Path, change: Callable[[Message, bytes], bytes]) -> None:
    """Replace each message by what `change` makes of it and its bytes. Where a message has a number
    twice, the last counts."""
    data = path.read_bytes()
    changed, at = [data[:MAGIC_BYTES]], MAGIC_BYTES
    for entry in messages(path):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        new = change(entry, data[at + 4 : end])
        changed += [len(new).to_bytes(4, "little"), new]
        at = end
    if (whole := b"".join(changed)) != data:
        path.write_bytes(whole)


def _rearmed(timer: Message, data: bytes) -> bytes:
    """What to add to a timerfd's entry; empty if the timer runs, or is not to run again."""
    ticks, *left = map(timer.number, (5, 7, 8))
    seconds, nanoseconds = map(timer.number, (9, 10))
    if not ticks or any(left) or not (seconds or nanoseconds):
        return b""
    data += b"\x38" + as_varint(seconds) + b"\x40" + as_varint(nanoseconds)
    return bytes([_TIMERFD << 3 | 2]) + as_varint(len(data)) + data


def page_runs(pagemap: Path) -> tuple[str, list[tuple[int, int]]]:
    """Name of the file with a process's pages, and the runs in it: number of the first page in the
    address space, and how many there are."""
    head, *entries = messages(pagemap)
    return f"pages-{head.number(1)}.img", [
        (entry.number(1) // mmap.PAGESIZE, entry.number(5))
        for entry in entries
        if entry.number(4) != _IN_PARENT
    ]


def saved_mappings(images_dir: Path, pid: int) -> list[SavedMapping]:
    """Mappings of a process of the image of which it has pages of its own, by their addresses.

    Shared memory and files are no process's own.
    """
    files = {
        entry.number(2): os.fsdecode(file.text(6))
        for entry in messages(images_dir / "files.img")
        if (file := entry.message(3)) is not None
    }
    areas = [
        (
            area.number(1),
            area.number(2),
            files.get(area.number(4), "") if area.number(7) & _FILE else "",
        )
        for memory in messages(images_dir / f"mm-{pid}.img")
        for area in memory.messages(14)
    ]
    starts = [start for start, _, _ in areas]
    saved = [0] * len(areas)
    for page, count in page_runs(images_dir / f"pagemap-{pid}.img")[1]:
        start, end = page * mmap.PAGESIZE, (page + count) * mmap.PAGESIZE
        for number in range(bisect_right(starts, start) - 1, len(areas)):
            if starts[number] >= end:
                break
            saved[number] += min(end, areas[number][1]) - max(start, starts[number])
    return [SavedMapping(*area, size) for area, size in zip(areas, saved, strict=True) if size]


def dump_stats(images_dir: Path) -> DumpStats:
    """Statistics that CRIU leaves beside a dump."""
    stats = _statistics(images_dir / "stats-dump", 1)
    return DumpStats(
        freezing_s=stats.number(1) / 1e6,
        frozen_s=stats.number(2) / 1e6,
        memory_dump_s=stats.number(3) / 1e6,
        memory_write_s=stats.number(4) / 1e6,
        pages_scanned=stats.number(5),
        pages_written=stats.number(7),
    )


def restore_stats(work_dir: Path) -> RestoreStats:
    """Statistics that CRIU leaves in the work folder of a restore."""
    stats = _statistics(work_dir / "stats-restore", 2)
    return RestoreStats(
        forking_s=stats.number(3) / 1e6,
        restore_s=stats.number(4) / 1e6,
        pages_restored=stats.number(5),
    )


def _statistics(path: Path, key: int) -> Message:
    stats = messages(path)[0].message(key)
    if stats is None:
        raise ImageDamaged(path=path, reason="not a CRIU image")
    return stats
