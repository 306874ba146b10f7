"""Samples of `make kill-storm`, `make soak` and `make swaps`."""

from __future__ import annotations

import pytest

from tests.faults import soak, soak_page, swaps
from tests.faults.matrix import Wrong
from tests.faults.storm import TARGETS, Draw, is_right, one_error, run

ROUNDS = range(40, 52)


def test_a_round_is_drawn_from_its_number_alone() -> None:
    assert Draw.of(7) == Draw.of(7) != Draw.of(8)
    drawn = {(draw.action, draw.target.kind) for draw in map(Draw.of, range(300))}
    assert drawn == {(action, kind) for action, kinds in TARGETS.items() for kind in kinds}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (73, ""),
        (73, "Error: one\nError: two"),
        (0, "Error: but it went well"),
        (1, "Error: of no name"),
        (73, "Error: one\nTraceback (most recent call last):"),
    ],
)
def test_what_is_not_one_named_error_is_wrong(code: int, said: str) -> None:
    with pytest.raises(Wrong):
        one_error(code, said, of_cli=False)


def test_whatever_is_killed_the_job_goes_on_or_is_known_as_ended() -> None:
    rows, about = run("emulated", ROUNDS, print)
    assert [row for row in rows if not is_right(row)] == []
    assert about["device_bytes_lost"] == 0


def test_a_short_soak_has_a_sample_after_each_checkpoint() -> None:
    about = soak.run(soak.parse(["--count", "5", "--restores", "1", "--turns", "2"]))
    assert [len(samples) for samples in about["parts"].values()] == [4, 1]
    assert about["steps"] > 0
    for samples in about["parts"].values():
        assert all(min(sample.values()) > 0 for sample in samples)
    assert [{*turn} for turn in about["in_turn"]] == [{"soak", "soak-new"}] * 2
    assert "2 turns with a new job" in soak_page.beside_new(about)


@pytest.mark.timeout(600)  # many commands, and a step of a job after each
def test_jobs_that_are_swapped_again_and_again_print_what_they_always_print(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORKLOAD_HURRY", "")  # so that it is as it was afterwards
    words = ["--count", "6", "--jobs", "segments,graphs,processes"]
    (found,) = swaps.run(swaps.parse(words))
    assert found["problems"] == []
    assert (found["swaps"], found["worked"], len(found["samples"])) == (6, 6, 2)
