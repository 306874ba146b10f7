"""Copies of memory that is written meanwhile, on a dictionary of chunks in place of a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordinator import before
from coordinator.chunks import CHUNK, U8, U64, Segments
from coordinator.dumping import Known
from flowgpu.image import layout
from flowgpu.image.linked import Linked
from tests.unit.test_chunk_plans import Catalogue, Memory, letter

PART = 0x7E0000000000


class Written(Memory):
    """The job writes a chunk each time when one has been looked at or copied."""

    number = 100

    def copy(self, sources: U64, destinations: U64) -> None:
        super().copy(sources, destinations)
        for at in sources:
            self.number += 1
            self.chunks[int(at)] = letter(self.number)


class Job:
    """Writes what is there when it is started to a file, with the digests that it is given."""

    def __init__(self, memory: Memory, path: Path) -> None:
        self.memory, self.path, self.closed = memory, path, False

    def start(self, segments: Segments, digests: U8 | None) -> None:
        found = [
            self.memory.chunks[int(at) + step]
            for at, size, _ in segments
            for step in range(0, int(size), CHUNK)
        ]
        self.path.write_bytes(b"".join(found))
        assert digests is not None
        self.path.with_suffix(".digests").write_bytes(digests.tobytes())

    def wait(self, stage: str, seconds: float) -> int:
        assert (stage, seconds) == ("done", 9.0)
        return 0

    def close(self) -> None:
        self.closed = True


def store(memory: Memory, folder: Path, part: int, where: U64) -> int:
    """Chunks that were stored, in parts of so many."""
    jobs: list[Job] = []

    def make(path: Path) -> Any:
        jobs.append(Job(memory, path))
        return jobs[-1]

    room: Any = SimpleNamespace(address=PART, size=part * CHUNK)
    known = Known(Catalogue(), Linked(folder))
    total = before.store(where, room, memory, known, folder, make, lambda: 9.0)
    assert all(job.closed for job in jobs)
    return total // CHUNK


def links(folder: Path) -> list[int]:
    """The letter of each slot of all links, which must have the digest of what it holds."""
    found = []
    for number, _ in enumerate(Linked(folder).slots):
        data = (folder / layout.link_data(number)).read_bytes()
        slots = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
        digests = b"".join(map(Memory([]).digest, slots))
        assert (folder / layout.link_digests(number)).read_bytes() == digests
        found += [slot[0] for slot in slots]
    return found


def test_digests_are_those_of_what_is_stored_whatever_the_job_writes(tmp_path: Path) -> None:
    memory = Written([letter(i) for i in range(1, 8)])
    where = memory.where
    assert store(memory, tmp_path, 3, where) == 7
    assert links(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert store(memory, tmp_path, 7, where) == 7  # all has changed since
    assert sorted(links(tmp_path)[7:]) == [101, 102, 103, 104, 105, 106, 107]


def test_zeros_equal_chunks_and_those_of_links_are_left_out(tmp_path: Path) -> None:
    memory = Memory([letter(1), letter(0), letter(2), letter(1), letter(3)])
    where = memory.where
    assert store(memory, tmp_path, 2, where[:3]) == 2
    assert links(tmp_path) == [1, 2]
    assert store(memory, tmp_path, 2, where) == 1
    assert links(tmp_path) == [1, 2, 3]
    assert store(memory, tmp_path, 2, where) == 0
    assert len(Linked(tmp_path).slots) == 3


@pytest.mark.parametrize(
    ("chunks", "room", "part"),
    [(10, 10, 10), (10, 50, 10), (16, 2, 2), (17, 2, 0), (5, 0, 0), (5, -3, 0), (0, 4, 0)],
)
def test_a_part_takes_what_there_is_unless_there_were_too_many(
    chunks: int, room: int, part: int
) -> None:
    assert before.part_bytes(chunks * CHUNK, room * CHUNK + 5) == part * CHUNK


def test_which_chunks_are_fresh_is_known_from_then_on() -> None:
    known = Known(Catalogue())
    memory = Memory([letter(1), letter(2), letter(1)])
    digests, _ = memory.scan(memory.where)
    assert known.fresh(digests).tolist() == [True, True, False]
    assert not np.any(known.fresh(digests))
