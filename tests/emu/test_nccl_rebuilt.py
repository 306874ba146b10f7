"""NCCL communicators that are ended in a checkpoint, and made anew behind the program's handles.

The lines must be those of a run that nobody disturbed, as with communicators that are kept
(test_nccl_checkpoint.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import DUMPED_EXIT, SharedOutside, Unsupported
from flowgpu.host.proctree import is_stopped, tree_pids
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from tests.emu import test_checkpoint, test_nccl_checkpoint
from tests.emu.test_checkpoint import Run, flowgpu
from tests.emu.test_nccl_checkpoint import (
    BOTH,
    ENGINES,
    PAIR,
    STEPS,
    ends_as_undisturbed,
    start,
    two_ranks,
)
from tests.unit.coordinator_job import wait_for

runtime_dir, runs = test_nccl_checkpoint.runtime_dir, test_nccl_checkpoint.runs
library, imports = test_nccl_checkpoint.library, test_nccl_checkpoint.imports
expected = test_nccl_checkpoint.expected

REBUILD = ("--communicators", "rebuild")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PROGRAM", "eager")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "engine"), [(2, "native"), (2, "replay"), (4, "native"), (4, "replay")]
)
def test_ranks_with_new_communicators_end_as_undisturbed_ones(
    ranks: int, engine: str, runs: Any, expected: Any, tmp_path: Path
) -> None:
    name = f"rebuilt-{ranks}-{engine}"
    run = start(runs, name, ranks, tmp_path, engine)
    run.dump(tmp_path / "first", *REBUILD)
    assert run.end(hurry=False) == 75
    manifest = Image(tmp_path / "first").manifest
    assert not manifest.imports and not manifest.peers
    done = flowgpu("restore", tmp_path / "first", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    done = flowgpu("pause-and-dump", name, "--output", tmp_path / "second", "--json", *REBUILD)
    assert done.returncode == 0, done.stderr
    assert "cut" in json.loads(done.stdout)["phases"]
    run.hurry()
    restored = flowgpu("restore", tmp_path / "second")
    assert restored.returncode == 0, restored.stderr
    log = (tmp_path / "second" / "output.log").read_text()
    assert sorted((log + restored.stdout).splitlines()) == expected(ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_are_left_running_with_new_communicators_end_as_undisturbed_ones(
    engine: str, runs: Any, expected: Any, tmp_path: Path
) -> None:
    run = start(runs, f"rebuilt-on-{engine}", 2, tmp_path, engine)
    for number, how in enumerate([REBUILD, (), REBUILD]):
        report = run.dump(tmp_path / f"image{number}", "--leave-running", *how)
        # Those that are kept connect when they are first used.
        assert how == () or not Image(tmp_path / f"image{number}").manifest.imports
        assert report["engine"] == engine
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)
    restored = flowgpu("restore", tmp_path / "image2")
    assert restored.returncode == 0, restored.stderr
    log = (tmp_path / "image2" / "output.log").read_text()
    assert sorted((log + restored.stdout).splitlines()) == expected(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_that_fails_leaves_the_ranks_with_communicators(
    engine: str, runs: Any, expected: Any, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    setting.touch()
    work = tmp_path / "ids"
    work.mkdir()
    words = [sys.executable, "-m", "tests.emu.nccl_program", "2", str(STEPS), str(work)]
    run = runs(f"rebuilt-not-{engine}", words, f"@{setting}", "--engine", engine)
    for fault in ("gate", "handover", "strip", "commit"):
        run.wait_lines(4)
        setting.write_text(f"{fault}:1")
        done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image", *REBUILD)
        assert done.returncode == 73, (fault, done.returncode, done.stderr)
        assert not (tmp_path / "image").exists()
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)


@pytest.mark.timeout(300)
def test_ranks_get_communicators_from_the_next_coordinator(
    runs: Any, expected: Any, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    setting.write_text("phase_coordinator:3")  # where HANDOVER begins
    work = tmp_path / "ids"
    work.mkdir()
    words = [sys.executable, "-m", "tests.emu.nccl_program", "2", str(STEPS), str(work)]
    run = runs("rebuilt-killed", words, f"@{setting}", "--engine", "replay")
    run.wait_lines(4)
    words = ["pause-and-dump", run.name, "--output", str(tmp_path / "image"), *REBUILD]
    with subprocess.Popen([*test_checkpoint.FLOWGPU, *words], stderr=subprocess.PIPE) as dump:
        (job,) = (one for one in Registry().all() if one.name == run.name)
        wait_for(lambda: is_stopped(job.coordinator_pid), "the coordinator's stop", 120)
        setting.write_text("")
        os.kill(job.coordinator_pid, signal.SIGKILL)
        dump.wait(120)
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)


# A rank stands in a group, and has of all that belongs to a communicator.
BELONGINGS = (
    PAIR
    + """
