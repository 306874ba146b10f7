"""bench.py on the emulated GPU, in small: what fails here would fail on a lent GPU, in its time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import nodes
from bench.bench import TIME_UP_EXIT
from bench.step_time import FEW_LAUNCHES
from bench.studies import variants
from tests.emu import ddp_program
from tests.gpu.site import ROOT
from tests.patience import SECONDS

RUN_KEYS = {"pause_seconds", "phases", "image_bytes", "next_step_seconds", "identical", "commit"}


def bench(output: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/bench.py", "--gpu", "emulated", "--output", str(output)]
    return subprocess.run(
        [*command, *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def results(output: Path) -> dict[str, Any]:
    return dict(json.loads(output.read_text())["sections"])


def offers(verb: str, option: str = "") -> bool:
    command = [sys.executable, "-m", "flowgpu", verb, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    return done.returncode == 0 and option in done.stdout


def test_a_second_call_takes_what_is_missing_and_nothing_twice(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    words = ["--only", "flowgpu,peer_torch_save", "--repeats", "1"]
    done = bench(output, *words)
    assert done.returncode == 0, done.stderr
    first = results(output)
    assert set(first) == {"rates", "flowgpu", "peer_torch_save"}
    for system in ("flowgpu", "peer_torch_save"):
        (run,) = first[system]["jobs"]["digits_mlp"]
        assert run.keys() >= RUN_KEYS
        assert run["identical"] is True
    done = bench(output, *words)
    assert done.returncode == 0, done.stderr
    assert {name: found.get("jobs") for name, found in results(output).items()} == {
        name: found.get("jobs") for name, found in first.items()
    }
    done = bench(output, "--only", "flowgpu", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    runs = results(output)["flowgpu"]["jobs"]["digits_mlp"]
    assert runs[0] == first["flowgpu"]["jobs"]["digits_mlp"][0]
    assert len(runs) == 2


def test_growth_has_a_point_of_each_row(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = bench(output, "--only", "growth", "--points", "1")
    assert done.returncode == 0, done.stderr
    runs = [run for runs in results(output)["growth"]["jobs"].values() for run in runs]
    assert [run["axis"] for run in runs] == ["allocations", "bytes", "processes"]
    assert all(run.keys() >= RUN_KEYS for run in runs)


def test_no_run_is_begun_that_would_not_be_done_in_time(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    began = time.monotonic()
    done = bench(output, "--only", "flowgpu,growth", "--points", "1", "--deadline", "15")
    assert time.monotonic() - began < 15
    assert done.returncode == TIME_UP_EXIT, done.stderr
    assert "no time was left for: flowgpu digits_mlp" in done.stderr
    assert "rates" in results(output)


def test_processes_with_and_without_flowgpu_take_turns(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    words = ["--only", "overhead,calls,calls_replay", "--pairs", "2", "--overhead-blocks", "2"]
    words += ["--overhead-parts", "intercept,stub,coordinator,vmm,switched"]
    done = bench(output, *words)
    assert done.returncode == 0, done.stderr
    found = results(output)["overhead"]["jobs"]["launches"]
    assert (len(found["pairs"]), found["blocks"]) == (2, 2)
    switched = {"switched", "switched_stub", "switched_heap"}
    assert set(found["parts"]) == {"intercept", "stub", "coordinator", *switched}
    for part in (found, *found["parts"].values()):
        assert part["ratio_low"] <= part["ratio_mean"] <= part["ratio_high"]
        for pair in part["pairs"]:
            assert 0 < pair["low"] <= pair["ratio"] <= pair["high"]
    assert 0 <= found["supervisor_cores"] < 1
    assert found["calls_a_step"] == {"cuCtxSynchronize": 1, "cuLaunchKernel": FEW_LAUNCHES}
    for section in ("calls", "calls_replay"):
        assert "1" in results(output)[section]["nanoseconds"]["cuLaunchKernel"]
    assert "| launches | flowgpu run | 2 |" in done.stdout
    few = ["--only", "overhead", "--pairs", "1", "--overhead-blocks", "1"]
    done = bench(output, *few, "--overhead-engine", "replay", "--overhead-parts", "switched")
    assert done.returncode == 0, done.stderr
    prepared = results(output)["overhead"]["jobs"]["launches, replay"]
    assert (prepared["engine"], set(prepared["parts"])) == ("replay", switched)
    assert prepared["calls_a_step"]["cuLaunchKernel"] == FEW_LAUNCHES
    assert prepared["calls_a_step"]["libc malloc"] == prepared["calls_a_step"]["libc free"] > 0
    done = bench(output, *words)
    assert done.returncode == 0, done.stderr
    assert results(output)["overhead"]["jobs"]["launches"] == found  # not taken twice


def test_blocks_with_a_checkpoint_are_compared_with_blocks_without(tmp_path: Path) -> None:
    out = tmp_path / "stall.json"
    words = ["--gpu", "emulated", "--job", "launches", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, "-m", "bench.stall", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {mode: row["rungs"] for mode, row in found["modes"].items()} == {
        "any": ["early-pages"],
        "stop": ["all-pages"],
    }
    for row in found["modes"].values():
        low, high = row["cost_interval"]
        assert low <= row["cost_seconds"] <= high
        assert 0 < row["freeze_seconds"] <= row["stall_seconds"] < row["total_seconds"]
    assert len(found["rounds"]) == 2 and "| any | early-pages |" in done.stdout


def test_jobs_are_timed_away_from_their_gpu_and_back(tmp_path: Path) -> None:
    out = tmp_path / "suspend.json"
    words = ["--gpu", "emulated", "--jobs", "launches", "--cycles", "2", "--out", str(out)]
    command = [sys.executable, "-m", "bench.suspend", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())["jobs"]["launches"]
    assert len(found["swaps"]) == 4 and "| launches | contexts kept |" in done.stdout
    for how, row in found["ways"].items():
        assert len(found["cycles"][how]) == 2
        assert 0 < row["suspend"] < row["suspend_command"]
        assert 0 < row["resume"] < row["next_step"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path: sockets below it are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        yield Path(name)


@pytest.mark.parametrize(("engine", "mode"), [("native", "stop"), ("replay", "cow")])
def test_ranks_are_measured_by_their_number(engine: str, mode: str, tmp_path: Path) -> None:
    output = tmp_path / "replicas.json"
    words = ["--gpu", "emulated", "--ranks", "1,2", "--repeats", "1", "--out", str(output)]
    command = [sys.executable, "-m", "bench.replicas", *words]
    command += ["--engine", engine, "--left-running", mode]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(output.read_text())["rows"]
    assert (one["ranks"], two["ranks"], two["linked"]) == (1, 2, True)
    assert one["gpu_bytes_passed"] == one["gpu_bytes_replicated"] == 0
    assert two["gpu_bytes_stored"] < 1.3 * two["gpu_bytes_of_one"]
    assert two["gpu_bytes_passed"] > 0.5 * two["gpu_bytes_of_one"]
    for left in (one["left_running"], two["left_running"]):
        assert 0 < left["freeze_seconds"] <= left["stall_seconds"] <= left["total_seconds"]
        assert left["mode"] == mode
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize("communicators", ["keep", "rebuild"])
def test_ranks_on_two_nodes_are_measured(communicators: str, tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("hosts take root and the program ip")
    output = tmp_path / "nodes.json"
    words = ["--gpu", "emulated", "--repeats", "1", "--communicators", communicators]
    command = [sys.executable, "-m", "bench.nodes", *words, "--out", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    document = json.loads(output.read_text())
    (row,) = document["rows"]
    assert 0 < row["cut_seconds"] < row["pause_seconds"]
    assert 0 < row["restore_seconds"] < row["next_step_seconds"]
    # Both nodes have the same parameters, and each stores its own.
    assert row["gpu_bytes_stored"] > 2 * ddp_program.PARAMETERS and row["cpu_bytes"] > 0
    assert nodes.table(document).splitlines()[2:] == done.stdout.splitlines()[1:]


def test_a_call_that_is_cut_off_leaves_its_results_and_no_process(short: Path) -> None:
    output = short / "results.json"
    command = [sys.executable, "bench/bench.py", "--gpu", "emulated", "--output", str(output)]
    process = subprocess.Popen(
        [*command, "--only", "flowgpu", "--jobs", "allocations", "--repeats", "50"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TMPDIR": str(short)},
    )
    deadline = time.monotonic() + 60
    while not (output.exists() and "flowgpu" in results(output)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    assert results(output)["flowgpu"]["jobs"]["allocations"]
    until = time.monotonic() + 10
    while left := processes_below(short):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def processes_below(folder: Path) -> list[str]:
    """Command lines that name something in `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name != str(os.getpid()) and os.fsencode(folder) in words:
            found.append(words.split(b"\0")[0].decode())
    return found


@pytest.mark.slow
def test_each_reduction_is_left_out_in_turn(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    if not offers("pause-and-dump", "--without"):
        pytest.skip("pause-and-dump has no --without")
    done = bench(output, "--only", "breakdown", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    jobs = results(output)["breakdown"]["jobs"]
    off = [job.partition(", without ")[2] for job in jobs if ", without " in job]
    assert off
    assert [job.partition(", ")[2] for job in jobs] == list(variants(off))
    assert all(run["identical"] for runs in jobs.values() for run in runs)


def test_later_images_are_held_against_what_changed(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    if not offers("checkpoint", "--every"):
        pytest.skip("flowgpu has no verb checkpoint")
    done = bench(output, "--only", "periodic")
    assert done.returncode == 0, done.stderr
    (run,) = results(output)["periodic"]["jobs"]["allocations"]
    assert len(run["images"]) > 1
    for image in run["images"][1:]:
        assert 0 < image["changed_bytes"] <= image["active_bytes"]
        assert image["written_bytes"] > 0
