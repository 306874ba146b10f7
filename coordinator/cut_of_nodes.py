"""One cut through the ranks of all nodes of a job, of which each node makes its part (cut.py).

A node tells the leader its targets and what it has come to whenever that changes (Word). The leader
answers each node that has to know more (Order): targets that other nodes have raised, of channels
which it has an end of. A node follows one order after another, and its words say which it has
followed. A channel within a node is the node's own affair. (a) and (b) are done by each node for
its own ranks, and what they raise is raised on all nodes. (c) is an order too, given once all
nodes stand still.

The cut is made when all nodes are quiet under their newest orders, and none has to know more.
Behind closed gates a rank issues nothing beyond the targets, and nothing but a new order raises
those of a quiet node. So what was quiet under an order stays so, however old the word is.

Pure, but for what `Part` is given to talk by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.cut import Behind, Channel, Cut, View

SAY_SECONDS = 0.0005
"""A node says no more than one word in so long."""
NAME_SECONDS = 0.05
"""A node that has to say no more than other names of who is behind waits for so long."""
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
    ranks: tuple[tuple[int, tuple[int, ...]], ...]
    """Which ones of these communicators are here."""
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
                "ranks": tuple((one, tuple(here)) for one, here in fields["ranks"]),
                "behind": _behind(fields["behind"]),
            }
        )


@dataclass(frozen=True)
class Order:
    """What the leader answers to a node."""

    number: int
    """Counted for each node."""
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
class _Node:
    """A node, as the leader knows it."""

    word: Word | None = None
    ordered: int = 0
    """The number of its newest order."""
    more: dict[Channel, int] = field(default_factory=dict)
    """Targets that it does not know yet."""

    def has_followed(self) -> bool:
        return self.word is not None and self.word.order == self.ordered

    def order(self, force: bool = False) -> Order:
        rows, self.more = tuple((*key, number) for key, number in self.more.items()), {}
        self.ordered += 1
        return Order(self.ordered, rows, force)


class Whole:
    """The cut of all nodes, as their leader sees it."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self._nodes = {node: _Node() for node in nodes}
        self._targets: dict[Channel, int] = {}
        self._of_communicator: dict[int, set[Channel]] = {}
        self._places: dict[tuple[int, int], int] = {}  # the node of a communicator's rank
        self._members: dict[int, set[int]] = {}  # the nodes of a communicator
        self._over = False

    def hear(self, node: int, word: Word) -> dict[int, Order]:
        """A node's word. Gives what nodes are to be told, if anything."""
        if self._over:
            return {}
        said = self._nodes[node]
        said.word = word
        if word.late:
            self._over = True
            late = self._late()
            return dict.fromkeys(self._nodes, late)
        self._meet(node, word)
        for *channel, number in word.targets:
            self._raise(node, (channel[0], channel[1], channel[2]), number)
        told = {n: one.order() for n, one in self._nodes.items() if one.more and one.has_followed()}
        if told or not all(one.has_followed() for one in self._nodes.values()):
            return told
        words = [one.word for one in self._nodes.values() if one.word is not None]
        if all(one.quiet for one in words):
            self._over = True
            return {n: Order(one.ordered, (), made=True) for n, one in self._nodes.items()}
        if all(one.still for one in words):
            return {n: one.order(force=True) for n, one in self._nodes.items()}
        return {}

    def _meet(self, node: int, word: Word) -> None:
        """Note which ranks a node has: it has to know what was said of their channels before."""
        for communicator, ranks in word.ranks:
            new = {rank for rank in ranks if (communicator, rank) not in self._places}
            if not new:
                continue
            self._places |= {(communicator, rank): node for rank in new}
            self._members.setdefault(communicator, set()).add(node)
            for channel in self._of_communicator.get(communicator, ()):
                if node in self._concerned(channel):
                    self._nodes[node].more[channel] = self._targets[channel]

    def _concerned(self, channel: Channel) -> set[int]:
        communicator, *ends = channel
        if ends[0] < 0:
            return self._members.get(communicator, set())
        places = self._places
        return {places[communicator, end] for end in ends if (communicator, end) in places}

    def _raise(self, node: int, channel: Channel, number: int) -> None:
        known = self._targets.get(channel, 0)
        if number >= known:
            self._nodes[node].more.pop(channel, None)
        if number <= known:
            return
        self._targets[channel] = number
        self._of_communicator.setdefault(channel[0], set()).add(channel)
        for other in self._concerned(channel) - {node}:
            self._nodes[other].more[channel] = number

    def _late(self) -> Order:
        words = {n: one.word for n, one in self._nodes.items() if one.word is not None}
        behind = [
            Behind(one.task, one.channel, one.rank, one.number, node)
            for node, word in words.items()
            for one in word.behind
        ]
        # A rank without a process was missed by a node where it is not.
        behind.sort(key=lambda one: one.task is None)
        first = behind[0].node if behind else None
        waits = [(n, word.process) for n, word in words.items() if word.process]
        waits.sort(key=lambda one: one[0] == first)
        waiting = waits[0] if waits else (0, 0)
        return Order(0, (), late=True, behind=tuple(behind[:NAMED]), waiting=waiting)


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
        if word != self._said and now >= self._next + self._patience(word):
            self._said, self._next = word, now + SAY_SECONDS
            self._say(word)
        return False

    def _patience(self, word: Word) -> float:
        said = self._said
        names_alone = said is not None and word == replace(said, behind=word.behind)
        return NAME_SECONDS if names_alone else 0.0

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
                if channel[0] in across and not across[channel[0]].issuperset(channel[1:])
            ),
            ranks=tuple((one, tuple(sorted(here))) for one, here in sorted(across.items())),
            quiet=quiet,
            still=cut.is_still(now),
            late=late,
            process=next(iter(views), 0),
            behind=tuple(cut.behind[:NAMED]),
        )


def _across(views: Mapping[int, View]) -> dict[int, set[int]]:
    """Communicators that have ranks elsewhere, with those that are here."""
    present: dict[int, set[int]] = {}
    ranks: dict[int, int] = {}
    for view in views.values():
        for end in view.ends:
            if end.channel[1] < 0:
                present.setdefault(end.channel[0], set()).add(end.rank)
                ranks[end.channel[0]] = end.ranks
    return {one: here for one, here in present.items() if len(here) < ranks[one]}
