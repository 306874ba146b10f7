"""Plans, phases and states of tasks together: no way through a checkpoint leaves a task behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator import control_state, phases, task_state
from coordinator.phases import SPECS, Event, Goal, Outcome, Phase, State
from coordinator.plan import Plan, choose
from coordinator.task_state import BEHIND_GATE, WAY_BACK, Step, TaskState
from coordinator.tasks import IS_CURRENT
from flowgpu.errors import CriuMissing, EngineUnusable
from flowgpu.options import CheckpointOptions
from flowgpu.wire import Engine

OPTIONS = CheckpointOptions(Path("/image"))
PLANS = [
    Plan(replace(OPTIONS, leave_running=leave), engine, late=late, can_keep=can_keep)
    for leave, engine, late, can_keep in itertools.product(
        (False, True), Engine, (False, True), (False, True)
    )
]
PARKED = {Goal.SUSPENDED: TaskState.STRIPPED, Goal.PARKED: TaskState.AWAY}
"""What every task of a suspended job is."""
WAYS = [
    (replace(plan, keeps_context=goal is Goal.PARKED), goal)
    for plan in PLANS
    for goal in ((Goal.RUNNING,) if plan.options.leave_running else (Goal.ENDED, *PARKED))
]
TASKS = 2
Tasks = tuple[TaskState, ...]

FORWARD = {Phase.PREPARE: Step.EXPORT, Phase.GATE: Step.GATE, Phase.STRIP: Step.STRIP}
BACK = {Phase.WAKE: Step.REBUILD, Phase.MAPBACK: Step.MAP_BACK, Phase.OPEN: Step.OPEN}


def step_of(plan: Plan, phase: Phase) -> Step | None:
    """What a phase does with each task."""
    if phase is Phase.HANDOVER:
        return plan.taking
    if phase is Phase.STRIP and plan.keeps_cuda:
        return None  # KEEP takes nothing
    return (FORWARD | BACK).get(phase)


def after(plan: Plan, phase: Phase, event: Event, tasks: Tasks) -> Iterator[Tasks]:
    """The tasks after a phase: one that has failed may have come to any of them."""
    step = step_of(plan, phase)
    ways = []
    for task in tasks:
        wanted = step is not None and (phase not in BACK or task in WAY_BACK[step])
        gone_on = [task_state.next(task, step)] if wanted and step else [task]
        ways.append(gone_on if event is Event.DONE else [task, *gone_on])
    yield from set(itertools.product(*ways))


def ends(plan: Plan, goal: Goal) -> Iterator[tuple[State, Tasks, bool]]:
    """Every end of a checkpoint by that plan, and whether the job has ended by then."""
    begin = (phases.start(goal), (TaskState.CONNECTED,) * TASKS, False)
    seen, left = {begin}, [begin]
    while left:
        state, tasks, ended = left.pop()
        if state.phase is Phase.END:
            yield state, tasks, ended
            continue
        if state.phase is Phase.PARK:
            assert tasks == (PARKED[goal],) * TASKS
        if state.phase is Phase.CAPTURE:
            ready = TaskState.LENT if plan.keeps_cuda else TaskState.STRIPPED
            assert tasks == (ready,) * TASKS
        for event in Event:
            over = ended or state.phase is Phase.KILL or event is Event.GONE
            for now in after(plan, state.phase, event, tasks):
                following = (phases.next(state, event), now, over)
                if following not in seen:
                    seen.add(following)
                    left.append(following)


@pytest.mark.parametrize(("plan", "goal"), WAYS, ids=str)
def test_a_job_that_lives_has_all_of_its_tasks_back(plan: Plan, goal: Goal) -> None:
    found = list(ends(plan, goal))
    assert {state.outcome for state, _, _ in found} == set(Outcome)
    for state, tasks, ended in found:
        if goal in PARKED and state.outcome is Outcome.GOOD:
            assert tasks == (PARKED[goal],) * TASKS or ended
        elif not ended:
            assert not BEHIND_GATE.intersection(tasks), (state, tasks)
            assert state.outcome is not Outcome.LOST


@pytest.mark.parametrize(("plan", "goal"), WAYS, ids=str)
def test_only_a_whole_image_or_a_loss_ends_a_job(plan: Plan, goal: Goal) -> None:
    for state, _, ended in ends(plan, goal):
        if state.outcome is Outcome.GOOD:
            assert ended or goal is not Goal.ENDED


@pytest.mark.parametrize(("state", "step"), list(itertools.product(TaskState, Step)))
def test_a_step_is_for_few_states_and_the_way_back_undoes_each(
    state: TaskState, step: Step
) -> None:
    try:
        found = task_state.next(state, step)
    except ValueError as error:
        assert state.value in str(error) and step.value in str(error)
        assert step is not Step.AGAIN
        return
    if step is Step.AGAIN:
        assert found is TaskState.CONNECTED
    for back, wanted in WAY_BACK.items():
        if found in wanted:
            found = task_state.next(found, back)
    assert found not in BEHIND_GATE


def test_the_pause_is_from_the_gate_to_the_commit() -> None:
    paused = [phase for phase, spec in SPECS.items() if spec.paused]
    ways = [Phase.CAPTURE, Phase.PARK]
    assert paused == [Phase.GATE, Phase.HANDOVER, Phase.STRIP, *ways, Phase.COMMIT]
    assert not State(Phase.COMMIT, Goal.RUNNING, resumed=True).spec.paused
    assert {spec.report for spec in SPECS.values()} - {""} < set(phases.REPORT)


# Which plan


def chosen(asked: Any, prepared: dict[int, bool], refusals: tuple[str, ...] = ()) -> Plan:
    return choose(replace(OPTIONS, engine=asked), "train", prepared, lambda: refusals)


@pytest.mark.parametrize(
    ("asked", "prepared", "refusals", "engine", "reason"),
    [
        ("auto", {}, (), Engine.NATIVE, ""),
        ("auto", {7: False}, (), Engine.NATIVE, ""),
        ("auto", {7: True, 8: True}, (), Engine.REPLAY, "it can save every task"),
        ("auto", {7: True}, ("a", "b"), Engine.NATIVE, "no replay: a; b"),
        ("native", {7: True}, (), Engine.NATIVE, "asked for"),
        ("replay", {7: True}, (), Engine.REPLAY, "asked for"),
        ("replay", {}, (), Engine.REPLAY, "asked for"),  # for tasks that come later
    ],
)
def test_the_engine_is_what_was_asked_for_or_can_save_all(
    asked: str, prepared: dict[int, bool], refusals: tuple[str, ...], engine: Engine, reason: str
) -> None:
    plan = chosen(asked, prepared, refusals)
    assert (plan.engine, plan.reason) == (engine, reason)


def test_a_task_that_was_not_prepared_is_named() -> None:
    why = "process 8 was started with --engine native"
    assert chosen("auto", {7: True, 8: False}).reason == f"no replay: {why}"
    with pytest.raises(EngineUnusable, match=why):
        chosen("replay", {7: True, 8: False})


def test_tasks_lend_their_memory_to_replay_and_keep_cuda_with_a_ghost_beside_them() -> None:
    for plan in PLANS:
        lends = plan.engine is Engine.REPLAY
        assert plan.taking is (Step.LEND if lends else Step.HAND_OVER)
        able = lends and plan.can_keep and plan.options.leave_running
        assert plan.keeps_cuda == (able and not plan.late)
        assert replace(plan, keeps_context=True).taking is Step.HAND_OVER


class Plugins:
    def __init__(self, there: bool) -> None:
        self.there = there

    def plugins(self) -> Path:
        if not self.there:
            raise CriuMissing(reason="another version")
        return Path("/plugins")


@pytest.mark.parametrize(
    ("tasks", "managed", "there", "why"),
    [
        ([IS_CURRENT, IS_CURRENT], 0, True, ""),
        ([IS_CURRENT, IS_CURRENT - 1], 0, True, "one has an older FlowGPU"),
        ([IS_CURRENT], 4096, True, "one has managed memory"),
        ([IS_CURRENT], 0, False, "CRIU"),
    ],
)
def test_tasks_keep_cuda_where_all_of_them_and_criu_know_how(
    tasks: list[int], managed: int, there: bool, why: str
) -> None:
    page = SimpleNamespace(managed_bytes=managed)
    found = [SimpleNamespace(hello=SimpleNamespace(replay=one), page=page) for one in tasks]
    criu: Any = Plugins(there)
    group: Any = SimpleNamespace(tasks=found)
    found_why = control_state.why_taken(criu, group)
    assert why in found_why and bool(found_why) == bool(why)
