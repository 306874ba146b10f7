"""bench/results keeps one small summary of each machine and kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import summary


def test_the_kept_results_are_small_and_one_of_each_machine_and_kind() -> None:
    assert summary.too_large() == []


@pytest.mark.parametrize(
    ("name", "size", "wrong"),
    [
        ("nvidia-h100/faults-native.json", 50_001, "has 50001 bytes"),
        ("nvidia-h100-2026-11-26-faults.json", 10, "has a date in its name"),
        ("faults.json", 10, "is no <machine>/<kind>.json"),
    ],
)
def test_rows_in_the_results_are_found(name: str, size: int, wrong: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    assert any(wrong in found for found in summary.too_large(tmp_path))


def test_results_may_not_grow_without_end(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"machine-{number}").mkdir()
        (tmp_path / f"machine-{number}" / "bench.json").write_bytes(b"x" * 50_000)
    assert summary.too_large(tmp_path) == ["all of it has 1050000 bytes"]


def support(date: str, **outcomes: tuple[str, str]) -> dict[str, Any]:
    about = {"kind": "support", "engine": "replay", "gpu": "NVIDIA H200", "date": date}
    return about | {"driver": "580", "command": "a", "commit": date, "outcomes": outcomes}


def test_measurements_of_several_jobs_stand_beside_each_other(tmp_path: Path) -> None:
    def of_ranks(most: int, pause: int) -> list[dict[str, int]]:
        return [{"ranks": ranks, "pause": pause} for ranks in (1, most)]

    for job, gpu, rows in (
        ("a", "NVIDIA H200", [{"pause": 1}]),
        ("a", "NVIDIA H200, replay", [{"pause": 2}]),
        ("b", "NVIDIA H200, replay", [{"pause": 3}]),
        ("a", "NVIDIA H200, replay", [{"pause": 4}]),
        ("a", "NVIDIA H200, replay", of_ranks(2, 5)),
        ("a", "NVIDIA H200, replay", of_ranks(2, 6)),
        ("a", "NVIDIA H200, replay", of_ranks(4, 7)),
    ):
        run = {"kind": "replicas", "gpu": gpu, "job": job, "rows": rows}
        (tmp_path / "raw.json").write_text(json.dumps(run))
        path = summary.write(tmp_path / "raw.json", tmp_path / "results")
    jobs = json.loads(path.read_text())["jobs"]
    assert {name: of["rows"] for name, of in jobs.items()} == {
        "a": [{"pause": 1}],
        "a, replay": [{"pause": 4}],
        "b, replay": [{"pause": 3}],
        "a, replay, up to 2 ranks": of_ranks(2, 6),
        "a, replay, up to 4 ranks": of_ranks(4, 7),
    }


def test_a_case_keeps_its_outcome_until_it_is_run_again(tmp_path: Path) -> None:
    runs = [
        support("2026-01-01", one=("round-trips", ""), two=("refused", "why")),
        support("2026-01-02", one=("round-trips", ""), two=("not run", "fewer GPUs")),
    ]
    for run in runs:
        (tmp_path / "raw.json").write_text(json.dumps(run))
        path = summary.write(tmp_path / "raw.json", tmp_path / "results")
    assert path.relative_to(tmp_path) == Path("results/nvidia-h200/support-replay.json")
    kept = {run["date"]: run["outcomes"] for run in json.loads(path.read_text())["runs"]}
    assert kept == {
        "2026-01-01": {"two": ["refused", "why"]},
        "2026-01-02": {"one": ["round-trips", ""]},
    }


def test_a_section_keeps_jobs_that_were_not_measured_again(tmp_path: Path) -> None:
    def document(date: str, job: str, pause: float) -> dict[str, Any]:
        run = {"pause_seconds": pause, "identical": True, "wall_seconds": 7.0}
        gpu = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_bytes": 1}
        section = {"jobs": {job: [run]}, "commands": [["bench.py", job]]}
        about = {"format": 1, "kind": "nvidia", "date": date, "commit": "a" * 40, "gpu": gpu}
        return about | {"sections": {"flowgpu": section}}

    for raw in (document("2026-01-01", "a", 1.0), document("2026-01-02", "b", 2.0)):
        (tmp_path / "raw.json").write_text(json.dumps(raw))
        path = summary.write(tmp_path / "raw.json", tmp_path / "results")
    section = json.loads(path.read_text())["sections"]["flowgpu"]
    assert section["jobs"] == {
        "a": [{"pause_seconds": 1.0, "identical": True}],
        "b": [{"pause_seconds": 2.0, "identical": True}],
    }
    assert section["taken"] == {
        "a": "2026-01-01 at aaaaaaaaaaaa",
        "b": "2026-01-02 at aaaaaaaaaaaa",
    }
