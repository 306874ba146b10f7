"""Ranks that train one model: what several of their GPUs have is copied out, stored and read once.

The ranks of ddp_program.py have 8 MiB of parameters and optimizer state each, equal on all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import ImageDamaged, NotEnoughDisk
from flowgpu.image import layout
from flowgpu.image.reader import Image
from flowgpu.launch import emulated_driver
from tests.emu import test_checkpoint
from tests.emu.ddp_program import PARAMETERS
from tests.emu.test_checkpoint import Run, emulated_machine, flowgpu

runtime_dir = test_checkpoint.runtime_dir

STEPS = 16
STATE = 2 * PARAMETERS
CHUNK = layout.CHUNK_BYTES

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(emulated_driver().parent))


@contextmanager
def job(
    folder: Path, ranks: int, spread: str = "processes", how: str = "", engine: str = "native"
) -> Iterator[Run]:
    """A job whose ranks wait for somebody to hurry them, on a machine with a GPU for each."""
    machine = {"FLOWGPU_EMU_DEVICES": str(ranks), "FLOWGPU_TEST_DDP": how}
    if how == "unlinked":
        machine["FLOWGPU_EMU_PEERS"] = "0"
    (folder / "ids").mkdir(exist_ok=True)
    words = [sys.executable, "-m", "tests.emu.ddp_program", str(ranks), str(STEPS)]
    with emulated_machine(**machine):
        run = Run("ddp", [*words, str(folder / "ids"), spread], folder, "", "--engine", engine)
        try:
            run.wait_lines(ranks * (STEPS - 4))
            yield run
        finally:
            run.kill()


def inspected(image: Path) -> dict[str, Any]:
    done = flowgpu("inspect", image, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def restored(image: Path) -> tuple[list[str], str]:
    """All lines of a job that ends after its restore, and what the command says."""
    done = flowgpu("restore", image)
    assert done.returncode == 0, done.stderr
    log = (image / layout.OUTPUT_LOG).read_text()
    return sorted((log + done.stdout).splitlines()), done.stderr


def undisturbed(folder: Path, run: Run) -> list[str]:
    """Lines of the same job, from its beginning."""
    for path in (folder / "ids").iterdir():
        path.unlink()
    words = run.process.args[run.process.args.index("--") :]
    done = flowgpu(*("run", "--gpu", "emulated"), *words, env={"WORKLOAD_HURRY": str(run.hurrying)})
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("ranks", "spread", "engine"),
    [
        (2, "processes", "native"),
        (2, "processes", "replay"),
        (4, "processes", "native"),
        (3, "threads", "native"),
        (2, "threads", "replay"),
    ],
)
def test_the_image_of_ranks_has_one_replica_and_restores_twice(
    ranks: int, spread: str, engine: str, tmp_path: Path
) -> None:
    with job(tmp_path, ranks, spread, engine=engine) as run:
        result = run.dump(tmp_path / "first")
        assert run.end(hurry=False) == 75
        found = inspected(tmp_path / "first")
        of_one = result["gpu_bytes_nonzero"] // ranks
        # What differs is the ranks' own: gradients, buffers of NCCL, rows of a random number.
        own = of_one - STATE
        assert STATE <= result["gpu_bytes_stored"] <= 1.1 * STATE + ranks * own
        assert result["gpu_bytes_replicated"] == found["gpu_bytes_replicated"]
        assert (ranks - 1) * STATE <= result["gpu_bytes_replicated"]
        # Each GPU has copied out its part.
        stored = [gpu["stored_bytes"] for gpu in found["gpus"]]
        assert max(stored) <= STATE // ranks + own + 2 * CHUNK
        assert flowgpu("verify", tmp_path / "first").returncode == 0
        done = flowgpu("restore", tmp_path / "first", "--detach", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["gpu_bytes_read"] == result["gpu_bytes_stored"]
        assert report["gpu_bytes_passed"] >= (ranks - 1) * STATE
        again = flowgpu("pause-and-dump", "ddp", "--output", tmp_path / "second", "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["gpu_bytes_replicated"] >= (ranks - 1) * STATE
        run.hurry()
        lines, said = restored(tmp_path / "second")
        assert "passed on between GPUs" in said
        assert lines == undisturbed(tmp_path, run)
        assert len(lines) == ranks * STEPS


def test_a_byte_that_one_rank_has_changed_costs_its_chunk(tmp_path: Path) -> None:
    found = {}
    for how in ("", "byte"):
        folder = tmp_path / f"ranks-{how}"
        folder.mkdir()
        with job(folder, 2, how=how) as run:
            result = run.dump(folder / "image")
            found[how] = result["gpu_bytes_replicated"]
            run.hurry()
            lines, _ = restored(folder / "image")
            assert lines == undisturbed(folder, run)
    assert found[""] - found["byte"] == CHUNK


def test_ranks_that_differ_in_all_they_have_are_stored_whole(tmp_path: Path) -> None:
    with job(tmp_path, 2, how="apart") as run:
        result = run.dump(tmp_path / "image")
        assert result["gpu_bytes_stored"] == result["gpu_bytes_distinct"] >= 2 * STATE - STATE // 8
        run.hurry()
        lines, _ = restored(tmp_path / "image")
        assert lines == undisturbed(tmp_path, run)


def test_gpus_that_do_not_reach_each_other_read_for_themselves(tmp_path: Path) -> None:
    with job(tmp_path, 2, how="unlinked") as run:
        result = run.dump(tmp_path / "image")
        assert result["gpu_bytes_replicated"] >= STATE
        done = flowgpu("restore", tmp_path / "image", "--detach", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["gpu_bytes_passed"] == 0
        assert report["gpu_bytes_read"] >= result["gpu_bytes_stored"] + STATE
        assert flowgpu("kill", "ddp").returncode == 0
        run.hurry()
        lines, said = restored(tmp_path / "image")
        assert "passed on" not in said
        assert lines == undisturbed(tmp_path, run)


def test_images_of_a_series_share_replicas_with_the_one_before(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with job(tmp_path, 2) as run:
        words = ["--store", store, "--every", "0.1", "--count", "2", "--compress", "--json"]
        done = flowgpu("checkpoint", "ddp", *words)
        assert done.returncode == 0, done.stderr
        first, second = (json.loads(line) for line in done.stdout.splitlines())
        assert first["gpu_bytes_stored"] <= 1.25 * STATE
        assert second["gpu_bytes_stored"] < STATE / 8 and second["gpu_bytes_linked"]
        assert second["gpu_bytes_replicated"] >= STATE
        assert run.end() == 0
        newest = Path(second["image"])
        assert inspected(newest)["gpu_bytes_replicated"] == second["gpu_bytes_replicated"]
        lines, said = restored(newest)
        # Each of the two has read half of what both have.
        assert "passed on between GPUs" in said
        assert lines == undisturbed(tmp_path, run) == sorted(run.lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_with_room_for_one_replica_is_enough(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()

    @contextmanager
    def mounted(mib: int) -> Iterator[None]:
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "none"]
        subprocess.run(["mount", *options, str(disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)

    with job(tmp_path, 2, how="large") as run:
        words = ("pause-and-dump", "ddp", "--output", disk / "image", "--json")
        with mounted(8):
            done = flowgpu(*words)
            assert done.returncode == NotEnoughDisk.exit_code, done.stderr
            needed = re.search(r"up to ([\d.]+) ([MG])iB", done.stderr + done.stdout)
            assert needed is not None, done.stderr
            mib = float(needed[1]) * (1024 if needed[2] == "G" else 1)
        with mounted(int(mib) + 20):
            done = flowgpu(*words, "--without", "dedup")
            assert done.returncode == NotEnoughDisk.exit_code, done.stderr
            done = flowgpu(*words)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["gpu_bytes_replicated"] >= 64 << 20
            run.hurry()
            lines, _ = restored(disk / "image")
            assert len(lines) == 2 * STEPS


def test_damage_to_a_chunk_that_all_ranks_have_is_named_once(tmp_path: Path) -> None:
    with job(tmp_path, 2) as run:
        run.dump(tmp_path / "image")
        image = Image(tmp_path / "image")
        rows = image.chunk_table(1).rows
        shared = rows[(rows["kind"] == 3) & (rows["extent"] == 0)][0]
        at = int(shared["first"])
        with open(image.extent_data(0), "r+b") as file:
            file.seek(at * CHUNK + 5)
            byte = file.read(1)[0]
            file.seek(at * CHUNK + 5)
            file.write(bytes([byte ^ 1]))
        for verb in ("verify", "restore"):
            done = flowgpu(verb, tmp_path / "image")
            assert done.returncode == ImageDamaged.exit_code, done.stderr
            assert done.stderr.count(f"chunk {at} of") == 1, done.stderr
            assert "gpu0.data" in done.stderr
