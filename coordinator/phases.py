"""Phases of a checkpoint as data: which step follows which, and what a failure undoes.

``next`` is pure. The session (checkpoint.py) does the I/O of a phase and reports one event. A
forward phase that fails enters the undo chain at the step that mends it, and the chain ends with
the job as it was before:

    PREPARE  GATE  HANDOVER  STRIP  CAPTURE  COMMIT  KILL  RELEASE
       |       |       |        \\______|_______/
       |       |       |               v
    RELEASE <-OPEN <-MAPBACK <------- WAKE

A task that says that it cannot go on (BROKEN) leads to KILL from anywhere in it.

With leave_running the same chain is the way on: CAPTURE, WAKE, MAPBACK, OPEN, then COMMIT behind
the running job. An engine that lends (control_state.py) has taken nothing by then, and its tasks
need OPEN alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Phase(Enum):
    """One step of a checkpoint; the value is what users and the coordinator's log read."""

    PREPARE = "prepare"
    GATE = "gate"
    HANDOVER = "handover"
    STRIP = "strip"
    CAPTURE = "capture"
    COMMIT = "commit"
    KILL = "kill"
    WAKE = "wake"
    MAPBACK = "mapback"
    OPEN = "open"
    RELEASE = "release"
    END = "end"


class Event(Enum):
    """How a phase ended."""

    DONE = "done"
    FAILED = "failed"
    GONE = "gone"  # the job's root process does not exist any more
    BROKEN = "broken"  # a task is left in a state that nothing brings back


class Outcome(Enum):
    """What the checkpoint came to, so far."""

    GOOD = "good"
    UNDONE = "undone"  # the checkpoint failed, the job goes on as before
    LOST = "lost"  # the job could not be brought back, or ended by itself


@dataclass(frozen=True)
class State:
    """Where a checkpoint stands."""

    phase: Phase
    leave_running: bool = False
    outcome: Outcome = Outcome.GOOD
    resumed: bool = False  # the gates are open again, so nothing is left to undo but the image


FORWARD = {
    Phase.PREPARE: Phase.GATE,
    Phase.GATE: Phase.HANDOVER,
    Phase.HANDOVER: Phase.STRIP,
    Phase.STRIP: Phase.CAPTURE,
    Phase.CAPTURE: Phase.COMMIT,
    Phase.COMMIT: Phase.KILL,
    Phase.KILL: Phase.RELEASE,
    Phase.RELEASE: Phase.END,
}

UNDO = {
    Phase.PREPARE: Phase.RELEASE,
    Phase.GATE: Phase.OPEN,
    Phase.HANDOVER: Phase.MAPBACK,
    Phase.STRIP: Phase.WAKE,
    Phase.CAPTURE: Phase.WAKE,
    Phase.COMMIT: Phase.WAKE,
}

WAY_BACK = {
    Phase.WAKE: Phase.MAPBACK,
    Phase.MAPBACK: Phase.OPEN,
}


def start(leave_running: bool) -> State:
    """The state before the first phase has run."""
    return State(Phase.PREPARE, leave_running)


def next(state: State, event: Event) -> State:
    """The state that follows when the phase of `state` ended with `event`."""
    phase = state.phase
    if phase is Phase.END:
        raise ValueError("a checkpoint that has ended has no next phase")
    if phase is Phase.RELEASE:
        # What is released belongs to us alone, so failing at it changes nothing for the job.
        return replace(state, phase=Phase.END)
    if event is Event.GONE and not state.resumed and phase is not Phase.KILL:
        return replace(state, phase=Phase.RELEASE, outcome=Outcome.LOST)
    if event is Event.BROKEN and not state.resumed and phase is not Phase.KILL:
        return replace(state, phase=Phase.KILL, outcome=Outcome.LOST)
    if phase in WAY_BACK or phase is Phase.OPEN:
        return _on_the_way_back(state, event)
    if event is Event.DONE:
        return _forward(state)
    if phase is Phase.KILL:
        return replace(state, phase=Phase.RELEASE)
    if state.resumed:
        return replace(state, phase=Phase.RELEASE, outcome=Outcome.UNDONE)
    return replace(state, phase=UNDO[phase], outcome=Outcome.UNDONE)


def _forward(state: State) -> State:
    if state.phase is Phase.CAPTURE and state.leave_running:
        return replace(state, phase=Phase.WAKE)
    if state.phase is Phase.COMMIT and state.resumed:
        return replace(state, phase=Phase.RELEASE)
    return replace(state, phase=FORWARD[state.phase])


def _on_the_way_back(state: State, event: Event) -> State:
    if event is not Event.DONE:
        # A task that cannot have its control state or its memory back must not run on with wrong
        # data.
        return replace(state, phase=Phase.KILL, outcome=Outcome.LOST)
    if state.phase is not Phase.OPEN:
        return replace(state, phase=WAY_BACK[state.phase])
    after = Phase.COMMIT if state.outcome is Outcome.GOOD else Phase.RELEASE
    return replace(state, phase=after, resumed=True)
