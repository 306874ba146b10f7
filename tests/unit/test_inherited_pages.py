"""Pages that forked processes have in common are in an image once, and stay common."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import criu_entries
import pytest
from criu_job import Job, StartJob
from test_early_pages import compare, dump_twice, stay_on_one_processor, track
from test_pages import IN_PARENT, restore

from coordinator.process import kill_tree
from flowgpu.errors import CriuFailed
from flowgpu.host import criu_view
from flowgpu.host.criu import Criu
from flowgpu.host.pages import PageServer, PageStats
from flowgpu.host.prctl import become_subreaper
from flowgpu.host.proctree import resume_tree, tree_pids
from flowgpu.image import inspect
from flowgpu.image.reader import Image, verify
from tests.unit.coordinator_job import Jobs

MIB = 1 << 20
OBEYS = """
signal.signal(signal.SIGUSR1, report)
signal.signal(signal.SIGUSR2, change)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.01)
"""
FAMILY = (
    """
import ctypes, hashlib, mmap, os, random, signal, time
dice = random.Random(1)
def private(size):
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_NOHUGEPAGE)
    return region
first, second, zeros = private(32 << 20), private(24 << 20), private(8 << 20)
for region in first, second:
    region[:] = dice.randbytes(len(region))
zeros[:] = bytes(len(zeros))
name = "root"
for number in range(3):
    if os.fork() == 0:
        name = f"child {number}"
        first[number << 20:number + 1 << 20] = dice.randbytes(1 << 20)
        if number == 1:
            # Other mappings than its parent's, with the same pages.
            address = ctypes.addressof(ctypes.c_char.from_buffer(second))
            for at in (9 << 20, 13 << 20):
                ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + at), 1 << 20, 1)
        if number == 2 and os.fork() == 0:
            name = "grandchild"
            first[5 << 20:6 << 20] = bytes(1 << 20)
        break
def report(*_):
    found = [hashlib.sha256(region).hexdigest()[:12] for region in (first, second, zeros)]
    os.write(1, f"{name} {' '.join(found)}\\n".encode())
def change(*_):
    first[10 << 20:12 << 20] = dice.randbytes(2 << 20)
    os.write(1, b"written\\n")
"""
    + OBEYS
)
PROCESSES = 5


@contextlib.contextmanager
def running(start: StartJob, processes: int, *words: str) -> Iterator[Job]:
    """A job that says once for each of so many processes that it is ready."""
    become_subreaper()
    job = start(*words)
    try:
        assert [job.line() for _ in range(processes)] == ["ready"] * processes
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            kill_tree(job.pid)


@pytest.fixture
def family(start: StartJob) -> Iterator[Job]:
    """A parent, three children and a grandchild, with 64 MiB that most of them have in common."""
    with running(start, PROCESSES, FAMILY) as job:
        yield job


def said(job: Job, number: int, processes: int = PROCESSES) -> list[str]:
    """What each process says to a signal."""
    for pid in tree_pids(job.pid):
        os.kill(pid, number)
    lines = [job.line() for _ in range(processes)]
    return sorted(line for line in lines if line is not None)


def memory(job: Job) -> int:
    """Bytes that the processes have, where what they have in common counts once."""
    found = 0
    for pid in tree_pids(job.pid):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        parts = re.search(r"^Pss_Anon:\s*(\d+) kB$", text, re.MULTILINE)
        assert parts is not None
        found += int(parts[1]) << 10
    return found


def mappings(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def stored(images: Path) -> int:
    return sum(path.stat().st_size for path in images.glob("pages-*.img"))


def dump(criu: Criu, job: Job, folder: Path, how: str) -> PageStats:
    """In `folder`/early the image of the server, in `folder`/whole that of CRIU alone."""
    folder.mkdir()
    if how == "early":
        server = track(job, folder)
        # The children had in common what their parent writes now: they have the old bytes.
        os.kill(job.pid, signal.SIGUSR2)
        assert job.line() == "written"
    else:
        stay_on_one_processor(job)
        server = PageServer.start(folder / "early", tree_pids(job.pid), threads=3)
        server.wait_ready(60)
    server.again(60)
    return dump_twice(criu, job, folder, server)


@pytest.mark.parametrize("how", ["still", "early"])
def test_what_processes_have_in_common_is_stored_once_and_stays_common(
    criu: Criu, family: Job, tmp_path: Path, how: str
) -> None:
    had = memory(family)
    for attempt in ("first", "again"):
        stats = dump(criu, family, tmp_path / attempt, how)
        compare(tmp_path / attempt)
        images = tmp_path / attempt / "early"
        assert len(stats.inherited) == PROCESSES - 1
        assert min(stats.inherited.values()) > 50 * MIB
        assert stored(images) < 120 * MIB < 280 * MIB < stored(tmp_path / attempt / "whole")
        resume_tree(family.pid)
        # Each page that is written is one more, and none that is read.
        assert memory(family) < had + 16 * MIB
    before = said(family, signal.SIGUSR1)
    counts = {pid: mappings(pid) for pid in tree_pids(family.pid)}
    family.end_tree()
    view = restore(criu, family, images)
    assert view is not None and view.inherits
    assert said(family, signal.SIGUSR1) == before
    # Also of child 1, whose mappings are others.
    assert memory(family) < had + 16 * MIB
    # The kernel has joined what the view had cut.
    assert all(mappings(pid) <= count for pid, count in counts.items())


FORKS = (
    """
