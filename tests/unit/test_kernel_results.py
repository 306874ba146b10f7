"""How near a kernel came is measured, kept, and shown in docs/reference/kernels.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import summary
from tests.emu.kernel_lib import Array, Near, Out, described
from tests.emu.kernel_results import keep
from tools.kernellist import render

f4, f8 = np.float32, np.float64
WANT = np.array([1.0, -2.0, 0.0, np.nan, np.inf], f8)


def moved(ulps: int) -> Array:
    """WANT as f4, and its first element so many units in the last place away."""
    got = WANT.astype(f4)
    got[0] += ulps * np.finfo(f4).eps
    return got


def test_the_largest_error_and_its_part_of_what_is_allowed_are_told() -> None:
    assert Out(WANT, "f4", ulps=4).check(moved(3)) == Near(3.0, 0.75)
    assert Out(WANT, "f4", relative=1e-3).check(moved(0)) == Near()
    assert Out(WANT.astype(f4)).check(moved(0)) == Near()
    with pytest.raises(AssertionError, match="1 of 5 differ"):
        Out(WANT, "f4", ulps=2).check(moved(3))


def test_an_argument_is_described_by_type_and_shape() -> None:
    out = Out(np.zeros((2, 3)), "bf16", ulps=1)
    given = [described(one) for one in (np.zeros((4, 8), f4), np.uint32(7), out)]
    assert given == ["f4[4, 8]", "u4 7", "out bf16[2, 3]"]


OUTPUT = {"allowed": {"ulps": 4.0}, "ulps": 3.0, "share": 0.75}
OUTCOMES = {
    "near": {"case": "near", "error": "", "inputs": ["f4[5]"], "outputs": [OUTPUT]},
    "same": {
        "case": "same",
        "error": "",
        "inputs": ["u4 7"],
        "outputs": [{"allowed": {}, "ulps": 0.0, "share": 0.0}],
    },
    "wrong": {"case": "wrong", "error": "AssertionError: 1 of 5 differ\nand more"},
}


def test_a_run_is_kept_where_a_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FLOWGPU_KERNELS_OUT", raising=False)
    keep("emulated", OUTCOMES)  # no file is named
    file = tmp_path / "emulated-2026-01-01-kernels.json"
    monkeypatch.setenv("FLOWGPU_KERNELS_OUT", str(file))
    keep("emulated", OUTCOMES)
    assert list(tmp_path.iterdir()) == [file]
    document = json.loads(file.read_text())
    assert [row["case"] for row in document["rows"]] == ["near", "same", "wrong"]
    summary.write(file, tmp_path / "results")
    text = render(summary.kept("kernels", tmp_path / "results"))
    assert "| emulated | " in text and "| 3 | 1 | **1** |" in text
    assert "- `wrong`: AssertionError: 1 of 5 differ\n" in text
    assert "| `near` | 4 ulp | 3 ulp (75%) |\n| `same` | equal bits | equal |" in text


def test_a_real_gpu_has_a_row_of_its_own(tmp_path: Path) -> None:
    machine = {"driver": "580", "cores": 2}
    about = {"kind": "kernels", "lane": "nvidia", "date": "2026-01-01", "gpu": "NVIDIA H200"}
    document = about | {"command": "a", "commit": None, "machine": machine}
    (tmp_path / "raw.json").write_text(json.dumps(document | {"rows": [OUTCOMES["near"]]}))
    assert summary.write(tmp_path / "raw.json", tmp_path).parent.name == "nvidia-h200"
    text = render(summary.kept("kernels", tmp_path))
    assert "| nvidia-h200 | 2026-01-01 at unknown | 1 | 0 | 0 |" in text
