"""What ordinary programs do, dumped, restored twice or left running (tests/trials).

Each program is tried here with one engine in one mode, in turn by its place in the catalogue.
`make trials` tries it with both engines in both modes, and tries what is pending.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from flowgpu.errors import all_errors
from tests.trials.__main__ import outcomes
from tests.trials.catalogue import all_cases, case_of_ci, catalogue
from tests.trials.prelude import ENGINES, PROGRAMS, RESTORED, SAME, TOLD

READY = [name for name, one in catalogue().items() if not one.missing(*case_of_ci(name))]


@pytest.mark.parametrize("name", READY)
def test_a_program_says_what_it_says_undisturbed_or_is_refused(name: str, tmp_path: Path) -> None:
    program, case = catalogue()[name], case_of_ci(name)
    (found,) = outcomes(program, [case], "emulated", tmp_path).values()
    assert found["outcome"] == program.outcome(*case), found


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("another-line", "different"), ("leaves-a-file", "litter"), ("fails", "different")],
)
def test_a_trial_tells_what_a_dump_has_changed(name: str, outcome: str, tmp_path: Path) -> None:
    import_module("tests.trials.programs._wrong")
    (found,) = outcomes(PROGRAMS[name], [(ENGINES[1], RESTORED)], "emulated", tmp_path).values()
    assert found["outcome"] == outcome, found


def test_both_engines_are_tried_in_both_modes() -> None:
    assert {case_of_ci(name) for name in READY} == {*all_cases()}


def test_every_refusal_is_an_error_of_ours_and_has_a_reason() -> None:
    known = {cls.__name__ for cls in all_errors()}
    for program in catalogue().values():
        for outcome in program.expected.values():
            how, _, name = outcome.partition(": ")
            assert outcome in (SAME, TOLD) or (how in ("refused", "refused then") and name in known)
        refuses = any(outcome != SAME for outcome in program.expected.values())
        assert refuses == bool(program.why), program.name
