"""The phases of a checkpoint as data: every path that an event can open ends, and ends well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator import phases
from coordinator.phases import Event, Outcome, Phase, State

BACK = [Phase.WAKE, Phase.MAPBACK, Phase.OPEN]
PATHS_ARE_SHORTER_THAN = 20


def paths(state: State, way: tuple[tuple[State, Event], ...] = ()) -> Iterator[list]:
    """Every path from `state` to the end, as (state, event) pairs and the last state."""
    assert len(way) < PATHS_ARE_SHORTER_THAN
    if state.phase is Phase.END:
        yield [*way, (state, None)]
        return
    for event in Event:
        yield from paths(phases.next(state, event), (*way, (state, event)))


ALL_PATHS = [path for leave in (False, True) for path in paths(phases.start(leave))]


def walk(leave_running: bool, failing: Phase | None) -> list[Phase]:
    """Phases in order when only `failing` fails, the first time it comes."""
    state, seen = phases.start(leave_running), []
    while state.phase is not Phase.END:
        fails = state.phase is failing and failing not in seen
        seen.append(state.phase)
        state = phases.next(state, Event.FAILED if fails else Event.DONE)
    return seen


def test_a_good_checkpoint_runs_every_forward_phase_once() -> None:
    forward = [Phase.PREPARE, Phase.GATE, Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE]
    assert walk(False, None) == [*forward, Phase.COMMIT, Phase.KILL, Phase.RELEASE]
    assert walk(True, None) == [*forward, *BACK, Phase.COMMIT, Phase.RELEASE]


@pytest.mark.parametrize(
    ("failing", "undo"),
    [
        (Phase.PREPARE, []),
        (Phase.GATE, [Phase.OPEN]),
        (Phase.HANDOVER, [Phase.MAPBACK, Phase.OPEN]),
        (Phase.STRIP, BACK),
        (Phase.CAPTURE, BACK),
        (Phase.COMMIT, BACK),
    ],
)
def test_a_failure_undoes_what_was_done_in_reverse(failing: Phase, undo: list[Phase]) -> None:
    seen = walk(False, failing)
    assert seen[seen.index(failing) + 1 :] == [*undo, Phase.RELEASE]


def test_a_commit_that_fails_behind_a_running_job_touches_only_the_image() -> None:
    assert walk(True, Phase.COMMIT)[-2:] == [Phase.COMMIT, Phase.RELEASE]


@pytest.mark.parametrize("failing", BACK)
def test_a_job_that_cannot_be_brought_back_is_ended(failing: Phase) -> None:
    assert walk(True, failing)[-2:] == [Phase.KILL, Phase.RELEASE]


@pytest.mark.parametrize("phase", [Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE, *BACK])
def test_a_job_with_a_task_that_cannot_go_on_is_ended_and_not_undone(phase: Phase) -> None:
    state = phases.next(State(phase), Event.BROKEN)
    assert (state.phase, state.outcome) == (Phase.KILL, Outcome.LOST)


def test_every_path_ends_after_one_release() -> None:
    for path in ALL_PATHS:
        order = [state.phase for state, _ in path]
        assert order.count(Phase.RELEASE) == 1
        assert order[-2:] == [Phase.RELEASE, Phase.END]


def test_an_image_counts_only_when_nothing_before_its_commit_failed() -> None:
    for path in ALL_PATHS:
        end = path[-1][0]
        committed = any(s.phase is Phase.COMMIT and e is Event.DONE for s, e in path)
        assert (end.outcome is Outcome.GOOD) == committed


def test_a_job_is_ended_only_after_a_commit_or_when_it_is_lost() -> None:
    for path in ALL_PATHS:
        done = [state.phase for state, event in path if event is Event.DONE]
        for state, _ in path:
            if state.phase is Phase.KILL:
                assert Phase.COMMIT in done or state.outcome is Outcome.LOST


def test_no_gate_stays_closed_while_the_job_lives() -> None:
    for path in ALL_PATHS:
        order = [state.phase for state, _ in path]
        gone = any(event is Event.GONE for _, event in path)
        if Phase.GATE in order and not gone:
            assert Phase.OPEN in order or Phase.KILL in order


def test_a_finished_checkpoint_has_no_next_phase() -> None:
    with pytest.raises(ValueError, match="ended"):
        phases.next(State(Phase.END), Event.DONE)
