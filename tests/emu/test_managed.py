"""A job with managed memory, which its threads and its kernels write all the time, is saved by the
engine replay.

So are managed variables of modules (__managed__). The engine native refuses both by name while they
live, and replay refuses variables where the driver is told to compile all code itself, so that
FlowGPU cannot. Then the job runs on, and once they are gone it is saved.
"""
# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowgpu import errors
from flowgpu.host.proctree import is_stopped
from flowgpu.jobs import Registry
from flowgpu.launch import emulated_driver
from tests.emu.intercept_lib import compile_program
from tests.emu.test_checkpoint import (
    FLOWGPU,
    ROOT,
    SECONDS,
    command,
    flowgpu,
    goes_on_from,
    runs,
    runtime_dir,
)
from tests.emu.test_suspend import free_bytes, wait_warm
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
    engine: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    job = runs(f"managed-{engine}", words, "", "--engine", engine)
    job.wait_lines(1)
    for _ in range(2 * (engine == "native")):
        said = refused(job.name, tmp_path / "image")
        assert re.search(r"memory from cuMemAllocManaged \(process \d+\), which cannot be", said)
    (tmp_path / "free").touch()
    job.wait_lines(2)
    said = refused(job.name, tmp_path / "image")
    assert re.search(r"managed variables of a module \(process \d+\).*, which cannot be", said)
    (tmp_path / "unload").touch()
    job.wait_lines(3)
    job.dump(tmp_path / "image")
    assert job.end() == errors.DUMPED_EXIT
    (tmp_path / "end").touch()
    done = flowgpu("restore", tmp_path / "image")
    assert done.returncode == 0, done.stderr
    assert "after 7" in done.stdout.splitlines(), done.stdout


STEPS = 400


