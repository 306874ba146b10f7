"""Kernels of ordinary programs against numpy, on the emulated GPU and on a real one.

Where FLOWGPU_KERNELS_OUT names a file, what each gave is written there (kernel_results).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

import pytest

from tests.emu.cuda_source import assemble
from tests.emu.kernel_cases import CASES
from tests.emu.kernel_results import Outcome, keep
from tests.emu.test_driver import ROOT, device_environment

Errors = dict[str, str]
Outcomes = dict[str, Outcome]
PROCESS_SECONDS = 100
pytestmark = pytest.mark.timeout(3 * PROCESS_SECONDS)  # the first test waits for all cases


def selected(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases that this run of pytest asks `test` for."""
    return [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        and item.originalname == test
    ]  # fmt: skip


def run_process(names: list[str], environment: Mapping[str, str]) -> tuple[Outcomes, str]:
    """What became of each case that was run, and what went wrong in the process itself."""
    command = [sys.executable, "-m", "tests.emu.kernel_cases", *names]
    with tempfile.TemporaryFile("w+") as lines:
        try:
            result = subprocess.run(
                command,
                env=dict(environment),
                cwd=ROOT,
                stdout=lines,
                stderr=subprocess.PIPE,
                text=True,
                timeout=PROCESS_SECONDS,
            )
            trouble = result.stderr[-2000:] if result.returncode else ""
        except subprocess.TimeoutExpired:
            trouble = f"not done after {PROCESS_SECONDS} seconds"
        lines.seek(0)
        outcomes = [json.loads(line) for line in lines]
    return {outcome["case"]: outcome for outcome in outcomes}, trouble


def failed(names: list[str], error: str) -> Outcomes:
    return {name: {"case": name, "error": error} for name in names}


def errors_of(outcomes: Outcomes) -> Errors:
    return {name: str(outcome["error"]) for name, outcome in outcomes.items()}


def run_cases(names: list[str], environment: Mapping[str, str]) -> Outcomes:
    """What became of each case; one process runs them as long as its context lives."""
    outcomes: Outcomes = {}
    while left := [name for name in names if name not in outcomes]:
        done, trouble = run_process(left, environment)
        outcomes |= done
        if trouble and not outcomes:  # no device, so no case can run
            return failed(names, trouble)
        unfinished = [name for name in left if name not in outcomes]
        if trouble and unfinished:
            outcomes |= failed(unfinished[:1], trouble)
    return outcomes


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    folder = tmp_path_factory.mktemp("kernels")
    names = selected(request, "test_on_the_emulated_gpu")
    outcomes = run_cases(names, device_environment(folder))
    keep("emulated", outcomes)
    log = folder / "device.log"
    device = log.read_text() if log.exists() else ""
    return {name: error and f"{error}\n{device}" for name, error in errors_of(outcomes).items()}


@pytest.fixture(scope="module")
def real(request: pytest.FixtureRequest) -> Errors:
    outcomes = run_cases(selected(request, "test_on_a_real_gpu"), os.environ)
    keep("nvidia", outcomes)
    return errors_of(outcomes)


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_the_emulated_gpu(name: str, emulated: Errors) -> None:
    assert emulated[name] == ""


@pytest.mark.parametrize("name", sorted(name for name in CASES if "asm" in CASES[name].source))
def test_the_assembler_of_nvidia_accepts_what_the_emulated_gpu_runs(name: str) -> None:
    assemble(CASES[name].source, CASES[name].options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_on_a_real_gpu(name: str, real: Errors) -> None:
    assert real[name] == ""
