"""Make docs/reliability.md from the summaries in bench/results.

    python -m tests.faults.page            write the page
    python -m tests.faults.page --check    fail if the page is not what would be written

Only what has run is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import summary
from bench.machine import ROOT
from flowgpu.wire import Fault
from tests.emu.record_programs import read, recordings

PAGE = ROOT / "docs" / "reliability.md"
OUTCOMES = {
    "goes on": "the checkpoint failed by a named error and the job went on as an undisturbed one. "
    "No image, process, descriptor, socket, file or shared memory was left. A second try succeeded",
    "mended": "the command succeeded all the same, because it tries the step again or the fault "
    "does no harm there. The image verifies, and the job goes on",
    "ended": "a task was killed. The checkpoint failed by a named error or its image verifies. "
    "The job is known as ended or goes on with the other task",
    "nothing left": "the restore failed by a named error before anything of the job ran. No "
    "process was left, the image verifies, and a second try succeeded",
    "taken over": "the coordinator was killed. The command said so, another coordinator has the "
    "job, and the job went on as an undisturbed one",
    "dumped, restored": "the coordinator was killed when the image was whole. The command said so, "
    "the job is known as dumped, and it went on from its image",
    "ran, was ended": "the restore failed when a gate had been asked to open. The job may have run "
    "for a moment before it was ended; the rest is as in *nothing left*",
}
NAMED = 4  # faults, of those that did not fire
Document = dict[str, Any]

INTRODUCTION = """<!-- Made by `python -m tests.faults.page`. Do not edit. -->
# Reliability

For readers who want to know what FlowGPU promises, how that was tried, and what came out.

## What is promised

- Before an image is committed, a failure costs the job nothing but time: it goes on as if nobody
  had asked for a checkpoint.
- A committed image restores, any number of times. A damaged one is refused by name.
- A command that fails says by a named error what happened ([errors](reference/errors.md)).
- What this does not cover is in [limits](limits.md), above all `kill -9` of coordinator and keeper.

## What was tried

- **Faults**: each of `native/include/flowgpu/fault.def` fires at its first pass, at its second, and
  so on, until it fires no more. It does so in `pause-and-dump`, with and without `--leave-running`,
  and in `restore`, with one task and with two (`make fault-matrix`).
- **Killed processes**: `kill -9` of a process of FlowGPU, of CRIU or of the job, at a drawn moment
  (`make kill-storm`).
- **Soak**: one job is checkpointed and restored again and again; nothing may grow (`make soak`).
- **Workloads**: programs that check themselves are dumped at drawn moments. Their output is
  compared, to the bit, with that of an undisturbed run (`python -m tests.gpu.campaign`).
- **Drawn programs**: driver calls, right and wrong ones, with checkpoints in between. Every answer
  is compared with the bare driver's (`make test-programs`).

