"""What becomes of a checkpoint of several nodes, whatever its nodes do in whatever order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.epoch import Epoch, Verdict, is_committed, settle, take_away
from coordinator.others import WAYS, Barrier
from flowgpu.errors import Busy, FlowError, ImageDamaged, NodeFailed
from flowgpu.image.job_file import (
    JOB_FILE,
    JobFile,
    Part,
    check_parts,
    mark_name,
    of_part,
    part_digest,
    parts_here,
    sync_rename,
)
from flowgpu.image.layout import MANIFEST

BARRIERS = WAYS["checkpoint"]
LOST = FlowError(reason="it is gone")


def epoch(count: int = 2) -> Epoch:
    return Epoch("e1", frozenset(range(count)))


def voted(count: int = 2) -> Epoch:
    made = epoch(count)
    for barrier in BARRIERS:
        for node in range(count):
            made.reached(node, barrier, f"digest{node}")
    return made


def test_all_go_on_once_the_last_has_come_to_a_barrier_and_hear_what_was_said() -> None:
    one = epoch(3)
    for barrier in BARRIERS:
        come = [one.reached(node, barrier, f"of {node}") for node in (2, 0, 1)]
        assert come == [None, None, {0: "of 0", 1: "of 1", 2: "of 2"}]


def test_a_node_that_comes_to_a_barrier_twice_counts_once() -> None:
    one = epoch()
    assert [one.reached(0, Barrier.LOOK) for _ in range(3)] == [None] * 3
    assert one.reached(1, Barrier.LOOK) == {0: None, 1: None}


def test_what_is_exchanged_between_barriers_is_heard_by_all_once_all_have_come() -> None:
    one = epoch()
    assert one.exchange(0, "first", "of 0") is None
    assert one.exchange(1, "first", "of 1") == {0: "of 0", 1: "of 1"}
    assert one.exchange(1, "second", "of 1") is None  # each place has its own
    one.failed(1, LOST)
    assert one.exchange(0, "second", "of 0") is None


def test_a_barrier_that_is_not_the_next_one_moves_nobody() -> None:
    one = epoch(1)
    assert one.reached(0, Barrier.COMMIT, "digest") is None
    assert one.votes == {}


def test_it_is_committed_with_all_votes_alone() -> None:
    one = epoch()
    for barrier in BARRIERS[:-1]:
        one.reached(0, barrier), one.reached(1, barrier)
    assert one.reached(0, Barrier.COMMIT, "a") is None
    with pytest.raises(ValueError, match="votes"):
        one.committed()
    assert one.reached(1, Barrier.COMMIT, "b") == {0: "a", 1: "b"}
    one.committed()
    assert one.verdict is Verdict.COMMITTED
    assert one.votes == {0: "a", 1: "b"}


def test_the_first_failure_is_the_one_that_is_told() -> None:
    one = epoch()
    assert one.failed(1, Busy("train", "its end"), disturbed=True)
    assert not one.failed(0, LOST)
    assert (one.failed_node, type(one.error), one.disturbed) == (1, Busy, True)


def test_after_a_failure_nobody_comes_through_a_barrier() -> None:
    one = voted()
    one.failed(0, LOST)
    assert one.reached(0, Barrier.COMMIT, "a") is None
    with pytest.raises(ValueError, match="once"):
        one.committed()


def test_a_node_that_is_lost_before_its_vote_ends_it() -> None:
    for at in range(len(BARRIERS)):
        one = epoch()
        for barrier in BARRIERS[:at]:
            one.reached(0, barrier), one.reached(1, barrier)
        assert one.gone(1, LOST)
        assert one.verdict is Verdict.ABORTED
        assert one.missing == [0]


def test_a_vote_stands_when_its_node_is_lost() -> None:
    one = epoch()
    for barrier in BARRIERS[:-1]:
        one.reached(0, barrier), one.reached(1, barrier)
    one.reached(1, Barrier.COMMIT, "b")
    assert not one.gone(1, LOST)
    assert one.reached(0, Barrier.COMMIT, "a") == {0: "a", 1: "b"}


@pytest.mark.parametrize("what", ["suspension", "resume"])
def test_what_leaves_no_file_is_decided_when_all_have_come_to_its_last_place(what: str) -> None:
    epoch = Epoch("e1", frozenset(range(2)), what)
    for barrier in WAYS[what]:
        assert epoch.verdict is Verdict.OPEN and epoch.reached(0, barrier, "a") is None
        assert epoch.reached(0, Barrier.COMMIT) is None
        assert epoch.reached(1, barrier, "b") == {0: "a", 1: "b"}
    epoch.committed()
    assert epoch.reached(0, WAYS[what][-1]) is None
    assert not epoch.gone(1, LOST) and epoch.verdict is Verdict.COMMITTED


@pytest.mark.parametrize("what", ["suspension", "resume"])
def test_who_is_lost_at_the_last_place_ends_what_leaves_no_file(what: str) -> None:
    epoch = Epoch("e1", frozenset(range(2)), what)
    for barrier in WAYS[what][:-1]:
        for node in range(2):
            epoch.reached(node, barrier)
    epoch.reached(0, WAYS[what][-1])
    assert epoch.gone(0, LOST) and epoch.verdict is Verdict.ABORTED


def test_what_fails_after_the_commit_changes_nothing() -> None:
    one = voted()
    one.committed()
    assert not one.failed(0, LOST)
    assert not one.gone(1, LOST)
    assert one.verdict is Verdict.COMMITTED
    assert one.missing == [0, 1]
    one.done(0, {"a": 1})
    one.done(1, None)
    assert one.over
    assert one.results == {0: {"a": 1}}


EVENTS = st.one_of(
    st.tuples(st.just("reached"), st.integers(0, 2), st.sampled_from(BARRIERS)),
    st.tuples(st.just("failed"), st.integers(0, 2), st.none()),
    st.tuples(st.just("gone"), st.integers(0, 2), st.none()),
    st.tuples(st.just("done"), st.integers(0, 2), st.none()),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_no_order_of_events_commits_without_all_votes_or_changes_a_verdict(
    events: list[tuple[str, int, Barrier | None]],
) -> None:
    one, verdicts = epoch(3), [Verdict.OPEN]
    for kind, node, phase in events:
        if kind == "reached" and phase is not None:
            if one.reached(node, phase, f"d{node}") and phase is Barrier.COMMIT:
                assert set(one.votes) == one.nodes
                one.committed()
        elif kind == "failed":
            one.failed(node, LOST)
        elif kind == "gone":
            one.gone(node, LOST)
        else:
            one.done(node, None)
        verdicts.append(one.verdict)
    assert sum(a is not b for a, b in itertools.pairwise(verdicts)) <= 1


# The files


def image_of(folder: Path, count: int = 2) -> JobFile:
    parts = []
    for node in range(count):
        part = folder / f"node-{node}"
        part.mkdir(parents=True)
        (part / MANIFEST).write_text(f"manifest of node {node}")
        parts.append(Part(node, part_digest(part), node))
    return JobFile("e1", "train", "10.0.0.1:7000", "k" * 32, tuple(parts))


def begin(folder: Path, file: JobFile) -> Path:
    mark = folder / mark_name(file.epoch)
    mark.write_text(file.to_json())
    return mark


def test_the_rename_of_the_leaders_file_is_the_commit(tmp_path: Path) -> None:
    file = image_of(tmp_path)
    mark = begin(tmp_path, file)
    assert not is_committed(tmp_path, "e1")
    sync_rename(mark, tmp_path / JOB_FILE)
    assert is_committed(tmp_path, "e1")
    assert not is_committed(tmp_path, "e2")
    assert JobFile.load(tmp_path) == file


def test_who_takes_the_leaders_file_away_first_has_decided(tmp_path: Path) -> None:
    mark = begin(tmp_path, image_of(tmp_path))
    assert take_away(tmp_path, "e1")
    with pytest.raises(FileNotFoundError):
        sync_rename(mark, tmp_path / JOB_FILE)
    assert not settle(tmp_path, "e1")


def test_a_new_leader_gives_up_what_is_not_committed_and_keeps_what_is(tmp_path: Path) -> None:
    mark = begin(tmp_path, image_of(tmp_path))
    sync_rename(mark, tmp_path / JOB_FILE)
    assert settle(tmp_path, "e1")
    other = tmp_path / "other"
    mark = begin(other, image_of(other))
    assert not settle(other, "e1")
    assert not mark.exists()


def test_parts_are_those_of_the_job_file(tmp_path: Path) -> None:
    file = image_of(tmp_path, 3)
    assert check_parts(tmp_path, file, 2) == tmp_path / "node-2"
    (tmp_path / "node-1" / MANIFEST).write_text("another epoch's")
    with pytest.raises(ImageDamaged, match=r"node-1.*not the one"):
        check_parts(tmp_path, file, 2)


def test_a_node_with_a_disk_of_its_own_needs_its_own_part_alone(tmp_path: Path) -> None:
    file = image_of(tmp_path)
    (tmp_path / "node-0" / MANIFEST).unlink()
    (tmp_path / "node-0").rmdir()
    assert check_parts(tmp_path, file, 1) == tmp_path / "node-1"
    with pytest.raises(ImageDamaged, match="node-0"):
        check_parts(tmp_path, file, 0)


def test_a_part_is_known_as_one_by_what_is_beside_it(tmp_path: Path) -> None:
    file = image_of(tmp_path)
    part = tmp_path / "node-1"
    assert of_part(part) is None  # somebody has called an image so
    mark = begin(tmp_path, file)
    assert of_part(part) == (tmp_path, 1)
    sync_rename(mark, tmp_path / JOB_FILE)
    assert of_part(part) == (tmp_path, 1)
    assert parts_here(tmp_path) == [tmp_path / "node-0", part]


@pytest.mark.parametrize(
    "change",
    [
        ('"version": 1', '"version": "x"'),
        ('"flowgpu-nodes"', '"another"'),
        ('"node": 1', '"node": 4'),
        ("10.0.0.1:7000", "nowhere"),
        ('"epoch": "e1",', ""),
        ("{", ""),
    ],
)
def test_a_damaged_job_file_is_named(tmp_path: Path, change: tuple[str, str]) -> None:
    text = image_of(tmp_path).to_json()
    assert change[0] in text
    (tmp_path / JOB_FILE).write_text(text.replace(*change, 1))
    with pytest.raises(FlowError, match=str(tmp_path)):
        JobFile.load(tmp_path)


def test_errors_of_nodes_name_the_node() -> None:
    error = NodeFailed(node=1, job="train", reason="the disk is full")
    assert str(error) == "Node 1 of job 'train' could not do its part: the disk is full."
