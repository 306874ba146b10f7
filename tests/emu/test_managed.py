"""A job with managed memory, which its threads and its kernels write all the time, is saved by the
engine replay.

The engine native refuses it by name while it lives, and managed variables are refused by both; then
the job runs on, and once the memory is gone it is saved.
"""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.jobs import Registry
from tests.emu.test_checkpoint import SECONDS, flowgpu, runs, runtime_dir
from tests.unit.coordinator_job import wait_for

PROGRAM = """
import sys, time
from pathlib import Path
from tests.emu.driver_cases_managed import (
    GLOBAL, VARIABLE, advise, cu, function, launch_inc, location, managed, ok, start, told, words,
)
folder, size = Path(sys.argv[1]), 3 << 20
start()
inc, data = function(b"inc"), managed(size)
seen, far = words(data, 4), words(data + size - 16, 4)
advise("SET_PREFERRED_LOCATION", data, size)
ok(cu.cuMemPrefetchAsync(data, size, location("DEVICE"), 0, 0))

def step():
    seen[:] += 1
    for part in (data, data + size - 16):
        ok(launch_inc(inc, part, 4))
    ok(cu.cuCtxSynchronize())
    far[:] += 1

def until(name):
    print(name, list(map(int, seen)), list(map(int, far)), flush=True)
    while not (folder / name).exists():
        step()
        time.sleep(0.01)
    assert list(seen) == list(far), (seen, far)
    assert told("PREFERRED_LOCATION", data, size) == 0

step()
until("free")
ok(cu.cuMemFree(data))
library = ok(cu.cuLibraryLoadData(VARIABLE, [], [], 0, [], [], 0))
address, _ = ok(cu.cuLibraryGetManaged(library, b"both"))
both = words(int(address), 2)
bump = ok(cu.cuLibraryGetKernel(library, b"bump_both"))

def bumped():
    before = int(both[0])
    ok(cu.cuLaunchKernel(cu.CUfunction(int(bump)), 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    ok(cu.cuCtxSynchronize())
    return int(both[0]) - before

print("unload", bumped(), flush=True)
while not (folder / "unload").exists():
    assert bumped() == 1
    time.sleep(0.01)
ok(cu.cuLibraryUnload(library))
print("end", flush=True)
while not (folder / "end").exists():
    time.sleep(0.01)
plain = int(ok(cu.cuMemAlloc(4096)))
ok(launch_inc(inc, plain, 4))
ok(cu.cuCtxSynchronize())
fresh = managed(4096)
words(fresh, 1)[0] = 6
ok(launch_inc(inc, fresh, 1))
ok(cu.cuCtxSynchronize())
print("after", int(words(fresh, 1)[0]), flush=True)
"""


def refused(job: str, image: Path) -> str:
    """What a checkpoint says that ends before the pause."""
    done = flowgpu("pause-and-dump", job, "--output", image)
    assert done.returncode == errors.Unsupported.exit_code, done.stderr
    log = Registry().dir(Registry().find(job).id).coordinator_log.read_text()
    assert "checkpoint: prepare failed" in log and "checkpoint: gate" not in log
    return done.stderr


@pytest.mark.parametrize("engine", ["native", "replay", "auto"])
def test_managed_memory_and_variables_are_named_before_the_pause(
    engine: str, runs: Any, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    job = runs(f"managed-{engine}", words, "", "--engine", engine)
    job.wait_lines(1)
    for _ in range(2 * (engine == "native")):
        said = refused(job.name, tmp_path / "image")
        assert re.search(r"memory from cuMemAllocManaged \(process \d+\), which cannot be", said)
    (tmp_path / "free").touch()
    job.wait_lines(2)
    said = refused(job.name, tmp_path / "image")
    assert re.search(r"managed variables of a module \(process \d+\), which cannot be", said)
    assert "cuMemAllocManaged" not in said
    (tmp_path / "unload").touch()
    job.wait_lines(3)
    job.dump(tmp_path / "image")
    assert job.end() == errors.DUMPED_EXIT
    (tmp_path / "end").touch()
    done = flowgpu("restore", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert "after 7" in done.stdout.splitlines(), done.stdout


def managed_job(runs: Any, folder: Path) -> Any:
    words = [sys.executable, "-m", "tests.emu.managed_program", str(folder)]
    job = runs("managed", words, "", "--engine", "auto")
    job.wait_lines(1)
    return job


def wait_said(job: str, line: str) -> None:
    wait_for(lambda: line in flowgpu("logs", job).stdout.splitlines(), line, SECONDS)


def test_managed_memory_that_threads_write_all_the_time_goes_on_in_the_image(
    runs: Any, tmp_path: Path
) -> None:
    """Dumped, restored, and dumped and restored again."""
    job = managed_job(runs, tmp_path)
    image, again = tmp_path / "image", tmp_path / "again"
    assert job.dump(image)["engine"] == "replay"
    assert job.end(hurry=False) == errors.DUMPED_EXIT
    (tmp_path / "begin").touch()
    restored = flowgpu("restore", image, "--detach")
    assert restored.returncode == 0, restored.stderr
    wait_said("managed", "one")
    done = flowgpu("pause-and-dump", "managed", "--output", again)
    assert done.returncode == 0, done.stderr
    for name in ("one", "two", "three"):
        (tmp_path / name).touch()
    for folder in (image, again):
        done = flowgpu("restore", folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "after 7", done.stdout
