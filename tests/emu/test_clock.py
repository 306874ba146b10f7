"""A wall clock that is set back or forward by days, between commands and in the middle of them.

It is that of the command, the coordinator, CRIU and the tasks, by a library that is loaded into
them (programs/clock.c); the machine's own stays as it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flowgpu.host.criu import Criu
from flowgpu.image import space
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Registry
from tests.emu.test_checkpoint import ROOT, SECONDS, runtime_dir

__all__ = ["runtime_dir"]

# The coordinator gets no preload of the command's: it is started by another program.
MAIN = "import sys; sys.executable = sys.argv.pop(1); import flowgpu.cli as cli; cli.main()"
SOURCE = Path(__file__).with_name("programs") / "clock.c"
STEPS = 60


class Clock:
    """A wall clock, and the commands of FlowGPU under it."""

    def __init__(self, folder: Path, criu: Criu) -> None:
        library = folder / "clock.so"
        flags = ["-Wall", "-Wextra", "-Werror", "-O2", "-D_GNU_SOURCE", "-fPIC", "-shared"]
        command = ["cc", *flags, str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        self._file = folder / "shift"
        self.set(0)
        self._python = self._under_it(folder / "python", library, Path(sys.executable))
        self.hurrying = folder / "hurry"
        self.env = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "SHIFTED_CLOCK": str(self._file),
            "WORKLOAD_HURRY": str(self.hurrying),
            "FLOWGPU_CRIU": str(self._under_it(folder / "criu", library, criu.program)),
        }

    @staticmethod
    def _under_it(path: Path, library: Path, program: Path) -> Path:
        path.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {program} "$@"\n')
        path.chmod(0o755)
        return path

    def set(self, days: float) -> None:
        new = self._file.with_name("new")
        new.write_text(str(int(days * 86400)))
        new.rename(self._file)

    @contextmanager
    def jumping(self) -> Iterator[None]:
        """Forward and back by days, every few milliseconds."""
        ended = threading.Event()

        def jump() -> None:
            turn = 0
            while not ended.wait(0.003):
                turn += 1
                self.set((5, -5, 0)[turn % 3])

        thread = threading.Thread(target=jump)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.set(0)

    def words(self, *words: object) -> list[str]:
        return [sys.executable, "-c", MAIN, str(self._python), *map(str, words)]

    def flowgpu(self, *words: object) -> str:
        done = subprocess.run(
            self.words(*words),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=self.env,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def job(self, name: str, *command: str) -> Iterator[subprocess.Popen[str]]:
        self.hurrying.unlink(missing_ok=True)
        words = self.words("run", "--gpu", "emulated", "--name", name, "--", *command)
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, env=self.env, cwd=ROOT
        ) as process:
            try:
                yield process
            finally:
                subprocess.run(self.words("kill", name), capture_output=True, env=self.env)
                process.kill()


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory, criu: Criu) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"), criu)


def task(delay: float) -> list[str]:
    """A job of one GPU, that says a line a step of its own, and waits near its end until somebody
    hurries it."""
    return [sys.executable, str(ROOT / "tests/emu/series_task.py"), "1", str(STEPS), str(delay)]


@pytest.fixture(scope="module")
def expected(clock: Clock, runtime_dir: Path) -> str:
    return clock.flowgpu("run", "--gpu", "emulated", "--", *task(0))


def days_off(image: Path) -> float:
    """What the clock was off by when an image was written, as its manifest says."""
    created = datetime.strptime(Image(image).manifest.created, "%Y-%m-%dT%H:%M:%SZ")
    return (created.replace(tzinfo=UTC) - datetime.now(UTC)) / timedelta(days=1)


@contextmanager
def being_written(partial: Path) -> Iterator[None]:
    """An image that another process is at."""
    partial.mkdir(parents=True)
    writer = space.lock(partial)
    assert writer is not None
    try:
        yield
    finally:
        os.close(writer)


def test_the_newest_image_of_a_series_is_the_one_taken_last(
    clock: Clock, expected: str, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    once = ("--store", store.path, "--every", "0.3", "--count")
    partial = store.path / "000009-20991231T235959Z.partial-00"
    clock.set(9)
    with being_written(partial), clock.job("other", "sh", "-c", "echo; sleep 99") as other:
        assert other.stdout and other.stdout.readline()
        clock.flowgpu("checkpoint", "other", *once, 1)
        (others,) = store.names()
        with clock.job("series", *task(0.03)) as process:
            assert process.stdout and process.stdout.readline()
            taken: list[str] = []
            for days, count, keep in ((5, 1, 9), (-5, 2, 9), (0, 1, 2)):
                clock.set(days)
                said = clock.flowgpu("checkpoint", "series", *once, count, "--keep", keep, "--json")
                reports = [json.loads(line) for line in said.splitlines()]
                images = [Path(report["image"]) for report in reports]
                assert [round(days_off(image)) for image in images] == [days] * count
                # Each shares what did not change with the one before.
                assert all(
                    Image(image).manifest.linked_bytes for image in images[len(taken) == 0 :]
                )
                taken += [image.name for image in images]
                assert store.names() == [others, *taken[-keep:]]
                assert store.newest(Registry().find("series").id) == images[-1]
        assert partial.is_dir()
    clock.hurrying.touch()
    newest = store.path / taken[-1]
    assert (newest / "output.log").read_text() + clock.flowgpu("restore", newest) == expected


def test_no_time_runs_out_and_none_is_waited_for_when_the_clock_jumps(
    clock: Clock, expected: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    with clock.jumping(), clock.job("jumps", *task(0.03)) as process:
        assert process.stdout
        said = process.stdout.readline()
        clock.flowgpu(
            "checkpoint", "jumps", "--store", tmp_path / "s", "--every", 0.5, "--count", 3
        )
        assert time.monotonic() - began > 1.0
        image = tmp_path / "image"
        clock.flowgpu("pause-and-dump", "jumps", "--output", image, "--timeout", 30)
        said += process.stdout.read()
        clock.hurrying.touch()
        clock.flowgpu("ps", "--all")
        clock.flowgpu("verify", image)
        said += clock.flowgpu("restore", image)
    assert said == expected
    assert time.monotonic() - began < SECONDS


def test_finished_jobs_are_known_as_long_and_in_order_whatever_the_clock_says(clock: Clock) -> None:
    for days in (3, 0, -3):
        clock.set(days)
        clock.flowgpu("run", "--gpu", "emulated", "--name", "again", "--", "echo", days)
        assert clock.flowgpu("logs", "again") == f"{days}\n"
    for days in (9, -9, 0):
        clock.set(days)
        jobs = json.loads(clock.flowgpu("ps", "--all", "--json"))
        moments = [job["created"] for job in jobs if job["name"] == "again"]
        assert len(moments) == 3 and moments == sorted(moments, reverse=True)
        assert clock.flowgpu("logs", "again") == "-3\n"
