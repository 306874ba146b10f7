"""Pages that the page server copies of processes that stand still (native/pages/still.h), with the
real CRIU. Needs root, as CRIU does, and Linux 6.7."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from criu_job import COUNTER, Job

from flowgpu.host.criu import Criu
from flowgpu.host.pages import PageServer, PageStats
from flowgpu.host.proctree import is_dead, resume_tree, tree_pids
from tests.unit.coordinator_job import wait_for
from tests.unit.test_early_pages import RUNS, Build, compare, program
from tests.unit.test_pages import MIB, StartJob, goes_on, leftovers, start

# The kernel writes into each thread's memory on which processor it is, unless it is told not to.
QUIET = "import os\nos.environ['GLIBC_TUNABLES'] = 'glibc.pthread.rseq=0'\n" + RUNS


@pytest.fixture
def kinds(start: StartJob, program: Build, tmp_path: Path) -> Job:
    """Two processes with memory of every kind."""
    named_as_a_device = f"/dev/shm/flowgpu-test-{os.getpid()}"
    job = start(QUIET, program("kinds_of_memory"), str(tmp_path / "file"), named_as_a_device)
    assert [job.line(), job.line()] == ["ready", "ready"]
    return job


def dump_twice(criu: Criu, job: Job, folder: Path, threads: int = 2) -> PageStats:
    """The job's image with what the server has copied, and one of the same moment by CRIU alone."""
    server = PageServer.start(folder / "early", tree_pids(job.pid), threads=threads)
    try:
        server.wait_ready(60)
        server.again(60)
        criu.start_dump(job.pid, folder / "early", pages=server).wait()
        criu.dump(job.pid, folder / "whole")
        return server.stats(60)
    finally:
        server.close()


def not_sent(stats: PageStats) -> int:
    """Bytes that CRIU was not asked for: copied, or found in common with a parent."""
    return stats.still_bytes + sum(stats.inherited.values())


@pytest.mark.parametrize("threads", [1, 4])
def test_the_pages_are_those_that_criu_sends(
    criu: Criu, kinds: Job, tmp_path: Path, threads: int
) -> None:
    stats = dump_twice(criu, kinds, tmp_path, threads)
    # CRIU has sent shared memory, a file that may be a device, and the kernel's code.
    sent = stats.bytes - stats.still_bytes
    assert not_sent(stats) > 40 * MIB and MIB < sent < 8 * MIB
    # The child has much in common with its parent.
    assert len(stats.inherited) == 1 and sum(stats.inherited.values()) > 16 * MIB
    compare(tmp_path)


def test_what_criu_is_not_told_it_sends(
    criu: Criu, kinds: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageServer, "environment", {})
    stats = dump_twice(criu, kinds, tmp_path)
    assert stats.still_bytes == 0 and stats.bytes > 40 * MIB
    compare(tmp_path)


def test_an_image_may_be_made_of_a_job_again(criu: Criu, kinds: Job, tmp_path: Path) -> None:
    """CRIU has had its code in the processes before."""
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert not_sent(dump_twice(criu, kinds, folder)) > 40 * MIB
        compare(folder)
        resume_tree(kinds.pid)


def test_a_process_that_is_killed_meanwhile_is_a_dead_one_in_the_image(
    criu: Criu, start: StartJob, tmp_path: Path
) -> None:
    job = start("import os\nif os.fork() == 0: os.close(1)\n" + COUNTER, "20")
    job.number()
    child = next(pid for pid in tree_pids(job.pid) if pid != job.pid)
    server = PageServer.start(tmp_path, tree_pids(job.pid))

    def kills() -> list[int]:
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: is_dead(child), "its end")
        return [job.pid]

    try:
        server.wait_ready(60)
        criu.start_dump(job.pid, tmp_path, pages=server, tasks=kills).wait()
        assert server.stats(60).still_bytes > 20 * MIB
    finally:
        server.close()
    assert f"pagemap-{job.pid}.img" in leftovers(tmp_path)
    assert f"pagemap-{child}.img" not in leftovers(tmp_path)
    resume_tree(job.pid)
    goes_on(job)
