"""Phases of a checkpoint as data: which step follows which, and what a failure undoes.

``next`` is pure, and SPECS has all that is fixed of a phase. The session (checkpoint.py) does the
I/O of a phase and reports one event. A forward phase that fails enters the undo chain at the step
that mends it, and the chain ends with the job as it was before:

    PREPARE  GATE  HANDOVER  STRIP  CAPTURE  COMMIT  KILL  RELEASE
       |       |       |        \\______|_______/
       |       |       |               v
    RELEASE <-OPEN <-MAPBACK <------- WAKE

A task that says that it cannot go on (BROKEN) leads to KILL from anywhere in it.

To leave a job running, the same chain is the way on: CAPTURE, WAKE, MAPBACK, OPEN, then COMMIT
behind the running job. Where tasks keep CUDA (plan.py) nothing is taken from them by then, and they
need OPEN alone. What becomes of each task on the way is in task_state.py.

A job that is suspended has PARK in the place of CAPTURE, and nothing after it: its memory is then
in the host's, and resume.py goes the way back from there. PARK is undone as CAPTURE is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter

from flowgpu.options import CheckpointOptions

UNDO_SECONDS = 60.0
FLUSH_SECONDS = 3600.0
"""Limit for writing what the running job does not wait for."""


class Phase(Enum):
    """One step of a checkpoint; the value is what users and the coordinator's log read."""

    PREPARE = "prepare"
    GATE = "gate"
    HANDOVER = "handover"
    STRIP = "strip"
    CAPTURE = "capture"
    PARK = "park"
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


class Goal(Enum):
    """What the job is to be in the end."""

    ENDED = "ended"  # with an image
    RUNNING = "running"  # with an image
    SUSPENDED = "suspended"
    PARKED = "parked"  # suspended, but that it keeps its contexts
    EVICTED = "evicted"  # suspended before, ended with an image


Limit = Callable[[CheckpointOptions], float | None]
"""The seconds of a phase. None: what the phase before it has left."""


def _own(seconds: float | None) -> Limit:
    return lambda options: seconds


PREPARE: Limit = attrgetter("prepare_seconds")
PAUSE: Limit = attrgetter("pause_seconds")
BACK = _own(UNDO_SECONDS)  # what made us late must not make us give up the job
SAME = _own(None)


@dataclass(frozen=True)
class PhaseSpec:
    """What is fixed of a phase."""

    then: Phase
    """What follows when it is done."""
    undo: Phase
    """What follows when it has failed."""
    limit: Limit
    paused: bool
    """True if the pause includes the phase's time."""
    report: str
    """The entry of the report that the phase's seconds count for; empty: none."""


SPECS = {
    Phase.PREPARE: PhaseSpec(Phase.GATE, Phase.RELEASE, PREPARE, False, "prepare"),
    Phase.GATE: PhaseSpec(Phase.HANDOVER, Phase.OPEN, PAUSE, True, "gate"),
    Phase.HANDOVER: PhaseSpec(Phase.STRIP, Phase.MAPBACK, SAME, True, "handover"),
    Phase.STRIP: PhaseSpec(Phase.CAPTURE, Phase.WAKE, SAME, True, "strip"),
    Phase.CAPTURE: PhaseSpec(Phase.COMMIT, Phase.WAKE, SAME, True, ""),
    Phase.PARK: PhaseSpec(Phase.RELEASE, Phase.WAKE, SAME, True, ""),
    Phase.COMMIT: PhaseSpec(Phase.KILL, Phase.WAKE, SAME, True, "commit"),
    Phase.KILL: PhaseSpec(Phase.RELEASE, Phase.RELEASE, SAME, False, "end"),
    Phase.WAKE: PhaseSpec(Phase.MAPBACK, Phase.KILL, BACK, False, "end"),
    Phase.MAPBACK: PhaseSpec(Phase.OPEN, Phase.KILL, BACK, False, "end"),
    Phase.OPEN: PhaseSpec(Phase.RELEASE, Phase.KILL, BACK, False, "end"),
    Phase.RELEASE: PhaseSpec(Phase.END, Phase.END, SAME, False, ""),
}
BEHIND = PhaseSpec(Phase.RELEASE, Phase.RELEASE, _own(FLUSH_SECONDS), False, "commit")
"""COMMIT, where the job runs again: only the image is left to be undone."""

ROUTES = {
    (Goal.RUNNING, Phase.CAPTURE): Phase.WAKE,
    (Goal.SUSPENDED, Phase.STRIP): Phase.PARK,
    (Goal.PARKED, Phase.HANDOVER): Phase.PARK,
    (Goal.EVICTED, Phase.PREPARE): Phase.STRIP,
    # What was taken from it before stays where it is.
    (Goal.EVICTED, Phase.WAKE): Phase.RELEASE,
}
"""Where the way to a goal is another than SPECS have it."""

REPORT = ("prepare", "cut", "gate", "handover", "strip", "copy", "criu", "pack", "commit", "end")
"""The order of the report. GATE, CAPTURE and COMMIT measure the entries that no phase has."""


@dataclass(frozen=True)
class State:
    """Where a checkpoint stands."""

    phase: Phase
    goal: Goal = Goal.ENDED
    outcome: Outcome = Outcome.GOOD
    resumed: bool = False  # the gates are open again, so nothing is left to undo but the image

    @property
    def spec(self) -> PhaseSpec:
        """What is fixed of the phase."""
        return BEHIND if self.resumed and self.phase is Phase.COMMIT else SPECS[self.phase]


def start(goal: Goal) -> State:
    """The state before the first phase has run."""
    return State(Phase.PREPARE, goal)


def next(state: State, event: Event) -> State:
    """The state that follows when the phase of `state` ended with `event`."""
    phase, outcome = state.phase, state.outcome
    if phase is Phase.END:
        raise ValueError("a checkpoint that has ended has no next phase")
    if phase in (Phase.KILL, Phase.RELEASE):
        # What is released belongs to us alone, so failing at it changes nothing for the job.
        return replace(state, phase=state.spec.then)
    if event is Event.GONE and not state.resumed:
        return replace(state, phase=Phase.RELEASE, outcome=Outcome.LOST)
    if event is Event.BROKEN and not state.resumed:
        return replace(state, phase=Phase.KILL, outcome=Outcome.LOST)
    if event is not Event.DONE:
        # A task that cannot have its control state or its memory back must not run on with wrong
        # data.
        lost = state.spec.undo is Phase.KILL
        outcome = Outcome.LOST if lost else Outcome.UNDONE
        return replace(state, phase=state.spec.undo, outcome=outcome)
    if phase is Phase.OPEN:
        after = Phase.COMMIT if outcome is Outcome.GOOD else state.spec.then
        return replace(state, phase=after, resumed=True)
    return replace(state, phase=ROUTES.get((state.goal, phase), state.spec.then))
