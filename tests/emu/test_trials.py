"""What ordinary programs do, dumped, restored twice and left running (tests/trials).

Each program has one engine a mode here, the other one in the other mode, in turn by its place in
the catalogue. `make trials` runs both engines in both modes, and what is pending.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from flowgpu.errors import all_errors
from tests.trials.__main__ import outcomes
from tests.trials.catalogue import all_cases, cases_of_ci, catalogue
from tests.trials.prelude import ENGINES, PROGRAMS, RESTORED, SAME, Program


def ready(program: Program) -> list[tuple[str, str]]:
    return [case for case in cases_of_ci(program.name) if not program.missing(*case)]


@pytest.mark.parametrize("name", [name for name, one in catalogue().items() if ready(one)])
def test_a_program_says_what_it_says_undisturbed_or_is_refused(name: str, tmp_path: Path) -> None:
    program = catalogue()[name]
    cases = ready(program)
    found = outcomes(program, cases, "emulated", tmp_path)
    expected = {" ".join(case): program.outcome(*case) for case in cases}
    assert {case: one["outcome"] for case, one in found.items()} == expected, found


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("another-line", "different"), ("leaves-a-file", "litter"), ("fails", "different")],
)
def test_a_trial_tells_what_a_dump_has_changed(name: str, outcome: str, tmp_path: Path) -> None:
    import_module("tests.trials.programs._wrong")
    (found,) = outcomes(PROGRAMS[name], [(ENGINES[1], RESTORED)], "emulated", tmp_path).values()
    assert found["outcome"] == outcome, found


def test_both_engines_run_in_each_mode() -> None:
    assert {case for name in catalogue() for case in cases_of_ci(name)} == set(all_cases())


def test_every_refusal_is_an_error_of_ours_and_has_a_reason() -> None:
    known = {cls.__name__ for cls in all_errors()}
    for program in catalogue().values():
        for outcome in program.expected.values():
            how, _, name = outcome.partition(": ")
            assert outcome == SAME or (how in ("refused", "refused then") and name in known)
        refuses = any(outcome != SAME for outcome in program.expected.values())
        assert refuses == bool(program.why), program.name