import hashlib, os, random, signal, time
data = bytearray(random.Random(1).randbytes(32 << 20))
def report(*_):
    os.write(1, f"{hashlib.sha256(data).hexdigest()[:12]}\\n".encode())
def change(*_):
    for number in range(2):
        if os.fork() == 0:
            data[number << 20:number + 1 << 20] = bytes([number]) * (1 << 20)
            os.write(1, b"forked\\n")
            return
    data[8 << 20:9 << 20] = bytes([7]) * (1 << 20)
    os.write(1, b"forked\\n")
"""
    + OBEYS
)


def test_processes_that_are_forked_since_the_last_pass_have_pages_of_their_parent(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    with running(start, 1, FORKS) as job:
        server = track(job, tmp_path)
        os.kill(job.pid, signal.SIGUSR2)
        assert [job.line() for _ in range(3)] == ["forked"] * 3
        stay_on_one_processor(job)
        before = said(job, signal.SIGUSR1, 3)
        stats = dump_twice(criu, job, tmp_path, server)
        compare(tmp_path)
        assert len(stats.inherited) == 2 and min(stats.inherited.values()) > 28 * MIB
        assert stored(tmp_path / "early") < 60 * MIB
        job.end_tree()
        restore(criu, job, tmp_path / "early")
        assert said(job, signal.SIGUSR1, 3) == before


DRAWN = (
    """
import ctypes, hashlib, mmap, os, random, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = libc.mprotect.argtypes = [*libc.munmap.argtypes, ctypes.c_int]
MIB = 1 << 20
dice = random.Random(int(sys.argv[1]))
file = os.memfd_create("of a file")
os.pwrite(file, dice.randbytes(4 * MIB), 0)
regions = []                                # [address, bytes, may be written]
for size, flags, fd in (8, 0x22, -1), (4, 0x22, -1), (4, 0x2, file), (2, 0x4022, -1):
    regions.append([libc.mmap(None, size * MIB, 3, flags, fd, 0), size * MIB, True])
    ctypes.memmove(regions[-1][0], dice.randbytes(size * MIB), size * MIB)
libc.madvise(regions[0][0], regions[0][1], 14)  # huge pages

