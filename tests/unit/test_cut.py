"""The cut of a checkpoint through ranks of NCCL (coordinator/cut.py): on traces, and on drawn
programs of ranks, against the closure that the specification asks for.

A drawn program gives each thread a list of units, taken from one common order, so that an
undisturbed run ends. The ranks here do as native/nccl does.
"""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass, field

import pytest

from coordinator.communicators import Communicators, refuse_outside
from coordinator.cut import (
    STILL_SECONDS,
    STUCK_SECONDS,
    Behind,
    Channel,
    Cut,
    End,
    State,
    Thread,
    View,
)
from coordinator.cut_of_nodes import Order, Part, Whole, Word
from flowgpu import nccl, wire
from flowgpu.errors import Unsupported

ONE, TWO = (1, -1, -1), (2, -1, -1)
STEP = 0.0002
Unit = tuple[tuple[Channel, int], ...]
"""Channels and the rank that takes a number of each."""


def view(*ends: End, parked: dict[Channel, int] | None = None) -> View:
    threads = [Thread(State.PARKED, 0.0, tuple(parked.items()))] if parked else []
    return View(ends, threads)


def test_ranks_that_are_level_are_cut_at_the_second_look() -> None:
    cut = Cut(0.0)
    views = {1: view(End(ONE, 0, 5, 2)), 2: view(End(ONE, 1, 5, 2))}
    assert [cut.look(0.0, views), cut.look(STEP, views), cut.look(2 * STEP, views)] == [
        False,  # the targets were raised
        False,
        True,
    ]
    assert cut.targets == {ONE: 5}


def test_a_rank_that_is_behind_catches_up_and_no_further() -> None:
    cut = Cut(0.0)
    late = {1: view(End(ONE, 0, 9, 2)), 2: view(End(ONE, 1, 5, 2), parked={ONE: 6})}
    assert not cut.look(0.0, late)
    assert (cut.targets, cut.first_behind) == ({ONE: 9}, 4)
    assert cut.behind == [Behind(2, ONE, 1, 9)]
    level = {1: view(End(ONE, 0, 9, 2), parked={ONE: 10}), 2: view(End(ONE, 1, 9, 2))}
    assert not cut.look(1.0, level)
    assert cut.look(2.0, level)
    assert cut.targets == {ONE: 9}  # who waits at 10 is not let on: nobody is behind


def test_what_stands_before_an_operation_that_is_behind_is_issued_too() -> None:
    cut = Cut(0.0)
    views = {
        1: view(End(ONE, 0, 3, 2), End(TWO, 0, 7, 2)),
        2: view(End(ONE, 1, 2, 2), End(TWO, 1, 7, 2), parked={TWO: 8}),
    }
    cut.look(0.0, views)
    assert cut.targets == {ONE: 3, TWO: 7}
    cut.look(STILL_SECONDS, views)
    assert cut.targets == {ONE: 3, TWO: 8}  # (b); now rank 0 is behind on it
    assert cut.grown == 1
    cut.look(STILL_SECONDS + STEP, views)
    assert Behind(1, TWO, 0, 8) in cut.behind


def test_where_all_stand_still_those_that_wait_are_let_on() -> None:
    """Rank 1 waits on the CPU for rank 0, which waits at the gate."""
    cut = Cut(0.0)
    views = {
        1: view(End(ONE, 0, 4, 2), End(TWO, 0, 1, 1), parked={TWO: 2}),
        2: view(End(ONE, 1, 3, 2)),
    }
    for now in (0.0, STEP, STUCK_SECONDS / 2):
        cut.look(now, views)
    assert TWO not in {channel for channel, number in cut.targets.items() if number > 1}
    cut.look(STUCK_SECONDS, views)
    assert (cut.targets[TWO], cut.forced) == (2, 1)


def test_a_rank_that_has_no_end_of_a_channel_yet_is_behind_on_it() -> None:
    message = (1, 0, 1)
    cut = Cut(0.0)
    views = {1: view(End(ONE, 0, 1, 2), End(message, 0, 1, 2)), 2: view(End(ONE, 1, 1, 2))}
    cut.look(0.0, views)
    assert cut.behind == [Behind(2, message, 1, 1)]


def test_a_communicator_that_is_being_made_waits_for_all_its_ranks() -> None:
    cut = Cut(0.0)
    views = {1: view(End(ONE, 0, 1, 3, made=False)), 2: view(End(ONE, 2, 1, 3, made=False))}
    for now in (0.0, 1.0, 2.0):
        assert not cut.look(now, views)
    assert cut.behind == [Behind(None, ONE, 1, 1)]


