"""The section of docs/reliability.md about drawn programs of driver calls."""

from __future__ import annotations

from typing import Any

from tests.emu.record_programs import read, recordings
from tests.faults.source import source

Document = dict[str, Any]


def section(document: Document) -> str:
    """Programs and calls by test, and how many a real GPU has answered."""
    rows = document["rows"]
    themes = sorted({theme for row in rows for theme in row["themes"]})
    lines = [
        f"| checkpoint | engine | programs | calls | checkpoints | {' | '.join(themes)} |",
        f"|---|---|---:|---:|---:|{'---:|' * len(themes)}",
    ]
    for row in rows:
        counts = (row["programs"], row["calls"], row["checkpoints"])
        cells = [*counts, *(row["themes"].get(theme, 0) for theme in themes)]
        words = " | ".join(f"{cell:,}" for cell in cells)
        lines.append(f"| {row['what']} | `{row['engine']}` | {words} |")
    recorded = {path: read(path) for path in recordings()}
    of_each = "; ".join(
        f"`tests/emu/{path.name}`: {len(of['programs'])}, {of['device']}"
        for path, of in recorded.items()
    )
    parts = [
        f"## Drawn programs, lane {document['lane']}, {document['date']}",
        f"{source(document)}. Each is a program of driver calls that hypothesis has drawn "
        "(`tests/emu/program_gen.py`), right and wrong ones, mostly about one theme; it runs on "
        "the bare driver and behind the intercept library with checkpoints in it. Every answer "
        "was the same.",
        "\n".join(lines),
        f"Of a real driver the answers to {sum(len(of['programs']) for of in recorded.values())} "
        f"programs are kept ({of_each}); the emulated one gives the same, but where a library is "
        "compiled later (`tests/emu/test_programs.py`).",
    ]
    return "\n\n".join(parts) + "\n"
