"""How soon a job that Slurm has preempted runs again, with a real slurmctld and slurmd here (root).

    python -m bench.preempt [--gpu nvidia|emulated] [--job gpt2_xl] [--rounds N] [--images DIR]
                            [--ghost auto|warm] [--out FILE.json]

The job runs by contrib/slurm/job.sh in a partition that another one preempts. A job of that other
partition asks for the GPU, and ends at once. What passes from that request until the first job's
next step has two parts: what FlowGPU takes (the dump from the signal to the whole image, and from
the start of `flowgpu run` in the next turn to the next step), and the rest, which is Slurm's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.jobs import measured
from flowgpu.image.reader import Image
from flowgpu.image.store import Store
from flowgpu.timeline import of_image
from tests.faults.lanes import lane_name
from tests.gpu.site import Site
from tests.slurm.cluster import SHIPPED, Cluster, missing
from tests.slurm.job import Job, cluster
from tests.unit.coordinator_job import wait_for

START_SECONDS, TURN_SECONDS = 300.0, 120.0
STEPS_BEFORE = 5


def round_of(slurm: Cluster, job: Job, images: Path) -> dict[str, float]:
    """Preempt the job once, and wait until it makes steps again; seconds of each part."""
    job.wait_more(STEPS_BEFORE)
    restored, starts = job.said.count("restored job-"), len(_starts(job))
    began = time.time()
    output = f"--output={job.folder}/other"
    slurm.ask("sbatch", "-p", "high", "--gres=gpu:1", "--mem=500", output, "--wrap", "true")
    wait_for(lambda: len(_starts(job)) > starts, "the next turn", TURN_SECONDS)
    before = len(job.lines)
    wait_for(
        lambda: job.said.count("restored job-") > restored and len(job.lines) > before,
        "the next step",
        TURN_SECONDS,
    )
    ended = time.time()
    newest = Image(images / Store(images).names()[-1])
    line = of_image(newest)
    assert line is not None
    dump, again = newest.manifest.total_seconds, ended - _starts(job)[-1]
    return {
        "total": ended - began,
        "dump": dump,
        "again": again,
        "flowgpu": dump + again,
        "slurm": ended - began - dump - again,
        "pause": newest.manifest.pause_seconds,
        "signal": line.began - began,
    }


def _starts(job: Job) -> list[float]:
    """When each turn has begun, in seconds since 1970."""
    path = job.folder / "starts"
    return [float(line) for line in path.read_text().split()] if path.exists() else []


def measure(site: Site, name: str, rounds: int, ghost: str, folder: Path) -> list[dict[str, float]]:
    """All rounds of a job. Raises AssertionError where something does not come in time."""
    (of,) = measured(name, None)
    os.environ |= site.environment
    script = folder / "job.sh"
    script.write_text(
        (SHIPPED / script.name).read_text().replace("flowgpu run", f"flowgpu run --ghost {ghost}")
    )
    with cluster(nodes=1) as slurm:
        first = f"date +%s.%N >> {folder}/starts"
        words = [of.command[0], str(machine.ROOT / of.command[1]), *of.command[2:]]
        job = Job(slurm, folder, script=str(script), words=words, every="3600", first=first)
        try:
            wait_for(lambda: len(job.lines) >= STEPS_BEFORE, "the first steps", START_SECONDS)
            images = folder / "images" / f"job-{job.number}"
            return [round_of(slurm, job, images) for _ in range(rounds)]
        except BaseException:
            print(job.said, file=sys.stderr)
            raise
        finally:
            slurm.ask("scancel", job.number)


def table(document: dict[str, Any]) -> str:
    """One line a round, in seconds."""
    lines = [
        f"{document['job']}: seconds from the request for its GPU to its next step",
        "| round | in all | dump | of it paused | next turn to next step | FlowGPU | Slurm |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows: Sequence[dict[str, float]] = document["rows"]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    for number, row in [*enumerate(rows, 1), ("median", middle)]:
        shown = ("total", "dump", "pause", "again", "flowgpu", "slurm")
        lines.append(f"| {number} | " + " | ".join(f"{row[key]:.2f}" for key in shown) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.preempt")
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--job", default="gpt2_xl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ghost", choices=["auto", "warm"], default="auto")
    parser.add_argument("--images", type=Path, help="a folder for images (default: a tmpfs)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if absent := missing():
        parser.error(f"Slurm is not installed: {', '.join(absent)}")
    document = machine.heading("preempt", machine.of_module("bench.preempt"))
    document |= {"gpu": options.gpu, "lane": lane_name(options.gpu, "replay"), "job": options.job}
    with Site(options.gpu, options.images) as site:
        os.chmod(site.images, 0o755)
        with tempfile.TemporaryDirectory(dir=site.images) as folder:
            document["rows"] = measure(
                site, options.job, options.rounds, options.ghost, Path(folder)
            )
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