@pytest.mark.parametrize("asks", ["first", "last"])
@pytest.mark.parametrize("moment", [10, STEPS // 2 + 10])
def test_variables_of_code_that_a_runtime_loads_before_a_context_go_on_in_an_image(
    moment: int, asks: str, runs: Any, tmp_path: Path
) -> None:
    """Before and after a reset of the device."""
    program = compile_program("early_library.c", tmp_path / "early", str(emulated_driver()))
    job = runs("early", [str(program), str(STEPS), asks], "", "--engine", "auto")
    job.wait_lines(moment)
    assert job.dump(tmp_path / "image", "--engine", "replay")["engine"] == "replay"
    assert job.end() == errors.DUMPED_EXIT
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines()[-1] == f"done {4 + 100 * STEPS}", restored.stdout


TAKEN = "CUDA has to be taken from its processes: one has managed memory"


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


def ends_well(job: Any, folder: Path) -> None:
    for name in ("begin", "one", "two", "three"):
        (folder / name).touch()
    assert job.end(hurry=False) == 0, job.out.with_suffix(".err").read_text()
    assert job.lines[-1] == "after 7", job.lines


# A process got no core in the quarter of a second in which all must stop to be tracked.
LATE = re.compile(r"process \d+ does not stop")


def test_a_job_with_managed_memory_goes_on_after_a_checkpoint_and_its_image_too(
    runs: Any, tmp_path: Path
) -> None:
    job = managed_job(runs, tmp_path)
    image = tmp_path / "image"
    done = flowgpu("checkpoint", job.name, "--output", image)
    assert done.returncode == 0, done.stderr
    while True:
        refusal = flowgpu("checkpoint", job.name, "--output", tmp_path / "no", "--mode", "cow")
        if not LATE.search(refusal.stderr):
            break
    assert refusal.returncode == errors.ModeUnusable.exit_code, refusal.stderr
    assert TAKEN in refusal.stderr
    log = Registry().dir(Registry().find(job.name).id).coordinator_log.read_text()
    assert "prepare failed" in log and "gate failed" not in log
    ends_well(job, tmp_path)
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines()[-1] == "after 7", restored.stdout


@pytest.mark.parametrize(
    ("mode", "done_so", "rung", "why"),
    [
        ("any", "stop", "early-pages", TAKEN),
        ("recopy", "recopy", "early-pages", TAKEN),
        ("stop", "stop", "all-pages", "asked for"),
    ],
)
def test_a_series_of_a_job_with_managed_memory_names_its_rung_and_each_image_is_right(
    mode: str, done_so: str, rung: str, why: str, runs: Any, tmp_path: Path
) -> None:
    job = managed_job(runs, tmp_path)
    words = ("--every", "0.2", "--count", "4", "--mode", mode, "--json")
    done = flowgpu("checkpoint", job.name, "--store", tmp_path / "store", *words)
    assert done.returncode == 0, done.stderr
    reports = list(map(json.loads, done.stdout.splitlines()))
    images = [Path(report["image"]) for report in reports]
    assert len(images) == 4
    assert all(report["mode"] == done_so for report in reports)
    found = {(report["rung"], report["rung_reason"]) for report in reports}
    assert {one for one in found if not LATE.fullmatch(one[1])} == {(rung, why)}
    ends_well(job, tmp_path)
    for image in images:
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        assert restored.stdout.splitlines()[-1] == "after 7", restored.stdout


def test_a_job_with_managed_memory_is_suspended_and_a_dump_of_it_then_is_whole(
    runs: Any, tmp_path: Path
) -> None:
    job = managed_job(runs, tmp_path)
    for words in ("suspend", "resume", "suspend"):
        done = flowgpu(words, job.name)
        assert done.returncode == 0, done.stderr
    image = tmp_path / "image"
    job.dump(image)
    assert job.end(hurry=False) == errors.DUMPED_EXIT
    for name in ("begin", "one", "two", "three"):
        (tmp_path / name).touch()
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.splitlines()[-1] == "after 7", restored.stdout


def test_a_job_with_managed_memory_gives_its_blocks_back_and_keeps_its_context(
    runs: Any, tmp_path: Path
) -> None:
    job = managed_job(runs, tmp_path)
    for words in (("suspend", "--keep-context"), ("resume",)) * 2:
        done = flowgpu(words[0], job.name, *words[1:])
        assert done.returncode == 0, done.stderr
    ends_well(job, tmp_path)


ON_THE_DEVICE = """
import sys, time
from pathlib import Path
from tests.emu.driver_cases_managed import (
    advise, cu, function, launch_inc, location, managed, ok, start, told, words,
)
size = 192 << 20
half = size // 2
start()
inc, data = function(b"inc"), managed(size)
seen = words(data, size // 4)
seen[:] = 5
advise("SET_READ_MOSTLY", data, half)
advise("SET_PREFERRED_LOCATION", data + half, half)
ok(cu.cuMemPrefetchAsync(data, size, location("DEVICE"), 0, 0))
ok(cu.cuCtxSynchronize())
print("ready", flush=True)
while not Path(sys.argv[1], "go").exists():
    time.sleep(0.01)
assert told("READ_MOSTLY", data, half) == 1
assert told("PREFERRED_LOCATION", data + half, half) == 0
for part in (data, data + half):
    ok(launch_inc(inc, part, 64))
ok(cu.cuCtxSynchronize())
print("after", int((seen == 6).sum()), int((seen == 5).sum()) + 128 == size // 4, flush=True)
"""


@pytest.mark.parametrize("engine", ["replay", "native"])
def test_managed_memory_leaves_the_device_though_the_context_stays(
    engine: str, runs: Any, tmp_path: Path
) -> None:
    """In a job prepared for native the driver has placed it, and FlowGPU does not know its hints: a
    copy of what is read mostly stays on the device."""
    size = (192 if engine == "replay" else 96) << 20
    words = [sys.executable, "-c", ON_THE_DEVICE, str(tmp_path)]
    # The ghost that stays with the contexts has one too: here it is there from the start.
    job = runs("on-device", words, "", "--engine", engine, "--ghost", "warm")
    job.wait_lines(1)
    wait_warm(job)
    before = free_bytes()
    for words in (("suspend", "--keep-context"), ("resume",)) * 2:
        done = flowgpu(words[0], job.name, *words[1:])
        assert done.returncode == 0, done.stderr
        gained = free_bytes() - before
        if words[0] == "suspend":
            assert gained >= size
        elif engine == "replay":  # as the program has prefetched it
            assert gained < 1 << 20
    (tmp_path / "go").touch()
    assert job.end(hurry=False) == 0, job.out.with_suffix(".err").read_text()
    assert job.lines[-1] == "after 128 True", job.lines


# What fails after the bytes are ordinary memory: CUDA is there yet, or not any more.
@pytest.mark.parametrize("fault", ["task_reply:5", "task_reply:6", "strip", "criu_dump"])
def test_a_checkpoint_that_fails_gives_managed_memory_back(
    fault: str, runs: Any, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "tests.emu.managed_program", str(tmp_path)]
    job = runs("managed", words, fault, "--engine", "auto")
    job.wait_lines(1)
    done = flowgpu("pause-and-dump", job.name, "--output", tmp_path / "image")
    if done.returncode == 0:  # an answer that was lost is asked for again
        assert fault.startswith("task_reply"), done.stdout
        assert job.end(hurry=False) == errors.DUMPED_EXIT
        for name in ("begin", "one", "two", "three"):
            (tmp_path / name).touch()
        done = flowgpu("restore", tmp_path / "image")
        assert done.stdout.splitlines()[-1] == "after 7", done.stderr
        return
    ends_well(job, tmp_path)


def tracer_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(re.search(r"^TracerPid:\s+(\d+)", status, re.MULTILINE)[1])


@pytest.mark.parametrize("moment", ["held", "away"])
def test_a_coordinator_that_is_killed_in_the_exchange_costs_nothing(
    moment: str, runs: Any, tmp_path: Path
) -> None:
    """While it holds the threads, or once the bytes are ordinary memory and CUDA is gone."""
    words = [sys.executable, "-m", "tests.emu.managed_program", str(tmp_path)]
    fault = "phase_coordinator:5" if moment == "away" else ""  # at the beginning of CAPTURE
    job = runs("managed", words, fault, "--engine", "auto")
    job.wait_lines(1)
    directory = Registry().dir(Registry().find(job.name).id)
    before = directory.read()
    dump = subprocess.Popen(
        [*FLOWGPU, "pause-and-dump", job.name, "--output", str(tmp_path / "image")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    if moment == "held":
        while not tracer_of(before.root_pid) and dump.poll() is None:
            pass
        assert dump.poll() is None
    else:
        wait_for(lambda: is_stopped(before.coordinator_pid), "the fault", SECONDS)
    os.kill(before.coordinator_pid, signal.SIGKILL)
    dump.wait(SECONDS)
    wait_for(lambda: directory.read().coordinator_pid != before.coordinator_pid, "another one")
    ends_well(job, tmp_path)


NBODY = """
import runpy, sys
sys.path.insert(0, "workloads")
import _cuda
from cuda.bindings import driver

def alloc(gpu, size):
    address = int(_cuda.check(driver.cuMemAllocManaged(size, 1)))
    gpu._sizes[address] = size
    return address

_cuda.Gpu.alloc = alloc
sys.argv[0] = "workloads/nbody.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_n_body_system_in_managed_memory_ends_as_one_in_device_memory(
    runs: Any, tmp_path: Path
) -> None:
    words = command("nbody")
    job = runs("managed-nbody", [words[0], "-c", NBODY, *words[2:]], "", "--engine", "auto")
    job.wait_lines(8)
    copies = [tmp_path / name for name in ("one", "two")]
    for copy in copies:
        done = flowgpu("checkpoint", job.name, "--output", copy)
        assert done.returncode == 0, done.stderr
        job.wait_more(3)
    image = tmp_path / "image"
    job.dump(image)
    assert job.end() == errors.DUMPED_EXIT
    for path in (*copies, image):
        goes_on_from(path, "nbody")
