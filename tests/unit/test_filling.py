"""A restore's copy of many extents into one GPU."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from coordinator.chunks import CHUNK, U8, U64, Bools, FillPlan, Passed, Segments
from coordinator.filling import AT_ONCE, FillJob, Meeting
from flowgpu.host.native import MoverError, Status
from tests.patience import SECONDS


class Reads:
    """Makes jobs that end when they are told to, and notes what happens to them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.closed: list[int] = []
        self.jobs: dict[int, Read] = {}
        self.most = 0

    def __call__(self, extent: int) -> Read:
        self.begun.append(extent)
        self.jobs[extent] = Read(self, extent)
        self.most = max(self.most, len(self.begun) - len(self.closed))
        return self.jobs[extent]


class Read:
    def __init__(self, reads: Reads, extent: int) -> None:
        self.reads, self.extent = reads, extent
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.size = 0

    def start(self, segments: Segments, digests: U8 | None) -> None:
        assert digests is None
        self.segments = segments.tolist()
        self.size = int(segments[:, 1].sum())

    def progress(self) -> tuple[int, int]:
        return (self.size if self.ended.is_set() else 1), self.size

    def wait(self, stage: str, seconds: float) -> int:
        if not self.ended.wait(seconds):
            raise TimeoutError(f"not {stage}")
        if self.error:
            raise self.error
        return self.size

    def cancel(self) -> None:
        self.error = MoverError(Status.CANCELLED, "cancelled")
        self.ended.set()

    def close(self) -> None:
        self.reads.closed.append(self.extent)