A *wrong* outcome is any but those that are listed below. Older code is not shown, but in the sums
over all storms and in the workloads.
"""


def page(results: Path = summary.RESULTS) -> str:
    """The whole page."""

    def of(*kinds: str) -> list[Document]:
        return [one for kind in kinds for one in summary.kept(kind, results).values()]

    faults = of("faults-native", "faults-replay")
    soaks = of("soak-native", "soak-native-restores", "soak-replay")
    sections = [
        _section("Faults", _faults(faults), _named(faults)),
        _section("Outcomes of faults", _outcomes(faults), ""),
        _section("Killed processes", _storms(of("storm-native", "storm-replay")), ""),
        _section("Soaks", _soaks(soaks), _growth(soaks)),
        _section("Workloads", _campaigns(summary.kept("campaign", results)), CUT_OFF),
        _section("Drawn programs", _programs(of("programs")), _recorded()),
    ]
    return INTRODUCTION + "".join(text for text in sections)


def _section(title: str, lines: Sequence[str], words: str) -> str:
    if len(lines) <= 2:
        return ""
    return f"\n## {title}\n\n" + "\n".join(lines) + (f"\n\n{words}\n" if words else "\n")


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], right_from: int) -> list[str]:
    rule = ["---" if column < right_from else "---:" for column in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|"]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def _about(document: Document) -> list[str]:
    lane, _, engine = document["lane"].partition(", ")
    when = f"{document['date']} at {(document['commit'] or 'unknown')[:12]}"
    return [lane, engine.replace("restores", "native, mostly restores") or "native", when]


def _count(wrong: Sequence[object]) -> str:
    return f"**{len(wrong)}**" if wrong else "0"


def _faults(documents: Sequence[Document]) -> list[str]:
    rows = [
        [
            *_about(one),
            one["runs"],
            f"{len(one['fired'])} of {len(Fault)}",
            f"{one['seconds']:.0f}",
            _count(one["wrong"]),
        ]
        for one in documents
    ]
    heads = ("lane", "engine", "measured", "runs", "faults that fired", "seconds", "wrong")
    return _table(heads, rows, 3)


def _named(documents: Sequence[Document]) -> str:
    """What of fault.def did not fire in a lane, and the wrong outcomes."""
    lines = []
    for one in documents:
        lane, engine, _ = _about(one)
        missing = [fault for fault in Fault if fault not in one["fired"]]
        if missing:
            names = ", ".join(f"`{fault}`" for fault in missing[:NAMED])
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            lines.append(f"- {lane}, {engine}: never fired, or not tried: {names}{more}.")
        for row in one["wrong"]:
            where = f"`{row['fault']}` in `{row['action']}`, {row['phase']}"
            lines.append(f"- **wrong** on {lane}, {engine}: {where}: {row['verdict']}.")
    return "\n".join(lines)


def _outcomes(documents: Sequence[Document]) -> list[str]:
    counts: Counter[str] = Counter()
    errors: dict[str, set[str]] = {}
    for one in documents:
        for verdict, error, _, count in one["outcomes"]:
            counts[verdict] += count
            errors.setdefault(verdict, set()).update({f"`{error}`"} if error else set())
    rows = [
        [f"*{verdict}*", OUTCOMES[verdict], ", ".join(sorted(errors[verdict])) or "none", count]
        for verdict, count in counts.most_common()
        if verdict in OUTCOMES
    ]
    return _table(("outcome", "what it means", "errors", "runs"), rows, 3)


def _storms(documents: Sequence[Document]) -> list[str]:
    rows = []
    for one in documents:
        of_all, lost = one["of_all"], one["device_bytes_lost"]
        rows.append(
            [
                *_about(one),
                *(one["rounds"], one["hits"], _count(one["wrong"])),
                "not looked at" if lost is None else max(lost, 0),
                f"{of_all['rounds']:,} in {of_all['storms']}",
                *(f"{of_all['hits']:,}", of_all["wrong"]),
            ]
        )
    heads = ("lane", "engine", "newest", "rounds", "hits", "wrong", "device bytes lost")
    return _table((*heads, "rounds of all storms", "hits", "wrong"), rows, 3)


GROWTH = (
    "A straight line is drawn through the last three quarters of the samples. Something grows "
    "where the line gains more than 2 % of their median and four standard errors, and it is no "
    "single step (`tests/faults/soak_page.py`). Looked at are the memory, descriptors and mappings "
    "of each process, device and shared memory, files, and the seconds of a checkpoint."
)


def _growth(documents: Sequence[Document]) -> str:
    lines = [GROWTH]
    for one in documents:
        grows = [key for part in one["parts"].values() for key in part["grows"]]
        if grows and one.get("note"):
            lines += ["", f"- {', '.join(_about(one))}: {one['note']}."]
    return "\n".join(lines)


def _soaks(documents: Sequence[Document]) -> list[str]:
    rows = []
    for one in documents:
        counts = [part["samples"] for part in one["parts"].values()]
        grows = [f"**{key}** ({name})" for name, of in one["parts"].items() for key in of["grows"]]
        rows.append([*_about(one), *counts, one["steps"], f"{one['seconds']:.0f}"])
        rows[-1].append(", ".join(grows) or "nothing")
    heads = ("lane", "engine", "measured", "checkpoints", "dumps and restores", "steps of the job")
    return _table((*heads, "seconds", "what grows"), rows, 3)


CUT_OFF = (
    "*Not to the end*: a workload that the time of its run, or a limit of seconds for a command, "
    "has cut off; its output until then is compared too."
)


def _campaigns(documents: Mapping[str, Document]) -> list[str]:
    found: dict[tuple[str, str, str], list[Document]] = {}
    for machine, one in documents.items():
        for run in one["runs"]:
            way = "goes on" if run["leave_running"] else "ends, is restored"
            found.setdefault((machine, run["engine"], way), []).append(run)
    rows = []
    for key, runs in found.items():
        names = {name for run in runs for name in run["workloads"]}
        dates = sorted({run["date"] for run in runs})
        sums = [sum(run[what] for run in runs) for what in ("dumps", "restores")]
        unfinished = sum(len(run["unfinished"]) for run in runs)
        other = sum(len(run["other_output"]) for run in runs)
        rows.append([*key, f"{dates[0]} to {dates[-1]}", len(names), len(runs), *sums, unfinished])
        rows[-1].append(f"**{other}**" if other else 0)
    heads = ("machine", "engine", "job", "when", "workloads", "rounds", "dumps", "restores")
    return _table((*heads, "not to the end", "other output"), rows, 4)


def _programs(documents: Sequence[Document]) -> list[str]:
    rows = [
        [*_about(one)[::2], row["what"], f"`{row['engine']}`"]
        + [f"{row[key]:,}" for key in ("programs", "calls", "checkpoints")]
        for one in documents
        for row in one["rows"]
    ]
    heads = ("lane", "measured", "checkpoint", "engine", "programs", "calls", "checkpoints")
    return _table(heads, rows, 4)


def _recorded() -> str:
    found = {path: read(path) for path in recordings()}
    of_each = "; ".join(f"{len(of['programs'])} on {of['device']}" for of in found.values())
    return (
        "Every answer was the same. The answers of a real driver are kept for "
        f"{sum(len(of['programs']) for of in found.values())} programs ({of_each}). The emulated "
        "one gives the same answers, but where a library is compiled later."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.page")
    parser.add_argument("--check", action="store_true", help="write nothing")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE.name} is stale: python -m tests.faults.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
