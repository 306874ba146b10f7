"""Every kind of memory and object of docs/support.md, on the emulated GPU and on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emu.support_lib import Failure, answers, show
from tests.emu.support_rows import CASES, ROWS
from tests.gpu.site import ROOT, Site
from tests.gpu.support import gpus
from tools.supportlist import render

# What the emulated driver says to what it does not have (native/emu/README.md).
LACKS = ("NOT_SUPPORTED", "INVALID_PTX")


def named(outcome: str) -> list[str]:
    return [name for name, case in CASES.items() if case.emulated == outcome]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("FLOWGPU_EMU_DEVICES", "2")
    with Site("emulated") as made:
        yield made


def test_what_round_trips_says_the_same_after_a_restore(site: Site, tmp_path: Path) -> None:
    assert show(site, tmp_path, named("round-trips")).outcome == "round-trips"


@pytest.mark.parametrize("name", named("refused"))
def test_what_is_refused_is_named_and_goes_on(name: str, site: Site, tmp_path: Path) -> None:
    shown = show(site, tmp_path, [name])
    assert shown.outcome == "refused"
    assert CASES[name].refusal in shown.words


def test_the_emulated_gpu_says_what_it_lacks(site: Site) -> None:
    found = answers(site, named("not supported"))
    assert list(found) == named("not supported")
    assert {name: answer for name, answer in found.items() if answer not in LACKS} == {}


def test_a_case_that_says_something_else_fails(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.emu.support_lib.undisturbed", lambda *_: ["something else"])
    with pytest.raises(Failure, match="instead of"):
        show(site, tmp_path, ["events"])


def test_each_row_names_tests_that_there_are_and_no_case_lacks_a_row() -> None:
    for row in ROWS:
        for file, _, name in (test.partition("::") for test in row.tests):
            assert f"def {name}(" in (ROOT / file).read_text(), row
    assert sorted(row.case for row in ROWS if row.case) == sorted(CASES)


def test_what_a_real_gpu_did_stands_on_the_page() -> None:
    about = {"gpu": "a GPU", "driver": "580", "date": "2026-01-01", "command": "it", "commit": None}
    outcomes = {"events": ["round-trips", ""], "managed_memory": ["refused", "It uses | this."]}
    text = render(about | {"outcomes": outcomes})
    assert "Real GPU: a GPU, driver 580, 2026-01-01" in text
    assert "| round-trips | case `events` | round-trips |" in text
    assert "| case `managed_memory` | refused: It uses \\| this. |" in text
    assert text.count("not run yet") == sum(row.real == "not run yet" for row in ROWS) - 2


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_it_round_trips_or_is_refused_by_name_on_a_real_gpu(name: str, tmp_path: Path) -> None:
    with Site("nvidia") as site:
        if CASES[name].devices > gpus():
            pytest.skip("this machine has one GPU")
        shown = show(site, tmp_path, [name])
    assert shown.outcome == "round-trips" or CASES[name].refusal in shown.words
