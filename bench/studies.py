"""Sections that vary one thing: the reductions of an image, the size of a job, repeated images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import sections
from bench.jobs import MANY_STEPS, Measured
from bench.overhead import overhead
from bench.periodic import periodic
from bench.sections import Bench, flowgpu_once, rows_of
from bench.units import Unit, measure
from flowgpu.launch import library_dir
from flowgpu.vocabulary import REDUCTIONS
from tests.gpu.site import Trouble

KIB, GIB = 1 << 10, 1 << 30


def offered(bench: Bench) -> list[str]:
    """What this flowgpu can leave out. Raises Trouble if that is nothing."""
    found = []
    for name in REDUCTIONS:
        # The words are looked at before the job is looked for.
        words = ("--output", "unused", "--without", name)
        said = bench.site.call("pause-and-dump", "no-such-job", *words).stderr
        if "--without" not in said:
            found.append(name)
    if not found:
        raise Trouble("this flowgpu pause-and-dump has no --without")
    return found


def variants(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What is left out, by the name of the variant."""
    each = {f"without {name}": (name,) for name in names}
    return {"all on": (), **each, "all off": tuple(names)}


def breakdown(bench: Bench) -> dict[str, Any]:
    """Each job with every reduction on, without each one, and with none."""

    def unit(job: Measured, variant: str, off: tuple[str, ...]) -> Unit:
        options = [word for name in off for word in ("--without", name)]

        def once(folder: Path, number: int) -> dict[str, Any]:
            name = f"{job.workload}-{'-'.join(off) or 'on'}-{number}"
            return flowgpu_once(bench, name, job.command, folder, options)

        about = {"lines_of": job.workload, "workload": job.workload, "without": list(off)}
        return Unit(f"{job.workload}, {variant}", job.repeats, job.about.flowgpu, once, about)

    chosen = variants(offered(bench))
    units = [unit(job, *variant) for job in bench.breakdown_jobs for variant in chosen.items()]
    return measure(bench, "breakdown", units)


@dataclass(frozen=True)
class Point:
    """A size of the job that grows: so many allocations of so many bytes in so many processes."""

    count: int
    total: int
    processes: int = 1

    @property
    def command(self) -> list[str]:
        words = [sys.executable, "workloads/allocations.py", "--steps", str(MANY_STEPS)]
        words += ["--count", str(self.count), "--bytes", str(self.total)]
        return [*words, "--processes", str(self.processes), "--step-delay", "0.05"]


# What grows, and the value of it that a point has.
Axis = tuple[str, Callable[[Point], int]]
AXES: tuple[Axis, ...] = (
    ("allocations", lambda point: point.count),
    ("bytes", lambda point: point.total),
    ("processes", lambda point: point.processes),
)


def points(small: bool) -> dict[str, list[Point]]:
    """The points of each axis; the emulated GPU has little memory."""
    if small:
        return {
            "allocations": [Point(count, 256 * KIB) for count in (4, 8, 16)],
            "bytes": [Point(8, size * KIB) for size in (64, 128, 256)],
            "processes": [Point(8, 256 * KIB, count) for count in (1, 2, 4)],
        }
    counts = (10, 100, 1000, 5000, 10_000, 20_000, 50_000)
    return {
        "allocations": [Point(count, 8 * GIB) for count in counts],
        "bytes": [Point(256, size * GIB) for size in (1, 4, 8, 16, 32, 48)],
        "processes": [Point(256, 4 * GIB, count) for count in (1, 2, 4, 8)],
    }


def growth(bench: Bench) -> dict[str, Any]:
    """The pause against the number of allocations, of bytes and of processes."""

    def unit(axis: str, value: int, point: Point) -> Unit:
        job = f"{axis} {value}"

        def once(folder: Path, number: int) -> dict[str, Any]:
            return flowgpu_once(bench, f"{axis}-{value}-{number}", point.command, folder)

        # Behind the start: fresh pages of the tmpfs at 5 GB/s, and filling on the job's side.
        seconds = 14.0 + point.total / 4e9 + point.count / 2500 + 2.0 * point.processes
        about = {
            "lines_of": f"allocations {point.count} {point.total} {point.processes}",
            "axis": axis,
            "value": value,
        }
        return Unit(job, bench.growth_repeats, seconds, once, about)

    units = []
    for axis, value in AXES:
        chosen = points(bench.small)[axis][: bench.points]
        units += [unit(axis, value(point), point) for point in chosen]
    return measure(bench, "growth", units)


def chunks(bench: Bench) -> dict[str, Any]:
    """The kernels on chunks, by bench/chunk_bench.py."""
    size = "0.002" if bench.small else "16"
    return {"rows": rows_of(bench.program("chunk_bench", "--gib", size, "--json").stdout)}


def mover_variants(bench: Bench) -> dict[str, Any]:
    """Every variant of the mover, by bench/mover_variants.py: its table as it printed it."""
    words = ["--gib", "0.125" if bench.small else str(bench.mover_gib)]
    words += ["--arena-gib", "0.125", "--piece-mib", "4"] if bench.small else []
    with bench.folder() as folder:
        driver = ("--driver", str(bench.site.driver.libcuda))
        done = bench.program("mover_variants", "--dir", str(folder), *words, *driver)
    return {"table": done.stdout.splitlines()}


def _nanoseconds(bench: Bench, *words: str, **environment: str) -> dict[str, Any]:
    """What a program of the build prints. Raises Trouble."""
    build = library_dir().parent
    program, *libraries = (build / word for word in words)
    if not all(path.is_file() for path in (program, *libraries)):
        raise Trouble(f"{' or '.join(words)} is not built: make build")
    done = subprocess.run(
        [program, *libraries],
        capture_output=True,
        text=True,
        timeout=bench.deadline.cap(120.0),
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        raise Trouble(f"{words[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return {"nanoseconds": json.loads(done.stdout)}


def memstub(bench: Bench) -> dict[str, Any]:
    """What an event of an allocator costs in the stub; needs no GPU."""
    return _nanoseconds(bench, "bin/bench_memstub", "lib/libflowgpu_memstub.so")


CALLS = ("bin/bench_calls", "lib/intercept/libcuda.so.1", "bin/libflowgpu_do_nothing_driver.so")


def calls(bench: Bench) -> dict[str, Any]:
    """What the intercept library adds to a driver call; needs no GPU."""
    return _nanoseconds(bench, *CALLS)


def calls_replay(bench: Bench) -> dict[str, Any]:
    """Measure calls in a job that is prepared for the replay engine."""
    return _nanoseconds(bench, *CALLS, FLOWGPU_REPLAY="1")


SECTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "rates": sections.rates,
    "flowgpu": sections.flowgpu,
    "flowgpu_replay": sections.flowgpu_replay,
    "peer": sections.peer,
    "peer_torch_save": sections.peer_torch_save,
    "breakdown": breakdown,
    "growth": growth,
    "periodic": periodic,
    "overhead": overhead,
    "mover": sections.mover,
    "mover_variants": mover_variants,
    "chunks": chunks,
    "memstub": memstub,
    "calls": calls,
    "calls_replay": calls_replay,
}
