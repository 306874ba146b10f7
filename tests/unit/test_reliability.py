"""docs/reliability.md is what the committed fault matrix says, and that covers fault.def."""

from __future__ import annotations

from flowgpu.wire import Fault
from tests.faults import matrix, page

ROW = {
    "fault": "gate",
    "nth": 1,
    "action": "pause-and-dump",
    "tasks": 1,
    "phase": "gate",
    "exit_code": 73,
    "error": "CheckpointFailed",
    "verdict": "goes on",
    "seconds": 1.0,
}
DOCUMENT = {
    "lane": "fakes",
    "date": "2026-01-01",
    "command": "a command",
    "commit": None,
    "machine": {"cores": 2, "kernel": "6", "criu": "4.1"},
    "seconds": 3.2,
    "faults": ["gate", "strip"],
    "rows": [ROW, ROW | {"verdict": "left: processes [7]"}],
}


def test_the_page_is_what_the_results_say() -> None:
    assert page.PAGE.read_text() == page.page(page.documents())


def test_what_is_wrong_and_what_never_fired_is_shown() -> None:
    text = page.page([DOCUMENT])
    assert "| `gate` | 2, **1** |" in text
    assert "| **left: processes [7]** | `CheckpointFailed` | 73 | 1 |" in text
    assert "Never fired: `strip`." in text


def test_every_fault_has_fired_on_the_real_parts() -> None:
    (document,) = [one for one in page.documents() if one["lane"] == "emulated"]
    assert {row["fault"] for row in document["rows"]} == set(Fault)
    assert {row["action"] for row in document["rows"]} == set(matrix.ACTIONS)
    assert set(page.OUTCOMES) == set(matrix.RIGHT)
