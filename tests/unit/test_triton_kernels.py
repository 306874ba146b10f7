"""The PTX of Triton kernels that is kept (tools/compile_triton.py) is what its sources say."""

from __future__ import annotations

from tests.emu.kernel_cases import CASES
from tests.emu.triton_kept import FOLDER, KEPT
from tools.compile_triton import LEFT_OUT, MARK, digest


def test_what_is_kept_was_compiled_from_the_sources() -> None:
    assert KEPT["sources"] == digest(), "run `make triton-kernels`"


def test_every_kernel_that_is_kept_has_a_case() -> None:
    kept = {f"triton_{name}" for name in KEPT["kernels"]}
    assert kept == {name for name in CASES if name.startswith("triton_")}
    assert set(KEPT["kernels"]) == {path.stem for path in FOLDER.glob("*.ptx")}


def test_nothing_that_is_kept_has_code_of_a_vendor_or_a_path() -> None:
    mark = MARK.format(KEPT["triton"])
    for path in FOLDER.glob("*.ptx"):
        text = path.read_text()
        assert text.startswith(mark), path.name
        assert not [words for words in LEFT_OUT if words in text[len(mark) :]], path.name
