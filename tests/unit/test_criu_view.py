"""Restores in which pages are written after CRIU, with the real CRIU, compared page by page."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import criu_entries
import pytest
from criu_job import Job
from criu_view_jobs import FORKED, KINDS, MEMORY, ON_BUFFER, RESERVATIONS, RESERVE

from coordinator.restore import Restore
from flowgpu import launch
from flowgpu.errors import CriuFailed, RestoreFailed
from flowgpu.host import criu_images, criu_view
from flowgpu.host.criu import Criu
from flowgpu.host.criu_view import FillFailed, View
from flowgpu.host.prctl import become_subreaper
from flowgpu.host.proctree import resume_tree, task_states, tree_pids
from flowgpu.options import RestoreOptions
from tests.unit.coordinator_job import Jobs, wait_for

StartJob = Callable[[str], Job]
Pages = dict[int, bytes]
PAGE = 4096


@pytest.fixture
def criu() -> Criu:
    return Criu.locate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """Starts jobs that hold memory, and ends them with the test."""
    become_subreaper()
    jobs: list[Job] = []

    def begin(program: str) -> Job:
        jobs.append(Job(f"{program}\ncount()", setup=MEMORY))
        assert jobs[-1].number() == 0
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end_tree()
        job.close()


def dump(criu: Criu, job: Job, images: Path) -> dict[int, Pages]:
    """Dump and end a job; gives its memory as it was."""
    criu.dump(job.pid, images)
    before = {pid: memory_of(pid) for pid in tree_pids(job.pid)}
    job.drain()
    job.end_tree()
    return before


def restore(criu: Criu, job: Job, images: Path, view: View | None, work: Path) -> None:
    """Restore it on a new pipe, and leave it stopped."""
    os.close(job.read_end)
    os.close(job.write_end)
    job.read_end, job.write_end = os.pipe()
    inherit = {f"pipe:[{job.inode}]": job.write_end}
    options = {"inherit_fds": inherit, "leave_stopped": True, "work_dir": work, "view": view}
    assert criu.restore(images, **options) == job.pid


def page_addresses(pagemap: Path) -> list[int]:
    _, *entries = criu_entries.messages(pagemap, "pagemap_head", "pagemap_entry")
    return [entry.vaddr + at * PAGE for entry in entries for at in range(entry.nr_pages)]


def zero_pages(images: Path, pid: int) -> set[int]:
    """Addresses of the pages that an image has although they hold zeros alone."""
    data = next(images.glob("pages-*.img")).read_bytes()
    addresses = page_addresses(images / f"pagemap-{pid}.img")
    return {
        address
        for number, address in enumerate(addresses)
        if data[number * PAGE : (number + 1) * PAGE] == bytes(PAGE)
    }


views: list[View] = []


@pytest.fixture(autouse=True)
def remove_views() -> Iterator[None]:
    yield
    while views:
        views.pop().remove()


def view_of(images: Path, tmp_path: Path) -> View:
    view = criu_view.make(images, tmp_path / "view")
    assert view is not None, "nothing to gain"
    views.append(view)
    return view


def memory_of(pid: int) -> Pages:
    """Pages of a stopped process that are not zero, by address, without what the kernel changes."""
    found = {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in private_ranges(pid):
            for at in range(start, end, 1 << 20):
                memory.seek(at)
                data = memory.read(min(1 << 20, end - at))
                if data == bytes(len(data)):
                    continue
                for page in range(0, len(data), PAGE):
                    if (content := data[page : page + PAGE]) != bytes(PAGE):
                        found[at + page] = content
    return found


def private_ranges(pid: int) -> Iterator[tuple[int, int]]:
    """Without what the kernel may drop (glibc from 2.41 on has random numbers there)."""
    found = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) .(.).p \S+ \S+ (\d+) *(.*)", line) or found
        if not line.startswith("VmFlags:") or found is None or "dp" in line.split():
            continue
        if found[5] in ("", "[heap]", "[stack]") or found[3] + found[5][:1] == "w/":
            yield int(found[1], 16), int(found[2], 16)
        found = None


def same_but_for_processor_numbers(images: Path, before: Pages, after: Pages) -> None:
    """Compare; the kernel writes the processor's number where a thread asked for it."""
    assert before.keys() == after.keys()
    own = set()
    for image in images.glob("core-*.img"):
        rseq = criu_entries.load(image)[0]["thread_core"].get("rseq_entry")
        if rseq:
            at = rseq["rseq_abi_pointer"]
            own.update(range(at, at + rseq["rseq_abi_size"]))
    for address in before:
        if before[address] != after[address]:
            differ = {address + i for i in range(PAGE) if before[address][i] != after[address][i]}
            assert differ <= own, f"{len(differ)} bytes of the page at {address:#x}"