def made(name, configured):
    one, ident = ctypes.c_void_p(), share_id(nccl, folder, rank, name)
    if configured:
        config = Config.made(blocking=1)
        nccl.CommInitRankConfig(ctypes.byref(one), 2, ident, rank, ctypes.byref(config))
    else:
        nccl.CommInitRank(ctypes.byref(one), 2, ident, rank)
    return one
def summed(one, operation=SUM):
    nccl.AllReduce(data, data, count, 2, operation, one, stream)
    ok(cu.cuStreamSynchronize(stream))
others = [made("second", True), made("third", False)]
triple, scalar, handle = ctypes.c_int(), ctypes.c_int(3), ctypes.c_void_p()
nccl.RedOpCreatePreMulSum(ctypes.byref(triple), ctypes.byref(scalar), 2, 1, comm)
nccl.CommRegister(comm, data, ctypes.c_size_t(36), ctypes.byref(handle))
nccl.GroupStart()
reduce()
os.write(1, f"begun {os.getpid()}\\n".encode())
wait_for(folder / "go", 200)
nccl.GroupEnd()
ok(cu.cuStreamSynchronize(stream))
summed(comm, triple.value)
for one in others:
    summed(one)
handles = {one.value for one in (comm, *others)}
more = [made(f"more{number}", False) for number in range(3)]
assert len(handles | {one.value for one in more}) == 6
for one in more:
    summed(one)
for one in (comm, *others, *more):
    ranks = ctypes.c_int()
    nccl.CommCount(one, ctypes.byref(ranks))
    assert ranks.value == 2
again = ctypes.c_int()
nccl.RedOpCreatePreMulSum(ctypes.byref(again), ctypes.byref(scalar), 2, 1, comm)
assert again.value != triple.value
nccl.RedOpDestroy(triple.value, comm)
nccl.CommDeregister(comm, handle)
nccl.GroupStart()
for one in (comm, *others, *more):
    nccl.CommDestroy(one)
nccl.GroupEnd()
os.write(1, f"ended {device.get(data, 9, 'i4').tolist()}\\n".encode())
"""
)


@pytest.mark.timeout(300)
def test_what_belongs_to_a_communicator_is_made_anew_with_it(runs: Any, tmp_path: Path) -> None:
    run = two_ranks(runs, "rebuilt-belongings", BELONGINGS, tmp_path)
    run.dump(tmp_path / "running", "--leave-running", *REBUILD)
    run.dump(tmp_path / "image", *REBUILD)
    assert run.end() == 75
    (tmp_path / "go").touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    ended = [line for line in restored.stdout.splitlines() if "ended" in line]
    # 1, with its like 2, three times each of both 12, and then doubled five times.
    assert ended == [f"ended {[12 * 2**5] * 9}"] * 2


# Once they are connected, ranks may use communicators in opposite orders.
CROSSED = (
    PAIR
    + """
other, beside = communicator(nccl, share_id(nccl, folder, rank, "other"), 2, rank), device.stream()
WIDE, I4 = 40_000, 2
def made(one):
    triple, scalar = ctypes.c_int(), ctypes.c_int(3)
    nccl.RedOpCreatePreMulSum(ctypes.byref(triple), ctypes.byref(scalar), I4, 1, one)
    return device.put(np.arange(2 * WIDE, dtype="i4")), device.put(np.zeros(2 * WIDE, "i4")), triple
parts = [(one, on, *made(one)) for one, on in ((comm, stream), (other, beside))]
def use(one, on, given, got, triple):
    few, many = ctypes.c_size_t(9), ctypes.c_size_t(WIDE)
    yield lambda: nccl.Reduce(given, got, few, I4, SUM, 1, one, on)
    yield lambda: nccl.AllReduce(got, given, few, I4, triple.value, one, on)
    yield lambda: nccl.AllGather(given, got, many, I4, one, on)
    yield lambda: nccl.ReduceScatter(got, given, many, I4, SUM, one, on)
    yield lambda: nccl.Broadcast(given, given, many, I4, 1, one, on)
    yield lambda: nccl.AlltoAll(given, got, few, I4, one, on)
    yield lambda: nccl.Gather(got, given, few, I4, 1, one, on)
    yield lambda: nccl.Scatter(given, got, few, I4, 0, one, on)
    yield lambda: nccl.Send(got, few, I4, 1, one, on) if rank == 0 else nccl.Recv(
        given, few, I4, 0, one, on)
    yield lambda: nccl.AllReduce(got, given, many, I4, SUM, one, on)
def use_all(order):
    for number in range(10):
        for part in order:
            list(use(*part))[number]()
    for part in parts:
        ok(cu.cuStreamSynchronize(part[1]))