class Kernels:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lost: list[int] = []
        self.copied: list[tuple[list[int], list[int]]] = []

    def scan(self, addresses: U64) -> tuple[U8, Bools]:
        """Digests of what `passing` brings, but for chunks that are lost."""
        self.calls.append("scan")
        found = digests(2)[4 + addresses // CHUNK - 1].copy()
        found[self.lost] ^= 9
        return found, np.zeros(len(found), np.bool_)

    def compare(self, left: U64, right: U64) -> Bools:
        raise AssertionError

    def copy(self, sources: U64, destinations: U64) -> None:
        self.calls.append("copy")
        self.copied.append((sources.tolist(), destinations.tolist()))

    def fill(self, destinations: U64, pattern: int) -> None:
        self.calls.append(f"fill {pattern:x}")


def passing(count: int) -> Passed:
    """So many chunks of extent 2, from slot 4 on."""
    rows = np.arange(count, dtype=np.uint64)
    at = (rows + 1) * CHUNK
    return Passed(at + (1 << 40), at, np.full(count, 2, np.uint16), 4 + rows)


def digests(extent: int) -> U8:
    """Digests of all slots, which are the slots' own numbers."""
    assert extent == 2
    return np.arange(16, dtype=np.uint8)[:, None] + np.zeros((1, 16), np.uint8)


def fill(
    plan: FillPlan,
    reads: Reads,
    kernels: Kernels | None,
    meeting: Meeting | None = None,
    *,
    poison: bool,
) -> FillJob:
    return FillJob(plan, reads, kernels, poison, meeting or met(1), digests)


def met(fills: int) -> Meeting:
    """The meeting of so many fills, on GPUs that reach each other."""
    meeting = Meeting(fills)
    meeting.tell(can_reach=True)
    return meeting


def plan(sizes: list[int]) -> FillPlan:
    """Reads so many chunks of each extent."""
    none = np.empty(0, np.uint64)
    rows = {n: np.array([[0, size * CHUNK, 0]], np.uint64) for n, size in enumerate(sizes)}
    return FillPlan(rows, passing(0), (none, none), none, none)


def test_a_few_extents_are_read_at_a_time_the_largest_first() -> None:
    reads, kernels = Reads(), Kernels()
    sizes = [5, 9, 1, 7, 3, 2, 8]
    job = fill(plan(sizes), reads, kernels, poison=True)
    assert reads.begun == [1, 6, 3, 0]
    assert job.progress() == (4, sum(sizes) * CHUNK)
    with pytest.raises(TimeoutError):
        job.wait("done", 0.01)
    waiting = threading.Thread(target=job.wait, args=("done", 10.0))
    waiting.start()
    # The newest end first, and others take their places beside the largest.
    for extent in (0, 4, 5, 2, 3, 6):
        while extent not in reads.jobs:
            pass
        assert kernels.calls == []
        reads.jobs[extent].ended.set()
    assert waiting.is_alive()
    reads.jobs[1].ended.set()
    waiting.join(SECONDS)
    assert sorted(reads.begun) == list(range(7)) and reads.most == AT_ONCE
    assert kernels.calls == ["copy", "fill 0", "fill f1f1f1f1f1f1f1f1"]
    assert job.wait("done", 0.0) == sum(sizes) * CHUNK and len(kernels.calls) == 3
    assert job.progress() == (sum(sizes) * CHUNK, sum(sizes) * CHUNK)
    # The job closed those whose memory was wanted on the way.
    assert reads.closed == [0, 4, 5]
    job.close()
    assert sorted(reads.closed) == list(range(7))


def test_the_first_failure_ends_it() -> None:
    reads, kernels = Reads(), Kernels()
    job = fill(plan([1] * 6), reads, kernels, poison=False)
    for read in reads.jobs.values():
        read.error = MoverError(Status.DAMAGED, "a chunk is damaged", 3)
        read.ended.set()
    with pytest.raises(MoverError, match="damaged"):
        job.wait("done", 10.0)
    job.cancel()
    job.close()
    assert sorted(reads.closed) == sorted(reads.begun) and len(reads.begun) == AT_ONCE
    assert kernels.calls == []


def test_a_cancel_ends_whoever_waits() -> None:
    reads, kernels = Reads(), Kernels()
    job = fill(plan([1] * 6), reads, kernels, poison=False)
    failures: list[MoverError] = []

    def wait() -> None:
        try:
            job.wait("done", 10.0)
        except MoverError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    job.cancel()
    waiting.join(SECONDS)
    assert [error.status for error in failures] == [Status.CANCELLED]
    job.close()
    assert sorted(reads.closed) == sorted(reads.begun) and kernels.calls == []


def test_nothing_to_read_is_done_at_once() -> None:
    kernels = Kernels()
    job = fill(plan([]), Reads(), kernels, poison=False)
    assert job.wait("done", 0.0) == 0 and job.progress() == (0, 0)
    assert kernels.calls == ["copy", "fill 0"]


def test_what_other_gpus_read_is_taken_once_all_have_read_and_are_reached() -> None:
    meeting = Meeting(2)
    first, second = (Reads(), Kernels()), (Reads(), Kernels())
    takes = plan([3])
    takes = dataclasses.replace(takes, passed=passing(2))
    job = fill(takes, *first, meeting, poison=False)
    gives = fill(plan([5]), *second, meeting, poison=False)
    first[0].jobs[0].ended.set()
    with pytest.raises(TimeoutError):
        job.wait("done", 0.05)
    assert first[1].calls == []
    second[0].jobs[0].ended.set()
    assert gives.wait("done", 10.0) == 5 * CHUNK
    with pytest.raises(TimeoutError):
        job.wait("done", 0.05)
    assert first[1].calls == []
    meeting.tell(can_reach=True)
    assert job.wait("done", 10.0) == 3 * CHUNK
    assert first[1].calls == ["copy", "scan", "copy", "fill 0"]
    job.close()
    gives.close()


@pytest.mark.parametrize("damaged", [True, False])
def test_who_waits_for_another_gpu_ends_with_it(damaged: bool) -> None:
    meeting = Meeting(2)
    first, second = (Reads(), Kernels()), (Reads(), Kernels())
    takes = plan([])
    takes = dataclasses.replace(takes, passed=passing(1))
    job = fill(takes, *first, meeting, poison=False)
    other = fill(plan([1]), *second, meeting, poison=False)
    status = Status.DAMAGED if damaged else Status.CANCELLED
    if damaged:
        second[0].jobs[0].error = MoverError(Status.DAMAGED, "a chunk is damaged", 3)
        second[0].jobs[0].ended.set()
    else:
        other.cancel()
    for one in (job, other):
        with pytest.raises(MoverError) as caught:
            one.wait("done", 10.0)
        assert caught.value.status is status
        one.close()
    assert first[1].calls == second[1].calls == []


def test_what_is_lost_between_gpus_is_read_from_the_image() -> None:
    reads, kernels = Reads(), Kernels()
    kernels.lost = [0, 1, 3]
    takes = dataclasses.replace(plan([]), passed=passing(5))
    job = fill(takes, reads, kernels, poison=False)
    while 2 not in reads.jobs:
        assert not job._done.is_set()
    reads.jobs[2].ended.set()
    job.wait("done", 10.0)
    lost = [[CHUNK, 2 * CHUNK, 4 * CHUNK], [4 * CHUNK, CHUNK, 7 * CHUNK]]
    assert reads.jobs[2].segments == lost
    assert kernels.calls == ["copy", "scan", "copy", "fill 0"]
    assert job.passed_bytes == 5 * CHUNK
    job.close()
    assert reads.closed == [2]


@pytest.mark.parametrize("with_kernels", [True, False])
def test_who_does_not_reach_others_reads_for_itself(with_kernels: bool) -> None:
    meeting = Meeting(2)  # it does not wait for the other one either
    reads, kernels = Reads(), Kernels() if with_kernels else None
    job = fill(
        dataclasses.replace(plan([3]), passed=passing(5)), reads, kernels, meeting, poison=False
    )
    if with_kernels:
        meeting.tell(can_reach=False)
    for extent in (0, 2):
        while extent not in reads.jobs:
            assert not job._done.is_set()
        reads.jobs[extent].ended.set()
    assert job.wait("done", 10.0) == 8 * CHUNK
    assert job.progress() == (8 * CHUNK, 8 * CHUNK)
    assert reads.jobs[2].segments == [[CHUNK, 5 * CHUNK, 4 * CHUNK]]
    assert job.passed_bytes == 0
    if kernels:
        assert kernels.calls == ["copy", "fill 0"]
    job.close()