def left_behind(images: Path) -> list[int]:
    return [pid for pid in criu_images.pids(images) if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_the_same_bit_for_bit(
    kind: str, criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job, images = start(KINDS[kind]), tmp_path / "images"
    before = dump(criu, job, images)
    view = view_of(images, tmp_path)
    assert view.bytes > 24 << 20
    restore(criu, job, images, view, tmp_path)
    view.remove()
    assert criu_images.restore_stats(tmp_path).pages_restored * PAGE < 50 << 20
    assert set(task_states(job.pid).values()) == {"T"}
    same_but_for_processor_numbers(images, before[job.pid], memory_of(job.pid))
    resume_tree(job.pid)
    first = job.number()
    assert job.number() == first + 1
    assert len(task_states(job.pid)) == (35 if kind == "35 threads" else 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "images", "restore.log", "stats-restore",
    ]  # fmt: skip


def proportional_kib(root: int) -> int:
    """Memory of a tree, each shared page once."""
    text = "".join(Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in tree_pids(root))
    return sum(int(size) for size in re.findall(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE))


def test_forked_processes_share_their_memory_again(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job, images = start(FORKED), tmp_path / "images"
    used = proportional_kib(job.pid)
    before = dump(criu, job, images)
    assert len(before) == 3
    view = view_of(images, tmp_path)
    assert set(view.pids) == set(before), "each has memory of its own"
    assert 100 << 20 < view.bytes <= 104 << 20
    restore(criu, job, images, view, tmp_path)
    view.remove()
    assert proportional_kib(job.pid) < used * 1.1
    for pid in before:
        same_but_for_processor_numbers(images, before[pid], memory_of(pid))
    resume_tree(job.pid)
    job.number()


def mappings(pid: int) -> list[tuple[str, int, int]]:
    """Rights, begin and end of the memory of no file, neighbours joined."""
    found: list[tuple[str, int, int]] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split()
        start, end = (int(part, 16) for part in span.split("-"))
        if name in ([], ["[heap]"]):
            if found and found[-1][0] == rights and found[-1][2] == start:
                start = found.pop()[1]
            found.append((rights, start, end))
    return found


@pytest.mark.parametrize("kind", RESERVATIONS)
def test_a_reservation_larger_than_memory_comes_back(
    kind: str, criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job, images = start(RESERVE + RESERVATIONS[kind]), tmp_path / "images"
    used = proportional_kib(job.pid)
    criu.dump(job.pid, images)
    before = {pid: (mappings(pid), used_memory_of(pid)) for pid in tree_pids(job.pid)}
    job.drain()
    job.end_tree()
    if kind != "not to be counted, its pages not to be touched, forked":
        with pytest.raises(CriuFailed, match=r"refused a process its address space|Page read err"):
            restore(criu, job, images, None, tmp_path)
    view = view_of(images, tmp_path)
    assert view.cut == len(before)
    restore(criu, job, images, view, tmp_path)
    view.remove()
    assert {pid: (mappings(pid), used_memory_of(pid)) for pid in tree_pids(job.pid)} == before
    assert all(len(memory) >= 1024 for _, memory in before.values())
    assert proportional_kib(job.pid) < used * 1.1
    resume_tree(job.pid)
    first = job.number()
    assert job.number() == first + 1


def used_memory_of(pid: int) -> Pages:
    """The first bytes of the pages that `reserve` has written to, which are their addresses."""
    found = {}
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for _, start, end in mappings(pid):
            for at in written(pid, start, min(end, start + (2 << 30))):
                memory.seek(at)
                found[at] = memory.read(64)
    return {at: data for at, data in found.items() if data[:8] == at.to_bytes(8, "little")}


def written(pid: int, start: int, end: int) -> Iterator[int]:
    """Addresses of the pages that are there."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for at in range(start, end, 64 << 20):
            pagemap.seek(at // PAGE * 8)
            entries = pagemap.read(min(64 << 20, end - at) // PAGE * 8)
            if entries != bytes(len(entries)):
                for number in range(len(entries) // 8):
                    if entries[number * 8 + 7] & 0xC0:
                        yield at + number * PAGE


@pytest.fixture
def on_buffer(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts the program whose stacks are in a buffer."""
    become_subreaper()
    source, program = tmp_path / "job.c", tmp_path / "job"
    source.write_text(ON_BUFFER)
    subprocess.run(["gcc", "-O1", "-pthread", str(source), "-o", str(program)], check=True)
    jobs = []

    def begin(*arguments: str) -> Job:
        jobs.append(Job(f"import os\nos.execv({str(program)!r}, {['job', *arguments]})"))
        assert jobs[-1].number() == 0
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end_tree()
        job.close()


@pytest.mark.parametrize("how", ["two", "aligned"])
def test_what_the_kernel_uses_is_there_when_criu_ends(
    how: str, criu: Criu, on_buffer: Callable[..., Job], tmp_path: Path
) -> None:
    job, images = on_buffer(how), tmp_path / "images"
    if how == "aligned":
        (other,) = task_states(job.pid).keys() - {job.pid}
        call = Path(f"/proc/{job.pid}/task/{other}/syscall")
        wait_for(lambda: call.read_text().startswith("34 "), "pause(2) on its own stack pointer")
    before = dump(criu, job, images)
    view = view_of(images, tmp_path)
    assert view.bytes > 40 << 20
    name = f"pagemap-{job.pid}.img"
    late = set(page_addresses(images / name)) - set(page_addresses(view.path / name))
    assert len(late) * PAGE == view.bytes
    assert late - zero_pages(images, job.pid) <= before[job.pid].keys()
    threads = [criu_entries.load(image)[0] for image in images.glob("core-*.img")]
    assert len(threads) == 2
    assert how == "two" or any(t["thread_info"]["gpregs"]["sp"] % PAGE == 0 for t in threads)
    for thread in threads:
        own, registers = thread["thread_core"], thread["thread_info"]["gpregs"]
        places = [registers["sp"], registers["fs_base"], own["futex_rla"]]
        places += [own["rseq_entry"]["rseq_abi_pointer"], thread["thread_info"]["clear_tid_addr"]]
        assert all(place for place in places)
        assert not late.intersection(place & -PAGE for place in places)
    restore(criu, job, images, view, tmp_path)
    same_but_for_processor_numbers(images, before[job.pid], memory_of(job.pid))


def test_signals_delivered_before_the_stop_keep_their_frames(
    criu: Criu, on_buffer: Callable[..., Job], tmp_path: Path
) -> None:
    job, images = on_buffer(), tmp_path / "images"
    numbers = [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]
    for number in numbers:
        os.kill(job.pid, number)  # which it blocks
    before = dump(criu, job, images)
    path = images / f"core-{job.pid}.img"
    core = criu_entries.messages(path, "core_entry")[0]
    core.tc.blk_sigset = core.thread_core.blk_sigset = 0
    top = core.thread_info.gpregs.sp
    criu_entries.rewrite(path, [core])
    view = view_of(images, tmp_path)
    restore(criu, job, images, view, tmp_path)
    after = memory_of(job.pid)
    changed = [at for at, page in before[job.pid].items() if after[at] != page]
    assert any(top - len(numbers) * PAGE <= at < top for at in changed), "no frames"
    resume_tree(job.pid)
    while (hits := job.number()) == 0:
        pass
    assert hits == len(numbers)


# What is not to be had in this way

SMALL = "take(8 << 20)"
LARGE = KINDS["small pages"]


def test_a_small_process_is_left_to_criu(
    criu: Criu, start: StartJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = start(SMALL)
    dump(criu, job, tmp_path / "images")
    assert criu_view.make(tmp_path / "images", tmp_path / "view") is None
    assert not caplog.records
    assert not (tmp_path / "view").exists()


def parent_link(images: Path, pid: int) -> str:
    (images / "parent").symlink_to(images)
    return "an incremental dump"


def unknown_flag(images: Path, pid: int) -> str:
    path = images / f"pagemap-{pid}.img"
    head, *entries = criu_entries.messages(path, "pagemap_head", "pagemap_entry")
    entries[1].flags |= 8
    criu_entries.rewrite(path, [head, *entries])
    return "with flags"


def no_registers(images: Path, pid: int) -> str:
    path = images / f"core-{pid}.img"
    core = criu_entries.messages(path, "core_entry")[0]
    core.ClearField("thread_info")
    criu_entries.rewrite(path, [core])
    return "without registers"


def short_pages(images: Path, pid: int) -> str:
    path = next(images.glob("pages-*.img"))
    os.truncate(path, path.stat().st_size - PAGE)
    return "has fewer bytes"


def cut_off(images: Path, pid: int) -> str:
    path = images / f"mm-{pid}.img"
    path.write_bytes(path.read_bytes()[:-3])
    return "ends within a message"


@pytest.fixture
def large(criu: Criu, start: StartJob, tmp_path: Path) -> Job:
    """A dumped and ended job."""
    job = start(LARGE)
    dump(criu, job, tmp_path / "images")
    return job


@pytest.mark.parametrize("change", [parent_link, unknown_flag, no_registers, short_pages, cut_off])
def test_unexpected_images_are_left_to_criu_with_the_reason(
    change: Callable[[Path, int], str],
    large: Job,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = change(tmp_path / "images", large.pid)
    assert criu_view.make(tmp_path / "images", tmp_path / "view") is None
    assert caplog.messages[0].startswith("CRIU reads all pages itself: ")
    assert reason in caplog.messages[0]
    assert not (tmp_path / "view").exists()


WITHOUT_THE_CALL = """#!{python}
import ctypes, os, struct, sys
# Linux: if the number is that of process_vm_writev, EPERM, else allow.
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 311), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
os.execv({real!r}, sys.argv)
"""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (WITHOUT_THE_CALL, "process_vm_writev: Operation not permitted"),
        ("#!/bin/sh\nkill -9 $$\n", "flowgpu-fill was ended by SIGKILL"),
        ("#!/nowhere\n", "No such file or directory"),
    ],
)
def test_without_the_program_or_its_system_call_criu_reads_all_pages(
    script: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = tmp_path / "program"
    real = str(launch.program("flowgpu-fill"))
    other.write_text(script.format(python=sys.executable, real=real))
    other.chmod(0o700)
    monkeypatch.setattr(launch, "program", lambda name: other)
    assert criu_view.make(tmp_path, tmp_path / "view") is None
    (message,) = caplog.messages
    assert message.startswith("CRIU reads all pages itself: ") and reason in message
    assert not (tmp_path / "view").exists()


def test_a_view_needs_tasks_that_stay_stopped(large: Job, criu: Criu, tmp_path: Path) -> None:
    view = view_of(tmp_path / "images", tmp_path)
    with pytest.raises(ValueError, match="left stopped"):
        criu.restore(tmp_path / "images", view=view)
    assert not left_behind(tmp_path / "images")


def test_the_parts_of_a_restore_are_in_the_log(
    large: Job, criu: Criu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flowgpu.host.criu")
    view = view_of(tmp_path / "images", tmp_path)
    restore(criu, large, tmp_path / "images", view, tmp_path)
    assert re.search(r"view 0\.\d+ s, CRIU \d+\.\d+ s .* pages\), fill \d.*3\d MiB", caplog.text)


# Failure


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_page_that_cannot_be_written_ends_what_was_restored(
    large: Job, criu: Criu, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    before = files(images)
    view = view_of(images, tmp_path)
    path = view.path / f"mm-{large.pid}.img"
    (memory,) = criu_entries.messages(path, "mm_entry")
    private = [vma for vma in memory.vmas if vma.status & ANON_PRIVATE]
    vma = max(private, key=lambda vma: vma.end - vma.start)
    vma.prot = 1
    criu_entries.rewrite(path, [memory])
    reason = rf"process {large.pid} at (0x[0-9a-f]+) cannot be written: Bad address"
    with pytest.raises(FillFailed, match=reason) as failure:
        restore(criu, large, images, view, tmp_path)
    assert vma.start <= int(re.search(reason, str(failure.value))[1], 16) < vma.end  # type: ignore[index]
    assert not left_behind(images)
    assert files(images) == before
    view.remove()
    restore(criu, large, images, view_of(images, tmp_path), tmp_path)


def test_an_image_that_ends_early_ends_what_was_restored(
    large: Job, criu: Criu, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    view = view_of(images, tmp_path)
    os.truncate(next(images.glob("pages-*.img")), 24 << 20)
    with pytest.raises(FillFailed, match=r"pages-\d+.img ends at byte 25165824"):
        restore(criu, large, images, view, tmp_path)
    assert not left_behind(images)


def test_a_program_that_is_killed_ends_what_was_restored(
    large: Job, criu: Criu, tmp_path: Path
) -> None:
    view = view_of(tmp_path / "images", tmp_path)
    # And is the first where memory runs out.
    assert Path(f"/proc/{view._program.pid}/oom_score_adj").read_text() == "1000\n"
    view._program.kill()
    with pytest.raises(FillFailed, match="ended by SIGKILL"):
        restore(criu, large, tmp_path / "images", view, tmp_path)
    assert not left_behind(tmp_path / "images")


def test_a_process_that_was_let_go_on_before_it_was_filled_ends(
    large: Job, criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, write = tmp_path / "images", View._write
    view = view_of(images, tmp_path)

    def late(of: View) -> None:
        write(of)  # else it would not live to be found running
        os.kill(large.pid, signal.SIGCONT)

    monkeypatch.setattr(View, "_write", late)
    with pytest.raises(FillFailed, match="stay stopped"):
        restore(criu, large, images, view, tmp_path)
    assert not left_behind(images)


def test_criu_fails_with_a_view_as_without(large: Job, criu: Criu, tmp_path: Path) -> None:
    images = tmp_path / "images"
    view = view_of(images, tmp_path)
    (view.path / "fdinfo-2.img").unlink()
    with pytest.raises(Exception, match="restore"):
        restore(criu, large, images, view, tmp_path)
    assert not left_behind(images)


# Made-up images, compared with a simpler computation

REGION = """
import mmap, os, signal
from ctypes import addressof, c_char
region = mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
print(addressof(c_char.from_buffer(region)), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
MANY_PAGES = (96 << 20) // PAGE
REGULAR, HEAP, FILE_PRIVATE, ANON_PRIVATE = 1, 1 << 5, 1 << 6, 1 << 9
DEVICE = 1 << 7 | 1 << 27  # shared, and left out of the image by a plugin


def made_up_images(images: Path, pid: int, base: int, dice: random.Random) -> set[int]:
    """Images of a process with that memory; gives the pages that may come late."""
    images.mkdir()
    late: set[int] = set()
    vmas, page = [], 0
    while page < MANY_PAGES:
        end = min(page + dice.choice([1, 5, 100, 700, 3000]), MANY_PAGES)
        kind, prot, flags = dice.choice(
            [(ANON_PRIVATE, 3, 0x22)] * 20
            + [(FILE_PRIVATE, 3, 2)] * 3
            + [(ANON_PRIVATE | HEAP, 3, 0x22), (ANON_PRIVATE, 1, 0x22)]
            + [(FILE_PRIVATE, 1, 2)]
            + [(ANON_PRIVATE, 3, 0x122), (ANON_PRIVATE, 3, 0x2022)]
            + [(DEVICE, 3, 1)]
        )
        if prot == 3 and flags in (0x22, 2):
            late.update(range(page, end))
        span = {"start": base + page * PAGE, "end": base + end * PAGE}
        vma = {"prot": prot, "flags": flags, "status": REGULAR | kind, "fd": -1}
        vmas.append(criu_entries.make("vma_entry", **span, **vma, pgoff=0, shmid=0))
        page = end + dice.choice([0, 0, 3])
    threads = [pid, pid + 1]
    places = []
    for thread in threads:
        stack, *near = (base + dice.randrange(MANY_PAGES * PAGE) for _ in range(4))
        places += [(stack - (1 << 20), stack + (64 << 10))]
        places += [(place - (64 << 10), place + (64 << 10)) for place in near]
        core = criu_entries.make("core_entry", mtype=1)
        core.thread_info.clear_tid_addr = near[0]
        core.thread_info.gpregs.sp, core.thread_info.gpregs.fs_base = stack, near[1]
        core.thread_core.rseq_entry.rseq_abi_pointer = near[2]
        criu_entries.rewrite(images / f"core-{thread}.img", [core])
    for start, end in places:
        late.difference_update(range((start - base) // PAGE, -(-(end - base) // PAGE)))
    tree = criu_entries.make("pstree_entry", pid=pid, ppid=0, pgid=1, sid=1, threads=threads)
    criu_entries.rewrite(images / "pstree.img", [tree])
    memory = criu_entries.make("mm_entry", exe_file_id=1, vmas=vmas)
    criu_entries.rewrite(images / f"mm-{pid}.img", [memory])
    entries, page = [], dice.randrange(9)
    while page < MANY_PAGES:
        count = min(dice.choice([1, 1, 2, 9, 60, 1000]), MANY_PAGES - page)
        flags = dice.choice([6] * 9 + [4])
        entry = {"vaddr": base + page * PAGE, "nr_pages": count, "flags": flags}
        entries.append(criu_entries.make("pagemap_entry", **entry, compat_nr_pages=0))
        page += count + dice.choice([0, 0, 1, 2, 40])
    head = criu_entries.make("pagemap_head", pages_id=1)
    criu_entries.rewrite(images / f"pagemap-{pid}.img", [head, *entries])
    with (images / "pages-1.img").open("wb") as pages:
        for address in page_addresses(images / f"pagemap-{pid}.img"):
            pages.write(content_of(address))
    return late


def content_of(address: int) -> bytes:
    return address.to_bytes(8, "little") * (PAGE // 8)


@pytest.mark.parametrize("seed", range(6))
def test_a_page_is_either_given_to_criu_or_written_later(seed: int, tmp_path: Path) -> None:
    job = Job(REGION)
    try:
        base, dice = job.number(), random.Random(seed)
        images = tmp_path / "images"
        late = made_up_images(images, job.pid, base, dice)
        name = f"pagemap-{job.pid}.img"
        pages = page_addresses(images / name)
        late &= {(address - base) // PAGE for address in pages}
        view = view_of(images, tmp_path)
        kept = [address for address in pages if (address - base) // PAGE not in late]
        assert page_addresses(view.path / name) == kept
        assert (view.path / "pages-1.img").read_bytes() == b"".join(map(content_of, kept))
        assert view.bytes == len(late) * PAGE
        assert {path.name for path in view.path.iterdir()} == {
            path.name for path in images.iterdir()
        }
        view.fill()
        assert memory_between(job.pid, base) == {
            base + page * PAGE: content_of(base + page * PAGE) for page in late
        }
        view.remove()
    finally:
        job.close()


def memory_between(pid: int, base: int) -> Pages:
    end = base + MANY_PAGES * PAGE
    return {at: page for at, page in memory_of(pid).items() if base <= at < end}


# Under the coordinator

STEPS = """
import os
data = os.urandom(32 << 20)
check = hash(data)
number = 0
while True:
    number += 1
    assert hash(bytes(memoryview(data))) == check
    print("step", number, flush=True)
"""


def test_a_coordinator_restores_with_a_view_and_removes_it(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.run([sys.executable, "-c", STEPS])
    job.wait_steps()
    job.dump(tmp_path / "image")
    assert job.end() == 75
    again = jobs.restore(tmp_path / "image")
    report = again.ask("wait-restored")
    again.wait_steps()
    assert report["phases"]["criu"] > 0
    (mebibytes,) = re.findall(r"restored: view .* fill \d.*\((\d+) MiB\)", again.log)
    assert int(mebibytes) >= 30
    names = {path.name for path in again.directory.path.iterdir()}
    assert "stats-restore" in names and "criu-view" not in names


def test_a_fill_that_fails_is_a_failed_restore_with_its_reason(tmp_path: Path) -> None:
    job = SimpleNamespace(name="train", start_ghost=None, keep_ghost=None)
    restoring = Restore(cast(Any, job), tmp_path, stdout=1, stderr=2, options=RestoreOptions())
    error = restoring._explain(FillFailed("memory of process 5 at 0x1000"))
    assert isinstance(error, RestoreFailed)
    assert "'train' failed: memory of process 5 at 0x1000" in str(error)
