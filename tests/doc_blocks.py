"""The command blocks of the README and of pages in docs, and how each says that it is run.

A line before a block of commands says which test runs it:

    <!-- runs: emulated -->        tests/emu/test_doc_commands.py, with the other blocks of the page
    <!-- runs: tests/NAME.py -->   that test
    <!-- runs: no, REASON -->      nobody does

In a block, a line that begins with `$ ` is a command, and the lines behind it are what it prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [*PAGES, *ROOT.glob("*.md"), *ROOT.glob("docs/*/*.md"), *ROOT.glob("native/**/README.md")]
BLOCK = re.compile(r"(?ms)(?:^<!-- runs: (.*?) -->\n)?^```(console|sh|bash)\n(.*?)^```$")


@dataclass(frozen=True)
class Block:
    """Commands, and what each prints; `runs` is who runs them, None where nothing says so."""

    page: Path
    runs: str | None
    commands: list[tuple[str, list[str]]]


def blocks(page: Path) -> list[Block]:
    """The blocks of commands of a page, in order."""
    found = []
    for runs, _, text in BLOCK.findall(page.read_text()):
        commands: list[tuple[str, list[str]]] = []
        for line in text.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            elif commands:
                commands[-1][1].append(line)
        found.append(Block(page, runs or None, commands))
    return found
