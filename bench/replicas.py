"""What a checkpoint and a restore of ranks that train one model take, by their number.

    python -m bench.replicas [--gpu nvidia|emulated] [--ranks 1,2,4] [--engine native|replay]
                             [--repeats N] [--out FILE.json]

On NVIDIA's GPUs the job is GPT-2 XL with DDP (workloads/gpt2_xl_ddp.py); by default once with one
rank and once with as many as there are GPUs. On the emulated GPU it is the small program of the
tests. Images go to a tmpfs. Read are the bytes that come from the image, passed on those that GPUs
take from each other; their rates are those of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import machine
from bench.watch import StepWatch
from flowgpu.launch import GpuKind, emulated_driver
from flowgpu.render import size
from tests.faults.lanes import lane_name
from tests.gpu.catalogue import gpus_here
from tests.gpu.job import Job
from tests.gpu.site import Site, Trouble

START_SECONDS, STEP_SECONDS = 240.0, 180.0
STEPS, STEPS_BEFORE, STEPS_AFTER = 2000, 8, 2
TOLD = (
    *("gpu_bytes_active", "gpu_bytes_nonzero", "gpu_bytes_stored", "gpu_bytes_replicated"),
    *("cpu_bytes", "image_bytes", "pause_seconds"),
)


def command(kind: GpuKind, ranks: int, folder: Path) -> list[str]:
    if kind == "nvidia":
        words = [sys.executable, "workloads/gpt2_xl_ddp.py", "--steps", str(STEPS)]
        return [*words, "--ranks", str(ranks)]
    ids = folder / "ids"
    ids.mkdir()
    words = [sys.executable, "-m", "tests.emu.ddp_program", str(ranks), str(STEPS)]
    return [*words, str(ids), "processes"]


def measured(site: Site, ranks: int, engine: str, folder: Path) -> dict[str, Any]:
    """One job, dumped and restored, on so many GPUs. Raises Trouble."""
    words = ["--engine", engine]
    image = Path(tempfile.mkdtemp(dir=site.images)) / "image"
    job = Job(site, f"replicas-{ranks}", command(site.kind, ranks, folder), folder, words)
    try:
        job.start(time.monotonic() + START_SECONDS)
        if not job.wait_step(STEPS_BEFORE, time.monotonic() + START_SECONDS):
            raise Trouble("the job ended by itself")
        paused = job.dump(image, time.monotonic() + STEP_SECONDS, options=words)
        if paused is None:
            raise Trouble("the job ended by itself")
        last = job.last_step()
        with StepWatch(job.directory.output_log) as watch:
            began = time.monotonic()
            restored = job.restore(image, time.monotonic() + STEP_SECONDS)
            came = watch.first_after(last, STEP_SECONDS)
            if came is None or watch.first_after(last + STEPS_AFTER - 1, STEP_SECONDS) is None:
                raise Trouble("the restored job made no steps")
    finally:
        job.kill()
    read, passed = restored["gpu_bytes_read"], restored["gpu_bytes_passed"]
    copy, passing = restored["phases"]["copy"], restored["passed_seconds"]
    return {
        "ranks": ranks,
        "engine": engine,
        **{name: paused[name] for name in TOLD},
        "gpu_bytes_of_one": paused["gpu_bytes_nonzero"] // ranks,
        "cut_seconds": paused["phases"].get("cut", 0.0),
        "copy_seconds": paused["phases"]["copy"],
        "restore_seconds": restored["restore_seconds"],
        "restore_copy_seconds": copy,
        "next_step_seconds": came - began,
        "gpu_bytes_read": read,
        "gpu_bytes_passed": passed,
        "passed_seconds": passing,
        "linked": passed > 0,
        "read_gbs": _rate(read / ranks, copy - passing),
        "passed_gbs": _rate(passed / ranks, passing),
    }


def _rate(count: float, seconds: float) -> float | None:
    return count / 1e9 / seconds if count and seconds > 0 else None


COLUMNS = (
    *("ranks", "pause", "cut", "copied", "one rank", "stored", "image", "restore", "next step"),
    *("read", "passed on"),
)


def show(row: dict[str, Any]) -> str:
    """A row of the table."""

    def rate(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.1f} GB/s"

    cells = (
        str(row["ranks"]),
        f"{row['pause_seconds']:.2f} s",
        f"{row['cut_seconds'] * 1e3:.0f} ms",
        f"{row['copy_seconds']:.2f} s",
        size(row["gpu_bytes_of_one"]),
        f"{size(row['gpu_bytes_stored'])} "
        f"({row['gpu_bytes_stored'] / max(row['gpu_bytes_of_one'], 1):.2f})",
        size(row["image_bytes"]),
        f"{row['restore_seconds']:.2f} s",
        f"{row['next_step_seconds']:.2f} s",
        rate("read_gbs"),
        rate("passed_gbs"),
    )
    return f"| {' | '.join(cells)} |"


@contextmanager
def place(kind: GpuKind, most: int) -> Iterator[Site]:
    """Where jobs of so many ranks run."""
    if kind == "emulated":
        os.environ["FLOWGPU_EMU_DEVICES"] = str(most)  # read by the device when it starts
        os.environ["LD_LIBRARY_PATH"] = str(emulated_driver().parent)
    with Site(kind) as site:
        yield site


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--ranks", help="numbers of ranks, joined by commas")
    parser.add_argument("--engine", choices=("native", "replay"), default="native")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    here = gpus_here() if options.gpu == "nvidia" else 2
    ranks = [int(word) for word in (options.ranks or f"1,{here}").split(",")]
    document = machine.heading("replicas", machine.of_module("bench.replicas"))
    document |= {"gpu": lane_name(options.gpu, options.engine), "rows": []}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    with place(options.gpu, max(ranks)) as site:
        for count in ranks * options.repeats:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(site, count, options.engine, Path(folder))
            document["rows"].append(row)
            print(show(row), flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
