"""All programs, in the order of the page."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.trials.prelude import ENGINES, MODES, PROGRAMS, Program

MODULES = ("memory_files", "files", "processes", "attributes", "sockets", "way_back", "gpu")
Case = tuple[str, str]  # engine and mode


def catalogue() -> dict[str, Program]:
    """All programs, by name."""
    for module in MODULES:
        import_module(f"tests.trials.programs.{module}")
    files = {path.stem for path in (Path(__file__).parent / "programs").glob("[!_]*.py")}
    assert files == {*MODULES}, "every file of programs is on the page"
    return {name: one for name, one in PROGRAMS.items() if one.module in MODULES}


def case_of_ci(name: str) -> Case:
    """What `make test-trials` runs of a program: one of the four, in turn by its place."""
    return all_cases()[list(catalogue()).index(name) % 4]


def all_cases() -> list[Case]:
    return [(engine, mode) for engine in ENGINES for mode in MODES]
