"""Every row of docs/reference/support.md, on the emulated GPU and on a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emu.support_lib import ENGINES, CaseFailed, Engine, answers, show
from tests.emu.support_rows import CASES, ROWS
from tests.gpu.site import ROOT, Site
from tests.gpu.slots import seeing
from tools.supportlist import render

# What the emulated driver says to what it does not have (native/emu/README.md).
LACKS = ("NOT_SUPPORTED", "INVALID_PTX")


def named(outcome: str, engine: Engine = "native", devices: int | None = None) -> list[str]:
    return [
        name
        for name, case in CASES.items()
        if case.outcome(engine) == outcome and devices in (None, case.devices)
    ]


@pytest.fixture
def devices() -> int:
    return 2


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, devices: int) -> Iterator[Site]:
    monkeypatch.setenv("FLOWGPU_EMU_DEVICES", str(devices))
    with Site("emulated") as made:
        yield made


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_round_trips_says_the_same_after_a_restore(
    site: Site, tmp_path: Path, engine: Engine, devices: int
) -> None:
    names = named("round-trips", engine, devices)
    assert show(site, tmp_path, names, engine).outcome == "round-trips"


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine in ENGINES for name in named("refused", engine)]
)
def test_what_is_refused_is_named_and_goes_on(
    engine: Engine, name: str, site: Site, tmp_path: Path
) -> None:
    shown = show(site, tmp_path, [name], engine)
    assert shown.outcome == "refused"
    assert CASES[name].names(engine) in shown.words


def test_the_emulated_gpu_says_what_it_lacks(site: Site) -> None:
    found = answers(site, named("not supported"))
    assert list(found) == named("not supported")
    assert {name: answer for name, answer in found.items() if answer not in LACKS} == {}


def test_the_emulated_gpu_says_what_it_lacks_with_the_engine_replay(
    site: Site, tmp_path: Path
) -> None:
    (name,) = set(named("not supported", "replay")) - set(named("not supported", "native"))
    with pytest.raises(CaseFailed, match="801"):  # CUDA_ERROR_NOT_SUPPORTED
        show(site, tmp_path, [name], "replay")


def test_a_case_that_says_something_else_fails(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.emu.support_lib.undisturbed", lambda *_: ["something else"])
    with pytest.raises(CaseFailed, match="instead of"):
        show(site, tmp_path, ["events"], "native")


def test_each_row_names_tests_that_there_are_and_no_case_lacks_a_row() -> None:
    for row in ROWS:
        for file, _, name in (test.partition("::") for test in row.tests):
            assert f"def {name}(" in (ROOT / file).read_text(), row
    assert sorted(row.case for row in ROWS if row.case) == sorted(CASES)


def test_what_a_real_gpu_did_stands_on_the_page() -> None:
    about = {"gpu": "a GPU", "driver": "580", "date": "2026-01-01", "command": "it", "commit": None}
    outcomes = {"events": ["round-trips", ""], "managed_memory": ["refused", "It uses | this."]}
    text = render({"native": [about | {"outcomes": outcomes}]})
    how = "(`make support-gpu`)"
    assert f"Real GPU, engine native {how}: a GPU, driver 580, 2026-01-01" in text
    assert f"Real GPU, engine replay {how}: no run is recorded" in text
    events = ["round-trips", "round-trips", "case `events`", "round-trips", "not run yet"]
    assert "\n| events with timing | " + " | ".join(events) + " |\n" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| managed memory |"))
    assert row.endswith("| refused: It uses \\| this. | not run yet |")


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_it_round_trips_or_is_refused_by_name_on_a_real_gpu(
    name: str, engine: Engine, tmp_path: Path
) -> None:
    with seeing("nvidia", CASES[name].devices), Site("nvidia") as site:
        shown = show(site, tmp_path, [name], engine)
    refusal = CASES[name].names(engine)
    assert shown.outcome == "round-trips" or (refusal and refusal in shown.words)
