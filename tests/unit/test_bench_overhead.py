"""The overhead section's arithmetic: turns, ratios of neighbours, intervals; and the two programs
without a GPU."""

from __future__ import annotations

import random
import socket
import statistics
import subprocess
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from bench import overhead, step_time
from bench.overhead import FLOWGPU, PLAIN, SKIPPED_STEPS, STUB, SWITCHED, Worker
from tests.gpu.site import Trouble
from tests.patience import SECONDS

NO_PROCESS = cast("subprocess.Popen[bytes]", None)


def worker(variant: str, group: int, steps: list[float]) -> Worker:
    """A process whose blocks have these medians."""
    made = Worker(variant, group, NO_PROCESS, Path("unused"))
    for seconds in steps:
        made.blocks.append(
            {
                "step_seconds": [9.0] * SKIPPED_STEPS + [seconds] * 3,
                "cpu_seconds": 2 * seconds,
                "minor_faults": 0,
                "switches": 2 * (SKIPPED_STEPS + 3),
            }
        )
    return made


def machine(slowdown: float, chance: float, pairs: int = 5, blocks: int = 20) -> list[list[Worker]]:
    """Processes on a machine that becomes 30 % slower and faster again: those under FlowGPU are
    slower by `slowdown`, and each by its own chance."""
    draw = random.Random(1)
    drift = [0.02 * (1.15 + 0.15 * draw.uniform(-1, 1)) for _ in range(blocks)]
    groups = []
    for group in range(pairs):
        plain, other = (1 + draw.gauss(0, chance) for _ in range(2))
        groups.append(
            [
                worker(PLAIN, group, [plain * seconds for seconds in drift]),
                worker(FLOWGPU, group, [other * slowdown * seconds for seconds in drift]),
            ]
        )
    return groups


def test_what_the_machine_does_to_all_is_not_in_the_ratio() -> None:
    found = overhead.summary(machine(slowdown=1.02, chance=0.0), FLOWGPU)
    assert found["ratio_mean"] == pytest.approx(1.02)
    assert (found["ratio_low"], found["ratio_high"]) == pytest.approx((1.02, 1.02))
    assert all(pair["low"] == pytest.approx(pair["high"]) for pair in found["pairs"])


@pytest.mark.parametrize(("slowdown", "slower"), [(1.0, False), (1.03, True)])
def test_chance_of_a_process_is_in_the_interval(slowdown: float, slower: bool) -> None:
    groups = machine(slowdown, chance=0.003)
    found = overhead.summary(groups, FLOWGPU)
    assert found["ratio_low"] < slowdown < found["ratio_high"]
    assert (found["ratio_low"] > 1.01) is slower
    assert (found["ratio_high"] <= 1.01) is not slower
    assert 0.001 < overhead.plain_stdev(groups) < 0.01


def test_quiet_steps_show_what_disturbances_hide() -> None:
    draw = random.Random(4)
    groups = []
    for group in range(5):
        pair = []
        for variant, slowdown in ((PLAIN, 1.0), (FLOWGPU, 1.004)):
            disturbed = [0.02 * slowdown * (1 + 0.1 * draw.random() ** 2) for _ in range(200)]
            pair.append(worker(variant, group, disturbed))
        groups.append(pair)
    found = overhead.summary(groups, FLOWGPU)
    low, high = found["quiet_interval"]
    assert 1.003 < low < 1.004 < high < 1.005
    assert found["ratio_high"] - found["ratio_low"] > 2 * (high - low)


def test_steps_that_took_turns_are_compared_one_by_one() -> None:
    """Each step is slow or quick with its neighbour, and now and then one of them is interrupted:
    that is not seen in the ratio, though the medians of blocks differ by chance."""
    draw = random.Random(5)
    groups = []
    for group in range(5):
        plain, ours = worker(PLAIN, group, [1.0] * 8), worker(SWITCHED, group, [1.0] * 8)
        for one, other in zip(plain.blocks, ours.blocks, strict=True):
            machine = [0.03 * (1 + 0.2 * draw.random()) for _ in range(17)]
            for block, slowdown in ((one, 1.0), (other, 1.006)):
                stopped = [5.0 if draw.random() < 0.05 else 1.0 for _ in machine]
                block["step_seconds"] = [
                    slowdown * s * t for s, t in zip(machine, stopped, strict=True)
                ]
        groups.append([plain, ours])
    found = overhead.summary(groups, SWITCHED)
    assert found["ratio_mean"] == pytest.approx(1.006, abs=1e-6)


def test_only_groups_that_have_a_part_count_for_it() -> None:
    groups = machine(1.0, 0.0, pairs=3)
    groups[0].append(worker(STUB, 0, groups[0][0].medians))
    found = overhead.summary(groups, STUB)
    assert len(found["pairs"]) == 1
    assert found["ratio_low"] is None
    assert found["pairs"][0]["a_step"][STUB]["switches"] == 2.0


def test_in_turn_each_is_first_and_meets_the_others_from_both_sides() -> None:
    group = [worker(variant, 0, []) for variant in (PLAIN, FLOWGPU, STUB)]
    orders = [[w.variant for w in overhead.in_turn(group, turn)] for turn in range(6)]
    assert {order[0] for order in orders} == {PLAIN, FLOWGPU, STUB}
    assert sum(order.index(PLAIN) < order.index(FLOWGPU) for order in orders) == 3


def test_the_interval_of_a_median_covers_it_as_often_as_it_says() -> None:
    draw = random.Random(2)
    trials = 2000
    hits = 0
    for _ in range(trials):
        low, high = overhead.median_interval([draw.expovariate(1.0) for _ in range(20)])
        hits += low <= 0.6931 <= high
    assert 0.945 < hits / trials < 0.975  # 0.959 by the binomial distribution
    assert overhead.median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    draw = random.Random(3)
    trials = 2000
    hits = 0
    for _ in range(trials):
        low, high = overhead.mean_interval([draw.gauss(1.0, 0.1) for _ in range(5)])
        assert low is not None and high is not None
        hits += low <= 1.0 <= high
    assert 0.935 < hits / trials < 0.965


def test_a_process_makes_as_many_steps_as_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setitem(step_time.JOBS, "launches", lambda: lambda: made.append(1))
    path = tmp_path / "turns"
    words = ["step_time", "--job", "launches", "--name", "plain-0", "--control", str(path)]
    monkeypatch.setattr("sys.argv", words)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=step_time.main)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            assert b'"name": "plain-0"' in overhead.read_line(connection)
            asked = Worker(PLAIN, 0, NO_PROCESS, tmp_path / "log", connection)
            before = len(made)
            answer: dict[str, Any] = asked.run(7)
            assert len(made) - before == len(answer["step_seconds"]) == 7
            assert statistics.median(answer["step_seconds"]) >= 0
        thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_process_that_ends_is_named_with_what_it_said(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with (
            subprocess.Popen(["sh", "-c", f"sleep 0.1; echo out of memory >>{log}"]) as process,
            pytest.raises(Trouble, match=r"stub-3 made no steps(.|\n)*out of memory"),
        ):
            Worker(STUB, 3, process, log, ours).run(1)
