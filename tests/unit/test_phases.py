"""The phases of a checkpoint as data: every path that an event can open ends, and ends well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator import phases
from coordinator.phases import Event, Goal, Outcome, Phase, State

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


ALL_PATHS = [path for goal in Goal for path in paths(phases.start(goal))]


def walk(goal: Goal, failing: Phase | None) -> list[Phase]:
    """Phases in order when only `failing` fails, the first time it comes."""
    state, seen = phases.start(goal), []
    while state.phase is not Phase.END:
        fails = state.phase is failing and failing not in seen
        seen.append(state.phase)
        state = phases.next(state, Event.FAILED if fails else Event.DONE)
    return seen


def test_a_good_checkpoint_runs_every_forward_phase_once() -> None:
    forward = [Phase.PREPARE, Phase.GATE, Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE]
    assert walk(Goal.ENDED, None) == [*forward, Phase.COMMIT, Phase.KILL, Phase.RELEASE]
    assert walk(Goal.RUNNING, None) == [*forward, *BACK, Phase.COMMIT, Phase.RELEASE]
    parked = [Phase.PARK, Phase.RELEASE]
    assert walk(Goal.SUSPENDED, None) == [*forward[:4], *parked]
    assert walk(Goal.PARKED, None) == [*forward[:3], *parked]
    ended = [Phase.STRIP, Phase.CAPTURE, Phase.COMMIT, Phase.KILL, Phase.RELEASE]
    assert walk(Goal.EVICTED, None) == [Phase.PREPARE, *ended]


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
    seen = walk(Goal.ENDED, failing)
    assert seen[seen.index(failing) + 1 :] == [*undo, Phase.RELEASE]


@pytest.mark.parametrize("goal", [Goal.SUSPENDED, Goal.PARKED])
def test_a_job_that_cannot_be_parked_runs_on(goal: Goal) -> None:
    assert walk(goal, Phase.PARK)[-5:] == [Phase.PARK, *BACK, Phase.RELEASE]


@pytest.mark.parametrize("failing", [Phase.STRIP, Phase.CAPTURE, Phase.COMMIT])
def test_a_suspended_job_that_cannot_be_dumped_stays_suspended(failing: Phase) -> None:
    assert walk(Goal.EVICTED, failing)[-3:] == [failing, Phase.WAKE, Phase.RELEASE]


def test_a_commit_that_fails_behind_a_running_job_touches_only_the_image() -> None:
    assert walk(Goal.RUNNING, Phase.COMMIT)[-2:] == [Phase.COMMIT, Phase.RELEASE]


@pytest.mark.parametrize("failing", BACK)
def test_a_job_that_cannot_be_brought_back_is_ended(failing: Phase) -> None:
    assert walk(Goal.RUNNING, failing)[-2:] == [Phase.KILL, Phase.RELEASE]


@pytest.mark.parametrize("phase", [Phase.HANDOVER, Phase.STRIP, Phase.CAPTURE, *BACK])
def test_a_job_with_a_task_that_cannot_go_on_is_ended_and_not_undone(phase: Phase) -> None:
    state = phases.next(State(phase), Event.BROKEN)
    assert (state.phase, state.outcome) == (Phase.KILL, Outcome.LOST)


def test_every_path_ends_after_one_release() -> None:
    for path in ALL_PATHS:
        order = [state.phase for state, _ in path]
        assert order.count(Phase.RELEASE) == 1
        assert order[-2:] == [Phase.RELEASE, Phase.END]


def test_an_image_or_a_suspension_counts_only_when_nothing_before_failed() -> None:
    for path in ALL_PATHS:
        end = path[-1][0]
        last = Phase.PARK if end.goal in (Goal.SUSPENDED, Goal.PARKED) else Phase.COMMIT
        whole = any(s.phase is last and e is Event.DONE for s, e in path)
        assert (end.outcome is Outcome.GOOD) == whole


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
        parked = path[-1][0].outcome is Outcome.GOOD and Phase.PARK in order
        if Phase.GATE in order and not gone and not parked:
            assert Phase.OPEN in order or Phase.KILL in order


def test_a_finished_checkpoint_has_no_next_phase() -> None:
    with pytest.raises(ValueError, match="ended"):
        phases.next(State(Phase.END), Event.DONE)
