"""The commands of README and tutorial do what the pages say, on the emulated GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import PAGES, ROOT, blocks
from tests.emu.test_cli_end_to_end import FLOWGPU, SECONDS, runtime_dir

__all__ = ["runtime_dir"]
MARK = "=== command"
# What differs from run to run: numbers with their units, ids, bars; and folders.
CHANGING = re.compile(r"\b[0-9a-f]{12,}\b|\b\d[\d.,]*( (GiB|MiB|KiB|ms|s))?(?![\w])|[#█]+")


def shape(line: str) -> list[str]:
    """The words of a line, without what differs from run to run."""
    return CHANGING.sub("#", re.sub(r"/\S*/", "", line)).split()


@pytest.mark.timeout(6 * SECONDS)  # all commands of a page, one after the other
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.runs == "emulated" for block in blocks(page))],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    commands = [c for block in blocks(page) if block.runs == "emulated" for c in block.commands]
    (tmp_path / "workloads").symlink_to(ROOT / "workloads")
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    python = f'exec {sys.executable} "$@"\n'
    for name, text in {
        "flowgpu": " ".join(["exec", *FLOWGPU, '"$@"']),
        "python": python,
        "make": f"[ $1 = demo ] && cd {ROOT} && exec {sys.executable} -m workloads.demo",
    }.items():
        (bin_dir / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_dir / name).chmod(0o755)
    script = "".join(f"echo '{MARK}'\n{command}\n" for command, _ in commands)
    environment = os.environ | {"PATH": f"{bin_dir}:{os.environ['PATH']}", "COLUMNS": "160"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=5 * SECONDS,
    )
    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(commands), done.stderr
    for (command, shown), found in zip(commands, printed, strict=True):
        lines = [shape(line) for line in found.splitlines()]
        for line in shown:
            if line.strip() not in ("", "..."):
                assert shape(line) in lines, (command, line, found, done.stderr)