def draw():
    region = dice.choice(regions)
    start, size, written = region
    at = dice.randrange(size // 4096) * 4096
    part = min(size - at, dice.choice([4096, 65536, MIB]))
    kind = dice.choice(["write"] * 6 + ["zero", "drop", "protect", "move", "cut", "new"])
    if kind in ("write", "zero") and written:
        data = dice.randbytes(part) if kind == "write" else bytes(part)
        ctypes.memmove(start + at, data, part)
    elif kind == "drop":
        libc.madvise(start + at, part, mmap.MADV_DONTNEED)
    elif kind == "protect" and at + part < size:
        libc.mprotect(start + at, part, 1)
        regions.remove(region)
        for begin, end, may in (0, at, written), (at, at + part, False), (at + part, size, written):
            if begin < end:
                regions.append([start + begin, end - begin, may])
    elif kind == "move":
        region[0] = libc.mremap(start, size, size, 3, libc.mmap(None, size, 0, 0x22, -1, 0))
    elif kind == "cut" and size > 2 * MIB:
        libc.munmap(start + size - MIB, MIB)
        region[1] -= MIB
    elif kind == "new" and len(regions) < 12:
        fresh = libc.mmap(None, MIB, 3, 0x22, -1, 0)
        ctypes.memmove(fresh, dice.randbytes(MIB), MIB)
        regions.append([fresh, MIB, True])

name = "p"
for _ in range(3):
    for _ in range(dice.randrange(4)):
        draw()
    if len(name) < 4 and os.fork() == 0:
        name += "c"
    else:
        name += "p"
    dice = random.Random(f"{sys.argv[1]} {name}")
def report(*_):
    found = hashlib.sha256()
    for start, size, _ in sorted(regions):
        found.update(start.to_bytes(8, "little") + ctypes.string_at(start, size))
    os.write(1, f"{name} {found.hexdigest()[:16]}\\n".encode())
def change(*_):
    for _ in range(6):
        draw()
    os.write(1, b"changed\\n")
"""
    + OBEYS
)
DRAWN_PROCESSES = 8


@pytest.mark.parametrize("how", ["still", "early"])
@pytest.mark.parametrize("seed", range(4))
def test_drawn_families_are_as_they_were(
    criu: Criu, start: StartJob, tmp_path: Path, seed: int, how: str
) -> None:
    """They write, drop, move, cut and protect memory before forks and after."""
    with running(start, DRAWN_PROCESSES, DRAWN, str(seed)) as job:
        if how == "early":
            server = track(job, tmp_path)
            for _ in range(seed % 3):
                assert set(said(job, signal.SIGUSR2, DRAWN_PROCESSES)) == {"changed"}
                server.again(60)
            assert set(said(job, signal.SIGUSR2, DRAWN_PROCESSES)) == {"changed"}
        else:
            stay_on_one_processor(job)
            server = PageServer.start(tmp_path / "early", tree_pids(job.pid), threads=2)
            server.wait_ready(60)
        server.again(60)
        before = said(job, signal.SIGUSR1, DRAWN_PROCESSES)
        dump_twice(criu, job, tmp_path, server)
        compare(tmp_path)
        job.end_tree()
        restore(criu, job, tmp_path / "early")
        assert said(job, signal.SIGUSR1, DRAWN_PROCESSES) == before


@pytest.mark.parametrize("what", ["list", "pages"])
def test_an_image_without_what_a_parent_has_is_not_restored(
    criu: Criu, family: Job, tmp_path: Path, what: str
) -> None:
    dump(criu, family, tmp_path / "job", "still")
    images = tmp_path / "job" / "early"
    family.end_tree()
    assert len(list(inheriting(images))) == PROCESSES - 1
    path = images / f"pagemap-{family.pid}.img"
    head, *entries = criu_entries.messages(path, "pagemap_head", "pagemap_entry")
    if what == "list":
        path.unlink()
    else:
        criu_entries.rewrite(path, [head, *entries[:2]])
    with pytest.raises(CriuFailed, match="parent"):
        view = criu_view.make(images, tmp_path / "view", needed=True)
        assert view is not None
        try:
            criu.restore(images, leave_stopped=True, view=view, work_dir=tmp_path)
        finally:
            view.remove()
    assert not (tmp_path / "view").exists()


def inheriting(images: Path) -> Iterator[str]:
    """Lists of pages some of which are a parent's."""
    for path in images.glob("pagemap-*.img"):
        _, *entries = criu_entries.load(path)
        if any(entry["flags"] == IN_PARENT for entry in entries):
            yield path.name


LINES = """
import hashlib, os, sys, time
data = [os.urandom(1 << 20) for _ in range(24)]
before, after = os.pipe()
for number in range(2):
    if os.fork() == 0:
        while True:
            for at in range(24):
                found = hashlib.sha256(data[at]).hexdigest()
                os.write(after, f"{at} {found}\\n".encode())
                time.sleep(0.02)
expected = [hashlib.sha256(part).hexdigest() for part in data]
for step, line in enumerate(os.fdopen(before)):
    at, found = line.split()
    print("step", step, "good" if found == expected[int(at)] else "wrong", flush=True)
"""


def test_an_image_says_what_is_in_common_and_is_restored(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run([sys.executable, "-c", LINES])
    job.wait_line("step 3 good")
    first, second = tmp_path / "first", tmp_path / "second"
    job.dump(first, leave_running=True)
    job.dump(second, base=str(first))
    for image in (first, second):
        said = inspect.summary(image)
        assert said["cpu_bytes"] < 40 * MIB < 48 * MIB < said["cpu_bytes_inherited"]
        assert verify(image) > 0
        assert len({entry.process for entry in Image(image).manifest.inherited}) == 2
        restored = jobs.restore(image)
        restored.wait_steps(100)
        assert not [line for line in restored.lines if "wrong" in line]
        restored.kill()
    assert inspect.summary(second)["cpu_bytes_linked"] > 20 * MIB