use_all(parts)
os.write(1, f"begun {os.getpid()}\\n".encode())
wait_for(folder / "go", 200)
use_all(parts if rank == 0 else parts[::-1])
sums = [int(device.get(data, 2 * WIDE, "i4").sum()) for part in parts for data in part[2:4]]
os.write(1, f"ended {rank} {sums}\\n".encode())
"""
)


@pytest.mark.timeout(300)
def test_ranks_use_new_communicators_in_opposite_orders(runs: Any, tmp_path: Path) -> None:
    run = two_ranks(runs, "rebuilt-crossed", CROSSED, tmp_path)
    run.dump(tmp_path / "running", "--leave-running", *REBUILD)
    run.dump(tmp_path / "image", *REBUILD)
    assert run.end() == 75
    (tmp_path / "go").touch()
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    work = tmp_path / "alone"
    work.mkdir()
    (work / "go").touch()
    words = [sys.executable, "-c", BOTH, str(tmp_path / "program.py"), str(work)]
    alone = flowgpu("run", "--gpu", "emulated", "--", *words)
    ended = [line for line in alone.stdout.splitlines() if "ended" in line]
    assert len(ended) == 2, alone.stderr
    assert sorted(x for x in restored.stdout.splitlines() if "ended" in x) == sorted(ended)


LEFT_ALONE = (
    PAIR
    + """
os.write(1, f"begun {os.getpid()}\\n".encode())
wait_for(folder / "go", 200)
state = ctypes.c_int()
deadline = time.monotonic() + 100
while not state.value and time.monotonic() < deadline:  # the others may be looked for still
    time.sleep(0.01)
    nccl.CommGetAsyncError(comm, ctypes.byref(state))
try:
    reduce()
except NcclError:
    nccl.CommAbort(comm)
    os.write(1, f"ended {state.value}\\n".encode())
"""
)
ALONE = BOTH.replace("max(", "min(")


@pytest.mark.timeout(300)
def test_a_rank_that_dies_without_communicators_has_failed_to_the_others(
    runs: Any, tmp_path: Path
) -> None:
    setting = tmp_path / "fault"
    setting.write_text("phase_stop:3")  # where HANDOVER begins
    (tmp_path / "program.py").write_text(LEFT_ALONE)
    words = [sys.executable, "-c", ALONE, str(tmp_path / "program.py"), str(tmp_path)]
    run = runs("rebuilt-dies", words, f"@{setting}", "--engine", "replay")
    wait_for(lambda: sum(line.startswith("begun") for line in run.lines) == 2, "two ranks", 60)
    command = ["pause-and-dump", run.name, "--output", str(tmp_path / "image"), *REBUILD]
    with subprocess.Popen([*test_checkpoint.FLOWGPU, *command]) as dump:
        (job,) = (one for one in Registry().all() if one.name == run.name)
        wait_for(lambda: is_stopped(job.coordinator_pid), "the coordinator's stop", 120)
        (dying,) = (
            pid
            for pid in tree_pids(job.root_pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0000\0")
        )
        os.kill(dying, signal.SIGKILL)
        setting.write_text("")
        os.kill(job.coordinator_pid, signal.SIGCONT)
        code = dump.wait(120)
    (tmp_path / "go").touch()
    if code == SharedOutside.exit_code:  # with who has died, as the other one noted before
        assert run.end() == 0
        lines = run.lines
    else:
        assert (code, run.end()) == (0, DUMPED_EXIT)
        lines = flowgpu("restore", tmp_path / "image").stdout.splitlines()
    assert "ended 6" in lines  # ncclRemoteError


@pytest.mark.timeout(300)
def test_graphs_with_operations_are_refused_and_the_job_runs_on(
    runs: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROGRAM", "")
    run = start(runs, "rebuilt-graphs", 2, tmp_path, "replay")
    words = ("pause-and-dump", run.name, "--output", tmp_path / "image", *REBUILD)
    done = flowgpu(*words)
    assert done.returncode == Unsupported.exit_code, done.stderr
    assert "CUDA graphs with operations of NCCL" in done.stderr
    assert not (tmp_path / "image").exists()
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_with_all_gpus_and_new_communicators_ends_as_an_undisturbed_one(
    engine: str, tmp_path: Path
) -> None:
    with test_checkpoint.emulated_machine(FLOWGPU_EMU_DEVICES="3"):
        words = [sys.executable, "-m", "tests.emu.nccl_one_process", "60"]
        run = Run("rebuilt-all", words, tmp_path, "", "--engine", engine)
        try:
            run.wait_lines(10)
            run.dump(tmp_path / "running", "--leave-running", *REBUILD)
            run.dump(tmp_path / "image", *REBUILD)
            assert run.end() == 75
            assert not Image(tmp_path / "image").manifest.peers
            ends_as_undisturbed(run, tmp_path / "image", words)
        finally:
            run.kill()
