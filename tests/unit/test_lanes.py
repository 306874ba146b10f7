"""Lanes of tests (tools/lanes.py) know what their tests depend on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.lanes import LANES, ROOT, files

# Where tests find their neighbours by name alone.
BESIDE = ("tests/emu", "tests/unit")


def imports(name: str) -> set[str]:
    """What a file imports of tests' own modules."""
    wanted = set()
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = set()
    for module in wanted:
        path = f"{module.replace('.', '/')}.py"
        tried = [path, *(f"{folder}/{path}" for folder in BESIDE)]
        found |= {one for one in tried if one.startswith("tests/") and (ROOT / one).is_file()}
    return found


def needs(name: str) -> set[str]:
    """The files that a test imports, and all that those import."""
    found, left = set(), {name}
    while left:
        one = left.pop()
        found.add(one)
        left |= imports(one) - found
    return found


@pytest.mark.parametrize("name", LANES)
def test_every_pattern_of_a_lane_is_of_files(name: str) -> None:
    lane = LANES[name]
    assert [pattern for pattern in (*lane.tests, *lane.inputs) if not files([pattern])] == []


@pytest.mark.parametrize("name", LANES)
def test_what_tests_of_a_lane_import_is_an_input(name: str) -> None:
    lane = LANES[name]
    known = {*files((*lane.tests, *lane.inputs))}
    wanted = set().union(*map(needs, lane.tests))
    assert sorted(wanted - known) == []


def test_a_file_is_in_one_lane() -> None:
    tests = [file for lane in LANES.values() for file in lane.tests]
    assert len(tests) == len({*tests})
    assert all(Path(file).name.startswith("test_") for file in tests)
