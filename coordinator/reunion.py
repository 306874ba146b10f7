"""New unique ids of communicators whose ranks are on several nodes: how the leader passes them on.

Each node brings its communicators back in its own time (renewal.py), after a checkpoint, after a
failure of one, in a restore, or by another coordinator. It says which of their ranks it has ready,
and the ids that it has made. A communicator's id goes to its nodes once all its ranks are ready.
So this belongs to no checkpoint, and a leader that begins anew hears of it again.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Row = tuple[int, int, Sequence[int], str]
"""A communicator, how many ranks it has, those that are ready, and its id in hex if it is known."""

Told = tuple[str, int, str]
"""The token of a node's own word, a communicator, and its id in hex."""


@dataclass(frozen=True)
class _Come:
    token: str
    ranks: frozenset[int]
    id: str


@dataclass
class Reunion:
    """What nodes have said, by communicator."""

    _come: dict[int, dict[int, _Come]] = field(default_factory=dict)
    _whole: set[int] = field(default_factory=set)

    def come(self, node: int, token: str, rows: Iterable[Row]) -> dict[int, list[Told]]:
        """A node has these ready; `token` is another one for each time. Gives what nodes are to be
        told."""
        told: dict[int, list[Told]] = {}
        for communicator, count, ranks, id_ in rows:
            nodes = self._come.setdefault(communicator, {})
            said = _Come(token, frozenset(ranks), id_)
            if communicator in self._whole and nodes.get(node) != said:
                nodes.clear()  # what was made anew then has been ended again
                self._whole.discard(communicator)
            nodes[node] = said
            ids = [one.id for one in nodes.values() if one.id]
            if ids and len(frozenset().union(*(one.ranks for one in nodes.values()))) == count:
                self._whole.add(communicator)
                for other, one in nodes.items():
                    told.setdefault(other, []).append((one.token, communicator, ids[0]))
        return told

    def leave(self, node: int, token: str | None = None) -> None:
        """A node waits no longer, or, without a token, its coordinator has gone."""
        for communicator, nodes in self._come.items():
            said = nodes.get(node)
            if communicator not in self._whole and said and token in (None, said.token):
                del nodes[node]
