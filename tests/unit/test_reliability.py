"""docs/reliability.md is what the committed results say, and the fault matrix covers fault.def."""

from __future__ import annotations

import pytest

from flowgpu.wire import Fault
from tests.faults import matrix, page, soak_page, storm, storm_page

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


STORM = DOCUMENT | {
    "device_bytes_lost": 0,
    "rows": [
        {"seed": seed, "action": "restore", "target": "ghost", "error": "", "verdict": verdict}
        for seed, verdict in enumerate(["not hit", "goes on", "Wrong: a process is left"])
    ],
}


def test_the_page_and_its_plots_are_what_the_results_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["page", "--check"])
    assert page.main() == 0


def test_a_storm_shows_what_went_wrong() -> None:
    text = page.page([], [STORM])
    assert "| restore | ghost | 1 | 1 | **1** |" in text
    assert "3 rounds, in 2 of which" in text
    assert "- **wrong**, round 2: Wrong: a process is left" in text
    assert set(storm_page.OUTCOMES) == set(storm.VERDICTS)


@pytest.mark.parametrize(
    ("key", "values", "wanted"),
    [
        ("task_rss", [5.0] * 100, False),
        ("task_rss", [float(n % 7) for n in range(100)], False),
        ("task_rss", [100.0 + (50.0 if n < 20 else 80.0) for n in range(100)], False),  # at first
        ("task_rss", [1000.0 + 1.0 * n for n in range(100)], True),
        ("task_rss", [1000.0 + 1.0 * n + 20 * (n % 3) for n in range(100)], True),
        ("task_rss", [1e6 + 1.0 * n for n in range(100)], False),  # less than can matter
        ("task_rss", [1000.0 - 1.0 * n for n in range(100)], False),
        ("task_rss", [1000.0 + 100 * (n > 60) for n in range(100)], False),  # once
        ("task_rss", [1000.0 + 10 * (n // 5) for n in range(100)], True),
        ("task_fds", [10.0 + (n > 60) for n in range(100)], True),  # one more is one too many
    ],
)
def test_a_soak_tells_growth_from_noise(key: str, values: list[float], wanted: bool) -> None:
    samples = [{key: value} for value in values]
    assert soak_page.growth_of(samples, key)[1] is wanted
    assert soak_page.grows(samples) == [key] * wanted


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
