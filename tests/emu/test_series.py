"""Repeated checkpoints on the real parts: each image stores what has changed, and needs no other.

With two emulated GPUs, whose memory is mostly equal.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from bench.periodic import changed_pages
from coordinator.filling import AT_ONCE
from flowgpu.errors import Unsupported
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.jobs import Registry
from flowgpu.start import kill_coordinator
from tests.emu.gpu_job import GPU
from tests.emu.program_lib import IMAGES as CODE
from tests.emu.series_task import CHANGING, CHUNK, CONSTANT
from tests.emu.test_checkpoint import FLOWGPU, ROOT, Run, emulated_machine, flowgpu
from tests.patience import SECONDS
from tests.unit.coordinator_job import wait_for

STEPS, DELAY = 120, 0.1
"""The waits of a run that nobody hurries are 100 s."""
IMAGES = 4

pytestmark = pytest.mark.timeout(600)  # the longest has twenty commands


@pytest.fixture(scope="module", autouse=True)
def runtime_dir() -> Iterator[None]:
    """A runtime folder of its own, so that its emulated device has two GPUs."""
    with emulated_machine(FLOWGPU_EMU_DEVICES="2"):
        yield


def command(gpus: int, delay: float = DELAY) -> list[str]:
    program = str(ROOT / "tests" / "emu" / "series_task.py")
    return [sys.executable, program, str(gpus), str(STEPS), str(delay)]


class Series:
    """A job, the images that `flowgpu checkpoint` took of it, and what each of them should say."""

    def __init__(self, folder: Path, gpus: int, ghost: str) -> None:
        self.gpus, self.ghost, self.store = gpus, ghost, Store(folder / "store")
        self.expected = flowgpu("run", "--gpu", "emulated", "--", *command(gpus, 0)).stdout
        run = Run(f"series-{gpus}", command(gpus), folder, "", "--ghost", ghost)
        try:
            run.wait_lines(3)
            words = ("--store", self.store.path, "--every", 1, "--count", IMAGES, "--json")
            done = flowgpu("checkpoint", run.name, *words)
            assert done.returncode == 0, done.stderr
            self.reports = [json.loads(line) for line in done.stdout.splitlines()]
            count = len(run.lines)
            run.wait_lines(count + 2)
            # It runs on, as if nothing had happened.
            assert self.expected.startswith("\n".join(run.lines))
        finally:
            run.kill()
            run.hurry()  # what is restored, too

    def stored(self, key: str) -> list[int]:
        return [report[key] // CHUNK for report in self.reports]

    def restores(self, name: str) -> None:
        """To the same end, from the step that its log says."""
        image = self.store.path / name
        done = flowgpu("restore", image)
        assert done.returncode == 0, done.stderr
        assert (image / "output.log").read_text() + done.stdout == self.expected


@pytest.fixture(scope="module", params=[(1, "auto"), (2, "warm")], ids=["cold", "two-warm"])
def series(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Series:
    return Series(tmp_path_factory.mktemp("series"), *request.param)


def copy_of(series: Series, folder: Path) -> Series:
    """A copy of the store, for a test that takes it apart."""
    other = object.__new__(Series)
    other.__dict__ |= series.__dict__
    other.store = Store(folder / "store")
    # With links as they are.
    subprocess.run(["cp", "-a", str(series.store.path), str(other.store.path)], check=True)
    return other


def test_what_is_written_is_what_has_changed(series: Series) -> None:
    gpus = series.gpus
    assert series.stored("gpu_bytes_stored") == [
        CONSTANT + gpus * CHANGING,
        *[gpus * CHANGING] * (IMAGES - 1),
    ]
    assert series.stored("gpu_bytes_distinct") == [CONSTANT + gpus * CHANGING] * IMAGES
    assert series.stored("gpu_bytes_active") == [gpus * (CONSTANT + CHANGING)] * IMAGES
    # The first extent of each GPU stays whole, for what has not changed in it.
    linked = CONSTANT + gpus * CHANGING
    assert series.stored("gpu_bytes_linked") == [0, *[linked] * (IMAGES - 1)]
    files = [path for path in series.store.path.rglob("gpu*.data") if path.stat().st_size]
    written = sum(path.stat().st_size for path in files) // CHUNK
    assert written == CONSTANT + IMAGES * gpus * CHANGING


def test_advice_is_by_what_these_checkpoints_took(series: Series) -> None:
    words = ("--failures-per-hour", 1, "--json")
    done = flowgpu("advise", f"series-{series.gpus}", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["gpus"], found["checkpoints"], found["restore"]) == (series.gpus, IMAGES, None)
    stalls = [report["stall_seconds"] for report in series.reports]
    assert found["stall"] == pytest.approx(median(stalls), abs=1e-4)
    assert found["best_seconds"] > found["total"] > found["drain"] > 0


def test_of_cpu_memory_only_pages_that_changed_are_written(series: Series, tmp_path: Path) -> None:
    """And of others at most a sixteenth of these, to let old files go."""
    images = [series.store.path / name for name in series.store.names()]
    for before, image in pairwise(images):
        files = [image / "pages.data", *image.glob("criu/pages-*.img")]
        written = sum(path.stat().st_size for path in files)
        changed = changed_pages(before, image, tmp_path)
        assert changed <= written <= changed * 17 // 16 < Image(image).manifest.counts.cpu_bytes
        assert list(image.glob("pages-link*.data"))


def test_one_ghost_has_written_them(series: Series) -> None:
    """Where it is warm; the second image on, as it may not have been ready for the first."""
    manifests = [Image(series.store.path / name).manifest for name in series.store.names()]
    kinds = [manifest.ghost for manifest in manifests]
    assert set(kinds[1:]) == {"warm" if series.ghost == "warm" else "cold"}


def test_verify_and_inspect_take_each_image_for_itself(series: Series) -> None:
    done = flowgpu("store", "verify", series.store.path)
    assert done.returncode == 0, done.stderr
    for name in series.store.names():
        assert flowgpu("verify", series.store.path / name).returncode == 0
    last = series.store.path / series.store.names()[-1]
    said = json.loads(flowgpu("inspect", last, "--json").stdout)
    assert said["gpu_bytes_linked"] == sum(e["bytes"] for e in said["extents"] if e["linked"])
    assert "of extents are shared with earlier images" in flowgpu("inspect", last).stdout


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=["oldest-first", "mixed"])
def test_an_image_restores_after_others_were_removed(
    series: Series, order: tuple[int, ...], tmp_path: Path
) -> None:
    taken = copy_of(series, tmp_path)
    names = taken.store.names()
    for number in order[:-1]:
        done = flowgpu("store", "rm", taken.store.path, names[number])
        assert done.returncode == 0, done.stderr
        assert flowgpu("store", "verify", taken.store.path).returncode == 0
    taken.restores(names[order[-1]])
    flowgpu("verify", taken.store.path / names[order[-1]])


def test_an_image_that_is_copied_away_restores(series: Series, tmp_path: Path) -> None:
    taken = copy_of(series, tmp_path)
    away = tmp_path / "away"
    subprocess.run(["cp", "-r", str(taken.store.path / taken.store.names()[1]), str(away)])
    for name in taken.store.names():
        taken.store.remove(name)
    Image(away).verify()
    taken.store = Store(tmp_path)
    taken.restores("away")


def test_an_image_of_many_extents_restores(tmp_path: Path) -> None:
    """What each period changes is in an extent of its own, and only a part of that is left."""
    words = [*command(1), "spread"]
    expected = flowgpu("run", "--gpu", "emulated", "--", *command(1, 0), "spread").stdout
    run = Run("series-spread", words, tmp_path)
    store = Store(tmp_path / "store")
    try:
        run.wait_lines(3)
        options = ("--store", store.path, "--every", 0.4, "--count", 8, "--keep", 1)
        done = flowgpu("checkpoint", run.name, *options)
        assert done.returncode == 0, done.stderr
    finally:
        run.kill()
        run.hurry()
    (name,) = store.names()
    assert len(Image(store.path / name).extents) > 1 + AT_ONCE
    restored = flowgpu("restore", store.path / name)
    assert restored.returncode == 0, restored.stderr
    assert (store.path / name / "output.log").read_text() + restored.stdout == expected


def test_packed_and_plain_images_of_a_series_share_and_restore(tmp_path: Path) -> None:
    """Two packed ones, then a plain one; what changes in a period is too small to be packed."""
    expected = flowgpu("run", "--gpu", "emulated", "--", *command(1, 0), "packable").stdout
    run = Run("series-packed", [*command(1), "packable"], tmp_path)
    store = Store(tmp_path / "store")
    try:
        run.wait_lines(3)
        for count, options in ((2, ["--compress"]), (1, [])):
            words = ("--store", store.path, "--every", 0.5, "--count", count, "--json", *options)
            done = flowgpu("checkpoint", run.name, *words)
            assert done.returncode == 0, done.stderr
            for line in done.stdout.splitlines():
                report = json.loads(line)
                changing = report["gpu_bytes_stored"] // CHUNK == CHANGING
                assert changing == bool(report["gpu_bytes_linked"])
    finally:
        run.kill()
        run.hurry()
    names = store.names()
    extents = [Image(store.path / names[0]).extent_data(0)]
    extents += [Image(store.path / name).extent_data(1) for name in names[1:]]
    assert [path.name for path in extents] == ["gpu0.data.zst", *["link0.data.zst"] * 2]
    assert all(path.samefile(extents[0]) for path in extents)
    first = Image(store.path / names[0])
    pages = {entry.plain: entry.bytes for entry in first.manifest.packed}
    pages |= {f"criu/{path.name}": path.stat().st_size for path in first.criu_dir.iterdir()}
    expected_bytes = sum(
        size for path, size in pages.items() if re.match(r"criu/pages.*\.img$", path)
    )
    assert first.manifest.counts.cpu_bytes == expected_bytes
    for name in names:
        assert flowgpu("store", "verify", store.path).returncode == 0
        restored = flowgpu("restore", store.path / name)
        assert restored.returncode == 0, restored.stderr
        assert (store.path / name / "output.log").read_text() + restored.stdout == expected
        store.remove(name)


def test_a_job_killed_while_an_image_is_written_leaves_the_others(tmp_path: Path) -> None:
    run = Run("series-killed", command(1), tmp_path)
    store = Store(tmp_path / "store")
    words = ["checkpoint", run.name, "--store", str(store.path), "--every", "0.1"]
    try:
        run.wait_lines(3)
        with open(tmp_path / "checkpoint.out", "wb") as out:
            taking = subprocess.Popen([*FLOWGPU, *words], stdout=out, stderr=out, cwd=ROOT)
        # The second or a later one: what is written is there for a moment only.
        wait_for(lambda: list(store.path.glob("*.partial-*/link0.data")), "links")
        kill_coordinator(Registry().dir(Registry().find(run.name).id))
        taking.wait(SECONDS)
    finally:
        run.kill()
    assert store.verify() and all(error is None for error in store.verify().values())
    wait_for(lambda: not list(store.path.glob("*.partial-*")) or store.clean(), "the lock")
    names = store.names()
    assert sorted(os.listdir(store.path)) == [".lock", *names]


# Its kernel `stop` traps: a real GPU and the emulated one fail its context for good.
FAILS = (
    GPU
    + f"""
code = {CODE["good"] + bytes(1)!r}
kernel = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(code)), b"stop"))
values = ((0, 0), (ctypes.c_uint64, ctypes.c_uint32))
ok(cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, values, 0))
print(int(cu.cuCtxSynchronize()[0]))
went()
print(int(cu.cuCtxSynchronize()[0]))
"""
)


def test_a_series_of_a_job_whose_kernel_has_failed_ends_and_says_why(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = Run("series-failed", [sys.executable, "-c", FAILS, str(go)], tmp_path)
    try:
        run.wait_lines(2)
        words = ("--store", tmp_path / "store", "--every", 0.2, "--count", 2)
        done = flowgpu("checkpoint", run.name, *words)
        assert done.returncode == Unsupported.exit_code
        assert "a CUDA context whose work has failed (CUDA_ERROR_LAUNCH_FAILED)" in done.stderr
        go.touch()
        assert run.end() == 0
        assert run.lines == ["719", "ready", "719"]
    finally:
        run.kill()
