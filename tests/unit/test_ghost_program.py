"""A ghost that serves several checkpoints, on the driver and mover of tests/fakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator import ghost_commands as commands
from coordinator import ghost_dump
from coordinator.chunks import pack_parts
from coordinator.ghost import GhostProgram
from coordinator.move_plan import Plan
from flowgpu.image.chunks import Kind, decode
from tests.fakes import ghost as fakes
from tests.fakes.ghost import CHUNK, FakeDriver, FakeJob, FakeMover

BLOCK_CHUNKS = 64


class Mover(FakeMover):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.arenas: list[int] = []
        self.pinned = self.kernels_made = 0
        self.jobs: list[FakeJob] = []
        self.plans: list[Plan] = []
        self.expected: list[int] = []

    def make_arena(self, plan: Plan) -> None:
        assert all(hasattr(job, "closed") for job in self.jobs), "a job still has the arena"
        self.arenas.append(plan.arena)

    def pin_arena(self, context: int) -> None:
        self.pinned += 1

    def kernels(self, context: int) -> fakes.FakeKernels:
        self.kernels_made += 1
        return super().kernels(context)

    def dump_job(self, *arguments: Any) -> Any:
        job = super().dump_job(*arguments)
        *_, expected, plan, kernels = arguments
        job.with_kernels = kernels is not None
        close = job.close

        def closing() -> None:
            close()
            job.closed = True

        job.close = closing
        self.jobs.append(job)
        self.plans.append(plan)
        self.expected.append(expected)
        return job


class Session:
    """One checkpoint after another with a ghost, as a coordinator asks for them."""

    def __init__(self, folder: Path) -> None:
        self.mover = Mover()
        self.folder = folder
        self.ghost = GhostProgram(FakeDriver, lambda library: self.mover)
        self.memory = os.memfd_create("gpu0")
        os.ftruncate(self.memory, BLOCK_CHUNKS * CHUNK)
        self.ghost.run(commands.Hello())

    def take(self, key: int) -> None:
        self.ghost.run(commands.Import((key,), (BLOCK_CHUNKS * CHUNK,), (0,), (self.memory,)))

    def target(self, name: str, arena: int, *reductions: str) -> commands.Target:
        data, table = self.folder / f"{name}.data", self.folder / f"{name}.chunks"
        return commands.Target(
            Plan("ring", 2, 2, 32 << 20, arena, direct=False),
            {0: commands.DumpFiles(str(data), str(table), 0)},
            links=None,
            gpus=1,
            reductions=reductions,
        )

    def prepare(
        self,
        target: commands.Target,
        active: str | None = None,
        in_use: int = 1 << 30,
        most: int = 1 << 30,
    ) -> None:
        self.ghost.run(commands.PrepareCopy(target, active, in_use, most, seconds=1.0))

    def write(self, chunk: int, value: int) -> None:
        os.pwrite(self.memory, bytes([value]) * CHUNK, chunk * CHUNK)

    def checkpoint(
        self, name: str, arena: int, reductions: tuple[str, ...] = ("zero", "dedup")
    ) -> list[int]:
        """Kinds of the chunks."""
        target = self.target(name, arena, *reductions)
        self.take(7)
        self.prepare(target)
        planned = self.ghost.run(commands.Copy(target, active=None)).gpus[0]
        assert planned.keys == (7,)
        assert planned.reduced.reductions == reductions
        self.ghost.run(commands.Wait("out", 10.0))
        self.ghost.run(commands.Forget())
        self.ghost.run(commands.Wait("done", 10.0))
        self.ghost.run(commands.Reset())
        slots = Path(target.files[0].data).stat().st_size // CHUNK
        table = Path(target.files[0].table).read_bytes()
        return [int(kind) for kind in decode(table, BLOCK_CHUNKS, [slots], 0).kind]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("FAKE_STATES", str(tmp_path))
    monkeypatch.setattr(fakes, "mapped", {})
    # So that a few checkpoints would use up what is reserved.
    monkeypatch.setattr(fakes, "MEMORY", 2 * BLOCK_CHUNKS * CHUNK)
    session = Session(tmp_path)
    yield session
    os.close(session.memory)


def test_one_ghost_serves_several_checkpoints(session: Session) -> None:
    for turn in range(1, 4):
        session.write(turn, turn)
        kinds = session.checkpoint(str(turn), 128 << 20)
        assert kinds == [Kind.STORED if 0 < at <= turn else Kind.ZERO for at in range(BLOCK_CHUNKS)]
        assert fakes.mapped == {} and all(job.closed for job in session.mover.jobs)
    mover = session.mover
    assert (mover.arenas, mover.pinned, mover.kernels_made) == ([128 << 20], 1, 1)


def test_addresses_are_used_again(session: Session) -> None:
    driver = session.ghost.devices.driver
    session.checkpoint("first", 128 << 20)
    reserved = driver.next_address  # type: ignore[attr-defined]
    for turn in range(5):
        session.checkpoint(str(turn), 128 << 20)
    assert driver.next_address == reserved  # type: ignore[attr-defined]


def test_an_arena_that_is_too_small_is_made_anew(session: Session) -> None:
    for name, arena in (("a", 128 << 20), ("b", 64 << 20), ("c", 256 << 20), ("d", 256 << 20)):
        session.checkpoint(name, arena)
    assert session.mover.arenas == [128 << 20, 256 << 20] and session.mover.pinned == 2
    assert [plan.arena >> 20 for plan in session.mover.plans] == [128, 128, 256, 256]


def test_reductions_are_those_of_each_checkpoint(session: Session) -> None:
    session.write(5, 1)
    session.checkpoint("all", 128 << 20)
    assert session.checkpoint("none", 128 << 20, reductions=()) == [Kind.STORED] * BLOCK_CHUNKS
    assert session.checkpoint("dedup", 128 << 20, reductions=("dedup",)).count(Kind.STORED) == 2
    assert [job.with_kernels for job in session.mover.jobs] == [True, False, True]


def test_a_checkpoint_that_failed_leaves_nothing_for_the_next(session: Session) -> None:
    session.write(1, 1)
    session.take(1)
    target = session.target("x", 128 << 20, "zero", "dedup")
    session.prepare(target)
    session.ghost.run(commands.Reset())
    assert fakes.mapped == {} and session.mover.jobs[0].closed
    assert session.checkpoint("next", 128 << 20).count(Kind.STORED) == 1


def test_as_much_is_prepared_as_will_be_in_use_and_new(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = BLOCK_CHUNKS // 2
    for chunk in range(BLOCK_CHUNKS):
        session.write(chunk, chunk // 2 + 1)
    session.take(1)
    active = pack_parts(np.array([(1, 0, half * CHUNK)], np.uint64))

    def prepared(active: str | None, in_use: int = 1 << 30, most: int = 1 << 30) -> int:
        session.prepare(session.target("x", 128 << 20, "zero", "dedup"), active, in_use, most)
        session.ghost.run(commands.Cancel())
        return session.mover.expected.pop() // CHUNK

    # To find out what is new takes longer than to make the pages of a little.
    assert [prepared(None), prepared(active)] == [BLOCK_CHUNKS, half]
    monkeypatch.setattr(ghost_dump, "ESTIMATE_BYTES", 1)
    assert [prepared(None), prepared(active)] == [half, half // 2]
    # The job's memory shrinks to a quarter before it is stopped.
    assert prepared(active, in_use=half // 4 * CHUNK) == half // 8
    assert prepared(active, most=3 * CHUNK) == 3
