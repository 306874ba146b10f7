"""The fake driver of the mover's tests, the mover on it, and jobs under a coordinator and under
CRIU alone."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_job import Job, StartJob
from hypothesis import HealthCheck, settings
from mover_lib import CONTEXT, FAKES, PIECE, mounted_tmpfs

from flowgpu.host.native import Arena, Kernels, Mover
from tests.unit.coordinator_job import Jobs

# On a busy machine any example may wait for a processor, and so may what draws them.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture
def jobs(tmp_path: Path, runtime_dir: Path) -> Iterator[Jobs]:
    states = tmp_path / "states"
    states.mkdir()
    jobs = Jobs(runtime_dir, states)
    yield jobs
    jobs.close()


@pytest.fixture
def start() -> Iterator[StartJob]:
    """Starts jobs and ends them with the test."""
    jobs: list[Job] = []

    def begin(*args: str, **options: str) -> Job:
        jobs.append(Job(*args, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra"]
    subprocess.run(["g++", *flags, str(FAKES / "fake_driver.cpp"), "-o", str(target)], check=True)
    fake = ctypes.CDLL(str(target))
    fake.fake_fail_copy.argtypes = [ctypes.c_int64]
    fake.fake_limit_memory.argtypes = [ctypes.c_uint64]
    for counter in (fake.fake_live_objects, fake.fake_copies, fake.fake_launches):
        counter.restype = ctypes.c_int64
    return fake


@pytest.fixture(scope="session")
def mover(fake: ctypes.CDLL) -> Mover:
    return Mover(Path(fake._name))


@pytest.fixture
def arena(mover: Mover, fake: ctypes.CDLL) -> Iterator[Arena]:
    arena = Arena(mover, 4 * PIECE, PIECE, threads=2)
    arena.register(CONTEXT)
    yield arena
    fake.fake_fail_copy(-1)
    fake.fake_refuse_register(0)
    fake.fake_delay(0)
    arena.close()
    assert fake.fake_live_objects() == 0, "streams, events or registrations were left behind"


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with mounted_tmpfs(tmp_path / "tmpfs", "64m") as path:
            yield path


@pytest.fixture
def kernels(mover: Mover, arena: Arena, fake: ctypes.CDLL, tmp_path: Path) -> Iterator[Kernels]:
    """Depends on the arena so that it goes first, and nothing may be left after both."""
    ptx = tmp_path / "chunks.ptx"
    ptx.write_text(".version 6.3\n")
    kernels = Kernels(mover, CONTEXT, ptx, 1 << 20)
    fake.fake_copies()
    fake.fake_launches()
    yield kernels
    fake.fake_limit_memory(2**64 - 1)
    kernels.close()
