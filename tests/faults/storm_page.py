"""The section of docs/reliability.md about a kill storm."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.faults.source import source

Document = dict[str, Any]
OUTCOMES = {
    "not hit": "the process was not there, or no more; the command succeeded",
    "goes on": "the job counts on without a gap. A checkpoint has failed by one named error and "
    "left no image, or has a whole one; a restore was finished all the same",
    "dumped, restored": "the job was dumped; its image is whole and was restored",
    "nothing left, restored": "the restore failed by one named error and left no process; the "
    "image is whole and was restored",
    "ended": "a task was killed, or, until 2026-11-25, died with CRIU, and the job is known as "
    "ended or goes on without it; where an image was written it is whole and was restored",
    "lost": "the job has no coordinator (or none was started, where the command was killed): `ps` "
    "says so, no helper is left, `flowgpu kill` ends the rest; where an image was written it is "
    "whole and was restored",
}


def section(document: Document) -> str:
    rows = document["rows"]
    wrong = _wrong(rows)
    lost = document["device_bytes_lost"]
    left = "not looked at, others used the GPU" if lost is None else f"{lost} bytes"
    parts = [
        f"## Killed processes, lane {document['lane']}, {document['date']}",
        f"{source(document)}: in "
        f"{document['seconds']:.0f} s {len(rows)} rounds, in {_hits(rows)} of which `kill -9` "
        "hit a process of the command at a drawn moment of it, or just after "
        "(`tests/faults/storm.py`). "
        f"{len(wrong) or 'None'} of them had a wrong outcome. Device memory that was not free "
        f"again at the end: {left}.",
        *_all(document),
        _table(document),
        "\n".join(
            f"- *{verdict}*: {words}."
            for verdict, words in OUTCOMES.items()
            if any(row["verdict"] == verdict for row in rows)
        ),
        *(["\n".join(f"- **wrong**, round {row['seed']}: {row['verdict']}" for row in wrong)]
          if wrong else []),
        _errors(rows),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _wrong(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["verdict"] not in OUTCOMES]


def _hits(rows: list[dict[str, Any]]) -> int:
    return sum(row["verdict"] != "not hit" for row in rows)


def _all(document: Document) -> list[str]:
    """What the storms of this lane come to, where there is more than one."""
    if not document.get("before"):
        return []
    rows = [row for storm in (*document["before"], document) for row in storm["rows"]]
    files = ", ".join(f"`{storm['file']}`" for storm in document["before"])
    return [
        f"With earlier storms of this lane ({files}): {len(rows)} rounds, {_hits(rows)} hits, "
        f"{len(_wrong(rows))} of them with a wrong outcome."
    ]


def _table(document: Document) -> str:
    rows = document["rows"]
    met = [verdict for verdict in OUTCOMES if any(row["verdict"] == verdict for row in rows)]
    lines = [
        f"| command | killed | {' | '.join(met)} | wrong |",
        f"|---|---|{'---:|' * (len(met) + 1)}",
    ]
    counts = Counter(
        (row["action"], row["target"], row["verdict"] if row["verdict"] in OUTCOMES else "wrong")
        for row in rows
    )
    for action, target in sorted({(row["action"], row["target"]) for row in rows}):
        cells = [str(counts[action, target, verdict] or "") for verdict in (*met, "wrong")]
        cells[-1] = f"**{cells[-1]}**" if cells[-1] else ""
        lines.append(f"| {action} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["error"] for row in rows if row["error"])
    named = ", ".join(f"`{error}` {count}" for error, count in sorted(counts.items()))
    return f"Errors that the commands ended with: {named or 'none'}."
