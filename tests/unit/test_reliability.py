"""docs/reliability.md is what the committed results say, and the fault matrix covers fault.def."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import summary
from flowgpu.wire import Fault
from tests.emu.program_results import Count, keep
from tests.faults import matrix, page, soak_page

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
    "kind": "faults",
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
    "kind": "storm",
    "device_bytes_lost": 0,
    "rows": [
        {"seed": seed, "action": "restore", "target": "ghost", "error": "", "verdict": verdict}
        for seed, verdict in enumerate(["not hit", "goes on", "Wrong: a process is left"])
    ],
}


def page_of(folder: Path, *documents: dict[str, Any]) -> str:
    """The page of results that are these."""
    for number, document in enumerate(documents):
        raw = folder / f"{number}.json"
        raw.write_text(json.dumps(document))
        summary.write(raw, folder / "results")
    return page.page(folder / "results")


def test_the_page_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["page", "--check"])
    assert page.main() == 0


def test_a_matrix_goes_on_with_what_an_earlier_one_did_not_try() -> None:
    early = DOCUMENT | {"left_out": [["restore", 2, "strip"], ["restore", 2, "gate"]]}
    later = DOCUMENT | {"command": "another", "left_out": [], "rows": [ROW | {"tasks": 2}]}
    whole = matrix.together(early, later)
    assert [row["tasks"] for row in whole["rows"]] == [1, 1, 2]
    assert (whole["command"], whole["seconds"], whole["left_out"]) == (
        "a command && another",
        6.4,
        [],
    )
    assert whole["commit"] == DOCUMENT["commit"]
    of_two = matrix.together(early, later | {"commit": "1234"})["commit"]
    assert of_two == f"{DOCUMENT['commit']}, the last 1 runs at 1234"
    with pytest.raises(matrix.Wrong, match="another kernel"):
        matrix.together(early, later | {"machine": later["machine"] | {"kernel": "5.4"}})


def test_a_storm_shows_what_went_wrong_and_storms_of_a_lane_are_added_up(tmp_path: Path) -> None:
    row = "| fakes | native | 2026-01-01 at unknown | 3 | 2 | **1** | 0 |"
    assert f"{row} 3 in 1 | 2 | 1 |" in page_of(tmp_path, STORM)
    assert f"{row} 3 in 1 | 2 | 1 |" in page_of(tmp_path, STORM)  # the same one again
    assert f"{row} 6 in 2 | 4 | 2 |" in page_of(tmp_path, STORM | {"seconds": 4.0})
    assert "not looked at" in page_of(tmp_path, STORM | {"device_bytes_lost": None})


def test_programs_that_were_compared_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = Count()
    count.add([["begin_capture"], ["launch"]], ["begin_capture", "launch"])
    keep("at a drawn step", "native", count, 3)  # no file is named
    monkeypatch.setenv("FLOWGPU_PROGRAMS_OUT", str(tmp_path / "emulated-programs.json"))
    keep("at a drawn step", "native", count, 3)
    keep("at a drawn step", "replay", count, 4)
    count.add([["alloc"]] * 7, ["alloc"])
    keep("at a drawn step", "native", count, 5)
    (file,) = tmp_path.iterdir()
    summary.write(file, tmp_path / "results")
    text = page.page(tmp_path / "results")
    assert "| at a drawn step | `replay` | 1 | 2 | 4 |" in text
    assert "| at a drawn step | `native` | 2 | 9 | 5 |" in text


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


@pytest.mark.parametrize(
    ("of_job", "of_new", "wanted"),
    [
        ([1.0 + n / 50 for n in range(40)], [1.0 + n / 50 for n in range(40)], []),
        ([1.2] * 40, [1.0] * 40, ["seconds"]),
        ([1.01] * 40, [1.0] * 40, []),  # less than can matter
        ([1.0, 1.5] * 20, [1.5, 1.0] * 20, []),
    ],
)
def test_seconds_of_a_soak_grow_where_a_new_job_takes_less(
    of_job: list[float], of_new: list[float], wanted: list[str]
) -> None:
    samples = [{"seconds": 1.0 + n / 50, "task_fds": n} for n in range(40)]
    turns = [
        {
            "soak": {"seconds": a, "pause_seconds": 1.0},
            "soak-new": {"seconds": b, "pause_seconds": 1.0},
        }
        for a, b in zip(of_job, of_new, strict=True)
    ]
    parts = {"checkpoint": samples, soak_page.RESTORES: samples}
    found = soak_page.grown({"parts": parts, "in_turn": turns})
    assert found["checkpoint"] == ["seconds", "task_fds"]
    assert found[soak_page.RESTORES] == [*wanted, "task_fds"]
    assert soak_page.grown({"parts": parts})[soak_page.RESTORES] == ["seconds", "task_fds"]


def test_what_is_wrong_and_what_never_fired_is_shown(tmp_path: Path) -> None:
    text = page_of(tmp_path, DOCUMENT)
    assert f"| fakes | native | 2026-01-01 at unknown | 2 | 1 of {len(Fault)} | 3 | **1** |" in text
    assert "- **wrong** on fakes, native: `gate` in `pause-and-dump`, gate: left: proc" in text
    assert "never fired, or not tried: `prepare`, `export`" in text


@pytest.mark.parametrize(
    ("kind", "other_engine"),
    [
        # The last run with this engine was before its pages were copied by the page server.
        ("faults-native", {Fault.LOOK_DIES, Fault.LOOK_UNTOLD}),
        # The ghost asks the driver for a checkpoint by the engine native alone.
        ("faults-replay", {Fault.GHOST_CHECKPOINT}),
    ],
)
def test_every_fault_has_fired_on_the_real_parts(kind: str, other_engine: set[Fault]) -> None:
    fired = summary.kept(kind)["emulated"]["fired"]
    assert set(Fault) - set(fired) <= other_engine
    assert {action for actions in fired.values() for action in actions} == set(matrix.ACTIONS)


def test_the_page_knows_every_right_outcome() -> None:
    assert set(page.OUTCOMES) == set(matrix.RIGHT)
