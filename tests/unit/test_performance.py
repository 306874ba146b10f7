"""docs/performance.md and the README's numbers are what the committed results say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import performance, plots
from bench.fit import straight
from bench.machine import ROOT


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return performance.documents()


def test_the_page_is_what_the_results_say(found: list[dict[str, Any]]) -> None:
    assert performance.PAGE.read_text() == performance.page(found)


def test_the_plots_are_of_these_results(found: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for document in found:
        for drawn, mark in plots.draw(document, tmp_path).items():
            assert mark in (performance.PAGE.parent / drawn.name).read_text(), drawn.name
            assert mark in drawn.read_text()
            assert f"({drawn.name})" in performance.PAGE.read_text()


def test_a_plot_has_the_same_bytes_each_time(found: list[dict[str, Any]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bytes_of = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        drawn = plots.draw(found[0], tmp_path / name)
        bytes_of.append([path.read_bytes() for path in drawn])
    assert bytes_of[0] and bytes_of[0] == bytes_of[1]


def test_the_readme_has_the_newest_results(found: list[dict[str, Any]]) -> None:
    readme = (ROOT / "README.md").read_text().splitlines()
    rows = next(rows for document in found if (rows := performance.readme_rows(document)))
    for row in rows:
        assert row in readme


def run(axis: str, value: int, pause: float) -> dict[str, Any]:
    return {"axis": axis, "value": value, "pause_seconds": pause}


@pytest.fixture
def measured(found: list[dict[str, Any]]) -> dict[str, Any]:
    """All results as one document, with made-up studies."""
    full = {
        "pause_seconds": 1.0,
        "image_bytes": 3 << 30,
        "gpu_bytes_stored": 2 << 30,
        "next_step_seconds": 2.0,
    }
    images = [
        {"step": 1, "written_bytes": 9 << 20},
        {
            "step": 9,
            "written_bytes": 7 << 20,
            "written_cpu_bytes": 2 << 20,
            "active_bytes": 64 << 20,
            "changed_bytes": 4 << 20,
            "changed_cpu_bytes": 1 << 20,
            "new_bytes": 4 << 20,
        },
    ]
    studies = {
        "breakdown": {"jobs": {"gpt2, without zero": [full, {"failed": "no"}]}},
        "periodic": {"jobs": {"lora": [{"images": images}]}},
        "growth": {
            "jobs": {
                f"allocations {count}": [run("allocations", count, pause)]
                for count, pause in ((10, 1.1), (100, 2.0), (200, 3.0), (1000, 30.0))
            }
        },
    }
    # What the first machine has not measured, another one has.
    sections: dict[str, Any] = {}
    for document in reversed(found):
        sections |= document["sections"]
    return found[0] | {"sections": sections | studies}


def test_the_studies_have_their_tables(measured: dict[str, Any], tmp_path: Path) -> None:
    text = performance.page([measured])
    assert "| gpt2, without zero | 1 | 1.00 | 3.00 | 2.00 | 2.00 |" in text
    assert "| lora | 2 | 64.0 | 4.0 | 1.0 | 7.0 | 2.0 | 1.40 | 1.25 |" in text
    assert "| 1000 | 30.00 |" in text
    assert (
        "Linear, to 10 %, up to 200 allocations: 1.00 s and 10 ms for each one. At 1000 it is 2.73"
    ) in text
    drawn = [path.name.rpartition("-")[2] for path in plots.draw(measured, tmp_path)]
    assert drawn == [f"{name}.svg" for name in plots.PLOTS]
    for name in plots.PLOTS:
        assert f"({plots.file_name(measured, name)})" in text


def test_the_parts_measured_alone_have_their_tables(measured: dict[str, Any]) -> None:
    mover = {
        "mode": "registered",
        "threads": 15,
        "piece": 32,
        "streams": 2,
        "bytes": 16 << 30,
        "dump_prep_s": 3.5,
        "out_gbs": 44.0,
        "d2h_gbs": 55.0,
        "done_gbs": 43.21,
    }
    digest = {
        "kernel": "digest",
        "threads_a_chunk": 8,
        "order": "shuffled",
        "read_gbs": 4512.3,
        "written_gbs": 0.0,
        "right": True,
        "seconds": [1.0],
    }
    sections = measured["sections"] | {
        "mover": {"rows": [mover, {"mode": "ring"}]},
        "chunks": {"rows": [digest, {"kernel": "copy", "right": False}]},
        "memstub": {"nanoseconds": {"live_4000": 11.5, "another": [1.0, 3.0, 9.0]}},
        "mover_variants": {"table": ["17.2 GB, 15 threads", "dump ring  51.20"]},
    }
    text = performance.page([measured | {"sections": sections}])
    assert "| registered | 15 | 32 | 2 | 16.0 | 3.50 | 44.0 (80%) | 43.2 | - |" in text
    assert "| ring | - | - | - | - | - | - | - | - |" in text
    assert "| digest | 8 | shuffled | 4512 | 0 | yes |" in text
    assert "| copy | - | - | - | - | **no** |" in text
    assert "| 4,000 blocks in use | 11.5 |" in text
    assert "| another | 3.0 |" in text
    assert "```\n17.2 GB, 15 threads\ndump ring  51.20\n```" in text


def test_a_plot_is_marked_with_what_it_shows_alone(measured: dict[str, Any]) -> None:
    before = {name: plots.mark(measured, name) for name in plots.PLOTS}
    changed = measured | {"sections": measured["sections"] | {"growth": {"jobs": {}}}}
    after = {name: plots.mark(changed, name) for name in plots.PLOTS}
    assert [name for name in before if before[name] != after[name]] == ["growth"]


def test_what_was_not_measured_has_no_heading(measured: dict[str, Any]) -> None:
    for name, heading in (
        ("breakdown", "Each reduction"),
        ("growth", "Pause against"),
        ("periodic", "Repeated images"),
        ("overhead", "Step time"),
    ):
        assert heading in performance.page([measured])
        sections = {key: value for key, value in measured["sections"].items() if key != name}
        without = performance.page([measured | {"sections": sections}])
        assert heading not in without and f"-{name}.svg" not in without
    none = {key: measured[key] for key in ("gpu", "machine", "date")} | {"sections": {}}
    assert "###" not in performance.page([none])


def test_a_line_ends_where_points_leave_it() -> None:
    line = straight([(1, 1.0), (2, 2.0), (3, 3.0), (4, 8.0)])
    assert line is not None
    assert (line.until, line.beyond) == (3, (4, 8.0))
    assert line.slope == pytest.approx(1)
    whole = straight([(1, 1.0), (2, 2.05), (3, 3.0)])
    assert whole is not None and whole.beyond is None
    assert straight([(1, 1.0), (2, 4.0), (3, 1.0)]) is None
