"""Pages that are copied while their process runs (native/pages/tracked.h), with the real CRIU.

They need root, as CRIU does, and Linux 6.7.
"""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from criu_job import Job

from flowgpu import tracking
from flowgpu.criu import Criu
from flowgpu.pages import PageServer, PageStats
from flowgpu.proctree import resume_tree, thread_ids, tree_pids
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

BUSY = Path(__file__).with_name("busy_memory.c")
RUNS = "import os, sys\nos.execv(sys.argv[1], sys.argv[1:])\n"
OF_FILE = 0, bytes(range(256)) * (PAGE // 256)
Ranges = Mapping[int, Iterable[tuple[int, int]]]


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of busy_memory.c."""
    program = tmp_path_factory.mktemp("busy") / "busy"
    subprocess.run(["gcc", "-O1", "-pthread", str(BUSY), "-o", str(program)], check=True)
    return program


def track(job: Job, folder: Path) -> PageServer:
    """A server that has copied all pages of the job, which runs."""
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
    for pid in tree_pids(job.pid):
        for thread in thread_ids(pid):
            os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})


def compare(folder: Path) -> None:
    """All pages to the bit; of anonymous memory the first image may lack zeros.

    And it may have pages of a private mapping of a file that are the file's again: the kernel keeps
    the mark of a page that was dropped, which CRIU takes for a page.
    """
    whole, early = contents(folder / "whole"), contents(folder / "early")
    assert whole.keys() == early.keys()
    for name, expected in whole.items():
        own = early[name]
        assert list(own) == sorted(own), name
        wrong = [hex(at) for at, (_, page) in own.items() if page != expected.get(at, OF_FILE)[1]]
        assert not wrong, (name, wrong)
        missing = expected.keys() - own.keys()
        assert missing <= anonymous_pages(folder / "early", name), name
        assert all(not any(expected[at][1]) for at in missing), name


@pytest.mark.parametrize("tree", [[], ["forks"]], ids=["alone", "tree"])
def test_the_pages_are_those_of_a_dump_at_the_same_moment(
    criu: Criu, start: StartJob, busy: Path, tmp_path: Path, tree: list[str]
) -> None:
    for number in range(3):
        job = start(RUNS, str(busy), str(tmp_path / f"file-{number}"), *tree)
        assert job.line() == "ready"
        stay_on_one_processor(job)
        folder = tmp_path / str(number)
        folder.mkdir()
        server = track(job, folder)
        for _ in range(number + 1):
            server.again(60)
        stats = dump_twice(criu, job, folder, server)
        assert stats.early_bytes > MIB
        compare(folder)
        job.end_tree()
