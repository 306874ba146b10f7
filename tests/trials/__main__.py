"""Every program, or those that are named, by both engines, restored twice and left running.

    python -m tests.trials [NAME...] [--engine native] [--mode restored] [--lane nvidia] [--out F]

A table is printed last; the exit code is 1 when an outcome is not the expected one. What is pending
is listed, and is no deviation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench import machine
from tests.faults.lanes import lane_name
from tests.gpu import shared
from tests.gpu.site import ROOT, many_pids
from tests.trials.catalogue import Case, all_cases, catalogue
from tests.trials.prelude import ENGINES, MODES, SAME, TOLD, Program

AT_ONCE = 2
SECONDS = 900.0  # of one program, at most
Results = dict[str, dict[str, dict[str, str]]]


def outcomes(
    program: Program, cases: Sequence[Case], lane: str, base: Path
) -> dict[str, dict[str, str]]:
    """What became of a program, by engine and mode."""
    place = base / program.name
    place.mkdir()
    keys = [" ".join(case) for case in cases]
    words = ["tests.trials.trial", program.module, program.name, str(place), lane, *keys]
    command = [sys.executable, "-m", *words]
    found: dict[str, dict[str, str]] = {}
    with (
        shared.gpu() if lane == "nvidia" else nullcontext(),
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            said, wrong = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, wrong = process.communicate()
    for line in said.splitlines():
        found |= json.loads(line)
    nothing = {"outcome": "no outcome", "details": wrong.strip()[-1000:]}
    return {key: found.get(key, nothing) for key in keys}


def judge(program: Program, found: dict[str, dict[str, str]]) -> None:
    """Say of each outcome what it should have been."""
    for case, one in found.items():
        engine, _, mode = case.partition(" ")
        one["expected"] = program.outcome(engine, mode)
        one["pending"] = program.missing(engine, mode)


def deviates(one: dict[str, str]) -> bool:
    return one["outcome"] != one["expected"]


def right(outcome: str) -> bool:
    """What a mend may come to."""
    return outcome in (SAME, TOLD) or (outcome.startswith("refused: ") and "Failed" not in outcome)


def table(results: Results) -> list[str]:
    """A line for each program, then what is not as expected, or is and was not thought to be."""
    cases = [" ".join(case) for case in all_cases()]
    wide = max(len(name) for name in results)
    lines = [f"{'':{wide}}  {'  '.join(f'{case:20}' for case in cases)}"]
    for name, found in results.items():
        cells = [found.get(case, {}).get("outcome", "-")[:20] for case in cases]
        lines.append(f"{name:{wide}}  {'  '.join(f'{cell:20}' for cell in cells)}".rstrip())
    remarks: dict[str, list[str]] = {}
    for name, found in results.items():
        for case, one in found.items():
            if deviates(one) and not (one["pending"] and right(one["outcome"])):
                about = f"pending ({one['pending']})" if one["pending"] else "DEVIATES"
                remark = f"{about}: {name}: {one['outcome']}, not {one['expected']}"
            elif one["pending"]:
                remark = f"pending no more: {name}: {one['outcome']}"
            else:
                continue
            remarks.setdefault(remark, []).append(case)
    return lines + [f"{remark} ({', '.join(where)})" for remark, where in remarks.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.trials")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--engine", choices=ENGINES)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--lane", choices=["emulated", "nvidia"], default="emulated")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    programs = catalogue()
    unknown = [name for name in options.names if name not in programs]
    if unknown:
        parser.error(f"no program {', '.join(unknown)}; there are {', '.join(programs)}")
    chosen = [programs[name] for name in options.names or programs]
    cases = [
        (engine, mode)
        for engine, mode in all_cases()
        if options.engine in (None, engine) and options.mode in (None, mode)
    ]
    heading: dict[str, Any] = machine.heading("trials", machine.of_module("tests.trials"))
    results: Results = {}
    gpu = lane_name(options.lane, "native")

    with (
        many_pids(),
        tempfile.TemporaryDirectory(prefix="trials-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def one(program: Program) -> dict[str, dict[str, str]]:
            found = outcomes(program, cases, options.lane, Path(folder))
            judge(program, found)
            return found

        for program, found in zip(chosen, pool.map(one, chosen), strict=True):
            results[program.name] = found
            for case, outcome in found.items():
                print(
                    program.name, case, outcome["outcome"], outcome.get("seconds", ""), flush=True
                )
                if deviates(outcome) and outcome["details"]:
                    print("    " + outcome["details"].replace("\n", "\n    "), flush=True)
            if options.out:  # after each, since a run may be cut off
                document = heading | {"lane": options.lane, "gpu": gpu, "programs": results}
                options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(*table(results), sep="\n")
    every = [one for found in results.values() for one in found.values()]
    return 1 if any(deviates(one) and not one["pending"] for one in every) else 0


if __name__ == "__main__":
    sys.exit(main())
