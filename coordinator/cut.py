"""The cut of a checkpoint through what the ranks of NCCL issue, so that all that was issued can
complete with the threads stopped: every operation has its counterparts.

A channel is what several ranks use in one order; a unit is what a thread issues at once
(native/include/flowgpu/nccl.h). The gates of all tasks are closed with the limit 0. Then ``look``
is given what the tasks' pages say, again and again. It says up to which number each channel may be
issued, its *target*:

(a) A channel's target is the most that any of its members has issued. A member that has issued
    less is behind, and catches up.
(b) Where a task that is behind stands still with a thread that waits for another channel, the
    target of that one becomes what the thread wants: what comes before is issued first, and groups
    are issued whole.
(c) Where everything stands still, all that wait are let on by one unit, because a rank may wait for
    another one on the CPU.

It ends when nobody is behind and no thread is in NCCL. What was issued then is the beginning of a
run in which, channel by channel, all members are there. So no kernel waits for one that is still to
come, and the GPUs become idle by themselves.

Where ranks are on several nodes, each node makes its part of one cut (cut_of_nodes.py).

Pure: the caller brings the clock and reads the pages (communicators.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

STILL_SECONDS = 0.001
"""A task that is behind stands still once it has issued nothing for so long, and waits (b)."""
STUCK_SECONDS = 0.15
"""Everything stands still once no task has issued anything for so long (c)."""

Channel = tuple[int, int, int]
"""Communicator, and from which rank to which messages go; -1 both: its collectives."""


class State(Enum):
    """What a thread does with NCCL."""

    OUTSIDE = "outside"
    DECIDING = "deciding"
    INSIDE = "inside"
    PARKED = "parked"


@dataclass(frozen=True)
class End:
    """One rank's end of a channel."""

    channel: Channel
    rank: int
    entered: int
    ranks: int
    """How many ranks the communicator has."""
    made: bool = True
    """True once the communicator is there: then all its ranks have come to it once."""
    pending: bool = False
    """True while NCCL still works on the communicator in the background."""


@dataclass(frozen=True)
class Thread:
    """A thread that has called NCCL."""

    state: State
    since: float = 0.0
    """When it was parked."""
    wants: tuple[tuple[Channel, int], ...] = ()


@dataclass(frozen=True)
class View:
    """What the page of one task says."""

    ends: Sequence[End]
    threads: Sequence[Thread]

    @property
    def issued(self) -> int:
        """A number that changes with everything that is issued."""
        return sum(end.entered for end in self.ends)


@dataclass(frozen=True)
class Behind:
    """A rank that has issued less of a channel than its target."""

    task: int | None
    """None: it is not known which task it is of."""
    channel: Channel
    rank: int
    number: int
    """What it has to come to."""
    node: int | None = None
    """Where it is; None: here."""


