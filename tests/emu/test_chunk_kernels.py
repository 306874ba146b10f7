"""The kernels on chunks, case by case, each in a process of its own; and how they are compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from ptx_runner import Kernel

from flowgpu.launch import library_dir
from tests.emu.chunk_cases import CASES, random_chunks
from tests.emu.chunk_kernels import CHUNK, SOURCES
from tests.emu.test_driver import ROOT, device_environment
from tests.patience import SECONDS
from tools.compile_kernels import compile_ptx, constants


def run_case(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.emu.chunk_cases", name],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_the_emulated_gpu(name: str, tmp_path: Path) -> None:
    result = run_case(name, device_environment(tmp_path))
    log = tmp_path / "device.log"
    device = log.read_text() if log.exists() else "(no device log)"
    assert result.stdout.endswith("passed\n"), f"{result.stderr}\n{device}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_on_a_real_gpu(name: str) -> None:
    result = run_case(name, dict(os.environ))
    assert result.stdout.endswith("passed\n"), result.stderr


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
def test_the_digest_is_the_same_for_any_number_of_threads_a_chunk(lanes: int) -> None:
    defines = (f"FGK_DIGEST_LANES={lanes}",)
    header = SOURCES / "chunks.h"
    kernel = Kernel(compile_ptx(SOURCES / "chunks.cu", [header], defines), "fgk_digest")
    data = random_chunks(19)
    data[[2, 17]] = 0
    data[17, -1] = 1
    addresses = np.uint64(kernel.map(data)) + np.arange(19, dtype=np.uint64) * np.uint64(CHUNK)
    digests, zero = np.zeros((19, 16), np.uint8), np.full(19, 7, np.uint8)
    per_block = constants(header, defines)["FGK_DIGEST_CHUNKS"]
    assert per_block == 256 // lanes
    kernel.run(-(-19 // per_block), 256, [addresses, np.uint32(19), digests, zero])
    assert [row.tobytes() for row in digests] == [xxhash.xxh3_128_digest(row) for row in data]
    assert zero.tolist() == [number == 2 for number in range(19)]


def test_the_ptx_asks_for_no_newer_driver_or_gpu_than_it_needs() -> None:
    head = (library_dir() / "flowgpu_chunks.ptx").read_text()[:1000]
    assert re.search(r"^\.version 6\.3$", head, re.MULTILINE)
    assert re.search(r"^\.target sm_75$", head, re.MULTILINE)


def test_a_source_with_an_error_is_refused_with_the_compilers_words(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void k() { missing(); }")
    output = tmp_path / "wrong.ptx"
    command = [sys.executable, str(ROOT / "tools" / "compile_kernels.py"), str(source), str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == 1
    assert "missing" in result.stderr and "wrong.cu" in result.stderr
    assert not output.exists()
