"""The tables and the chart of a results file, from made-up results; and how results are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import bench, report

RUN = {
    "pause_seconds": 2.0,
    "phases": {
        "prepare": 5.0,
        "gate": 0.1,
        "handover": 0.1,
        "strip": 0.3,
        "copy": 1.5,
        "criu": 0.9,
        "commit": 0.2,
        "end": 0.1,
    },
    "image_bytes": 3 << 30,
    "cpu_bytes": 1 << 30,
    "restore_seconds": 1.8,
    "restore_phases": {
        "verify": 0.2,
        "criu": 0.5,
        "ghost": 0.6,
        "copy": 0.4,
        "engine": 0.2,
        "mapback": 0.1,
    },
    "next_step_seconds": 2.1,
    "dump_copy_gbs": 40.0,
    "restore_copy_gbs": 25.0,
    "identical": True,
}
PEER = {
    "pause_seconds": 9.0,
    "phases": {"lock": 0.0, "checkpoint": 4.0, "criu": 4.9, "end": 0.1},
    "image_bytes": 9 << 30,
    "restore_seconds": 5.0,
    "restore_phases": {"criu": 3.0, "restore": 2.0, "unlock": 0.0},
    "next_step_seconds": 5.2,
    "identical": True,
}


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "format": 1,
        "date": "2026-01-02",
        "commit": "0123456789abcdef",
        "gpu": {"gpu": "Made-up GPU", "gpu_memory_bytes": 80 << 30},
        "machine": {
            "cpu": "Some CPU",
            "cores": 16,
            "memory_bytes": 128 << 30,
            "kernel": "6.1",
            "driver": "580.1",
            "criu": "4.2",
        },
        "sections": {
            "rates": {"d2h_gbs_median": 50.0, "h2d_gbs_median": 50.0},
            "flowgpu": {"jobs": {"gpt2": [RUN, RUN | {"pause_seconds": 4.0}, {"failed": "no"}]}},
            "peer": {"jobs": {"gpt2": [PEER]}},
            "overhead": {
                "jobs": {
                    "gpt2": {
                        "pairs": [{"plain": 0.020, "flowgpu": 0.021, "ratio": 1.05}],
                        "ratio_mean": 1.05,
                        "ratio_min": 1.05,
                        "ratio_max": 1.05,
                        "parts": {
                            "intercept": {
                                "pairs": [{"plain": 0.020, "flowgpu": 0.0202, "ratio": 1.01}],
                                "ratio_mean": 1.008,
                                "ratio_min": 1.006,
                                "ratio_max": 1.010,
                                "ratio_low": 1.004,
                                "ratio_high": 1.012,
                            }
                        },
                        "plain_stdev": 0.004,
                    }
                }
            },
        },
    }


def rows(text: str, start: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {start} ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_system_that_never_succeeded_says_why(document: dict[str, Any]) -> None:
    said = "bench.peer ended with 1: Traceback\nflowgpu.errors.CriuUnsupported: it holds a device."
    document["sections"]["peer"]["jobs"]["gpt2"] = [{"failed": "before"}, {"failed": said}]
    document["sections"]["peer_torch_save"] = {
        "jobs": {"gpt2": [{"failed": "it ended with 70: Error: no room.\nhint: Make some.\n"}]}
    }
    rows = [row for row in report.checkpoint_table(document) if "| 0 |" in row]
    assert [row.split(" | ")[3] for row in rows] == [
        "failed: it holds a device.",
        "failed: no room.",
    ]
    assert {row.count("|") for row in report.checkpoint_table(document)} == {12}


def test_the_table_has_medians_of_the_runs_that_succeeded(document: dict[str, Any]) -> None:
    ours, peer, overhead, part = rows(report.tables(document), "gpt2")
    numbers = "2 | 3.00 | 0.90 | 3.00 | 1.00 | 2.10 | 40.0 (80%) | 25.0 (50%) | yes"
    assert ours == ["gpt2", "FlowGPU", *numbers.split(" | ")]
    numbers = "1 | 9.00 | 4.90 | 9.00 | - | 5.20 | - | - | yes"
    assert peer == ["gpt2", "NVIDIA API + CRIU", *numbers.split(" | ")]
    numbers = "1 | 20.000 | 21.000 | 1.0500 | - | 1.0500 | 1.0500 | - | 0.40 % | now"
    assert overhead == ["gpt2", "flowgpu run", *numbers.split(" | ")]
    numbers = "1 | 20.000 | 20.200 | 1.0080 | 1.0040 to 1.0120 | 1.0060 | 1.0100 | open | - | now"
    assert part == ["gpt2", "intercept library alone", *numbers.split(" | ")]


@pytest.mark.parametrize(
    ("interval", "word"), [((0.99, 1.0099), "yes"), ((1.0101, 1.2), "**no**"), ((0.9, 1.2), "open")]
)
def test_the_interval_says_whether_a_step_is_slower(
    interval: tuple[float, float], word: str, document: dict[str, Any]
) -> None:
    found = document["sections"]["overhead"]["jobs"]["gpt2"]
    found["ratio_low"], found["ratio_high"] = interval
    assert rows(report.tables(document), "gpt2")[2][-3] == word


def test_a_call_has_its_nanoseconds_by_threads(document: dict[str, Any]) -> None:
    document["sections"]["calls"] = {"nanoseconds": {"cuLaunchKernel": {"1": 1.66, "8": 1.7}}}
    assert "| call | 1 thread | 8 threads |" in report.tables(document)
    assert rows(report.tables(document), "cuLaunchKernel") == [["cuLaunchKernel", "1.7", "1.7"]]


def test_a_run_that_printed_other_lines_shows(document: dict[str, Any]) -> None:
    document["sections"]["flowgpu"]["jobs"]["gpt2"][1]["identical"] = False
    assert rows(report.tables(document), "gpt2")[0][-1] == "**no**"


def test_the_hardware_is_named(document: dict[str, Any]) -> None:
    first = report.tables(document).splitlines()[0]
    for word in ("Made-up GPU (80 GiB)", "16 cores of Some CPU", "driver 580.1"):
        assert word in first


@pytest.mark.parametrize("run", [RUN, PEER], ids=["flowgpu", "peer"])
@pytest.mark.parametrize(
    ("what", "key"), [("pause", "pause_seconds"), ("restore", "next_step_seconds")]
)
def test_the_parts_of_a_bar_are_the_whole(run: dict[str, Any], what: str, key: str) -> None:
    found = report.parts(run, what)
    assert sum(found.values()) == pytest.approx(run[key])
    assert set(found) <= set(report.COLORS)


def test_a_copy_shows_only_as_far_as_others_do_not_hide_it() -> None:
    assert report.parts(RUN, "pause")["copy"] == pytest.approx(2.0 - 1.7)
    assert report.parts(RUN, "restore")["copy"] == pytest.approx(0.6 + 0.4 - 0.7)
    hidden = RUN | {"pause_seconds": 1.7}
    assert report.parts(hidden, "pause")["copy"] == pytest.approx(0, abs=1e-9)


def test_the_chart_is_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.chart(document, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_later_call_keeps_the_other_jobs_and_sections(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    keep = bench.keeper(bench.load(path), path, ["--only", "flowgpu", "--output", str(path)])
    keep("flowgpu", {"jobs": {"a": [1], "b": [2]}})
    keep = bench.keeper(bench.load(path), path, [])
    keep("flowgpu", {"jobs": {"b": [3]}})
    keep("peer", {"jobs": {"a": [4]}})
    sections = json.loads(path.read_text())["sections"]
    assert sections["flowgpu"]["jobs"] == {"a": [1], "b": [3]}
    assert sections["peer"]["jobs"] == {"a": [4]}


def test_the_recorded_command_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    words = ["--only", "rates", "--output", str(path), f"--images={tmp_path}", "--repeats", "2"]
    bench.keeper(bench.load(path), path, words)("rates", {})
    commands = json.loads(path.read_text())["sections"]["rates"]["commands"]
    assert commands == [["bench/bench.py", "--only", "rates", "--repeats", "2"]]


def test_results_of_another_format_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"format": 2, "sections": {}}')
    with pytest.raises(SystemExit, match="format"):
        bench.load(path)
