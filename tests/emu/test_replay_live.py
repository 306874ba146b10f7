"""Jobs that are dumped with CUDA and go on: the copy alone loses it, when it is restored."""

# ruff: noqa: F401, F811 (fixtures)

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import ModeUnusable, Unsupported
from flowgpu.image import inspect
from flowgpu.image.reader import Image
from flowgpu.jobs import Registry
from tests.emu.test_checkpoint import (
    ROOT,
    Run,
    command,
    flowgpu,
    goes_on_from,
    runs,
    runtime_dir,
    undisturbed,
)

REPLAY = ("--engine", "replay")


def test_a_copy_is_dumped_like_its_original(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("live-again", command("modules"), "", *REPLAY)
    run.wait_lines(8)
    run.dump(tmp_path / "first", "--leave-running", *REPLAY)
    run.wait_more(2)
    assert run.dump(tmp_path / "next", "--leave-running")["live"] is True
    assert run.dump(tmp_path / "stripped")["live"] is False
    assert run.end(hurry=False) == 75
    done = flowgpu("restore", tmp_path / "first", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    for name, options in (("second", ["--leave-running"]), ("third", [])):
        done = flowgpu("pause-and-dump", run.name, "--output", tmp_path / name, "--json", *options)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["engine"], report["live"]) == ("replay", bool(options))
    run.hurry()
    for name in ("next", "stripped", "second", "third"):
        goes_on_from(tmp_path / name, "modules")


def shared_memory(job: str) -> list[str]:
    """The names of the shared and anonymous mappings of a job's process: its driver's."""
    pid = Registry().find(job).root_pid
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in maps if "/dev/zero" in line]


