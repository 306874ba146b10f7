"""How many drawn programs were compared: rows of a results file, for docs/reliability.md.

Written where $FLOWGPU_PROGRAMS_OUT names a file, by tests that have found no difference; the next
run of the same test writes its row anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from tests.emu.program_gen import THEMES, names_of

OUT = "FLOWGPU_PROGRAMS_OUT"


@dataclass
class Count:
    """One test's programs, their calls of the driver, and how many are mostly of each theme."""

    programs: int = 0
    calls: int = 0
    themes: Counter[str] = field(default_factory=Counter)

    def add(self, program: Sequence[Sequence[Any]], drawn: Sequence[str]) -> None:
        """`drawn`: names of the steps that it was built of."""
        self.programs += 1
        self.calls += len(program)
        fits = {theme: sum(name in names_of(theme) for name in drawn) for theme in sorted(THEMES)}
        self.themes[max(fits, key=fits.__getitem__)] += 1


def keep(what: str, engine: str, count: Count, checkpoints: int) -> None:
    """Add the row of a test that has passed to the file, if one is named."""
    if not (name := os.environ.get(OUT)):
        return
    row = {
        "what": what,
        "engine": engine,
        "programs": count.programs,
        "calls": count.calls,
        "themes": dict(sorted(count.themes.items())),
        "checkpoints": checkpoints,
    }
    with Path(name).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or '{"rows": []}')
        others = [r for r in before["rows"] if (r["what"], r["engine"]) != (what, engine)]
        command = (
            f"FLOWGPU_PROGRAMS={os.environ.get('FLOWGPU_PROGRAMS', '')} {OUT}={name} "
            "python -m pytest tests/emu/test_programs.py"
        )
        document = machine.heading("programs", command) | {
            "lane": "emulated",
            "rows": [*others, row],
        }
        file.truncate(0)
        file.write(json.dumps(document, indent=1) + "\n")
