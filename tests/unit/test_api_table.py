"""The intercept library's table, tested as data, and the shape of the library built from it."""

from __future__ import annotations

import re
import subprocess
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
    for family in ("cuIpcOpenEventHandle", "cuMulticastCreate", "cuMemImportFromShareableHandle"):
        assert treatment[family] == "REFUSE"


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
