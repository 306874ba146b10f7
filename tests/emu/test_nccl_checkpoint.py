"""Jobs of several ranks with live NCCL communicators: dumped, restored and left running.

The libnccl.so.2 is the emulated GPU's. The program is skewed on purpose (nccl_program.py), and says
a digest of all that its ranks have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import PeerIsIdle, TopologyMismatch, Unsupported
from flowgpu.host.proctree import tree_pids
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from flowgpu.launch import emulated_driver
from tests.emu import test_checkpoint
from tests.emu.nccl_cuts import undisturbed
from tests.emu.test_checkpoint import Run, flowgpu
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

runtime_dir, runs = test_checkpoint.runtime_dir, test_checkpoint.runs

STEPS = 320
ENGINES = ("native", "replay")
KEPT = ("replay", ("--keep-context",))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulated_driver().parent))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Lines of a run that nobody disturbed, by the number of ranks."""
    known: dict[int, list[str]] = {}

    def lines(count: int) -> list[str]:
        if count not in known:
            found = undisturbed(count, STEPS, tmp_path_factory.mktemp("undisturbed"))
            known[count] = [line.rstrip("\n") for line in found]
        return known[count]

    yield lines


def start(runs: Any, name: str, ranks: int, folder: Path, engine: str) -> Run:
    work = folder / f"{name}-ids"
    work.mkdir()
    words = [sys.executable, "-m", "tests.emu.nccl_program", str(ranks), str(STEPS), str(work)]
    run: Run = runs(name, words, "", "--engine", engine)
    run.wait_lines(2 * ranks)
    return run


def lines_of_two_dumps(runs: Any, ranks: int, folder: Path, engine: str) -> list[str]:
    """What ranks say, sorted, that are dumped, restored and dumped again on their way."""
    name = f"nccl-{ranks}-{engine}"
    run = start(runs, name, ranks, folder, engine)
    result = run.dump(folder / "first")
    assert run.end(hurry=False) == 75
    assert result["engine"] == engine
    assert 0 < result["phases"]["cut"] < result["pause_seconds"]
    done = flowgpu("restore", folder / "first", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    done = flowgpu("pause-and-dump", name, "--output", folder / "second", "--json")
    assert done.returncode == 0, done.stderr
    assert "cut" in json.loads(done.stdout)["phases"]
    run.hurry()
    restored = flowgpu("restore", folder / "second")
    assert restored.returncode == 0, restored.stderr
    log = (folder / "second" / "output.log").read_text()
    return sorted((log + restored.stdout).splitlines())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "engine"), [(2, "native"), (2, "replay"), (4, "native"), (4, "replay")]
)
def test_ranks_end_as_undisturbed_ones_after_two_dumps(
    ranks: int, engine: str, runs: Any, expected: Any, tmp_path: Path
) -> None:
    assert lines_of_two_dumps(runs, ranks, tmp_path, engine) == expected(ranks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_talk_by_tcp_end_as_undisturbed_ones(
    engine: str, runs: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_PROGRAM_HOSTS", "2")
    assert lines_of_two_dumps(runs, 2, tmp_path, engine) == expected(2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_are_left_running_end_as_undisturbed_ones(
    engine: str, runs: Any, expected: Any, tmp_path: Path
) -> None:
    run = start(runs, f"nccl-on-{engine}", 2, tmp_path, engine)
    for number in range(4):
        run.dump(tmp_path / f"image{number}", "--leave-running")
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)
    for image in (tmp_path / "image0", tmp_path / "image3"):
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        log = (image / "output.log").read_text()
        assert sorted((log + restored.stdout).splitlines()) == expected(2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "keep"), [(one, ()) for one in ENGINES] + [KEPT])
def test_ranks_that_are_suspended_end_as_undisturbed_ones(
    engine: str, keep: Sequence[str], runs: Any, expected: Any, tmp_path: Path
) -> None:
    run = start(runs, f"nccl-off-{engine}{len(keep)}", 2, tmp_path, engine)
    for _ in range(3):
        suspended = flowgpu("suspend", run.name, "--json", *keep)
        assert suspended.returncode == 0, suspended.stderr
        resumed = flowgpu("resume", run.name)
        assert resumed.returncode == 0, resumed.stderr
    assert run.end() == 0
    assert sorted(run.lines) == expected(2)


def test_ranks_are_saved_by_replay_unless_the_drivers_checkpoint_is_asked_for(
    runs: Any, tmp_path: Path
) -> None:
    run = start(runs, "nccl-auto", 2, tmp_path, "auto")
    by_itself = run.dump(tmp_path / "first", "--leave-running")
    assert by_itself["engine"] == "replay" and by_itself["engine_reason"]
    asked_for = run.dump(tmp_path / "second", "--leave-running", "--engine", "native")
    assert asked_for["engine"] == "native"
    assert run.end() == 0


PAIR = """
import os, sys, time
from pathlib import Path
from tests.emu.nccl_lib import *
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
device, nccl = Device(), Nccl()
comm, stream = communicator(nccl, share_id(nccl, folder, rank), 2, rank), device.stream()
data, count = device.put(np.full(9, rank, "i4")), ctypes.c_size_t(9)
def reduce():
    nccl.AllReduce(data, data, count, 2, SUM, comm, stream)
reduce()
ok(cu.cuStreamSynchronize(stream))
"""
IDLE = (
    PAIR
    + """
os.write(1, f"begun {os.getpid()}\\n".encode())
if rank == 1:
    wait_for(folder / "go")
reduce()
ok(cu.cuStreamSynchronize(stream))
os.write(1, f"ended {device.get(data, 9, 'i4').tolist()}\\n".encode())
"""
)
BOTH = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, *sys.argv[1:], str(rank)]) for rank in range(2)]
raise SystemExit(max(abs(rank.wait()) for rank in ranks))
"""


def two_ranks(runs: Any, name: str, program: str, folder: Path) -> Run:
    (folder / "program.py").write_text(program)
    words = [sys.executable, "-c", BOTH, str(folder / "program.py"), str(folder)]
    run: Run = runs(name, words, "", "--engine", "replay")
    wait_for(lambda: sum(line.startswith("begun") for line in run.lines) == 2, "two ranks")
    return run


def sums_at_the_end(run: Run, folder: Path) -> list[str]:
    """What each of two ranks says last, once the one that was idle goes on."""
    (folder / "go").touch()
    assert run.end() == 0
    return [line for line in run.lines if "ended" in line]


BOTH_ENDED = [f"ended {[2] * 9}"] * 2


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(test_checkpoint.ROOT))


@pytest.mark.timeout(600)
def test_a_rank_that_does_not_come_is_named_and_the_job_runs_on(runs: Any, tmp_path: Path) -> None:
    run = two_ranks(runs, "nccl-idle", IDLE, tmp_path)
    # Rank 0 has issued what rank 1 comes to later; its GPU waits.
    done = flowgpu(
        *("pause-and-dump", run.name, "--output", tmp_path / "image", "--timeout", "2"), "--json"
    )
    assert done.returncode == PeerIsIdle.exit_code, done.stderr
    pids = {line.split()[1] for line in run.lines}
    assert all(pid in done.stderr + done.stdout for pid in pids)
    assert "operation 3 " in done.stderr + done.stdout
    assert not (tmp_path / "image").exists()
    assert sums_at_the_end(run, tmp_path) == BOTH_ENDED


@contextmanager
def in_the_cut(run: Run, folder: Path) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A dump that waits in its cut for the idle rank, and the job's record."""
    words = ["pause-and-dump", run.name, "--output", folder / "image"]
    whole = [*test_checkpoint.FLOWGPU, *words]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as dump:
        try:
            (job,) = (one for one in Registry().all() if one.name == run.name)
            log = Registry().dir(job.id).coordinator_log
            wait_for(lambda: "checkpoint: gate" in log.read_text(), "the cut")
            yield dump, job
        finally:
            dump.kill()


