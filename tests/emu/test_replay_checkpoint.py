"""What only the replay engine does, or refuses; test_checkpoint has what both do."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import EngineUnusable, GpuMismatch, NoCodeForGpu, RestoreFailed
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from flowgpu.launch import emulator_socket
from tests.emu.test_checkpoint import (
    ROOT,
    Run,
    command,
    emulated_machine,
    flowgpu,
    runs,
    runtime_dir,
    undisturbed,
)
from tests.unit.coordinator_job import wait_for

REPLAY = ("--engine", "replay")


def prepared(runs: Any, kind: str, workload: str) -> Run:
    name = f"replay-{kind}-{workload}".replace("_", "-")
    run: Run = runs(name, command(workload), "", *REPLAY)
    return run


def test_a_job_that_replay_cannot_save_is_refused_by_name_or_saved_natively(
    runs: Any,
    tmp_path: Path,
) -> None:
    program = [sys.executable, str(ROOT / "tests" / "emu" / "late_variable.py")]
    expected = [*(f"step {step} {21 + 5 * step}" for step in range(40)), "done"]
    run = runs("replay-refused", program, "", *REPLAY)
    run.wait_lines(5)
    done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / "image", *REPLAY)
    assert done.returncode == EngineUnusable.exit_code, (done.returncode, done.stderr)
    assert "the addresses of module variables: total" in done.stderr
    assert not list(tmp_path.glob("image*"))
    result = run.dump(tmp_path / "image")
    assert result["engine"] == "native"
    assert "module variables" in result["engine_reason"]
    assert run.end() == 75
    restored = flowgpu("restore", tmp_path / "image")
    assert restored.returncode == 0, restored.stderr
    assert run.lines + restored.stdout.splitlines() == expected


# Shows a step; once a file is there, five more.
SHOW = """
    print("step", download(data, 256).sum() // 256, flush=True)
    left -= os.path.exists(sys.argv[1])
    time.sleep(0.05)
"""

# Has most of its GPU from a pool, so that there is no room for a copy.
POOL = """
import os, sys, time
from tests.emu.driver_lib import *
start()
stream = ok(cu.cuStreamCreate(1))
data = int(ok(cu.cuMemAllocAsync(192 * MIB, stream)))
ok(cu.cuMemsetD32Async(data, 0, 256, stream))
left = 5
while left:
    ok(cu.cuMemsetD32Async(data, download(data, 1)[0] + 1, 256, stream))
    ok(cu.cuStreamSynchronize(stream))"""

# This program has the same in an array.
ARRAY = """
import os, sys, time
from tests.emu.driver_lib import *
start()
about = cu.CUDA_ARRAY_DESCRIPTOR()
about.Width, about.Height = 4096, 192 * MIB // (16 * 4096)
about.Format, about.NumChannels = cu.CUarray_format.CU_AD_FORMAT_FLOAT, 4
array, data = ok(cu.cuArrayCreate(about)), int(ok(cu.cuMemAlloc(1024)))
ok(cu.cuMemsetD32(data, 0, 256))
ok(cu.cuMemcpyDtoA(array, 0, data, 1024))
left = 5
while left:
    ok(cu.cuMemcpyAtoD(data, array, 0, 1024))
    ok(cu.cuMemsetD32(data, download(data, 1)[0] + 1, 256))
    ok(cu.cuMemcpyDtoA(array, 0, data, 1024))"""

ROOMLESS = {
    "device memory of pools (cuMemAllocAsync), of which 192 MiB cannot be": POOL,
    "arrays, of which 192 MiB cannot be": ARRAY,
}


@pytest.mark.parametrize("named", ROOMLESS, ids=["pool", "array"])
def test_what_has_no_room_for_a_copy_is_refused_by_name_or_saved_natively(
    named: str, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, end = tmp_path / "image", tmp_path / "end"
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as base:
        monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", base)
        monkeypatch.setenv("FLOWGPU_EMU_IDLE", "1")
        monkeypatch.setenv("FLOWGPU_EMU_MEMORY", "330M")
        words = [sys.executable, "-c", ROOMLESS[named] + SHOW, str(end)]
        run = runs("roomless", words, "", *REPLAY)
        run.wait_lines(5)
        done = flowgpu("pause-and-dump", run.name, "--output", image, *REPLAY)
        assert done.returncode == EngineUnusable.exit_code, (done.returncode, done.stderr)
        assert named in done.stderr
        run.wait_lines(len(run.lines) + 3)
        result = run.dump(image)
        assert result["engine"] == "native" and named in result["engine_reason"]
        assert run.end() == 75
        end.touch()
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        lines = run.lines + restored.stdout.splitlines()
        assert lines == [f"step {n + 1}" for n in range(len(lines))]
        device = emulator_socket(Path(base))
        wait_for(lambda: not device.exists(), "the end of the device")


def test_a_job_goes_on_on_another_model(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {engine: tmp_path / engine for engine in ("replay", "native")}
    expected = undisturbed("modules")
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as base:
        monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", base)
        monkeypatch.setenv("FLOWGPU_EMU_IDLE", "1")
        for engine, image in images.items():
            run = prepared(runs, f"to-another-{engine}", "modules")
            run.wait_lines(10)
            run.dump(image, "--engine", engine)
            assert run.end() == 75
        # The device takes its socket away when it ends; to ask there would keep it.
        device = emulator_socket(Path(base))
        wait_for(lambda: not device.exists(), "the end of the first device")
        monkeypatch.setenv("FLOWGPU_EMU_NAME", "Another emulated GPU")
        monkeypatch.setenv("FLOWGPU_EMU_MEMORY", "4G")
        monkeypatch.setenv("FLOWGPU_EMU_CAPABILITY", "9.0")  # code for variables is made for it
        failed = flowgpu("restore", images["native"])
        assert failed.returncode == GpuMismatch.exit_code, failed.stderr
        assert "this machine has Another emulated GPU" in failed.stderr
        restored = flowgpu("restore", images["replay"])
        assert restored.returncode == 0, restored.stderr
        wait_for(lambda: not device.exists(), "the end of the device")
    log = (images["replay"] / "output.log").read_text().splitlines()
    assert log + restored.stdout.splitlines() == expected


def test_nothing_but_the_image_is_needed(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reboot leaves no device and no runtime folder, and the image has been moved. The folder may
    have another name."""
    expected = undisturbed("modules")
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as parent:
        base, other_name = f"{parent}/base", f"{parent}/link/base"
        os.mkdir(base, 0o700)
        os.symlink(parent, f"{parent}/link")
        monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", base)
        monkeypatch.setenv("FLOWGPU_EMU_IDLE", "1")
        device = emulator_socket(Path(base))
        for engine in ("replay", "native"):
            run = prepared(runs, f"alone-{engine}", "modules")
            run.wait_lines(10)
            run.dump(tmp_path / engine, "--engine", engine)
            assert run.end() == 75
        with emulated_machine():
            elsewhere = flowgpu("restore", tmp_path / "replay")
        assert elsewhere.returncode == RestoreFailed.exit_code, elsewhere.stderr
        assert f"FLOWGPU_RUNTIME_DIR={base} restores it" in elsewhere.stderr
        for engine, same_base in ("replay", base), ("native", other_name):
            wait_for(lambda: not device.exists(), "the end of the device")
            monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", same_base)
            shutil.rmtree(base)
            os.mkdir(base, 0o700)
            image = tmp_path / "elsewhere" / engine
            shutil.move(tmp_path / engine, image)
            restored = flowgpu("restore", image)
            assert restored.returncode == 0, restored.stderr
            log = (image / "output.log").read_text().splitlines()
            assert log + restored.stdout.splitlines() == expected
        wait_for(lambda: not device.exists(), "the end of the device")


# Counts with a kernel that the driver has linked for the GPU that it is on.
LINKED = """
import os, sys, time
from tests.emu.cubin_cases import linked
from tests.emu.driver_lib import *
start()
code = linked(PTX)
kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(code)), b"inc"))
data = int(ok(cu.cuMemAlloc(1024)))
ok(cu.cuMemsetD32(data, 0, 256))
left = 5
while left:
    ok(launch_inc(kernel, data, 256))
    ok(cu.cuCtxSynchronize())"""


def test_a_kernel_without_code_for_the_gpu_of_a_restore_is_named(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, end = tmp_path / "image", tmp_path / "end"
    with tempfile.TemporaryDirectory(prefix="flowgpu-") as base:
        monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", base)
        monkeypatch.setenv("FLOWGPU_EMU_IDLE", "1")
        run = runs("linked", [sys.executable, "-c", LINKED + SHOW, str(end)], "", *REPLAY)
        run.wait_lines(5)
        run.dump(image)
        assert run.end() == 75
        device = emulator_socket(Path(base))
        wait_for(lambda: not device.exists(), "the end of the first device")
        end.touch()
        monkeypatch.setenv("FLOWGPU_EMU_CAPABILITY", "9.0")
        failed = flowgpu("restore", image)
        assert failed.returncode == NoCodeForGpu.exit_code, failed.stderr
        assert "(compute capability 8.0) that has none for" in failed.stderr
        assert "(compute capability 9.0): making a module again" in failed.stderr
        wait_for(lambda: not device.exists(), "the end of the other device")
        monkeypatch.delenv("FLOWGPU_EMU_CAPABILITY")
        restored = flowgpu("restore", image)
        assert restored.returncode == 0, restored.stderr
        wait_for(lambda: not device.exists(), "the end of the device")
    log = (image / "output.log").read_text().splitlines()
    lines = log + restored.stdout.splitlines()
    assert lines == [f"step {step + 1}" for step in range(len(log) + 5)]


LEAVES = """
import ctypes, signal, time
from tests.emu.driver_lib import *
start()
kernel, data = function(b"inc"), int(ok(cu.cuMemAlloc(4096)))
signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).exit(7))
print("runs", flush=True)
while True:
    ok(launch_inc(kernel, data, 1024))
    ok(cu.cuCtxSynchronize())
    time.sleep(0.001)
"""


@pytest.mark.parametrize("engine", ["native", "replay"])
def test_a_program_that_exits_in_its_checkpoint_exits_when_it_is_restored(
    engine: str, runs: Any, tmp_path: Path
) -> None:
    run = runs(f"leaves-{engine}", [sys.executable, "-c", LEAVES], "", "--engine", engine)
    run.wait_lines(1)
    folder = Registry().dir(Registry().find(run.name).id)

    def leave() -> None:
        wait_for(lambda: "checkpoint: handover" in folder.coordinator_log.read_text(), "the gate")
        os.kill(folder.read().root_pid, signal.SIGUSR1)

    leaving = threading.Thread(target=leave)
    leaving.start()
    run.dump(tmp_path / "image", "--engine", engine)
    leaving.join()
    assert run.end() == 75
    for _ in range(2):
        restored = flowgpu("restore", tmp_path / "image")
        assert (restored.returncode, restored.stderr.count("Error")) == (7, 0), restored.stderr
