"""Every workload that runs on any GPU, on the emulated one: right, and the same each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.launch import emulated_driver
from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ROOT / "workloads"
DESCRIPTIONS = {
    path.stem: tomllib.loads(path.read_text()) for path in sorted(WORKLOADS.glob("*.toml"))
}
# But for those with legacy handles, which the emulated driver has by FlowGPU alone.
ON_ANY_GPU = [
    name
    for name, about in DESCRIPTIONS.items()
    if about["needs"]["gpu"] == "any" and name not in ("sharing", "all_reduce")
]
STEPS = 4
STEP = re.compile(r"step (\d+) ((-?0x[0-9a-f.]+p[+-]\d+)(/[0-9a-f]{32})?|[0-9a-f]{32})")


@pytest.fixture(autouse=True, scope="module")
def own_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A device daemon of this file's own; the first program starts it, and it ends when idle."""
    with pytest.MonkeyPatch.context() as patch:
        socket = tmp_path_factory.mktemp("device") / "flowgpu-emu.sock"
        patch.setenv("FLOWGPU_EMU_SOCKET", str(socket))
        yield


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    library = str(emulated_driver().parent)
    rest = environment.get("LD_LIBRARY_PATH")
    environment["LD_LIBRARY_PATH"] = f"{library}:{rest}" if rest else library
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )


def start(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(WORKLOADS / f"{name}.py"), *arguments])


def lines_of(name: str, *arguments: str) -> list[str]:
    result = start(name, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", ON_ANY_GPU)
def test_two_runs_print_the_same_lines(name: str) -> None:
    first = lines_of(name, "--steps", str(STEPS))
    steps = [STEP.fullmatch(line) for line in first[:-1]]
    assert [match and int(match[1]) for match in steps] == list(range(STEPS))
    assert re.fullmatch(r"done [0-9a-f]{32}", first[-1])
    # Each step changes the state, so each line is another.
    assert len({match[2] for match in steps if match}) == STEPS
    assert lines_of(name, "--steps", str(STEPS)) == first


# `managed` has no data but what its steps make of zeros.
@pytest.mark.parametrize("name", sorted({*ON_ANY_GPU} - {"managed"}))
def test_another_seed_prints_other_lines(name: str) -> None:
    first = lines_of(name, "--steps", "2")
    other = lines_of(name, "--steps", "2", "--seed", "1")
    assert not set(first) & set(other)


# Flips one bit in the middle of one allocation between two steps, as a wrong restore would.
FLIP = r"""
import runpy, sys
import numpy as np
program, which = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, program.rpartition("/")[0])
sys.argv = [program, "--steps", "4"]
import _common, _cuda
alloc, line, seen = _cuda.Gpu.alloc, _common.Report._line, []

def recorded(gpu, size):
    seen.append((gpu, alloc(gpu, size), size))
    return seen[-1][1]

def flipping(report, index, value):
    line(report, index, value)
    if index == 1:
        gpu, address, size = seen[which]
        at = address + size // 2
        gpu.write(at, gpu.read(at, np.uint8, 1) ^ np.uint8(4))

_cuda.Gpu.alloc, _common.Report._line = recorded, flipping
runpy.run_path(program, run_name="__main__")
"""


# Not those that fill their allocations after making them, nor processes, whose launcher has no GPU
# memory: all of them compare every byte with what it must be. `managed` has none from `Gpu.alloc`.
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize(
    "name", sorted({*ON_ANY_GPU} - {"managed", "small_allocs", "stream_ordered", "processes"})
)
def test_one_flipped_bit_shows(name: str, which: int) -> None:
    right = lines_of(name, "--steps", "4")
    command = [sys.executable, "-c", FLIP, str(WORKLOADS / f"{name}.py"), str(which)]
    result = run(command)
    found = result.stdout.splitlines()
    assert found[:2] == right[:2]
    if result.returncode == 0:
        # The lines between may be right again: a step overwrites what is not carried on.
        assert found[2] != right[2] and found[-1] != right[-1]
    else:
        assert "failed: " in result.stderr, result.stderr


# Identities as they are after hours: products with them pass 32 bits, which numpy 2 refuses to put
# into an array.
PATTERNS = r"""
import sys
import numpy as np
sys.path.insert(0, "workloads")
from _cuda import mix32, pattern_of

for identity in (0, 255, 256, 257, 1 << 20, (1 << 32) - 1, 1 << 40):
    wide = [(i + identity * 0x01000193) % (1 << 32) for i in range(16)]
    expected = mix32(np.array(wide, np.uint32)).view(np.uint8)
    for size in (64, 63, 1, 0):
        assert np.array_equal(pattern_of(identity, size), expected[:size]), (identity, size)
"""


def test_patterns_are_those_of_the_kernels_whatever_the_identity() -> None:
    result = run([sys.executable, "-W", "error", "-c", PATTERNS])
    assert result.returncode == 0, result.stderr


def test_digits_mlp_learns_the_digits() -> None:
    steps = DESCRIPTIONS["digits_mlp"]["costs"]["steps"]
    lines = lines_of("digits_mlp")
    assert len(lines) == steps + 1
    losses = [float.fromhex(line.split()[2].split("/")[0]) for line in lines[:-1]]
    assert sum(losses[-10:]) < sum(losses[:10]) / 5


def test_a_failed_check_ends_with_code_1_and_a_reason() -> None:
    result = start("processes", "--steps", "1", "--device", "1000")
    assert result.returncode == 1
    assert "failed: " in result.stderr


@pytest.mark.parametrize("name", sorted(DESCRIPTIONS))
def test_description_is_complete(name: str) -> None:
    about = DESCRIPTIONS[name]
    assert (WORKLOADS / f"{name}.py").is_file()
    assert set(about) == {"needs", "costs"}
    assert {"gpu", "packages", "gpu_memory", "processes"} <= set(about["needs"])
    kinds = {"nvidia"} if about["needs"]["gpu"] == "nvidia" else {"emulated", "nvidia"}
    assert set(about["costs"]["seconds_per_step"]) == kinds


def test_every_program_has_a_description() -> None:
    programs = {path.stem for path in WORKLOADS.glob("*.py") if not path.stem.startswith("_")}
    assert programs - {"demo"} == set(DESCRIPTIONS)