@pytest.mark.timeout(600)
def test_ranks_go_on_when_the_coordinator_is_killed_in_a_cut(runs: Any, tmp_path: Path) -> None:
    run = two_ranks(runs, "nccl-killed", IDLE, tmp_path)
    with in_the_cut(run, tmp_path) as (_, job):
        os.kill(Registry().dir(job.id).read().coordinator_pid, signal.SIGKILL)
        assert sums_at_the_end(run, tmp_path) == BOTH_ENDED


@pytest.mark.timeout(600)
def test_a_rank_that_dies_in_a_cut_is_missed_by_name(runs: Any, tmp_path: Path) -> None:
    run = two_ranks(runs, "nccl-dies", IDLE, tmp_path)
    with in_the_cut(run, tmp_path) as (dump, job):
        (idle,) = (
            pid
            for pid in tree_pids(job.root_pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(b"\0001\0")
        )
        os.kill(idle, signal.SIGKILL)
        said = dump.communicate(timeout=SECONDS)[1]
        assert dump.returncode == Unsupported.exit_code, said
        assert "an NCCL communicator of 2 ranks, 1 of which are in the job" in said
        assert not (tmp_path / "image").exists()


def ends_as_undisturbed(run: Run, image: Path, words: Sequence[str]) -> None:
    """What a job said until its dump, and says restored, is what a run of these words says."""
    said = run.lines
    restored = flowgpu("restore", image)
    assert restored.returncode == 0, restored.stderr
    alone = flowgpu(
        *("run", "--gpu", "emulated", "--", *words), env={"WORKLOAD_HURRY": str(run.hurrying)}
    )
    assert alone.returncode == 0, alone.stderr
    assert said + restored.stdout.splitlines() == alone.stdout.splitlines()
    assert len(said) >= 10


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_process_with_all_gpus_ends_as_an_undisturbed_one(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with test_checkpoint.emulated_machine(FLOWGPU_EMU_DEVICES="3"):
        words = [sys.executable, "-m", "tests.emu.nccl_one_process", "60"]
        run = Run("nccl-all", words, tmp_path, "", "--engine", engine)
        try:
            run.wait_lines(10)
            run.dump(tmp_path / "running", "--leave-running")
            result = run.dump(tmp_path / "image")
            assert run.end() == 75
            assert result["engine"] == engine
            manifest = Image(tmp_path / "image").manifest
            assert len(manifest.peers) == 3 * 2
            otherwise = tuple(dataclasses.replace(one, atomics=0) for one in manifest.peers)
            joined = dataclasses.replace(manifest, peers=otherwise)
            (tmp_path / "image" / "manifest.json").write_bytes(joined.to_bytes())
            refused = flowgpu("restore", tmp_path / "image", "--detach")
            assert refused.returncode == TopologyMismatch.exit_code, refused.stderr
            assert "without atomics" in refused.stderr and "with atomics" in refused.stderr
            (tmp_path / "image" / "manifest.json").write_bytes(manifest.to_bytes())
            ends_as_undisturbed(run, tmp_path / "image", words)
        finally:
            run.kill()
