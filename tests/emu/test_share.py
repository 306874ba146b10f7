"""Jobs take turns on a GPU: `flowgpu share`.

Where a turn is long, what happens ends it, and not the time.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flowgpu.jobs import RUNNING, SUSPENDED
from tests.emu import test_checkpoint
from tests.emu.test_checkpoint import FLOWGPU, ROOT, SECONDS, Run, command, flowgpu, undisturbed
from tests.emu.test_suspend import resume, stands, state, suspend
from tests.emu.test_takeover import kill_coordinator
from tests.unit.coordinator_job import wait_for

runtime_dir, runs = test_checkpoint.runtime_dir, test_checkpoint.runs
LONG = 600  # seconds, in which no test of these ends

pytestmark = pytest.mark.timeout(600)  # many commands


class Sharing:
    """A `flowgpu share` under way."""

    def __init__(self, folder: Path, quantum: float, *words: str) -> None:
        self._out, self._err = folder / "share.out", folder / "share.err"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(
                [*FLOWGPU, "share", "--quantum", str(quantum), "--json", *words],
                stdout=out,
                stderr=err,
                cwd=ROOT,
            )

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Those whose lines are whole."""
        return [json.loads(line) for line in self._out.read_text().split("\n")[:-1]]

    @property
    def said(self) -> str:
        return self._err.read_text()

    def wait_turn(self, count: int) -> dict[str, Any]:
        """The turn of that number, from 1 on."""
        wait_for(lambda: len(self.turns) >= count or self.ended, f"turn {count}", SECONDS)
        assert len(self.turns) >= count, self.said
        return self.turns[count - 1]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self, signum: int = 0) -> int:
        if signum:
            self.process.send_signal(signum)
        return self.process.wait(SECONDS)


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Any]:
    started: list[Sharing] = []

    def start(quantum: float, *jobs: Run | str) -> Sharing:
        words = [job if isinstance(job, str) else job.name for job in jobs]
        started.append(Sharing(tmp_path, quantum, *words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def begin(runs: Any, *workloads: str) -> list[Run]:
    """Jobs that are at work."""
    made = [runs(name, command(name), "", "--engine", "replay") for name in workloads]
    for run in made:
        run.wait_lines(3)
    return made


def end_as_undisturbed(*made: Run) -> None:
    for run in made:
        assert run.end() == 0
        assert run.lines == undisturbed(run.name)


@pytest.mark.parametrize("options", [(), ("--keep-context",)])
def test_jobs_take_turns_until_one_is_left(runs: Any, sharing: Any, options: Any) -> None:
    made = first, second, third = begin(runs, "segments", "graphs", "modules")
    share = sharing(0.5, first, second, third, *options)
    share.wait_turn(7)
    turns = share.turns[:7]
    names = [run.name for run in made]
    assert [turn["job"] for turn in turns] == [names[i % 3] for i in range(7)]
    assert {one["job"] for one in turns[0]["out"]} == {*names[1:]} and not turns[0]["in"]
    for before, turn in pairwise(turns):
        assert [one["job"] for one in turn["out"]] == [before["job"]]
        assert turn["in"]["job"] == turn["job"]
        assert {one["keeps_context"] for one in turn["out"]} == {bool(options)}
    end_as_undisturbed(second, third)
    assert share.end() == 0
    assert f"{second.name} leaves the round: it is exited" in share.said
    assert f"{first.name} runs on" in share.said
    assert state(first) == RUNNING
    end_as_undisturbed(first)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_jobs_as_they_were(signum: int, runs: Any, sharing: Any) -> None:
    first, second, third = begin(runs, "segments", "graphs", "modules")
    suspend(third)
    share = sharing(LONG, first, second, third)
    assert share.wait_turn(1)["job"] == first.name
    stands(second)
    assert share.end(signum) == 128 + signum
    assert [state(run) for run in (first, second, third)] == [RUNNING, RUNNING, SUSPENDED]
    assert f"{second.name} runs on" in share.said
    assert f"`flowgpu resume {third.name}`" in share.said
    resume(third)
    end_as_undisturbed(first, second, third)


def test_a_job_that_cannot_be_suspended_keeps_its_turn(runs: Any, sharing: Any) -> None:
    first, second = begin(runs, "segments", "graphs")
    suspend(first)
    flowgpu("kill", "--signal", "STOP", second.name)
    share = sharing(0.3, first, second)
    for number in range(1, 4):
        assert share.wait_turn(number) == {
            "turn": number,
            "job": second.name,
            "out": [],
            "in": None,
        }
    assert share.said.count("keeps the GPU") == 1 and "SIGSTOP" in share.said
    flowgpu("kill", "--signal", "CONT", second.name)
    wait_for(lambda: share.turns[-1]["job"] == first.name, "the turn of the first", SECONDS)
    assert share.end(signal.SIGTERM) == 128 + signal.SIGTERM
    for run in (first, second):
        if state(run) == SUSPENDED:
            resume(run)
    end_as_undisturbed(first, second)


def test_a_job_that_cannot_come_back_misses_its_turn(runs: Any, sharing: Any) -> None:
    cannot = runs("graphs", command("graphs"), "fill:1", "--engine", "replay")
    cannot.wait_lines(3)
    (other,) = begin(runs, "segments")
    suspend(cannot)
    share = sharing(LONG, cannot, other)
    turn = share.wait_turn(1)
    assert (turn["job"], turn["out"][0]["job"]) == (other.name, other.name)
    assert f"{cannot.name} misses its turn" in share.said
    # Its next turn comes when the other one leaves the GPU, whoever has suspended that.
    suspend(other)
    turn = share.wait_turn(2)
    assert (turn["job"], turn["in"]["job"]) == (cannot.name, cannot.name)
    assert state(other) == SUSPENDED
    # The last one of the round runs, without a turn's wait.
    assert flowgpu("kill", cannot.name).returncode == 0
    assert share.end() == 0
    assert state(other) == RUNNING
    end_as_undisturbed(other)


def test_a_coordinator_that_is_killed_costs_no_job_its_turns(runs: Any, sharing: Any) -> None:
    first, second = begin(runs, "segments", "graphs")
    share = sharing(1, first, second)
    share.wait_turn(2)
    kill_coordinator(first.name)
    count = len(share.turns)
    share.wait_turn(count + 3)
    assert {turn["job"] for turn in share.turns[count:]} == {first.name, second.name}
    assert share.end(signal.SIGTERM) == 128 + signal.SIGTERM
    end_as_undisturbed(first, second)


def test_fewer_than_two_jobs_share_nothing(runs: Any, sharing: Any) -> None:
    (run,) = begin(runs, "segments")
    share = sharing(1, run, run)
    assert share.end() == 2
    assert "two jobs" in share.said
    assert state(run) == RUNNING
