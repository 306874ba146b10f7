"""The intercept library's table, tested as data, and the shape of the library built from it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from flowgpu import launch
from tools import gen_intercept

ROWS = gen_intercept.read_table()
INCLUDE = gen_intercept.cuda_include()
PROTOTYPES = gen_intercept.prototypes(INCLUDE)
FAMILIES = {gen_intercept.family_of(symbol) for symbol in PROTOTYPES}


@pytest.fixture(scope="module")
def library() -> Path:
    path = launch.intercept_library()
    assert path.exists(), "run make build"
    return path


def test_every_function_of_the_header_has_one_row() -> None:
    names = [row.family for row in ROWS]
    assert len(names) == len(set(names))
    assert FAMILIES - set(names) == set()


def test_rows_are_sorted_within_both_halves() -> None:
    header = [row.family for row in ROWS if row.family in FAMILIES]
    others = [row.family for row in ROWS if row.family not in FAMILIES]
    assert [row.family for row in ROWS] == header + others
    assert header == sorted(header)
    assert others == sorted(others)


def test_only_tracked_rows_have_handlers_and_all_of_them_do() -> None:
    for row in ROWS:
        assert bool(row.handled) == (row.treatment in ("TRACK", "TRANSLATE")), row
        assert all(gen_intercept.family_of(symbol) == row.family for symbol in row.handled), row


def test_every_handled_symbol_has_a_definition() -> None:
    folder = gen_intercept.TABLE.parent
    source = "".join(path.read_text() for path in folder.glob("handlers_*.cpp"))
    for row in ROWS:
        for symbol in row.handled:
            assert re.search(rf"^CUresult {symbol}\(", source, re.MULTILINE), symbol


def test_functions_that_share_memory_outside_are_refused() -> None:
    treatment = {row.family: row.treatment for row in ROWS}
    for family in (
        "cuMemPoolImportFromShareableHandle",
        "cuMulticastCreate",
        "cuMemPoolExportToShareableHandle",
    ):
        assert treatment[family] == "REFUSE"


def test_every_copy_memset_launch_and_free_states_an_effect() -> None:
    """The test goes by names alone, so that a rule of the generator that is too narrow fails."""
    kinds = {
        "Memcpy": {"writes"},
        "Memset": {"writes"},
        "Launch": {"launch", "none"},
        "Free": {"frees", "none"},
        "WriteValue": {"writes"},
    }
    seen = dict.fromkeys(kinds, 0)
    for row in ROWS:
        in_a_graph = row.family.startswith("cuGraph") and row.family != "cuGraphLaunch"
        if row.treatment == "FORWARD" or in_a_graph:
            continue
        for word, effects in kinds.items():
            if word in row.family:
                assert row.effect.partition("(")[0] in effects, row
                seen[word] += 1
    assert {word: count > 1 for word, count in seen.items()} == dict.fromkeys(kinds, True)
    none = {row.family for row in ROWS if "Launch" in row.family and row.effect == "none"}
    assert none == {"cuLaunchHostFunc"}


def test_an_effects_words_are_arguments_of_every_prototype_of_its_row() -> None:
    checked = 0
    for row in ROWS:
        if "(" not in row.effect:
            continue
        words = set(re.findall(r"[A-Za-z]\w*", row.effect.partition("(")[2]))
        assert words, row
        for symbol, parameters in PROTOTYPES.items():
            if gen_intercept.family_of(symbol) == row.family:
                assert words <= set(gen_intercept.argument_names(parameters).split(", ")), symbol
                assert gen_intercept.effect_of(row.effect, parameters), symbol
                checked += 1
    assert checked > 100


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        ("writes(dstDevice,Bytes)", "cuMemcpyHtoD_v2 has no argument Bytes"),
        ("writes(srcHost)", "of no known form"),
        ("writes(dstDevice,ByteCount+1)", "cannot be read"),
        ("", "cuMemcpyHtoD is not stated"),
    ],
)
def test_an_effect_that_does_not_fit_stops_the_generator(effect: str, message: str) -> None:
    rows = [replace(row, effect=effect) if row.family == "cuMemcpyHtoD" else row for row in ROWS]
    with pytest.raises(SystemExit, match=re.escape(message)):
        gen_intercept.emit(rows, PROTOTYPES)


def test_a_new_function_that_writes_must_state_it_by_its_arguments_too() -> None:
    parameters = "CUdeviceptr dst, size_t bytes, CUstream hStream"
    rows = [*ROWS, gen_intercept.Row("cuNewThing", "GATE", "", ())]
    with pytest.raises(SystemExit, match="the effect of cuNewThing is not stated"):
        gen_intercept.emit(rows, PROTOTYPES | {"cuNewThing": parameters})


@pytest.mark.parametrize("treatment", ["FORWARD", "REFUSE"])
def test_a_function_that_is_never_watched_has_no_effect(treatment: str) -> None:
    rows = [replace(r, treatment=treatment) if r.family == "cuMemsetD8" else r for r in ROWS]
    with pytest.raises(SystemExit, match="cuMemsetD8 has an effect, and is never watched"):
        gen_intercept.emit(rows, PROTOTYPES)


def test_a_row_that_is_malformed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "api.def"
    path.write_text("cuInit GATE\ncuFoo SOMETIMES\n")
    with pytest.raises(ValueError, match=r"api\.def:2"):
        gen_intercept.read_table(path)


def test_a_missing_row_stops_the_generator() -> None:
    rows = [row for row in ROWS if row.family != "cuLaunchKernel"]
    with pytest.raises(SystemExit, match="no row for cuLaunchKernel"):
        gen_intercept.emit(rows, PROTOTYPES)


def test_the_library_exports_the_table_and_what_the_stub_asks_for(library: Path) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1].split("@")[0] for line in listing.splitlines()}
    plain = {row.family for row in ROWS if row.family not in FAMILIES}
    assert exported == set(PROTOTYPES) | plain | {"flowgpu_nvml_guard"}


def test_the_library_needs_no_driver_and_answers_to_its_name(library: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    assert "soname: [libcuda.so.1]" in dynamic
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert not [name for name in needed if "cuda" in name or "stdc++" in name]


def test_the_library_does_nothing_when_loaded(library: Path) -> None:
    """A constructor of ours would run in every shell and tool that inherits LD_PRELOAD."""
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    sources = {path.name for path in (gen_intercept.ROOT / "native").rglob("*.cpp")}
    ours = [line for line in symbols.splitlines() if "_GLOBAL__sub_I_" in line]
    assert not [line for line in ours if line.split("_GLOBAL__sub_I_")[1] in sources]
