"""What ordinary programs do, dumped, restored twice or left running (tests/trials).

Each program is tried here with one engine in one mode, in turn by its place in the catalogue.
`make trials` tries it with both engines in both modes, and tries what is pending.
"""

from __future__ import annotations

from pathlib import Path

from tests.trials.__main__ import outcomes
from tests.trials.catalogue import case_of_ci, catalogue

READY = [name for name, one in catalogue().items() if not one.missing(*case_of_ci(name))]


def of(*modules: str) -> list[str]:
    """Names of the programs of these modules."""
    return [name for name in READY if catalogue()[name].module in modules]


def becomes_what_it_must(name: str, folder: Path) -> None:
    """It says what it says undisturbed, or is refused by name."""
    program, case = catalogue()[name], case_of_ci(name)
    (found,) = outcomes(program, [case], "emulated", folder).values()
    assert found["outcome"] == program.outcome(*case), found
