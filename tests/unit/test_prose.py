"""Each sentence of a comment, a docstring or a page says who does what.

One that begins with "of" or "whether" does not: only its writer understands it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doc_blocks import BLOCK, LINKED, ROOT

TREES = ("flowgpu", "coordinator", "bench", "tools", "workloads", "tests")
# With a capital these words begin a sentence; names of functions and files have none.
BEGINNING = re.compile(r"\b(?:Of|Whether|What of it)\b(?! course)")


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Comments and docstrings of a Python file, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.lineno, str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def without_subject(source: str) -> list[int]:
    if not BEGINNING.search(source):
        return []  # to parse every file takes long
    return sorted(line for line, text in prose(source) if BEGINNING.search(text))


def test_a_sentence_without_a_subject_is_found() -> None:
    bad = '"""Whether it runs."""\nx = 1  # Of it.\n"""It is. Of x."""'
    assert without_subject(bad) == [1, 2, 3]
    good = '"""True if it runs, of many."""\nx = "Of"  # says whether'
    assert without_subject(good) == []


@pytest.mark.parametrize("tree", TREES)
def test_every_sentence_of_the_code_has_a_subject(tree: str) -> None:
    files = sorted((ROOT / tree).rglob("*.py"))
    assert files
    lines = {str(file.relative_to(ROOT)): without_subject(file.read_text()) for file in files}
    assert {file: found for file, found in lines.items() if found} == {}


def test_every_comment_of_native_code_has_a_subject() -> None:
    files = [
        file for ext in ("h", "cpp", "cc", "cu") for file in (ROOT / "native").rglob(f"*.{ext}")
    ]
    assert files
    found = {
        str(file.relative_to(ROOT)): number
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if "//" in line and BEGINNING.search(line.partition("//")[2])
    }
    assert found == {}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_sentence_of_a_page_has_a_subject(page: Path) -> None:
    lines = BLOCK.sub("", page.read_text()).splitlines()
    assert [line for line in lines if BEGINNING.search(line)] == []
