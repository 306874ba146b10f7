"""Which runs are taken, which are kept and which are left for a later call."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
from store_lib import write

from bench.deadline import CLEANUP_SECONDS, Deadline
from bench.periodic import CHUNK, PAGE, changed, changed_pages, stored
from bench.units import Unit, measure
from tests.gpu.site import Trouble


@dataclass
class FakeBench:
    """What `measure` uses of a Bench."""

    folder_path: Path
    document: dict[str, Any]
    deadline: Deadline = field(default_factory=Deadline)
    again: bool = False
    missing: list[str] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        yield self.folder_path

    def keep(self, name: str, found: dict[str, Any]) -> None:
        self.document["sections"][name] = {"jobs": {j: list(r) for j, r in found["jobs"].items()}}
        self.saved.append(sum(map(len, found["jobs"].values())))

    def say(self, text: str) -> None:
        assert text

    def same_lines(self, job: str, found: list[str]) -> bool:
        return job == "job" and found == ["line"]


def unit(job: str = "job", repeats: int = 2, seconds: float = 0.0, fails: int = 0) -> Unit:
    calls = iter(range(100))

    def once(_folder: Path, number: int) -> dict[str, Any]:
        if next(calls) < fails:
            raise Trouble("it failed")
        return {"pause_seconds": 1.0, "number": number, "lines": ["line"]}

    return Unit(job, repeats, seconds, once, {"lines_of": job})


@pytest.fixture
def bench(tmp_path: Path) -> FakeBench:
    return FakeBench(tmp_path, {"sections": {}})


def runs(bench: FakeBench, one: Unit) -> list[dict[str, Any]]:
    found = measure(bench, "section", [one])  # type: ignore[arg-type]
    return list(found["jobs"].get(one.job, []))


def test_every_run_is_saved_when_it_ends(bench: FakeBench) -> None:
    assert [run["number"] for run in runs(bench, unit(repeats=3))] == [0, 1, 2]
    assert bench.saved == [1, 2, 3]


def test_runs_of_earlier_calls_count(bench: FakeBench) -> None:
    first = runs(bench, unit(repeats=1))
    assert runs(bench, unit(repeats=2))[:1] == first
    assert bench.saved == [1, 2]
    bench.again = True
    assert len(runs(bench, unit(repeats=1))) == 1
    assert bench.saved == [1, 2, 1]


def test_a_failure_is_recorded_and_tried_again_by_the_next_call(bench: FakeBench) -> None:
    one = unit(repeats=2, fails=1)
    assert [run.get("failed") for run in runs(bench, one)] == ["it failed"]
    assert [run.get("failed") for run in runs(bench, one)] == ["it failed", None, None]


def test_what_does_not_fit_is_missing(bench: FakeBench) -> None:
    bench.deadline = Deadline(CLEANUP_SECONDS + 10)
    assert runs(bench, unit(seconds=9)) == []
    assert bench.missing == ["section job"]
    assert len(runs(bench, unit(seconds=7))) == 2
    # What it took before counts, and the guess no more.
    for run in bench.document["sections"]["section"]["jobs"]["job"]:
        run["seconds"] = 9.0
    assert len(runs(bench, unit(repeats=3, seconds=1))) == 2
    assert bench.missing == ["section job"] * 2


def test_a_run_that_the_deadline_cut_off_is_no_failure(bench: FakeBench) -> None:
    bench.deadline = Deadline(CLEANUP_SECONDS + 60)

    def once(_folder: Path, _number: int) -> dict[str, Any]:
        bench.deadline = Deadline(0)
        raise Trouble("took too long")

    assert runs(bench, Unit("job", 1, 0.0, once, {})) == []
    assert bench.missing == ["section job"]


def test_changed_bytes_are_those_of_other_contents(tmp_path: Path) -> None:
    before = [(0, 1), (CHUNK, 2), (2 * CHUNK, 3), (3 * CHUNK, 9)]
    # Rows are: equal, changed, changed to what another held, freed to zeros, and two new ones.
    after = [(0, 1), (CHUNK, 5), (2 * CHUNK, 2), (3 * CHUNK, 0), (4 * CHUNK, 6), (5 * CHUNK, 6)]
    for step, rows in ((3, before), (8, after)):
        numpy.save(tmp_path / f"step-{step}.npy", numpy.array(rows, numpy.uint64))
    assert changed(tmp_path, 3, 8) == {
        "active_bytes": 6 * CHUNK,
        "changed_bytes": 4 * CHUNK,
        "new_bytes": 2 * CHUNK,
    }


def test_a_linked_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two" / "criu").mkdir(parents=True)
    (tmp_path / "one" / "data").write_bytes(bytes(100))
    (tmp_path / "two" / "data").hardlink_to(tmp_path / "one" / "data")
    (tmp_path / "two" / "criu" / "pages").write_bytes(bytes(30))
    (tmp_path / "two" / "pages.data").write_bytes(bytes(5))
    assert stored(tmp_path) == (135, 35)


def test_changed_pages_are_those_of_other_bytes_at_an_address(tmp_path: Path) -> None:
    """The number is the same if one of the images, both or none shares with the one before."""
    first = {at: at for at in range(1, 40)}
    second = {**first, 7: 1, 8: 1, 90: 1}
    del second[20]
    write(tmp_path / "zero", [[1]], None, "job", cpu=[first, {}, {1: 1}])
    for bases in ((None, None), (None, "a"), ("zero", "a"), ("zero", None)):
        for name, base, cpu in (
            ("a", bases[0], [first, {}, {1: 1}]),
            ("b", bases[1], [second, {5: 5}, {1: 1}]),
        ):
            write(tmp_path / name, [[1]], tmp_path / base if base else None, "job", cpu=cpu)
            assert (tmp_path / name / "pages.data").exists() == (base is not None)
        assert changed_pages(tmp_path / "a", tmp_path / "b", tmp_path) == 4 * PAGE
        for name in "ab":
            shutil.rmtree(tmp_path / name)
