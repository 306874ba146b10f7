"""Pages that are copied while their process runs (native/pages/tracked.h), with the real CRIU.

They need root, as CRIU does, and Linux 6.7.
"""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import criu_entries
import pytest
from criu_job import COUNTER, Job

from flowgpu.host import ptrace, tracking
from flowgpu.host.criu import Criu
from flowgpu.host.pages import PageServer, PageStats
from flowgpu.host.proctree import is_dead, thread_ids, thread_state, tree_pids
from tests.unit.coordinator_job import wait_for
from tests.unit.test_pages import (
    MEMORY,
    MIB,
    PAGE,
    StartJob,
    anonymous_pages,
    contents,
    digests,
    goes_on,
    restore,
    start,
)

HERE = Path(__file__).parent
RUNS = "import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n"
OF_FILE = 0, bytes(range(256)) * (PAGE // 256)
Build = Callable[[str], str]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Builds a program of this folder."""

    def build(name: str) -> str:
        made = tmp_path_factory.mktemp(name) / name
        source = str(HERE / f"{name}.c")
        subprocess.run(["gcc", "-O1", "-pthread", source, "-o", str(made)], check=True)
        return str(made)

    return build


def track(job: Job, folder: Path) -> PageServer:
    """A server that has copied all pages of the job, which runs."""
    stay_on_one_processor(job)
    tracked = tracking.descriptors(job.pid, 5.0, folder / "notes")
    try:
        server = PageServer.start(folder / "early", tree_pids(job.pid), tracked=tracked)
    finally:
        for fd in tracked.values():
            os.close(fd)
    server.wait_ready(60)
    return server


def dump_twice(criu: Criu, job: Job, folder: Path, server: PageServer) -> PageStats:
    """The job's image with what `server` has copied, and one of the same moment by CRIU alone."""
    try:
        criu.start_dump(job.pid, folder / "early", pages=server).wait()
        criu.dump(job.pid, folder / "whole")
        return server.stats(60)
    finally:
        server.close()


def stay_on_one_processor(job: Job) -> None:
    """The C library has the kernel write into each thread's memory on which processor it is."""
    one = {min(os.sched_getaffinity(0))}
    # Again for those that were made meanwhile by one that was not there yet.
    while elsewhere := [
        thread
        for pid in tree_pids(job.pid)
        for thread in thread_ids(pid)
        if os.sched_getaffinity(thread) != one
    ]:
        for thread in elsewhere:
            os.sched_setaffinity(thread, one)


def compare(folder: Path) -> None:
    """All mappings, and all pages to the bit; of anonymous memory the first image may lack zeros.

    And it may have pages of a private mapping of a file that are the file's again: the kernel keeps
    the mark of a page that was dropped, which CRIU takes for a page. It may lack those where CRIU
    has put its code for a moment, in the first one and before the second image.
    """
    whole, early = contents(folder / "whole"), contents(folder / "early")
    assert whole.keys() == early.keys()
    for path in (folder / "whole").glob("mm-*.img"):
        assert mappings(folder / "early" / path.name) == mappings(path)
    for name, expected in whole.items():
        own = early[name]
        assert list(own) == sorted(own), name
        wrong = [hex(at) for at, (_, page) in own.items() if page != expected.get(at, OF_FILE)[1]]
        assert not wrong, (name, wrong)
        missing = expected.keys() - own.keys()
        of_files = pages_of_files(folder / "whole", name)
        missing -= {at for at in missing if of_files.get(at) == expected[at][1]}
        assert missing <= anonymous_pages(folder / "early", name), name
        assert all(not any(expected[at][1]) for at in missing), name


def mappings(path: Path) -> list[dict[str, Any]]:
    """Mappings of a process's image; neighbours that differ in nothing but their place are one.

    The kernel keeps a mapping that is tracked apart from a new one beside it, until neither is.
    """
    found: list[dict[str, Any]] = []
    for area in criu_entries.load(path)[0]["vmas"]:
        before = found[-1] if found else area
        where = {key: before[key] for key in ("start", "end")}
        if not area["shmid"] and before["end"] == area["start"] and area | where == before:
            before["end"] = area["end"]
        else:
            found.append(area)
    return found


def pages_of_files(folder: Path, name: str) -> dict[int, bytes]:
    """The first page of each mapping that may be executed, as its file has it, by address."""
    if not (folder / name.replace("pagemap", "mm")).exists():
        return {}  # shared memory
    files = {
        entry["id"]: entry["reg"]["name"]
        for entry in criu_entries.load(folder / "files.img")
        if "reg" in entry
    }
    (memory,) = criu_entries.load(folder / name.replace("pagemap", "mm"))
    found = {}
    for area in memory["vmas"]:
        path = files.get(area["shmid"])
        if path and area["prot"] & mmap.PROT_EXEC:
            with open(path, "rb") as file:
                file.seek(area["pgoff"])
                found[area["start"]] = file.read(PAGE).ljust(PAGE, b"\0")
    return found


@pytest.mark.parametrize("tree", [[], ["forks"]], ids=["alone", "tree"])
def test_the_pages_are_those_of_a_dump_at_the_same_moment(
    criu: Criu, start: StartJob, program: Build, tmp_path: Path, tree: list[str]
) -> None:
    busy = program("busy_memory")
    for number in range(3):
        job = start(RUNS, busy, str(tmp_path / f"file-{number}"), *tree)
        assert job.line() == "ready"
        folder = tmp_path / str(number)
        folder.mkdir()
        server = track(job, folder)
        for _ in range(number + 1):
            server.again(60)
        stats = dump_twice(criu, job, folder, server)
        assert stats.early_bytes > 0
        compare(folder)
        job.end_tree()


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_what_a_device_has_written_is_compared_where_that_is_known(
    criu: Criu, start: StartJob, program: Build, tmp_path: Path, told: bool
) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"b" * MIB)
    job = start(RUNS, program("device_writes"), str(data))
    word, span = (job.line() or "").split()
    assert word == "ready"
    server = track(job, tmp_path)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.line() == "written"
    server.again(60)  # sees no write
    if told:
        begin, end = (int(part, 16) for part in span.split("-"))
        server.compare({job.pid: [(begin, end)]})
    stats = dump_twice(criu, job, tmp_path, server)
    if told:
        assert stats.mended_bytes == stats.compared_bytes == MIB
        compare(tmp_path)
    else:  # so this kernel and this test do what a device does
        with pytest.raises(AssertionError, match="pagemap"):
            compare(tmp_path)


