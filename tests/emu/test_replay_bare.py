"""Round trips of driver calls without FlowGPU: a driver answers as the cases say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowgpu.launch import GpuKind
from tests.emu import intercept_lib as lib
from tests.emu.replay_cases import ANY, PRELUDE, Case
from tests.emu.replay_run import CASES
from tests.emu.test_replay import LANES, Task
from tests.gpu.slots import seeing


def answers_as_expected(task: Task | lib.Program, asks: dict[str, object]) -> dict[str, object]:
    """Assert that each question is answered as expected; gives the answers."""
    answers = {question: task.do(question) for question in asks}
    for question, expected in asks.items():
        assert expected is ANY or answers[question] == expected, question
    return answers


def skip_where_it_is_none(case: Case, lane: GpuKind) -> None:
    if case.emulated_only and lane != "emulated":
        pytest.skip("it is the emulated driver's alone")


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_driver_by_itself_answers_so(case: Case, lane: GpuKind, tmp_path: Path) -> None:
    skip_where_it_is_none(case, lane)
    with seeing(lane, case.devices):
        environment = dict(os.environ) | {"PYTHONFAULTHANDLER": "1"}
    if lane == "emulated":
        environment = lib.bare_environment(tmp_path, DEVICES=str(case.devices))
    with lib.Program(environment) as program:
        program.do("start()")
        program.do(PRELUDE)
        program.do(case.setup)
        answers_as_expected(program, case.asks)
        answers_as_expected(program, case.last)