def test_a_copy_has_no_memory_of_its_originals_driver(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("live-memory", command("modules"), "", *REPLAY)
    run.wait_lines(8)
    assert shared_memory(run.name) == ["/dev/zero (deleted)"]  # of its context
    for name in ("first", "second"):
        image = tmp_path / name
        done = flowgpu("pause-and-dump", run.name, "--output", image, "--leave-running", *REPLAY)
        assert done.returncode == 0, done.stderr
        assert flowgpu("kill", run.name).returncode == 0
        done = flowgpu("restore", image, "--detach")
        assert done.returncode == 0, done.stderr
        assert shared_memory(run.name) == ["/dev/zero (deleted)"]
    flowgpu("kill", run.name)


def test_a_log_that_went_on_is_cut_back_for_a_copy(runs: Any, tmp_path: Path) -> None:
    """Who writes it does not use the GPU, so it goes on before the tasks do."""
    log, image = tmp_path / "log", tmp_path / "image"
    words = ["/bin/sh", "-c", '"$@" | tee -a "$0"', str(log), *command("modules")]
    run: Run = runs("live-log", words, "", *REPLAY)
    run.wait_lines(8)
    assert run.dump(image, "--leave-running", *REPLAY)["live"] is True
    assert run.end() == 0
    assert run.lines == log.read_text().splitlines() == undisturbed("modules")
    for _ in range(2):
        goes_on_from(image, "modules")
        assert log.read_text().splitlines() == undisturbed("modules")
    assert len(list(tmp_path.glob("image.cut-*"))) == 2


def test_only_a_job_that_is_left_running_keeps_cuda(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("live-not", command("modules"), "", *REPLAY)
    run.wait_lines(8)
    report = run.dump(tmp_path / "native", "--leave-running", "--engine", "native")
    assert (report["engine"], report["live"]) == ("native", False)
    assert (report["rung"], report["rung_reason"]) == ("all-pages", "the engine is native")
    assert "live" not in json.loads((tmp_path / "native" / "manifest.json").read_text())
    report = run.dump(tmp_path / "replay", *REPLAY)
    assert (report["engine"], report["live"]) == ("replay", False)
    assert not inspect.summary(tmp_path / "replay").get("live")


def in_time(take: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """The report of an image, taken again where a process got no core to stop in time."""
    for number in range(20):
        report = take(number)
        if not report["rung_reason"].endswith(" does not stop"):
            break
    return report


def test_how_soon_a_job_goes_on_may_be_chosen(runs: Any, tmp_path: Path) -> None:
    run: Run = runs("live-mode", command("modules"), "", *REPLAY)
    run.wait_lines(8)

    def series(*options: str) -> Any:
        words = ("--store", tmp_path / "store", "--every", "1", "--count", "1", "--json", *options)
        return flowgpu("checkpoint", run.name, *words)

    for mode, rung, why in (("any", "early-pages", ""), ("stop", "all-pages", "asked for")):

        def take(_: int, mode: str = mode) -> Any:
            done = series("--mode", mode, *REPLAY)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        report = in_time(take)
        assert report["mode"] == {"any": "cow"}.get(mode, mode)
        assert (report["rung"], report["rung_reason"]) == (rung, why)
        assert (report["hold_seconds"] is None) == (mode == "stop")
    refused = series("--mode", "cow", "--engine", "native")
    assert refused.returncode == ModeUnusable.exit_code
    assert "the engine is native" in refused.stderr
    assert run.end() == 0
    assert run.lines == undisturbed("modules")


PINNED = """
import ctypes, os, sys, time
from cuda.bindings import driver as cu

def ok(result):
    assert int(result[0]) == 0, result
    return result[-1] if len(result) > 1 else None

ok(cu.cuInit(0))
ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(0))))
device, size = ok(cu.cuMemAlloc(1 << 20)), 1 << 20
host = int(ok(cu.cuMemHostAlloc(size, 0)))
passing = ctypes.create_string_buffer(b"a" * 3 * size)
ok(cu.cuMemsetD8(device, 7, size))
ok(cu.cuMemcpyDtoH(host, device, size))
number = 0
while number < int(sys.argv[1]):
    # Held by the driver for a moment, like those of a library that registers what it is given.
    ok(cu.cuMemHostRegister(ctypes.addressof(passing), 2 * size, 0))
    ok(cu.cuMemHostUnregister(ctypes.addressof(passing)))
    total = sum(ctypes.string_at(host, size)[::4096]) + sum(passing.raw[:size:4096])
    # However slow the machine is, who dumps this program finds it running.
    if number < 100 or os.path.exists(os.environ["WORKLOAD_HURRY"]):
        number += 1
        print(number, total, flush=True)
    time.sleep(0.03)
"""


def test_memory_that_the_driver_holds_is_compared_while_all_stands_still(
    runs: Any, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PINNED)
    run: Run = runs("live-pinned", [sys.executable, str(program), "200"], "", *REPLAY)
    run.wait_lines(8)
    report = in_time(lambda n: run.dump(tmp_path / f"image{n}", "--leave-running", *REPLAY))
    assert report["rung"] == "early-pages", report["rung_reason"]
    log = Registry().dir(Registry().find(run.name).id).coordinator_log.read_text()
    found = re.findall(r"early_bytes=(\d+), compared_bytes=(\d+)", log)
    early, compared = map(int, found[-1])
    assert early > compared >= 3 << 20
    assert run.end() == 0
    assert run.lines == [f"{n} {256 * (7 + ord('a'))}" for n in range(1, 201)]
    restored = flowgpu("restore", report["image"])
    assert restored.returncode == 0, restored.stderr
    log_lines = (Path(report["image"]) / "output.log").read_text().splitlines()
    assert log_lines + restored.stdout.splitlines() == run.lines


def test_without_its_plugin_the_tasks_are_stripped(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tmp_path / "build"
    no_plugin = shutil.ignore_patterns("criu", "*.a")
    shutil.copytree(ROOT / "build" / "lib", build / "lib", ignore=no_plugin)
    (build / "bin").symlink_to(ROOT / "build" / "bin")
    monkeypatch.setenv("FLOWGPU_LIB", str(build / "lib"))
    run: Run = runs("live-without", command("modules"), "", *REPLAY)
    run.wait_lines(8)
    report = run.dump(tmp_path / "image", "--leave-running", *REPLAY)
    assert (report["engine"], report["live"]) == ("replay", False)
    assert run.end() == 0
    assert run.lines == undisturbed("modules")
    # A restore asks it for AMX, where the processor has that.
    shutil.copytree(ROOT / "build" / "lib" / "criu", build / "lib" / "criu")
    goes_on_from(tmp_path / "image", "modules")


def test_a_device_that_is_nobodys_to_rewind_is_refused(runs: Any, tmp_path: Path) -> None:
    device = f"/dev/nvidia-live-test-{os.getpid()}"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 229))
    except PermissionError as error:
        pytest.skip(f"no device can be made: {error.strerror}")
    try:
        holder = f'exec 3<>{device}; "$@" 3<&-; exit $?'
        words = ["/bin/sh", "-c", holder, "sh", *command("modules")]
        run: Run = runs("live-stranger", words, "", *REPLAY)
        run.wait_lines(8)
        done = flowgpu(
            "pause-and-dump", run.name, "--output", tmp_path / "image", "--leave-running", *REPLAY
        )
        assert done.returncode == Unsupported.exit_code, (done.returncode, done.stderr)
        assert "which uses the GPU but not through FlowGPU" in done.stderr
        assert not list(tmp_path.glob("image*"))
        assert run.end() == 0
        assert run.lines == undisturbed("modules")
    finally:
        os.unlink(device)
