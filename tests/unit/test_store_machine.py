"""Drawn uses of a store, with crashes in the middle: each image stays what was written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_lib import INACTIVE, read, read_cpu, write

from flowgpu.image.chunks import usage
from flowgpu.image.linked import MOST_DISK, MOST_LINKS
from flowgpu.image.reader import Image
from flowgpu.image.store import Store

OPERATIONS = ("link", "rename", "mkdir", "unlink", "rmdir")


class Crash(BaseException):
    """The process is gone."""


class Breaker:
    """From its n-th change on, the disk takes none: what a crash looks like from outside."""

    def __init__(self, left: int | None) -> None:
        self.left = left

    def step(self) -> None:
        if self.left is not None:
            if not self.left:
                raise Crash
            self.left -= 1

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.step()
            return real(*args, **options)

        return call

    def run(self, work: Callable[[], Any]) -> bool:
        """True if the work was carried through."""
        locks: list[int] = []
        real_lock = mock.patch("flowgpu.image.space.lock", side_effect=_noting(locks))
        patches = [mock.patch.object(os, n, self.wrap(getattr(os, n))) for n in OPERATIONS]
        for patch in (real_lock, *patches):
            patch.start()
        try:
            work()
        except Crash:
            return False
        finally:
            for patch in (real_lock, *patches):
                patch.stop()
            for fd in locks if self.left == 0 else []:
                try:
                    os.close(fd)  # the kernel does it for a process that is gone
                except OSError:
                    pass
        return True


def _noting(locks: list[int]) -> Callable[[Path], int | None]:
    from flowgpu.image.space import lock

    def call(folder: Path) -> int | None:
        fd = lock(folder)
        if fd is not None:
            locks.append(fd)
        return fd

    return call


crashes = st.none() | st.integers(0, 30)
memories = st.lists(st.integers(INACTIVE, 12), min_size=1, max_size=10)


class StoreMachine(RuleBasedStateMachine):
    """Images by name with what their memory was; the disk must say the same after every step."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="flowgpu-store-"))
        self.store = Store(self.folder / "store")
        self.store.path.mkdir()
        self.model: dict[str, list[list[int]]] = {}
        self.cpu: dict[str, list[dict[int, int]]] = {}
        self.memory = {job: [[0], [1, 2]] for job in "ab"}
        self.pages: dict[str, list[dict[int, int]]] = {job: [{1: 1, 2: 2}, {}] for job in "ab"}

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @rule(job=st.sampled_from("ab"), gpu=st.integers(0, 1), chunks=memories)
    def run_on(self, job: str, gpu: int, chunks: list[int]) -> None:
        self.memory[job][gpu] = chunks

    @rule(
        job=st.sampled_from("ab"),
        process=st.integers(0, 1),
        first=st.integers(0, 20),
        values=st.lists(st.integers(0, 3), max_size=12),
    )
    def write_to_pages(self, job: str, process: int, first: int, values: list[int]) -> None:
        """0 takes a page away."""
        pages = self.pages[job][process]
        for at, value in enumerate(values, first):
            pages.pop(at, None)
            if value:
                pages[at] = value

    @rule(
        job=st.sampled_from("ab"),
        at=st.integers(0, 9),
        value=st.integers(INACTIVE, 99),
        compress=st.booleans(),
        crash=crashes,
    )
    def checkpoint(self, job: str, at: int, value: int, compress: bool, crash: int | None) -> None:
        chunks = self.memory[job][1]
        chunks[at % len(chunks)] = value
        memory = [list(one) for one in self.memory[job]]
        cpu = [dict(one) for one in self.pages[job]]
        output, base = self.store.next_image(), self.store.newest(job)
        breaker = Breaker(crash)
        done = breaker.run(
            lambda: write(output, memory, base, job, breaker.step, compress=compress, cpu=cpu)
        )
        if output.exists():
            self.model[output.name] = memory
            self.cpu[output.name] = cpu
            image = Image(output)
            tables = [image.chunk_table(gpu) for gpu in (0, 1)]
            used = usage(tables, [extent.slots for extent in image.extents])
            assert all(one.any() for one in used[2:])
            needed = sum(int(np.count_nonzero(one)) for one in used)
            assert sum(map(len, used)) <= MOST_DISK * needed
            assert len(image.extents) <= 2 + 2 * MOST_LINKS
        else:
            assert not done

    @rule(at=st.integers(0, 99), crash=crashes)
    def remove(self, at: int, crash: int | None) -> None:
        if names := self.store.names():
            name = names[at % len(names)]
            if Breaker(crash).run(lambda: self.store.remove(name)) or crash:
                del self.model[name]
            assert (name in self.store.names()) == (name in self.model)

    @rule(job=st.sampled_from("ab"), count=st.integers(1, 4), crash=crashes)
    def keep(self, job: str, count: int, crash: int | None) -> None:
        before = self.store.of_job(job)
        done = Breaker(crash).run(lambda: self.store.keep(job, count))
        left = self.store.of_job(job)
        assert left == before[len(before) - len(left) :]
        assert len(left) >= min(count, len(before))
        assert len(left) <= count or not done
        for name in set(before) - set(left):
            del self.model[name]

    @rule(crash=crashes)
    def reopen(self, crash: int | None) -> None:
        self.store = Store(self.store.path)
        if Breaker(crash).run(self.store.clean):
            assert set(os.listdir(self.store.path)) == set(self.model)

    @rule(at=st.integers(0, 99))
    def copy_away(self, at: int) -> None:
        if names := self.store.names():
            name = names[at % len(names)]
            away = self.folder / "away"
            shutil.copytree(self.store.path / name, away)
            Image(away).verify()
            assert read(away) == self.model[name]
            assert read_cpu(away) == self.cpu[name]
            shutil.rmtree(away)

    @invariant()
    def every_image_is_what_was_written(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.names() == sorted(self.model)
        assert all(error is None for error in self.store.verify().values())
        for name, memory in self.model.items():
            assert read(self.store.path / name) == memory
            assert read_cpu(self.store.path / name) == self.cpu[name]


StoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreMachine = StoreMachine.TestCase
