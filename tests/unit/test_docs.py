"""Pages link to what is there, and say who runs their commands and what each variable means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.doc_blocks import LINKED, PAGES, ROOT, blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")
VARIABLE = re.compile(r"(?:getenv\(|environ\.get\(|environ\[)[\"'](FLOWGPU_[A-Z_]+)")


def anchors(text: str) -> set[str]:
    """What a `#` can lead to: the headings, as GitHub names them."""
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_commands_says_who_runs_it(page: Path) -> None:
    for block in blocks(page):
        assert block.commands, "a block without a line that begins with `$ `"
        assert block.runs is not None, block.commands[0]
        if block.runs.startswith("tests/"):
            assert (ROOT / block.runs).is_file(), block.runs
        else:
            assert block.runs == "emulated" or block.runs.startswith("no, "), block.runs


def test_every_variable_that_is_read_is_on_the_page_about_operations() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    read: set[str] = set()
    for folder in ("flowgpu", "coordinator", "native"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".cpp", ".cc", ".h", ".c"):
                read |= set(VARIABLE.findall(file.read_text()))
    assert "FLOWGPU_RUNTIME_DIR" in read
    assert [name for name in sorted(read) if f"`{name}`" not in page] == []


def test_every_fact_that_a_comment_cites_is_on_the_page_of_evidence() -> None:
    page = (ROOT / "docs" / "design" / "evidence.md").read_text()
    cited: set[str] = set()
    for folder in ("coordinator", "flowgpu", "native/intercept", "native/vmm", "native/ghost"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".cpp", ".h"):
                cited |= set(re.findall(r"\b([EP]\d{1,2})(?=[):,.;\s])", _comments(file)))
    assert {"E2", "P11"} <= cited
    assert [fact for fact in sorted(cited) if f"| {fact} |" not in page] == []


def _comments(file: Path) -> str:
    lines = file.read_text().splitlines()
    return "\n".join(re.sub(r'^.*?(//|#|""")', "", line) for line in lines if _is_prose(line))


def _is_prose(line: str) -> bool:
    return any(mark in line for mark in ("//", "#", '"""'))


def test_the_changelog_has_releases_with_dates_and_a_line_for_each_change() -> None:
    first, *releases = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == "Unreleased"
    assert releases
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", name) for name in releases)
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 160] == []
    changes = [line for line in lines if line.startswith("- ")]
    assert [line for line in changes if changes.count(line) > 1] == []
    assert [line for line in lines if line.startswith(" ")] == []


def test_the_first_pages_fit_in_a_few_minutes() -> None:
    for name, most in {"README.md": 120, "docs/limits.md": 90}.items():
        assert len((ROOT / name).read_text().splitlines()) <= most, name
