"""Which ghost a session gets, and which one is there between sessions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.ghost_client import GhostGone
from coordinator.ghosts import Ghosts


class Ghost:
    """Answers what is asked of it with contexts on these GPUs."""

    def __init__(self, *warm: int) -> None:
        self.warm, self.ended, self.asked = warm, "", 0

    def alive(self) -> bool:
        return not self.ended

    def ask(self, command: object, deadline: float) -> Any:
        return SimpleNamespace(gpus=[SimpleNamespace(ordinal=0)], warm=self.warm)

    def submit(self, command: object) -> None:
        if self.ended:
            raise GhostGone("it has ended")
        self.asked += 1

    def quit(self) -> None:
        self.ended = "quit"

    def kill(self) -> None:
        self.ended = "killed"


class Ready:
    """Ghosts of a job, and those that were made."""

    def __init__(self, *, warm: bool, first: Ghost | None = None) -> None:
        self.made: list[Ghost] = []
        self.ghosts = Ghosts(
            cast(Any, self.make), cast(Any, None), warm=warm, first=cast(Any, first)
        )

    def make(self) -> Ghost:
        self.made.append(Ghost())
        return self.made[-1]

    def start(self) -> Ghost:
        return cast(Any, self.ghosts.start())

    def keep(self, ghost: Ghost, *, stays: bool = False) -> bool:
        return self.ghosts.keep(cast(Any, ghost), stays)


@pytest.mark.parametrize("warm", [False, True])
def test_the_first_one_is_used_once_and_one_that_has_died_never(warm: bool) -> None:
    first = Ghost()
    ready = Ready(warm=warm, first=first)
    assert ready.start() is first
    assert [ready.start(), ready.start()] == ready.made
    dead = Ghost()
    ready = Ready(warm=warm, first=dead)
    dead.ended = "by itself"
    assert [ready.start()] == ready.made


def test_a_first_one_that_a_restore_has_not_taken_ends_unless_it_is_to_be_warm() -> None:
    for warm in (False, True):
        first = Ghost()
        Ready(warm=warm, first=first).ghosts.restored()
        assert first.alive() is warm


@pytest.mark.parametrize("warm", [False, True])
def test_a_suspended_job_has_one_without_contexts_ready(warm: bool) -> None:
    ready = Ready(warm=warm)
    used = Ghost(0)
    assert ready.keep(used) is warm  # when the suspension is done with it
    ready.ghosts.prepare(rests=True)
    ready.ghosts.rest(True)
    (one,) = ready.made
    assert one.alive() and one.asked == 1
    assert used.ended == ("quit" if warm else "")
    assert not ready.keep(Ghost(0))
    ready.ghosts.rest(False)
    assert ready.start() is one


@pytest.mark.parametrize("warm", [False, True])
def test_a_resumed_job_has_one_ready_or_warm(warm: bool) -> None:
    ready = Ready(warm=warm)
    used = Ghost(0)
    assert ready.keep(used) is warm
    ready.ghosts.prepare(rests=False)
    ready.ghosts.prepare(rests=False)
    assert len(ready.made) == (0 if warm else 1)
    assert ready.start() is (used if warm else ready.made[0])


@pytest.mark.parametrize("warm", [False, True])
def test_a_suspended_job_with_contexts_keeps_the_ghost_with_its_own(warm: bool) -> None:
    ready = Ready(warm=warm)
    used = Ghost(*([0] if warm else []))
    assert ready.keep(used, stays=True)
    ready.ghosts.prepare(rests=False)
    ready.ghosts.rest(False)
    assert ready.made == [] and used.alive()
    assert ready.start() is used


def test_none_outlives_its_job() -> None:
    ready = Ready(warm=False)
    ready.ghosts.prepare(rests=False)
    ready.ghosts.close()
    assert [ghost.ended for ghost in ready.made] == ["killed"]
