"""One checkpoint of all nodes of a job as data: what a node waits for, and what becomes of it.

Each node takes its own checkpoint (checkpoint.py) and stops in it at some places, its barriers,
until all nodes have come there (`Barrier` in others.py). The last one is its vote. A suspension or
a resume of all nodes is an epoch too, but leaves no file. It is decided when all have come to its
last barrier, and who does not hear of that undoes its part.

Two phases of a commit: with the votes of all nodes the leader renames `job.partial-EPOCH` to
`job.json`. With that the image is there; without it there is none, and each node removes its part.
A node that has not voted undoes by itself whatever it does not hear. One that has voted is in
doubt until it hears, or sees what became of the file:

- `job.json` names the epoch: it is committed;
- a node that sees the leader's file in its own folder, and hears nothing of the leader for
  DOUBT_SECONDS, takes the file away. Then nobody can commit, since a rename of it fails;
- a node with a disk of its own cannot do that, and waits. Its processes stay stopped.

A leader that begins anew has no epoch under way. It is asked by those in doubt, and answers by the
files alone: what is not committed it takes away.

Pure, but for `settle`, which looks at these files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from coordinator.cut_of_nodes import Whole
from coordinator.others import WAYS, Barrier
from flowgpu.errors import FlowError
from flowgpu.image import job_file

DOUBT_SECONDS = 60.0


class Verdict(Enum):
    """What an epoch has come to."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass
class Epoch:
    """One of them, as its leader sees it."""

    id: str
    nodes: frozenset[int]
    what: str = "checkpoint"
    """See WAYS in others.py."""
    verdict: Verdict = Verdict.OPEN
    error: FlowError | None = None
    """The first failure."""
    failed_node: int | None = None
    disturbed: bool = False
    """True if another try may succeed."""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Reports of nodes that have done their part."""
    votes: dict[int, Any] = field(default_factory=dict)
    """What nodes say of their parts."""
    _cuts: dict[int, Whole] = field(default_factory=dict)
    _exchanged: dict[str, dict[int, Any]] = field(default_factory=dict)
    _at: int = 0
    _said: dict[int, Any] = field(default_factory=dict)
    _over: set[int] = field(default_factory=set)

    @property
    def waits_at(self) -> Barrier:
        """The barrier that not all have come to."""
        return WAYS[self.what][self._at]

    @property
    def over(self) -> bool:
        """True once nothing more is to be heard of it."""
        return self._over >= self.nodes

    @property
    def missing(self) -> list[int]:
        """The nodes that have not said what became of it."""
        return sorted(self.nodes - self._over)

    def reached(self, node: int, barrier: Barrier, said: Any = None) -> dict[int, Any] | None:
        """A node has come to a barrier, the last one with its vote. Gives what each has said there
        once all have come: from the last one nobody goes on before `committed`."""
        if self.verdict is not Verdict.OPEN or barrier is not self.waits_at:
            return None
        self._said[node] = said
        is_last = barrier is WAYS[self.what][-1]
        if is_last:
            self.votes = self._said
        if self._said.keys() < self.nodes:
            return None
        all_said = self._said
        if not is_last:
            self._at += 1
            self._said = {}
        return all_said

    def exchange(self, node: int, place: str, said: Any) -> dict[int, Any] | None:
        """A node has come to a place between two barriers. Gives what each has said there once all
        have come."""
        all_said = self._exchanged.setdefault(place, {})
        all_said[node] = said
        if self.verdict is not Verdict.OPEN or all_said.keys() < self.nodes:
            return None
        return self._exchanged.pop(place)

    def cut(self, number: int) -> Whole:
        """The cut of that number."""
        return self._cuts.setdefault(number, Whole(self.nodes))

    def committed(self) -> None:
        """The image of all nodes is there; or all have come to the last barrier."""
        if self.verdict is not Verdict.OPEN or set(self.votes) != self.nodes:
            raise ValueError("an epoch is committed once, with the votes of all nodes")
        self.verdict = Verdict.COMMITTED

    def failed(self, node: int | None, error: FlowError, disturbed: bool = False) -> bool:
        """A node cannot do its part, or the leader its own. True: this has ended the epoch."""
        if self.verdict is not Verdict.OPEN:
            return False
        self.verdict, self.error, self.failed_node = Verdict.ABORTED, error, node
        self.disturbed = disturbed
        return True

    def gone(self, node: int, error: FlowError) -> bool:
        """The connection to a node has ended. True: this has ended the epoch.

        One that has voted for an image hears what became of it when it asks.
        """
        may_ask = self.what == "checkpoint" and node in self.votes
        if may_ask and self.verdict is Verdict.OPEN:
            return False
        aborts = self.failed(node, error)
        if self.verdict is Verdict.ABORTED:
            self._over.add(node)
        return aborts

    def done(self, node: int, result: dict[str, Any] | None) -> None:
        """A node has done its part, and whatever undoes it."""
        if result is not None:
            self.results[node] = result
        self._over.add(node)

    def give_up(self, nodes: Iterable[int]) -> None:
        """Wait for these no longer."""
        self._over |= set(nodes)


def is_committed(image: Path, epoch: str) -> bool:
    """True if `job.json` of this image names that epoch."""
    with contextlib.suppress(FlowError):
        return job_file.JobFile.load(image).epoch == epoch
    return False


def take_away(image: Path, epoch: str) -> bool:
    """See to it that nobody can commit; False: somebody has, or it cannot be seen from here."""
    try:
        (image / job_file.mark_name(epoch)).unlink()
    except OSError:
        return False
    return True


def settle(image: Path, epoch: str) -> bool:
    """What became of an epoch of which no leader knows: True, it is committed. For the leader."""
    take_away(image, epoch)
    return is_committed(image, epoch)
