"""Jobs under a real Slurm, preempted at drawn moments.

`python -m tests.slurm.storm --jobs 20 --seconds 120`: each must go on to its end with the lines of
an undisturbed run. Prints how often they were queued again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.emu.test_checkpoint import command, emulated_machine, flowgpu
from tests.slurm.cluster import Cluster
from tests.slurm.job import Job, cluster

NODES, CPUS = 2, 3
WORDS = command("digits_mlp", steps=60)
END_SECONDS = 600.0


def preempt(slurm: Cluster, folder: Path, chance: random.Random) -> None:
    """A job of `high` takes some of a node for a moment."""
    node, cpus = chance.choice(slurm.nodes), chance.randint(1, CPUS)
    nap = f"sleep {chance.uniform(0.2, 3):.1f}"
    place = ("-p", "high", f"--nodelist={node}", f"--ntasks={cpus}", "--mem=100")
    number = slurm.ask("sbatch", "--parsable", *place, f"--output={folder}/high", "--wrap", nap)
    slurm.wait_state(number.strip(), "COMPLETED", END_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    with (
        emulated_machine(),
        tempfile.TemporaryDirectory(prefix="storm-") as base,
        cluster(nodes=NODES, cpus=CPUS) as slurm,
    ):
        words = command("digits_mlp", **{"steps": 60, "step-delay": 0})
        expected = flowgpu("run", "--gpu", "emulated", "--", *words).stdout.splitlines()
        jobs = []
        for number in range(asked.jobs):
            folder = Path(base) / str(number)
            folder.mkdir()
            options = ("--gres=none", "--mem=100")
            jobs.append(Job(slurm, folder, *options, words=WORDS, every="600"))
        end = time.monotonic() + asked.seconds
        preempted = 0
        while time.monotonic() < end:
            time.sleep(chance.uniform(0, 2))
            preempt(slurm, Path(base), chance)
            preempted += 1
        for job in jobs:
            job.hurrying.touch()
        wrong = 0
        restarts: Counter[int] = Counter()
        for job in jobs:
            record = slurm.wait_end(job.number, END_SECONDS)
            restarts[int(record["Restarts"])] += 1
            if record["JobState"] != "COMPLETED" or job.lines != expected:
                wrong += 1
                print(job.number, record["JobState"], job.said, *job.lines, sep="\n")
    counts = ", ".join(f"{count} jobs {times} times" for times, count in sorted(restarts.items()))
    print(f"{asked.jobs} jobs, {preempted} jobs of high; requeued: {counts}; wrong: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
