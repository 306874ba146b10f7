"""One cut through the ranks of all nodes of a job, of which each node makes its part (cut.py).

A node says what it has come to whenever that changes (Word), and the leader answers with the
targets of all nodes (Order). A channel within a node is the node's own affair. Orders have numbers;
a word tells which one it follows. (a) and (b) are done by each node for its own ranks, and what
they raise is raised on all nodes. (c) is an order too, given once all nodes stand still.

The cut is made when all nodes are quiet under the newest order. Behind closed gates a rank issues
nothing beyond the targets, and nothing but a new order raises those of a quiet node. So what was
quiet under an order stays so, however old the word is.

Pure, but for what `Part` is given to talk by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coordinator.cut import Behind, Channel, Cut, View

SAY_SECONDS = 0.0005
"""A node says no more than one word in so long."""
ANSWER_SECONDS = 2.0
"""For which a node whose time is over waits for who is behind on other nodes."""
NAMED = 4
"""Ranks that are behind are named in a word up to so many."""

Rows = tuple[tuple[int, int, int, int], ...]
"""Targets: each channel's three numbers, and how far it may go."""


@dataclass(frozen=True)
class Word:
    """What a node says of its part."""

    order: int
    """The newest order that it has followed."""
    targets: Rows
    """Those of communicators that have ranks elsewhere."""
    quiet: bool
    """Its ranks have issued what the targets say, and nobody is in NCCL."""
    still: bool
    """Nothing has been issued here for a while."""
    late: bool
    """Its time is over."""
    process: int
    """One that has communicators; 0: none has."""
    behind: tuple[Behind, ...]

    def to_fields(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Word:
        """What `to_fields` has made."""
        return cls(
            **{
                **fields,
                "targets": _rows(fields["targets"]),
                "behind": _behind(fields["behind"]),
            }
        )


@dataclass(frozen=True)
class Order:
    """What the leader answers to all nodes."""

    number: int
    targets: Rows
    force: bool = False
    """All that wait go on by one unit."""
    made: bool = False
    late: bool = False
    """There will be no cut: `behind` has who did not come, and `waiting` who waits for it."""
    behind: tuple[Behind, ...] = ()
    waiting: tuple[int, int] = (0, 0)
    """Node and process."""

    def to_fields(self) -> dict[str, Any]:
        """For a message."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Order:
        """What `to_fields` has made."""
        return cls(
            **{
                **fields,
                "targets": _rows(fields["targets"]),
                "behind": _behind(fields["behind"]),
                "waiting": tuple(fields["waiting"]),
            }
        )


def _rows(rows: Iterable[Sequence[int]]) -> Rows:
    return tuple((row[0], row[1], row[2], row[3]) for row in rows)


def _behind(found: Iterable[Mapping[str, Any]]) -> tuple[Behind, ...]:
    return tuple(Behind(**{**one, "channel": tuple(one["channel"])}) for one in found)


@dataclass
class Whole:
    """The cut of all nodes, as their leader sees it."""

    nodes: frozenset[int]
    _number: int = 0
    _targets: dict[Channel, int] = field(default_factory=dict)
    _words: dict[int, Word] = field(default_factory=dict)
    _over: bool = False

    def hear(self, node: int, word: Word) -> Order | None:
        """A node's word. Gives what all nodes are to be told, if anything."""
        if self._over:
            return None
        self._words[node] = word
        if word.late:
            self._over = True
            return self._late()
        raised = False
        for *channel, number in word.targets:
            key = (channel[0], channel[1], channel[2])
            if number > self._targets.get(key, 0):
                self._targets[key] = number
                raised = True
        words = self._words.values()
        if raised:
            return self._order()
        if len(words) < len(self.nodes) or any(one.order != self._number for one in words):
            return None
        if all(one.quiet for one in words):
            self._over = True
            return Order(self._number, self._rows(), made=True)
        return self._order(force=True) if all(one.still for one in words) else None

    def _order(self, force: bool = False) -> Order:
        self._number += 1
        return Order(self._number, self._rows(), force)

    def _rows(self) -> Rows:
        return tuple((*channel, number) for channel, number in self._targets.items())

    def _late(self) -> Order:
        behind = tuple(
            Behind(one.task, one.channel, one.rank, one.number, node)
            for node, word in self._words.items()
            for one in word.behind
        )
        # A rank without a process was missed by a node where it is not.
        behind = tuple(sorted(behind, key=lambda one: one.task is None))
        first = behind[0].node if behind else None
        waits = [(n, w.process) for n, w in self._words.items() if w.process]
        waits.sort(key=lambda one: one[0] == first)
        return Order(
            self._number, (), late=True, behind=behind, waiting=waits[0] if waits else (0, 0)
        )


class Late(Exception):
    """There is no cut in time; `order` says who did not come."""

    def __init__(self, order: Order) -> None:
        self.order = order
        super().__init__("a cut of all nodes was not made in time")


class Part:
    """A node's part of one cut: `made` is asked after each look."""

    def __init__(self, say: Callable[[Word], None], hear: Callable[[float], Order | None]) -> None:
        """`hear` gives the newest order, and waits for one for so many seconds at most. Both raise
        FlowError where the checkpoint is given up."""
        self._say, self._hear = say, hear
        self._followed = 0
        self._said: Word | None = None
        self._next = 0.0

    def made(self, cut: Cut, quiet: bool, views: Mapping[int, View], now: float) -> bool:
        """True once all nodes have made theirs. Raises Late, FlowError."""
        order = self._hear(0.0)
        if order is not None and order.late:
            raise Late(order)
        if order is not None and order.made:
            return True
        if order is not None and order.number > self._followed:
            self._followed = order.number
            cut.take({(row[0], row[1], row[2]): row[3] for row in order.targets})
            if order.force:
                cut.force(now, views)
            quiet = False  # until it has looked again
        word = self._word(cut, quiet, views, now)
        if word != self._said and now >= self._next:
            self._said, self._next = word, now + SAY_SECONDS
            self._say(word)
        return False

    def late(self, cut: Cut, views: Mapping[int, View], now: float) -> Late:
        """Its time is over: say it, and hear who is behind. Raises FlowError."""
        self._say(self._word(cut, False, views, now, late=True))
        order = self._hear(ANSWER_SECONDS)
        if order is None or not order.late:
            order = Order(self._followed, (), late=True, behind=tuple(cut.behind))
        return Late(order)

    def _word(
        self, cut: Cut, quiet: bool, views: Mapping[int, View], now: float, late: bool = False
    ) -> Word:
        across = _across(views)
        return Word(
            order=self._followed,
            targets=tuple(
                (*channel, number)
                for channel, number in sorted(cut.targets.items())
                if channel[0] in across
            ),
            quiet=quiet,
            still=cut.is_still(now),
            late=late,
            process=next(iter(views), 0),
            behind=tuple(cut.behind[:NAMED]),
        )


def _across(views: Mapping[int, View]) -> set[int]:
    """Communicators that have ranks elsewhere."""
    present: dict[int, set[int]] = {}
    ranks: dict[int, int] = {}
    for view in views.values():
        for end in view.ends:
            if end.channel[1] < 0:
                present.setdefault(end.channel[0], set()).add(end.rank)
                ranks[end.channel[0]] = end.ranks
    return {one for one, count in ranks.items() if len(present[one]) < count}
