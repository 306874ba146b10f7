"""What programs do to themselves and their attributes (trials_lib.py), and what a trial finds."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from flowgpu.errors import all_errors
from tests.emu import test_trials_files, test_trials_processes
from tests.emu.trials_lib import READY, becomes_what_it_must, of
from tests.trials.__main__ import outcomes
from tests.trials.catalogue import all_cases, case_of_ci, catalogue
from tests.trials.prelude import ENGINES, PROGRAMS, RESTORED, SAME, TOLD

HERE = ("attributes", "way_back")


@pytest.mark.parametrize("name", of(*HERE))
def test_a_program_says_what_it_says_undisturbed_or_is_refused(name: str, tmp_path: Path) -> None:
    becomes_what_it_must(name, tmp_path)


def test_each_program_is_tried_in_one_of_these_files() -> None:
    modules = (*HERE, *test_trials_files.HERE, *test_trials_processes.HERE)
    assert sorted(of(*modules)) == sorted(READY)


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