def test_a_rank_that_has_ended_its_communicator_is_not_waited_for() -> None:
    cut = Cut(0.0)
    views = {1: view(End(ONE, 0, 7, 2)), 2: view()}
    cut.look(0.0, views)
    cut.look(1.0, views)
    assert cut.look(2.0, views)


@pytest.mark.parametrize("state", [State.DECIDING, State.INSIDE])
def test_a_thread_in_nccl_is_waited_for(state: State) -> None:
    cut = Cut(0.0)
    views = {1: View([End(ONE, 0, 5, 1)], [Thread(state)])}
    assert not any(cut.look(now * STEP, views) for now in range(5))


def test_what_goes_on_in_the_background_is_waited_for() -> None:
    cut = Cut(0.0)
    views = {1: View([End(ONE, 0, 5, 1, pending=True)], [])}
    assert not any(cut.look(now * STEP, views) for now in range(5))


def page_of(rows: list[tuple[int, int, int]]) -> Communicators:
    """A page with rows of collectives: communicator, number of ranks, own rank."""
    fd = os.memfd_create("page")
    os.ftruncate(fd, nccl.BYTES)
    head = nccl.Header.FORMAT.pack(nccl.MAGIC, nccl.VERSION, 0, *[0] * 5, len(rows), *[0] * 6)
    os.pwrite(fd, head, 0)
    for number, (communicator, ranks, rank) in enumerate(rows):
        fields = communicator, 0, 0, ranks, rank, nccl.NO_RANK, nccl.NO_RANK, 1, 0, 0, 0
        os.pwrite(fd, nccl.Row.FORMAT.pack(*fields), nccl.ROWS_AT + number * nccl.Row.SIZE)
    return Communicators(fd)


def test_a_communicator_with_ranks_elsewhere_is_refused() -> None:
    pages = {10: page_of([(1, 2, 0), (2, 1, 0)]), 11: page_of([(1, 2, 1)])}
    try:
        refuse_outside(pages)
        with pytest.raises(
            Unsupported, match=r"of 2 ranks, 1 of which are in the job .*process 10"
        ):
            refuse_outside({10: pages[10]})
        refuse_outside({10: pages[10]}, {1: [1]})  # on another node
    finally:
        for page in pages.values():
            page.close()


