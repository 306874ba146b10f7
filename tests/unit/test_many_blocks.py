"""Thousands of blocks: as many descriptors in the coordinator, and what each costs in the pause."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator import chunks
from coordinator.active import by_block, merge
from coordinator.polling import readable
from flowgpu import codec
from flowgpu.image import manifest as m
from tests.unit.coordinator_job import Jobs

COUNT = 50_000
BLOCK_BYTES = 2 << 20
# Far more than it takes, far less than with Python's work for each block and each range of it.
SECONDS = 0.5


@pytest.fixture
def many_files() -> Iterator[None]:
    """Files may have numbers beyond what select.select takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def few_files(soft: int) -> Iterator[None]:
    """What a shell gives the processes that it starts, only less."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
def test_descriptors_beyond_1023_are_waited_for() -> None:
    read, write = os.pipe()
    taken = [os.dup(read) for _ in range(1100)]
    try:
        high = taken[-1]
        assert high > 1023
        began = time.monotonic()
        assert readable(high, seconds=0.05) == set()
        assert time.monotonic() - began >= 0.05
        assert readable(high, seconds=0) == set()
        os.write(write, b"1")
        assert readable(high, read) == {high, read}
    finally:
        for fd in (*taken, read):
            os.close(fd)
    os.close(write)


def test_a_job_of_many_blocks_is_dumped_and_left_running(jobs: Jobs, tmp_path: Path) -> None:
    """The way there and back, with more descriptors than select.select takes."""
    job = jobs.task(1100, task_env={"FAKE_TASK_BLOCK": str(chunks.CHUNK)})
    result = job.dump(tmp_path / "image", leave_running=True)
    assert result["allocations"] == 1100
    job.wait_steps()
    job.dump(tmp_path / "second")
    assert job.end() == 75
    assert job.lines == [f"step {n + 1}" for n in range(len(job.lines))]
    with few_files(512):
        again = jobs.restore(tmp_path / "second")
    again.ask("wait-restored")
    again.wait_steps()


def test_parts_of_many_blocks_take_no_time() -> None:
    numbers = np.arange(COUNT, dtype=np.uint64)
    starts = np.uint64(1 << 45) + numbers * np.uint64(BLOCK_BYTES)
    blocks = np.column_stack([numbers, starts, np.full(COUNT, BLOCK_BYTES, np.uint64)])
    # Four ranges in each block, none of them touching another.
    quarters = np.repeat(starts, 4) + np.tile(np.arange(4, dtype=np.uint64), COUNT) * np.uint64(
        BLOCK_BYTES // 4
    )
    ranges = merge(np.column_stack([quarters, np.full(4 * COUNT, 4096, np.uint64)]))
    keys, sizes = numbers.tolist(), [BLOCK_BYTES] * COUNT
    began = time.thread_time()
    parts = by_block(ranges, blocks)
    active = chunks.active_chunks(keys, sizes, chunks.unpack_parts(chunks.pack_parts(parts)))
    assert time.thread_time() - began < SECONDS
    assert len(parts) == active.sum() == 4 * COUNT


def test_blocks_of_a_manifest_are_read_in_no_time() -> None:
    rows = [vars(m.Block(0, n, n << 21, 1 << 21, n << 21, 0)) for n in range(COUNT)]
    began = time.thread_time()
    found = [codec.decode(m.Block, row) for row in rows]
    assert time.thread_time() - began < 2 * SECONDS
    assert vars(found[-1]) == rows[-1]