@dataclass
class Cut:
    """One cut. `look` until it says True."""

    began: float
    alone: bool = True
    """False: there are other nodes, so who uses it says when (c) is due."""
    targets: dict[Channel, int] = field(default_factory=dict)
    behind: list[Behind] = field(default_factory=list)
    """Who is, as of the last look."""
    first_behind: int = 0
    """Operations that ranks were behind at first."""
    grown: int = 0
    """How many operations targets grew by later."""
    forced: int = 0
    """How often by (c)."""
    _quiet: bool = False
    _issued: dict[int, int] = field(default_factory=dict)
    _moved: dict[int, float] = field(default_factory=dict)
    _looks: int = 0

    def look(self, now: float, views: Mapping[int, View]) -> bool:
        """Take in what the pages of all tasks say; True: the cut is made."""
        self._watch(now, views)
        raised = self._raise(
            (end.channel, end.entered) for view in views.values() for end in view.ends
        )
        self.behind = _behind(views, self.targets)
        if self._looks == 0:
            self.first_behind = sum(one.number - _entered(views, one) for one in self.behind)
        self._looks += 1
        busy = any(
            thread.state in (State.DECIDING, State.INSIDE)
            for view in views.values()
            for thread in view.threads
        ) or any(end.pending for view in views.values() for end in view.ends)
        if not (self.behind or busy or raised):
            seen_twice, self._quiet = self._quiet, True
            return seen_twice
        self._quiet = False
        self._let_on(now, views)
        return False

    def _watch(self, now: float, views: Mapping[int, View]) -> None:
        for task, view in views.items():
            if self._issued.get(task) != view.issued:
                self._issued[task] = view.issued
                self._moved[task] = now

    def _raise(self, wanted: Iterable[tuple[Channel, int]]) -> int:
        """Raise targets; gives by how much."""
        raised = 0
        for channel, number in wanted:
            more = number - self.targets.get(channel, 0)
            if more > 0:
                self.targets[channel] = number
                raised += more
        return raised

    def _let_on(self, now: float, views: Mapping[int, View]) -> None:
        late = {one.task for one in self.behind}
        self.grown += self._raise(
            want
            for task, thread in _parked(now, views)
            if task in late and now - self._moved[task] >= STILL_SECONDS
            for want in thread.wants
        )
        if self.alone and self.is_still(now):
            self.force(now, views)

    def is_still(self, now: float) -> bool:
        """True once no task has issued anything for so long that (c) is due."""
        return now - max(self._moved.values(), default=self.began) >= STUCK_SECONDS

    def force(self, now: float, views: Mapping[int, View]) -> None:
        """Let all that wait on by one unit (c)."""
        forced = self._raise(want for _, thread in _parked(now, views) for want in thread.wants)
        if forced:
            self.grown += forced
            self.forced += 1
        if forced or not self.alone:
            self._moved = dict.fromkeys(self._moved, now)

    def take(self, targets: Mapping[Channel, int]) -> None:
        """Have at least these targets, which other nodes have."""
        self._raise(targets.items())


def _parked(now: float, views: Mapping[int, View]) -> list[tuple[int, Thread]]:
    """Threads that wait for a limit, and have for a while, with their tasks."""
    return [
        (task, thread)
        for task, view in views.items()
        for thread in view.threads
        if thread.state is State.PARKED and now - thread.since >= STILL_SECONDS
    ]


def _behind(views: Mapping[int, View], targets: Mapping[Channel, int]) -> list[Behind]:
    """Who has issued less than the targets. A rank that has not used a channel yet has no end of
    it; one that has ended the communicator has none any more."""
    found: list[Behind] = []
    ranks: dict[tuple[int, int], int] = {}  # of a communicator: the task that a rank is of
    ends: dict[tuple[Channel, int], int] = {}
    present: dict[int, set[int]] = {}
    unmade: dict[int, int] = {}
    for task, view in views.items():
        for end in view.ends:
            ends[end.channel, end.rank] = end.entered
            if end.channel[1] < 0:
                communicator = end.channel[0]
                ranks[communicator, end.rank] = task
                present.setdefault(communicator, set()).add(end.rank)
                if not end.made and end.entered:
                    unmade[communicator] = end.ranks
            if end.entered < targets.get(end.channel, 0):
                found.append(Behind(task, end.channel, end.rank, targets[end.channel]))
    for channel, target in targets.items():
        for rank in channel[1:]:
            owner = ranks.get((channel[0], rank))
            if target and owner is not None and (channel, rank) not in ends:
                found.append(Behind(owner, channel, rank, target))
    for communicator, count in unmade.items():
        for rank in range(count):
            if rank not in present[communicator]:
                found.append(Behind(None, (communicator, -1, -1), rank, 1))
    return found


def _entered(views: Mapping[int, View], one: Behind) -> int:
    if one.task is None:
        return 0
    return sum(
        end.entered
        for end in views[one.task].ends
        if (end.channel, end.rank) == (one.channel, one.rank)
    )
