"""Measure FlowGPU on this machine and write build/results/<gpu>-<date>.json.

    python bench/bench.py
    python bench/bench.py --only flowgpu,peer --jobs gpt2_xl --deadline 530 --output FILE
    python bench/bench.py --gpu emulated --only flowgpu,growth

The file is written after each run of each job. A call with a file that exists takes what is missing
in it and nothing twice (but with --again); a run that failed is tried once more. With --deadline no
run is begun that would not be done in time, and at the deadline everything is ended. All images go
to a tmpfs. `make performance-doc` makes docs/performance.md from the files.

Exit code: 0 everything asked for is in the file; 1 something failed; 3 time was up before all was
done; 142 cut off at the deadline, which loses one run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# As a script, Python looks in this folder first, where `bench` would be this file.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import machine, overhead, report, summary
from bench.deadline import Deadline
from bench.jobs import JOBS, Measured, measured
from bench.sections import Bench
from bench.studies import SECTIONS
from flowgpu.errors import FlowError
from flowgpu.launch import GpuKind
from tests.gpu.catalogue import catalogue
from tests.gpu.site import Site, Trouble

FORMAT = 1
OVERHEAD_JOBS: dict[GpuKind, str] = {
    "nvidia": "gpt2,gpt2_xl,resnet50,launches",
    "emulated": "launches",
}
BREAKDOWN_JOBS: dict[GpuKind, str] = {"nvidia": "gpt2,gpt2_xl", "emulated": "digits_mlp"}
PERIODIC_JOBS: dict[GpuKind, str] = {"nvidia": "resnet50_infer,lora", "emulated": "allocations"}
TIME_UP_EXIT = 3
TOUCHED = Path("/run/flowgpu-bench-touched")
# Sections without jobs: taken in one go, in about so many seconds on a real GPU.
WHOLE = {
    "rates": 15.0,
    "mover": 90.0,
    "mover_variants": 90.0,
    "chunks": 45.0,
    "memstub": 10.0,
    "calls": 10.0,
    "calls_replay": 10.0,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", choices=("nvidia", "emulated"), default="nvidia")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, joined by commas")
    parser.add_argument("--jobs", help="workloads to measure, joined by commas")
    parser.add_argument("--repeats", type=int, help="runs of each job, of either system")
    parser.add_argument("--points", type=int, help="points of each row of growth, at most")
    parser.add_argument("--deadline", type=float, help="seconds that this call may take")
    parser.add_argument("--again", action="store_true", help="replace what the file has")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of processes in overhead")
    parser.add_argument("--overhead-jobs", help="gpt2, gpt2_short, gpt2_xl, resnet50, launches")
    parser.add_argument("--overhead-blocks", type=int, default=20, help="turns of each process")
    parser.add_argument(
        "--overhead-same-addresses",
        action="store_true",
        help="without the system's randomisation of addresses, by which plain processes differ",
    )
    parser.add_argument(
        "--overhead-engine",
        choices=("native", "replay"),
        default="native",
        help="what jobs under FlowGPU are prepared for",
    )
    parser.add_argument(
        "--overhead-parts",
        default="intercept,stub",
        help=f"measured beside flowgpu run: of {', '.join(overhead.PARTS)}",
    )
    parser.add_argument("--mover-gib", type=float, help="GiB that the mover moves")
    parser.add_argument("--images", type=Path, help="where images go (default: a tmpfs)")
    parser.add_argument("--output", type=Path, help="results file (default: build/results/...)")
    options = parser.parse_args(arguments)
    unknown = set(options.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if unknown := set(options.overhead_parts.split(",")) - {"", *overhead.PARTS}:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    return options


def here(names: str) -> str:
    """The workloads of `a,b` whose packages this machine has."""
    known = catalogue()
    missing = {name: lack for name in names.split(",") if (lack := known[name].missing())}
    for name, lack in missing.items():
        say(f"{name} is left out: {lack} is not here")
    return ",".join(name for name in names.split(",") if name not in missing)


def bench_of(site: Site, options: argparse.Namespace, deadline: Deadline) -> Bench:
    kind: GpuKind = options.gpu
    small = kind == "emulated"

    def jobs(default: dict[GpuKind, str]) -> list[Measured]:
        return measured(options.jobs or here(default[kind]), options.repeats)

    return Bench(
        site=site,
        jobs=jobs(JOBS),
        pairs=options.pairs,
        overhead_jobs=(options.overhead_jobs or OVERHEAD_JOBS[kind]).split(","),
        overhead_blocks=options.overhead_blocks,
        overhead_same_addresses=options.overhead_same_addresses,
        overhead_engine=options.overhead_engine,
        overhead_parts=[part for part in options.overhead_parts.split(",") if part],
        small=small,
        mover_gib=options.mover_gib or (0.125 if small else 16.0),
        say=say,
        keep=lambda name, found: None,
        deadline=deadline,
        document={"format": FORMAT, "sections": {}},
        again=options.again,
        points=options.points,
        growth_repeats=options.repeats or (1 if small else 2),
        breakdown_jobs=jobs(BREAKDOWN_JOBS),
        periodic_jobs=jobs(PERIODIC_JOBS),
    )


def stop_at(bench: Bench, seconds: float | None) -> None:
    """End everything when the process is told to end, and at the deadline."""
    bench.site.end_when_terminated()
    end_jobs = signal.getsignal(signal.SIGTERM)

    def end(signum: int, frame: Any) -> None:
        say(f"{signal.Signals(signum).name}: ended; what was measured is in the file")
        bench.end_programs()
        assert callable(end_jobs)
        end_jobs(signum, frame)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def load(path: Path) -> dict[str, Any]:
    """The results in `path`, or an empty document."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {"format": FORMAT, "sections": {}}
    if document.get("format") != FORMAT:
        raise SystemExit(f"{path} has another format than {FORMAT}")
    return dict(document)


