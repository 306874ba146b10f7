"""What a checkpoint and a restore of ranks that train one model take, by their number.

    python -m bench.replicas [--gpu nvidia|emulated] [--job gpt2_xl_ddp|torch_fsdp[:SIZE]]
                             [--ranks 1,2,4] [--engine native|replay] [--left-running MODE]
                             [--repeats N] [--out FILE.json]

On NVIDIA's GPUs the job is GPT-2 XL with DDP (workloads/gpt2_xl_ddp.py) or a model that FSDP cuts
into parts; by default once with one rank and once with as many as there are GPUs. On the emulated
GPU it is the small program of the tests. Images go to a tmpfs. Read are the bytes that come from
the image, passed on those that GPUs take from each other; their rates are those of one GPU. With
--left-running, another image is taken of the restored job, which goes on. Mode cow needs replay.
"""

from __future__ import annotations

import argparse
import os
import shutil
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
from flowgpu.vocabulary import MODE_CHOICES
from tests.faults.lanes import lane_name
from tests.gpu.catalogue import gpus_here
from tests.gpu.job import Job
from tests.gpu.site import Site, Trouble

START_SECONDS, STEP_SECONDS = 240.0, 180.0
STEPS, STEPS_BEFORE, STEPS_AFTER = 2000, 8, 2
JOBS = ("gpt2_xl_ddp", "torch_fsdp")
TOLD = (
    *("gpu_bytes_active", "gpu_bytes_nonzero", "gpu_bytes_stored", "gpu_bytes_replicated"),
    *("cpu_bytes", "image_bytes", "pause_seconds"),
)
TOLD_LEFT_RUNNING = ("stall_seconds", "freeze_seconds", "total_seconds", "mode", "rung")


def command(kind: GpuKind, job: str, ranks: int, folder: Path) -> list[str]:
    if kind == "nvidia":
        name, _, its_size = job.partition(":")
        words = [sys.executable, f"workloads/{name}.py", "--steps", str(STEPS)]
        return [*words, "--ranks", str(ranks), *(["--size", its_size] if its_size else [])]
    ids = folder / "ids"
    ids.mkdir()
    words = [sys.executable, "-m", "tests.emu.ddp_program", str(ranks), str(STEPS)]
    return [*words, str(ids), "processes"]


def measured(
    site: Site, ranks: int, engine: str, folder: Path, name: str = JOBS[0], mode: str | None = None
) -> dict[str, Any]:
    """One job, dumped and restored, on so many GPUs; left running too, in the mode if there is one.

    Raises Trouble.
    """
    words = ["--engine", engine]
    image = Path(tempfile.mkdtemp(dir=site.images)) / "image"
    job = Job(site, f"replicas-{ranks}", command(site.kind, name, ranks, folder), folder, words)
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
        left = left_running(job, image, [*words, "--mode", mode]) if mode else {}
    finally:
        job.kill()
        shutil.rmtree(image.parent)
    read, passed = restored["gpu_bytes_read"], restored["gpu_bytes_passed"]
    copy, passing = restored["moved_seconds"], restored["passed_seconds"]
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
        **left,
    }


def left_running(job: Job, image: Path, words: list[str]) -> dict[str, Any]:
    """What another image costs the job, which goes on; or why it is refused. Raises Trouble."""
    # A tmpfs may have room for one only.
    shutil.rmtree(image)
    try:
        found = job.dump(image, time.monotonic() + STEP_SECONDS, leave_running=True, options=words)
    except Trouble as trouble:
        if not job.live:
            raise
        print(f"not left running: {trouble}", file=sys.stderr, flush=True)
        return {"left_running": None, "left_running_refused": str(trouble)}
    if found is None:
        raise Trouble("the restored job ended by itself")
    return {"left_running": {key: found.get(key) for key in TOLD_LEFT_RUNNING}}


def _rate(count: float, seconds: float) -> float | None:
    return count / 1e9 / seconds if count and seconds > 0 else None


COLUMNS = (
    *("ranks", "pause", "cut", "copied", "one rank", "stored", "image", "restore", "next step"),
    *("read", "passed on", "left running: stall", "freeze"),
)


def show(row: dict[str, Any]) -> str:
    """A row of the table."""

    def rate(name: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.1f} GB/s"

    def left(name: str) -> str:
        seconds = (row.get("left_running") or {}).get(name)
        return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"

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
        left("stall_seconds"),
        left("freeze_seconds"),
    )
    return f"| {' | '.join(cells)} |"


HEADING = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def table(document: dict[str, Any]) -> str:
    """What job it is, and its rows."""
    rows = "\n".join(map(show, document["rows"]))
    return f"{document['job']} ({document['gpu']})\n{HEADING}\n{rows}"


@contextmanager
def place(kind: GpuKind, most: int) -> Iterator[Site]:
    """Where jobs of so many ranks run."""
    if kind == "emulated":
        os.environ["FLOWGPU_EMU_DEVICES"] = str(most)  # read by the device when it starts
        os.environ["LD_LIBRARY_PATH"] = str(emulated_driver().parent)
        # On a busy machine its steps are over before it is asked: so it waits with the last ones.
        os.environ["WORKLOAD_HURRY"] = "/dev/null/never"
    with Site(kind) as site:
        yield site


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--job", default=JOBS[0], help=f"{JOBS[0]}, or {JOBS[1]}[:SIZE]")
    parser.add_argument("--ranks", help="numbers of ranks, joined by commas")
    parser.add_argument("--engine", choices=("native", "replay"), default="native")
    parser.add_argument(
        "--left-running", choices=MODE_CHOICES, help="also take an image of the restored job"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.job.partition(":")[0] not in JOBS:
        parser.error(f"no job {options.job}")
    here = gpus_here() if options.gpu == "nvidia" else 2
    ranks = [int(word) for word in (options.ranks or f"1,{here}").split(",")]
    document = machine.heading("replicas", machine.of_module("bench.replicas"))
    document |= {"gpu": lane_name(options.gpu, options.engine), "job": options.job, "rows": []}
    print(HEADING)
    with place(options.gpu, max(ranks)) as site:
        for count in ranks * options.repeats:
            with tempfile.TemporaryDirectory() as folder:
                row = measured(
                    *(site, count, options.engine, Path(folder)),
                    *(options.job, options.left_running),
                )
            machine.keep_row(document, row, show(row), options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
