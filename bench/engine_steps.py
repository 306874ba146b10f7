"""What the replay engine's ending of CUDA and making it anew take, step by step.

    python -m bench.engine_steps [--gpu nvidia|emulated] [--jobs gpt2,gpt2_xl] [--rounds N]
                                 [--out FILE.json]

Each job is dumped and restored N times, one after the other, every time from what the one before
has restored. Milliseconds of each step come from the coordinator's log (docs/replay-engine.md),
seconds of the phases from the commands' own reports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine
from bench.jobs import KNOWN, MANY_STEPS, About
from tests.gpu.site import Site, Trouble, many_pids

START_SECONDS, FIRST_LINES, ON_SECONDS = 300.0, 6, 2.0


def steps(log: str, request: str) -> dict[str, float]:
    """Milliseconds of the steps of the last STRIP or REBUILD that the log tells of."""
    told = re.findall(rf"task \d+: {request}: (.*)", log)
    found = re.findall(r"([^,]+) ([0-9.]+) ms(?:, )?", told[-1] if told else "")
    return {step.strip(): float(value) for step, value in found}


def measure(site: Site, name: str, rounds: int) -> list[dict[str, Any]]:
    """What each dump and restore of one workload said. Raises Trouble."""
    words = ["run", "--name", name, "--gpu", site.kind, "--engine", "replay", "--"]
    words += [sys.executable, f"workloads/{name}.py", "--steps", str(MANY_STEPS)]
    words += KNOWN.get(name, About()).options
    with open(os.devnull, "wb") as null, site.start(*words, stdout=null, stderr=null):
        try:
            return list(rows(site, name, rounds))
        finally:
            site.call("kill", name)


def rows(site: Site, name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Dump and restore the job again and again. Raises Trouble."""
    deadline = time.monotonic() + START_SECONDS
    while len(site.call("logs", name).stdout.splitlines()) < FIRST_LINES:
        if time.monotonic() > deadline:
            raise Trouble(f"{name} does not start")
        time.sleep(0.5)
    log = site.registry.dir(site.registry.find(name).id).coordinator_log
    for number in range(rounds):
        time.sleep(ON_SECONDS)
        image = site.images / f"{name}-{number}"
        dump = site.call("pause-and-dump", name, "--output", str(image), "--json").json()
        strip = steps(log.read_text(), "STRIP")
        restore = site.call("restore", str(image), "--detach", "--json").json()
        rebuild = steps(log.read_text(), "REBUILD")
        shutil.rmtree(image)
        print(name, f"pause {dump['pause_seconds']:.2f} s", dump["phases"], strip)
        print(name, f"restore {restore['restore_seconds']:.2f} s", restore["phases"], rebuild)
        yield {"dump": dump, "strip": strip, "restore": restore, "rebuild": rebuild}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=["nvidia", "emulated"], default="nvidia")
    parser.add_argument("--jobs", default="gpt2,gpt2_xl", help="workloads, joined by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with many_pids(), Site(options.gpu) as site:
        jobs = {name: measure(site, name, options.rounds) for name in options.jobs.split(",")}
    document = {
        "kind": "engine-steps",
        "gpu": options.gpu,
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python -m bench.engine_steps", *sys.argv[1:]]),
        "commit": machine.commit(),
        "machine": machine.facts(),
        "jobs": jobs,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
