"""Make docs/reliability.md from the newest fault matrix, kill storm and soak of each lane in
bench/results.

    python -m tests.faults.page            write the page
    python -m tests.faults.page --check    fail if the page is not what would be written

Only what has run is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.machine import ROOT
from flowgpu.wire import Fault
from tests.faults import programs_page, soak_page, storm_page
from tests.faults.source import source

RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "reliability.md"
DUMP_PHASES = (
    "prepare",
    "gate",
    "handover",
    "strip",
    "capture",
    "commit",
    "kill",
    "wake",
    "mapback",
    "open",
    "release",
)
RESTORE_STEPS = ("criu", "fill", "engine", "rebuild", "mapback", "open")
OUTCOMES = {
    "goes on": "the checkpoint failed with a named error and the job went on as an undisturbed one "
    "does: no image, no process, no descriptor, no socket, file or shared memory was left, and a "
    "second try succeeded",
    "mended": "the command succeeded all the same, because the step was tried again or the fault "
    "does no harm there: the image verifies, the job goes on, from it after `pause-and-dump`; "
    "commands that came in between were refused",
    "ended": "a task was killed: the checkpoint failed with a named error, or its image verifies, "
    "and the job is known as ended, or goes on with the other task",
    "nothing left": "the restore failed with a named error before anything of the job ran: no "
    "process was left, the image verifies, and a second try succeeded (not tried where the fault "
    "is the task's: it is in the image)",
    "taken over": "the coordinator was killed: the command said so, and another one has the job, "
    "which went on as an undisturbed one does: nothing was left, but a whole image where COMMIT "
    "was over, and a second try succeeded",
    "dumped, restored": "the coordinator was killed when the image of `pause-and-dump` was whole: "
    "the command said so, the job is known as dumped, and went on from its image",
    "ran, was ended": "the restore failed when a gate had been asked to open: the job may have run "
    "for a moment before it was ended; the rest as in *nothing left*",
}
Document = dict[str, Any]

INTRODUCTION = """# Reliability

Made by `make fault-matrix`, `make kill-storm`, `make soak` and `make test-programs`; do not edit.

*Faults*: each of `native/include/flowgpu/fault.def` is let fire at its first pass, its second and
so on until it fires no more: in `pause-and-dump`, in `pause-and-dump --leave-running` and in
`restore`, of a job of one task and of a job of two (`tests/faults/matrix.py`; what of that does not
differ is tried once, see `tests/faults/points.py`). A cell counts the runs in which the fault fired
in that phase, or made it fail; bold are those with a wrong outcome. A task, the ghost, the page
server and the coordinator are killed at the beginning of each phase in which they are there
(`phase_task`, `phase_ghost`, `phase_pages`, `phase_coordinator`; the coordinator stands still
meanwhile). What CRIU itself writes is met by a full disk (`phase_disk`) alone. *Killed processes*:
the same commands, with `kill -9` of these, of CRIU, filler, command and keeper at a drawn moment;
`docs/limits.md` says in which of them a job may be lost. *Soak*: one job, again and again. *Drawn
programs*: driver calls, with checkpoints between them.
"""


def documents(kind: str = "faults", folder: Path = RESULTS) -> list[Document]:
    """The newest of its kind of each lane, with those `before` it."""
    newest: dict[str, Document] = {}
    for path in sorted(folder.glob(f"*-{kind}.json")):
        document = json.loads(path.read_text())
        last = newest.get(document["lane"], {"before": []})
        before = [*last["before"], last] if "file" in last else []
        newest[document["lane"]] = document | {"file": path.name, "before": before}
    return [newest[lane] for lane in sorted(newest)]


def page(
    faults: Sequence[Document],
    storms: Sequence[Document] = (),
    soaks: Sequence[Document] = (),
    programs: Sequence[Document] = (),
) -> str:
    """The whole page."""
    sections = [
        *map(_one, faults),
        *map(storm_page.section, storms),
        *map(soak_page.section, soaks),
        *map(programs_page.section, programs),
    ]
    return INTRODUCTION + "".join("\n" + text for text in sections)


def _one(document: Document) -> str:
    rows = document["rows"]
    restores = [row for row in rows if row["action"] == "restore"]
    dumps = [row for row in rows if row["action"] != "restore"]
    fired = {row["fault"] for row in rows}
    left_out: dict[str, list[str]] = {}
    for action, tasks, fault in document.get("left_out", ()):
        how = f"No time was left for `{action}`, {tasks} task{'s' * (tasks > 1)}"
        left_out.setdefault(how, []).append(fault)
    late = {fault for faults in left_out.values() for fault in faults}
    named = {
        "Never fired": [f for f in document["faults"] if f not in fired | late],
        "Not tried": [fault for fault in Fault if fault not in document["faults"]],
        **left_out,
    }
    parts = [
        f"## Faults, lane {document['lane']}, {document['date']}",
        f"{source(document)}: {len(rows)} runs with a fault in {document['seconds']:.0f} s.",
        *(f"{how}: {_names(faults)}." for how, faults in named.items() if faults),
        *_table("Checkpoints, by phase", dumps, DUMP_PHASES),
        *_table("Restores, by step", restores, RESTORE_STEPS),
        "### Outcomes",
        _outcomes(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _names(faults: Sequence[str]) -> str:
    return ", ".join(f"`{fault}`" for fault in faults)


def _table(title: str, rows: Sequence[dict[str, Any]], order: Sequence[str]) -> list[str]:
    if not rows:
        return []
    phases = sorted({row["phase"] for row in rows}, key=order.index)
    lines = [f"| fault | {' | '.join(phases)} |", f"|---|{'---:|' * len(phases)}"]
    for fault in dict.fromkeys(row["fault"] for row in rows):
        cells = []
        for phase in phases:
            here = [row for row in rows if (row["fault"], row["phase"]) == (fault, phase)]
            wrong = sum(row["verdict"] not in OUTCOMES for row in here)
            cells.append((f"{len(here)}" if here else "") + (f", **{wrong}**" if wrong else ""))
        lines.append(f"| `{fault}` | {' | '.join(cells)} |")
    return [f"### {title}", "\n".join(lines)]


def _outcomes(rows: Sequence[dict[str, Any]]) -> str:
    counts = Counter((row["verdict"], row["error"], row["exit_code"]) for row in rows)
    lines = ["| outcome | error | exit code | runs |", "|---|---|---:|---:|"]
    for (verdict, error, code), count in sorted(counts.items()):
        shown = verdict if verdict in OUTCOMES else f"**{verdict}**"
        lines.append(f"| {shown} | {f'`{error}`' if error else 'none'} | {code} | {count} |")
    met = [verdict for verdict in OUTCOMES if any(row["verdict"] == verdict for row in rows)]
    return "\n".join([*lines, "", *(f"- *{verdict}*: {OUTCOMES[verdict]}." for verdict in met)])


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.faults.page")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    soaks = documents("soak")
    text = page(documents(), documents("storm"), soaks, documents("programs"))
    plots = {PAGE.parent / soak_page.plot_name(soak): soak_page.mark(soak) for soak in soaks}
    if not options.check:
        PAGE.write_text(text)
        for soak in soaks:
            soak_page.draw(soak, PAGE.parent)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        print(f"{PAGE.name} is stale: python -m tests.faults.page", file=sys.stderr)
        return 1
    elif stale := [path.name for path, mark in plots.items() if mark not in _text(path)]:
        print(f"{stale[0]} is stale: python -m tests.faults.page", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
