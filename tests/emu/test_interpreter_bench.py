"""The interpreter's speed is measured and kept; nothing here says how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.interpreter import KINDS, ROOT
from tests.patience import SECONDS


def test_every_kind_of_kernel_is_timed_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "interpreter.json"
    words = [sys.executable, "-m", "bench.interpreter", "--small", "--out", str(out)]
    said = subprocess.check_output(words, cwd=ROOT, text=True, timeout=SECONDS)
    document = json.loads(out.read_text())
    assert document["kind"] == "interpreter"
    assert [row["kernel"] for row in document["rows"]] == [kind.name for kind in KINDS]
    assert all(row["elements_per_second"] > 0 for row in document["rows"])
    assert all(f"| `{kind.name}` | 1,024 |" in said for kind in KINDS)