def test_a_read_past_the_cache_may_end_behind_the_protection(
    criu: Criu, start: StartJob, program: Build, tmp_path: Path
) -> None:
    """A process that has a file with O_DIRECT is compared whole."""
    data = tmp_path / "data"
    data.write_bytes(b"b" * MIB)
    direct = f"os.open({str(data)!r}, os.O_RDONLY | os.O_DIRECT)\n"
    job = start(
        RUNS.replace("os.execv", f"os.set_inheritable({direct.strip()}, True)\nos.execv"),
        program("device_writes"),
        str(data),
    )
    assert (job.line() or "").startswith("ready")
    server = track(job, tmp_path)
    os.kill(job.pid, signal.SIGUSR1)
    assert job.line() == "written"
    stats = dump_twice(criu, job, tmp_path, server)
    assert stats.mended_bytes == MIB
    assert stats.compared_bytes == stats.early_bytes
    compare(tmp_path)


def test_the_mappings_are_as_they_were_once_their_pages_are_copied(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    """Protection ends in pieces, and the mappings are more than one piece."""
    job = start(MEMORY, str(tmp_path / "file"), "alone")
    assert job.line() == "ready"
    maps = Path(f"/proc/{job.pid}/maps")
    before = maps.read_text()
    server = track(job, tmp_path)
    assert " uw" in maps.with_name("smaps").read_text()
    try:
        how = {"leave_stopped": False, "leave_running": True}
        criu.dump(job.pid, tmp_path / "early", pages=server, **how)
        assert server.stats(60).early_bytes > 32 * MIB
    finally:
        server.close()
    assert maps.read_text() == before
    assert " uw" not in maps.with_name("smaps").read_text()


def test_what_cannot_be_tracked_is_named_and_goes_on(start: StartJob, tmp_path: Path) -> None:
    job, notes = start(COUNTER, "1"), tmp_path / "notes"
    job.number()
    before = os.listdir(f"/proc/{job.pid}/fd")
    ptrace.ptrace(ptrace.SEIZE, job.pid)
    try:
        # Whoever traces it has its signals, so it stops for that one.
        with pytest.raises(tracking.Untrackable, match=f"process {job.pid} may not be traced"):
            tracking.descriptors(job.pid, 0.2, notes)
    finally:
        wait_for(lambda: thread_state(job.pid, job.pid) == "t", "the stop that its tracer sees")
        ptrace.let_go(job.pid, [job.pid])
    goes_on(job)
    assert os.listdir(f"/proc/{job.pid}/fd") == before
    assert not notes.exists()


def test_one_that_stops_late_is_tried_again(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, tries = start(COUNTER, "1"), iter([TimeoutError("late"), None])
    job.number()
    stop = tracking.Standstill

    def late_once(*arguments: Any, **options: Any) -> Any:
        if error := next(tries):
            raise error
        return stop(*arguments, **options)

    monkeypatch.setattr(tracking, "Standstill", late_once)
    found = tracking.descriptors(job.pid, 5.0, tmp_path / "notes")
    assert list(found) == [job.pid]
    os.close(found[job.pid])
    goes_on(job)


def test_a_child_that_has_ended_needs_no_tracking(start: StartJob, tmp_path: Path) -> None:
    job = start("import os\nif os.fork() == 0: os._exit(0)\n" + COUNTER, "1")
    job.number()
    pids = tree_pids(job.pid)
    wait_for(lambda: any(is_dead(pid) for pid in pids), "a dead child")
    found = tracking.descriptors(job.pid, 5.0, tmp_path / "notes")
    assert list(found) == [job.pid] and len(pids) == 2
    assert os.readlink(f"/proc/self/fd/{found[job.pid]}") == "anon_inode:[userfaultfd]"
    os.close(found[job.pid])
    goes_on(job)
