"""Records what the driver of this machine answers to the programs of a file.

python -m tests.emu.record_programs [--seed S] [--count N] [--theme T]... [--seconds S] [--out FILE]
    [FILE]

FILE has programs and their traces, none if it is not there yet. Without --seed they are recorded
anew; with it, kept programs and N drawn ones are added to them, or with --theme, N that are mostly
about one of these themes (program_gen.THEMES). It is written again, or to --out; needs Python, the
CUDA bindings, and the driver. test_programs.py compares with every recorded_*.json of this folder.
What no time is left for is left out. Each program runs twice if there is time, and what differed is
null: something that a driver does not promise.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen
from typing import Any

from tests.emu.program_gen import THEMES, draw
from tests.emu.program_kept import ASKED, KEPT
from tests.emu.program_lib import library
from tests.emu.program_run import run

RECORDED = Path(__file__).with_name("recorded_programs.json")
SECONDS_EACH = 8.0
WORKERS = 8


def recordings() -> list[Path]:
    return sorted(RECORDED.parent.glob("recorded_*.json"))


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"programs": [], "traces": []}
    recorded: dict[str, Any] = json.loads(path.read_text())
    return recorded


def write(recorded: dict[str, Any], path: Path) -> None:
    """One line a program, and one a trace."""
    parts = []
    for key, value in recorded.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def agreed(first: list[Any], second: list[Any]) -> list[Any]:
    shorter = min(len(first), len(second))
    same = [a if a == b else None for a, b in zip(first, second, strict=False)]
    return same if len(first) == len(second) else [*same[:shorter], None]


def workers(count: int) -> list[Popen[str]]:
    words = [sys.executable, "-m", "tests.emu.record_programs", "--worker"]
    return [Popen(words, stdin=PIPE, stdout=PIPE, text=True) for _ in range(count)]


def traces(programs: Sequence[Any], pool: list[Popen[str]], until: float) -> Iterator[Any]:
    """In the programs' order; None for those that no time was left for."""
    free = list(pool)

    def one(program: Any) -> Any:
        if time.monotonic() > until:
            return None
        worker = free.pop()
        assert worker.stdin and worker.stdout
        worker.stdin.write(json.dumps(program) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        free.append(worker)
        return json.loads(answer)

    with ThreadPoolExecutor(len(pool)) as threads:
        yield from threads.map(one, programs)


def hold_device(driver: ctypes.CDLL) -> tuple[int, str]:
    """A child that keeps the device from being set up anew for each program, and its name."""
    source, out = os.pipe()
    child = os.fork()
    if child == 0:
        name, context = ctypes.create_string_buffer(64), ctypes.c_void_p()
        driver.cuInit(0)
        driver.cuDeviceGetName(name, 64, 0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        os.write(out, name.value)
        os.close(out)
        time.sleep(3600)
    os.close(out)
    name_read = os.read(source, 64).decode()
    os.close(source)
    return child, name_read


def work() -> None:
    driver = library()
    for line in sys.stdin:
        print(json.dumps(run(driver, json.loads(line), SECONDS_EACH)), flush=True)


def record(programs: list[Any], seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    driver = library()
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    holder, name = hold_device(driver)
    pool = workers(WORKERS)
    try:
        until = began + seconds
        first = list(traces(programs, pool, until))
        second = list(traces(programs, pool, until))
    finally:
        for worker in pool:
            assert worker.stdin
            worker.stdin.close()
            worker.wait()
        os.kill(holder, 9)
        os.waitpid(holder, 0)
    pairs = list(zip(first, second, strict=True))
    once = sum(a is not None and b is None for a, b in pairs)
    unlike = sum(a != b for a, b in pairs if b is not None)
    done = [(p, a, b) for p, a, b in zip(programs, first, second, strict=True) if a is not None]
    ends = Counter(a[-1] for _, a, _ in done if isinstance(a[-1], str))
    print(
        f"{len(done)} of {len(programs)} programs on {name}, {once} of them once; {unlike} were "
        f"answered otherwise the second time; not to their end: {dict(ends) or 'none'}"
    )
    return {
        "device": name,
        "driver": version.value,
        "programs": [program for program, _, _ in done],
        "traces": [agreed(a, b) if b is not None else a for _, a, b in done],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=RECORDED)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--theme", action="append", choices=list(THEMES))
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        work()
        return
    known = read(options.file)
    if options.seed is None:
        recorded = record(known["programs"], options.seconds)
    else:
        random = Random(options.seed)
        drawn = [draw(random, options.theme or list(THEMES)) for _ in range(options.count)]
        kept = [] if options.theme else [*KEPT.values(), *ASKED]
        recorded = record([*kept, *drawn], options.seconds)
        for key in ("programs", "traces"):
            recorded[key] = known[key] + recorded[key]
    write(recorded, options.out or options.file)


if __name__ == "__main__":
    main()