def test_a_page_of_another_version_is_not_read() -> None:
    fd = os.memfd_create("page")
    os.ftruncate(fd, nccl.BYTES)
    with pytest.raises(wire.WireError):
        Communicators(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


@dataclass
class Simulated:
    """One rank: its units in order, how far it is, and when it goes on."""

    units: list[Unit]
    done: int = 0
    busy_until: float = 0.0
    parked: bool = False
    since: float = 0.0
    entered: dict[Channel, int] = field(default_factory=dict)

    def want(self, rank: int) -> dict[Channel, int]:
        found: dict[Channel, int] = {}
        for channel, _ in self.units[self.done]:
            found[channel] = found.get(channel, self.entered.get(channel, 0)) + 1
        return found

    def go_on(self, now: float, rank: int, limits: dict[Channel, int], pause: float) -> None:
        """At the gate: issue the next unit, or wait."""
        if self.done == len(self.units) or now < self.busy_until:
            return
        want = self.want(rank)
        if all(limits.get(channel, 0) >= number for channel, number in want.items()):
            self.entered |= want
            self.done += 1
            self.parked = False
            self.busy_until = now + pause
        elif not self.parked:
            self.parked, self.since = True, now

    def view(self, rank: int, channels: dict[Channel, set[int]]) -> View:
        ends = [
            End(channel, rank, self.entered.get(channel, 0), len(members))
            for channel, members in channels.items()
            if rank in members
        ]
        threads = []
        if self.parked:
            threads = [Thread(State.PARKED, self.since, tuple(self.want(rank).items()))]
        return View(ends, threads)


def drawn(random_: random.Random) -> tuple[dict[Channel, set[int]], list[list[Unit]]]:
    """Channels with their members, and each rank's units in one common order, some of which ranks
    swap where that cannot hang."""
    ranks = random_.randrange(2, 5)
    channels: dict[Channel, set[int]] = {}
    for number in range(random_.randrange(1, 4)):
        members = set(random_.sample(range(ranks), random_.randrange(2, ranks + 1)))
        channels[number + 1, -1, -1] = members
        one, two = random_.sample(sorted(members), 2)
        channels[number + 1, one, two] = {one, two}
    units: list[list[Unit]] = [[] for _ in range(ranks)]
    for _ in range(random_.randrange(5, 40)):
        group = random_.sample(sorted(channels), random_.choice((1, 1, 1, min(2, len(channels)))))
        for rank in range(ranks):
            mine = tuple((channel, rank) for channel in group if rank in channels[channel])
            if mine:
                units[rank].append(mine)
    return channels, units


def closure(
    channels: dict[Channel, set[int]], units: list[list[Unit]], done: list[int]
) -> list[int]:
    """How many units each rank has issued in the least set that has `done`, with each unit those
    before it, and of each channel the same number at all members."""
    done = list(done)
    while True:
        counts = [_counts(units[rank][: done[rank]]) for rank in range(len(units))]
        changed = False
        for channel, members in channels.items():
            most = max(counts[rank].get(channel, 0) for rank in members)
            for rank in members:
                while _counts(units[rank][: done[rank]]).get(channel, 0) < most:
                    done[rank] += 1
                    changed = True
        if not changed:
            return done


def _counts(units: list[Unit]) -> dict[Channel, int]:
    found: dict[Channel, int] = {}
    for unit in units:
        for channel, _ in unit:
            found[channel] = found.get(channel, 0) + 1
    return found


@pytest.mark.parametrize("seed", range(300))
def test_a_cut_is_the_least_that_is_closed(seed: int) -> None:
    random_ = random.Random(seed)
    channels, units = drawn(random_)
    ranks, least = stopped_anywhere(random_, channels, units)
    cut, now = Cut(0.0), 0.0
    while True:
        now += STEP
        assert now < 20, "the cut does not end"
        if cut.look(now, {rank: one.view(rank, channels) for rank, one in enumerate(ranks)}):
            break
        for rank, one in enumerate(ranks):
            one.go_on(now, rank, cut.targets, random_.random() * 0.0008)
    assert [one.done for one in ranks] == least
    assert cut.forced == 0


def stopped_anywhere(
    random_: random.Random, channels: dict[Channel, set[int]], units: list[list[Unit]]
) -> tuple[list[Simulated], list[int]]:
    """Ranks where the gates close, and how many units each has issued in the least cut."""
    ranks = [Simulated(one) for one in units]
    started = random_.randrange(max(map(len, units)) + 1)
    for rank, one in enumerate(ranks):  # each somewhere else when the gates close
        for _ in range(min(max(started + random_.randrange(-6, 7), 0), len(one.units))):
            one.go_on(0.0, rank, dict.fromkeys(channels, 1 << 40), 0.0)
    return ranks, closure(channels, units, [one.done for one in ranks])


@dataclass
class OnNode:
    """A node's part of a cut, with messages that take their time."""

    ranks: dict[int, Simulated]
    cut: Cut = field(default_factory=lambda: Cut(0.0, alone=False))
    words: list[Word] = field(default_factory=list)
    orders: list[tuple[float, Order]] = field(default_factory=list)
    made: bool = False
    now: float = 0.0
    arrives: float = 0.0
    """When its last word does."""

    def __post_init__(self) -> None:
        self.part = Part(self.words.append, lambda seconds: self.newest())

    def newest(self) -> Order | None:
        return next((order for at, order in reversed(self.orders) if at <= self.now), None)

    def look(self, now: float, channels: dict[Channel, set[int]]) -> None:
        views = {rank: one.view(rank, channels) for rank, one in self.ranks.items()}
        self.look_at(views, now)

    def look_at(self, views: dict[int, View], now: float) -> None:
        self.now = now
        self.made = self.part.made(self.cut, self.cut.look(now, views), views, now)


@pytest.mark.parametrize("seed", range(300))
def test_a_cut_of_several_nodes_is_the_least_that_is_closed(seed: int) -> None:
    random_ = random.Random(seed)
    channels, units = drawn(random_)
    ranks, least = stopped_anywhere(random_, channels, units)
    count, now = random_.randrange(1, 4), 0.0
    places = [random_.randrange(count) for _ in ranks]
    nodes = [
        OnNode({rank: one for rank, one in enumerate(ranks) if places[rank] == node})
        for node in range(count)
    ]
    whole = Whole(range(count))
    delayed: list[tuple[float, int, Word]] = []
    while not all(node.made for node in nodes):
        now += STEP
        assert now < 20, "the cut does not end"
        for number, node in enumerate(nodes):
            if not node.made:
                node.look(now, channels)
            for word in node.words:
                node.arrives = max(node.arrives, now + random_.random() * 0.002)
                delayed.append((node.arrives, number, word))
            node.words.clear()
            for rank, one in node.ranks.items():
                one.go_on(now, rank, node.cut.targets, random_.random() * 0.0008)
        for at, number, word in [one for one in delayed if one[0] <= now]:
            delayed.remove((at, number, word))
            told = whole.hear(number, Word.from_fields(json.loads(json.dumps(word.to_fields()))))
            for other, order in told.items():
                order = Order.from_fields(json.loads(json.dumps(order.to_fields())))
                nodes[other].orders.append((now + random_.random() * 0.002, order))
    assert [one.done for one in ranks] == least
    assert all(node.cut.forced == 0 for node in nodes)


def test_a_word_has_what_other_nodes_have_to_know() -> None:
    words: list[Word] = []
    views = {
        7: view(End(ONE, 0, 3, 3), End((1, 0, 1), 0, 2, 3), End((1, 0, 2), 0, 1, 3)),
        8: view(End(ONE, 1, 3, 3), End((1, 0, 1), 1, 2, 3), End(TWO, 0, 9, 1)),
    }
    cut = Cut(0.0, alone=False)
    part = Part(words.append, lambda seconds: None)
    part.made(cut, cut.look(0.0, views), views, 0.0)
    (word,) = words
    assert word.targets == ((*ONE, 3), (1, 0, 2, 1))  # not what is within the node
    assert (word.ranks, word.process, word.quiet) == (((1, (0, 1)),), 7, False)


MANY_NODES, RANKS, ROUND_BYTES = 125, 8, 100 << 10


def test_a_thousand_ranks_are_cut_soon_after_the_last_has_caught_up() -> None:
    """Communicators of all ranks, of each node and across nodes, and messages to the next node."""
    random_ = random.Random(1)
    total = MANY_NODES * RANKS
    members: dict[Channel, set[int]] = {(1, -1, -1): set(range(total))}
    for node in range(MANY_NODES):
        members[1000 + node, -1, -1] = set(range(node * RANKS, (node + 1) * RANKS))
    for lane in range(RANKS):
        members[100 + lane, -1, -1] = {node * RANKS + lane for node in range(MANY_NODES)}
    for rank in range(total - RANKS):
        members[1, rank, rank + RANKS] = {rank, rank + RANKS}
    of_rank: list[dict[Channel, set[int]]] = [{} for _ in range(total)]
    for channel, ranks in members.items():
        for rank in ranks:
            of_rank[rank][channel] = ranks
    order = [
        [(1000 + rank // RANKS, -1, -1), (100 + rank % RANKS, -1, -1)] * 3
        + [channel for channel in of_rank[rank] if channel[1] >= 0]
        + [(1, -1, -1)]
        for rank in range(total)
    ]
    ranks = [
        Simulated([((channel, rank),) for channel in order[rank] * 6]) for rank in range(total)
    ]
    for rank, one in enumerate(ranks):
        for _ in range(24 + random_.randrange(-4, 5)):
            one.go_on(0.0, rank, dict.fromkeys(of_rank[rank], 1 << 40), 0.0)
    nodes = [
        OnNode({rank: ranks[rank] for rank in range(node * RANKS, (node + 1) * RANKS)})
        for node in range(MANY_NODES)
    ]
    whole, now, last = Whole(range(MANY_NODES)), 0.0, 0.0
    sent, busy = [0] * MANY_NODES, 0.0
    delayed: list[tuple[float, int, str]] = []
    known: dict[int, View] = {}
    while not all(node.made for node in nodes):
        now += 0.001
        assert now < 5, "the cut does not end"
        for number, node in enumerate(nodes):
            moved = [one for one in node.ranks if one not in known]
            known |= {one: ranks[one].view(one, of_rank[one]) for one in moved}
            if not node.made:
                node.look_at({one: known[one] for one in node.ranks}, now)
            for word in node.words:
                delayed.append((now + 0.0003, number, json.dumps(word.to_fields())))
                sent[number] += len(delayed[-1][2])
            node.words.clear()
            for rank, one in node.ranks.items():
                before = one.done, one.parked
                one.go_on(now, rank, node.cut.targets, random_.random() * 0.003)
                if (one.done, one.parked) != before:
                    known.pop(rank)
                    last = now if one.done != before[0] else last
        came, delayed = delayed, []
        for at, number, text in came:
            if at > now:
                delayed.append((at, number, text))
                continue
            began = time.process_time()
            told = whole.hear(number, Word.from_fields(json.loads(text)))
            texts = {other: json.dumps(one.to_fields()) for other, one in told.items()}
            busy += time.process_time() - began
            for other, said in texts.items():
                sent[other] += len(said)
                nodes[other].orders.append((now + 0.0003, Order.from_fields(json.loads(said))))
    assert now - last <= 0.05
    assert busy < 1.0  # seconds of the leader's processor
    assert max(sent) <= ROUND_BYTES