def save(document: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.replace(path)


def without_paths(arguments: Sequence[str]) -> list[str]:
    """The arguments less those that name folders of this machine or say how long it may take."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word in ("--output", "--images", "--deadline"):
            next(words, None)
        elif not word.startswith(("--output=", "--images=", "--deadline=")):
            kept.append(word)
    return kept


def keeper(
    document: dict[str, Any], path: Path, arguments: Sequence[str]
) -> Callable[[str, dict[str, Any]], None]:
    """What puts a section, finished or not, into the document and the document on the disk."""
    command = ["bench/bench.py", *without_paths(arguments)]

    def keep(name: str, found: dict[str, Any]) -> None:
        before = document["sections"].get(name, {})
        if "jobs" in found and "jobs" in before:
            found = found | {"jobs": before["jobs"] | found["jobs"]}
        commands = [words for words in before.get("commands", ()) if words != command]
        document["sections"][name] = found | {"commands": [*commands, command]}
        save(document, path)

    return keep


def failures(name: str, found: dict[str, Any]) -> list[str]:
    """The jobs of a section whose last run failed or printed other lines."""
    bad = []
    for job, runs in found.get("jobs", {}).items():
        last = runs[-1] if isinstance(runs, list) and runs else {}
        if "failed" in last or last.get("identical") is False:
            bad.append(f"{name} {job}")
    return bad


def open_results(bench: Bench, options: argparse.Namespace, arguments: Sequence[str]) -> Path:
    """Load the file of this GPU and day, or the one asked for; SystemExit if it is another's."""
    today = datetime.date.today().isoformat()
    gpu = json.loads(bench.program("rates", "--dir", "/", "--only-name").stdout)
    path: Path = options.output or summary.RAW / f"{slug(gpu['gpu'])}-{today}.json"
    document = bench.document = load(path)
    about = {key: gpu[key] for key in ("gpu", "gpu_memory_bytes")}
    if document.setdefault("gpu", about) != about:
        raise SystemExit(f"{path} is of {document['gpu']['gpu']}, this is {gpu['gpu']}")
    document |= {
        "date": document.get("date", today),
        "kind": options.gpu,
        "commit": document.get("commit") or machine.commit(),
        "machine": machine.facts(),
    }
    bench.keep = keeper(document, path, arguments)
    return path


def touch_memory(bench: Bench) -> None:
    """Have this machine's memory touched, once since it was started."""
    if not bench.small and not TOUCHED.exists():
        found = json.loads(bench.program("touch").stdout)
        say(f"touched {found['bytes'] >> 30} GiB of memory in {found['seconds']:.0f} s")
        TOUCHED.touch()


def take(bench: Bench, sections: Sequence[str]) -> list[str]:
    """Measure the sections and give what failed."""
    failed = []
    for name in sections:
        if name in WHOLE and name in bench.document["sections"] and not bench.again:
            continue
        if not bench.deadline.fits(0 if bench.small else WHOLE.get(name, 0)):
            bench.missing.append(name)
            continue
        began = time.monotonic()
        try:
            found = SECTIONS[name](bench)
        except Trouble as trouble:
            say(f"{name}: {trouble}")
            failed.append(name)
            continue
        except Exception as error:
            say(f"{name}: {error}")
            traceback.print_exc()
            failed.append(name)
            continue
        if found.get("jobs", True):
            bench.keep(name, {"seconds": time.monotonic() - began} | found)
        failed += failures(name, found)
    return failed


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    deadline = Deadline(options.deadline)
    try:
        with Site(options.gpu, options.images) as site:
            bench = bench_of(site, options, deadline)
            stop_at(bench, options.deadline)
            path = open_results(bench, options, arguments)
            wanted = options.only.split(",")
            touch_memory(bench)
            # The rates are what the other sections are held against.
            failed = take(bench, ["rates", *(name for name in wanted if name != "rates")])
    except FlowError as error:
        say(f"Error: {error}")
        return 2
    print(report.tables(bench.document))
    for name in failed:
        say(f"failed: {name}")
    for name in bench.missing:
        say(f"no time was left for: {name}")
    say(f"results: {path}")
    if not options.output:
        say(f"summary: {summary.write(path)}")
    if failed:
        return 1
    return TIME_UP_EXIT if bench.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
