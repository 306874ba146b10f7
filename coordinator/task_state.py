"""What a checkpoint has of one task, as data: ``next`` says what each step makes of it.

    out   CONNECTED - EXPORTED - GATED - AWAY or LENT - STRIPPED
    back  STRIPPED - AWAY - MAPPED, or not - GATED - CONNECTED, and LENT - CONNECTED

Memory that was only lent has ended with CUDA once the task is STRIPPED. An answer may be lost. So a
step that takes something from a task counts from when it may have begun. A step that gives it back
counts when it has succeeded. Nothing here asks the tasks: task_group.py does.
"""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    """How far a task is out of CUDA."""

    CONNECTED = "connected"  # it runs, and nothing of it is here
    EXPORTED = "exported"  # descriptors of its blocks are here, and it has a handover channel
    GATED = "gated"  # its gate is closed
    AWAY = "away"  # it may have let go of its memory, which descriptors keep
    MAPPED = "mapped"  # it has its memory again, but not yet what was in it
    LENT = "lent"  # its memory is here as well
    STRIPPED = "stripped"  # CUDA may be taken from it


class Step(Enum):
    """What was done with a task."""

    EXPORT = "export"
    GATE = "gate"
    HAND_OVER = "hand over"
    LEND = "lend"
    STRIP = "strip"
    REBUILD = "rebuild"
    MAP = "map"
    MAP_BACK = "map back"
    OPEN = "open"
    AGAIN = "again"  # it has connected anew, and its gate is open


_NEXT = {
    (TaskState.CONNECTED, Step.EXPORT): TaskState.EXPORTED,
    (TaskState.EXPORTED, Step.EXPORT): TaskState.EXPORTED,
    (TaskState.EXPORTED, Step.GATE): TaskState.GATED,
    (TaskState.GATED, Step.HAND_OVER): TaskState.AWAY,
    (TaskState.GATED, Step.LEND): TaskState.LENT,
    (TaskState.AWAY, Step.STRIP): TaskState.STRIPPED,
    (TaskState.LENT, Step.STRIP): TaskState.STRIPPED,
    (TaskState.STRIPPED, Step.REBUILD): TaskState.AWAY,
    (TaskState.AWAY, Step.MAP): TaskState.MAPPED,
    (TaskState.AWAY, Step.MAP_BACK): TaskState.GATED,
    (TaskState.MAPPED, Step.MAP_BACK): TaskState.GATED,
    (TaskState.GATED, Step.OPEN): TaskState.CONNECTED,
    (TaskState.LENT, Step.OPEN): TaskState.CONNECTED,
    **dict.fromkeys(((state, Step.AGAIN) for state in TaskState), TaskState.CONNECTED),
}

BEHIND_GATE = frozenset(TaskState) - {TaskState.CONNECTED, TaskState.EXPORTED}
"""States of a task that does not go on by itself."""

WAY_BACK = {
    step: frozenset(state for state, one in _NEXT if one is step)
    for step in (Step.REBUILD, Step.MAP, Step.MAP_BACK, Step.OPEN)
}
"""The steps back in their order, and the states that each is for."""


def next(state: TaskState, step: Step) -> TaskState:
    """The state after a step. Raises ValueError for one that is not for this state."""
    try:
        return _NEXT[state, step]
    except KeyError:
        raise ValueError(f"a task that is {state.value} has no step {step.value!r}") from None
