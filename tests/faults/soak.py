"""Hundreds of checkpoints of one job: what its processes hold after each.

    python -m tests.faults.soak [--gpu emulated|nvidia] [--engine replay] [--count N]
                                [--restores M] [--every SECONDS] [--turns N]
                                [--out FILE.json]

All but M are images of one `flowgpu checkpoint`, with the same coordinator and a warm ghost; then
the job is dumped and restored M times, so that its task is what may grow. At the end the job takes
turns with a new one: if both take longer, the machine is slower, not the job. soak_page.py says
what grows.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from bench import machine
from flowgpu import launch
from tests.faults.case import BLOCK_FILE
from tests.faults.killing import below, running
from tests.faults.lanes import ON_A_GPU, lane_name
from tests.faults.soak_page import NAME, NEW, RESTORES, beside_new, grown
from tests.gpu.site import ROOT, Site, many_pids

KEEP = 2
START_SECONDS = 60.0
Sample = dict[str, float]

# Asked for all of its memory, the emulated device first looks who still holds what was exported.
FREE = """
import sys
from tests.emu.driver_lib import GRANULE, cu, ok, properties, refuses, start
start()
for _ in sys.stdin:
    total = ok(cu.cuMemGetInfo())[1]
    refuses(cu.cuMemCreate(total // GRANULE * GRANULE, properties(), 0), "OUT_OF_MEMORY")
    print(ok(cu.cuMemGetInfo())[0], flush=True)
"""


class Meter:
    """Looks at the processes of the job, and through one of its own at the device."""

    def __init__(self, site: Site, name: str = NAME) -> None:
        self.site, self.name = site, name
        self.probe = subprocess.Popen(
            [sys.executable, "-c", FREE],
            cwd=ROOT,
            env=site.plain_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.most_free = self._free()

    def _free(self) -> int:
        assert self.probe.stdin and self.probe.stdout
        self.probe.stdin.write("\n")
        return int(self.probe.stdout.readline())

    def sample(self) -> Sample:
        record = self.site.registry.find(self.name)
        coordinator = record.coordinator_pid
        of_kind = {
            "coordinator": [coordinator],
            "ghost": running("ghost", [coordinator]),
            "task": below([record.root_pid]),
        }
        found: Sample = {"device_bytes": self.most_free - self._free()}
        for kind, pids in of_kind.items():
            found[f"{kind}_rss"] = sum(psutil.Process(pid).memory_info().rss for pid in pids)
            found[f"{kind}_fds"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
        found["task_mappings"] = sum(map(mappings, of_kind["task"]))
        found["processes"] = len(below([coordinator]))
        found["shared_bytes"] = shared_bytes([pid for pids in of_kind.values() for pid in pids])
        return found

    def close(self) -> None:
        self.probe.communicate()


def mappings(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_bytes().splitlines())


def shared_bytes(pids: list[int]) -> int:
    """Bytes of shared memory that these processes have open, without the device's."""
    sizes: dict[int, int] = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):
                target = os.readlink(path)
                if target.startswith(("/memfd:", "/dev/shm")) and BLOCK_FILE not in target:
                    about = os.stat(path)
                    sizes[about.st_ino] = about.st_blocks * 512
    return sum(sizes.values())


@contextmanager
def job(site: Site, engine: launch.EngineChoice, name: str) -> Iterator[None]:
    """A job that has made steps."""
    words = ["run", "--name", name, "--gpu", site.kind, "--engine", engine, "--ghost", "warm"]
    words += ["--", *ON_A_GPU]
    deadline = time.monotonic() + START_SECONDS
    with open(os.devnull, "wb") as null, site.start(*words, stdout=null, stderr=null):
        try:
            while not site.call("logs", name).stdout:
                assert time.monotonic() < deadline, "the job does not start"
            yield
        finally:
            site.call("kill", name)


def images(site: Site, meter: Meter, count: int, every: float) -> Iterator[Sample]:
    """A sample after each image of a running job."""
    store = site.images / "store"
    words = ["--store", str(store), "--every", str(every), "--keep", str(KEEP)]
    command = [sys.executable, "-m", "flowgpu", "checkpoint", NAME, *words]
    with subprocess.Popen(
        [*command, "--count", str(count), "--json"],
        cwd=ROOT,
        env=site.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            report = json.loads(line)
            yield {
                "seconds": report["total_seconds"],
                "pause_seconds": report["pause_seconds"],
                **phases("dump", report),
                "command_rss": psutil.Process(process.pid).memory_info().rss,
                "store_bytes": sum(p.lstat().st_blocks * 512 for p in store.rglob("*")),
                **meter.sample(),
            }
    shutil.rmtree(store)


def phases(kind: str, report: dict[str, Any]) -> Sample:
    """The seconds of each phase, which tell what grows where the seconds of all do."""
    return {f"{kind}_{name}_seconds": value for name, value in report["phases"].items()}


def cycle(site: Site, name: str) -> Sample:
    """What a dump and a restore say of themselves."""
    image = site.images / "image"
    dump = site.call("pause-and-dump", name, "--output", str(image), "--json").json()
    back = site.call("restore", str(image), "--detach", "--json").json()
    shutil.rmtree(image)
    return {
        "seconds": dump["total_seconds"] + back["restore_seconds"],
        "pause_seconds": dump["pause_seconds"],
        "image_bytes": dump["image_bytes"],
        **phases("dump", dump),
        **phases("restore", back),
    }


def cycles(site: Site, meter: Meter, count: int) -> Iterator[Sample]:
    """A sample after each dump and restore."""
    for _ in range(count):
        yield cycle(site, NAME) | meter.sample()


def in_turn(site: Site, engine: launch.EngineChoice, turns: int) -> list[dict[str, Sample]]:
    """A dump and restore of the job, and one of a new job, in each turn."""
    found: list[dict[str, Sample]] = []
    with job(site, engine, NEW):
        for turn in range(turns):
            names = (NAME, NEW) if turn % 2 else (NEW, NAME)
            found.append({name: cycle(site, name) for name in names})
    return found


def steps_of(site: Site) -> int:
    """Steps that the job has made. Raises AssertionError if one is missing or torn."""
    steps = site.call("logs", NAME).succeeded().stdout.splitlines()
    assert steps == [f"step {number}" for number in range(1, len(steps) + 1)]
    return len(steps)


def run(options: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, list[Sample]] = {}
    with many_pids(), Site(options.gpu) as site:
        meter = Meter(site)
        with job(site, options.engine, NAME):
            before = options.count - options.restores
            for name, samples in (
                ("checkpoint", images(site, meter, before, options.every)),
                (RESTORES, cycles(site, meter, options.restores)),
            ):
                parts[name] = []
                for sample in samples:
                    parts[name].append(sample)
                    print(name, len(parts[name]), sample, flush=True)
            turns = in_turn(site, options.engine, options.turns)
            steps = steps_of(site)
        meter.close()
    return {"parts": parts, "in_turn": turns, "steps": steps}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.soak")
    parser.add_argument("--gpu", choices=["emulated", "nvidia"], default="emulated")
    parser.add_argument("--engine", choices=["native", "replay"], default="native")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--restores", type=int, default=100, help="of the count")
    parser.add_argument("--every", type=float, default=0.8, help="seconds between two images")
    parser.add_argument("--turns", type=int, default=20, help="with a new job, at the end")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    began = time.monotonic()
    heading = machine.heading("soak", machine.of_module("tests.faults.soak"))
    about = run(options)
    growing = grown(about)
    mostly_restores = 2 * options.restores > options.count  # a lane of its own on the page
    print(f"{about['steps']} steps; what grows: {growing}; {beside_new(about)}")
    if options.out:
        document = heading | {
            "lane": lane_name(options.gpu, options.engine) + ", restores" * mostly_restores,
            "seconds": round(time.monotonic() - began, 1),
            **about,
        }
        options.out.write_text(json.dumps(document) + "\n")
    return 1 if any(growing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
