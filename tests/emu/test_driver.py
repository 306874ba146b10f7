"""The emulated driver, case by case, each in a process of its own with a device of its own."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgpu.launch import emulated_driver
from tests.emu.driver_cases import CASES, MODULE, REWINDING
from tests.emu.forks import Forks, forks
from tests.patience import SECONDS

ROOT = Path(__file__).resolve().parents[2]


def device_environment(folder: Path) -> dict[str, str]:
    """Variables that give a program the emulated driver and a device that only it knows."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLOWGPU_EMU_")}
    environment["LD_LIBRARY_PATH"] = str(emulated_driver().parent)
    environment["FLOWGPU_EMU_SOCKET"] = str(folder / "flowgpu-emu.sock")
    environment["FLOWGPU_EMU_LOG"] = str(folder / "device.log")
    environment["FLOWGPU_EMU_WRITE_LOG"] = str(folder / "writes.jsonl")
    environment["FLOWGPU_EMU_IDLE"] = "2"
    return environment


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(MODULE, device_environment(tmp_path_factory.mktemp("none"))) as running:
        yield running


def passes(name: str, cases: Forks, folder: Path) -> None:
    code, said = cases.run(name, device_environment(folder) | CASES[name].environment)
    log = folder / "device.log"
    device = log.read_text() if log.exists() else "(no device log)"
    assert said.endswith("passed\n"), f"{said}\n{device}"
    assert code == 0, said
    if log.exists():
        nothing_is_left(log)


# What rewinds the driver is in test_rewind.py.
@pytest.mark.parametrize("name", sorted(CASES.keys() - REWINDING))
def test_emulated_driver(name: str, cases: Forks, tmp_path: Path) -> None:
    passes(name, cases, tmp_path)


def nothing_is_left(log: Path) -> None:
    """Every client that the device has lost is gone with all that it had."""
    deadline = time.monotonic() + SECONDS
    while (text := log.read_text()).count(" arrives\n") > text.count(" is gone, nothing left\n"):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def test_nobody_connects_while_an_idle_device_decides_to_end(tmp_path: Path) -> None:
    init = "from cuda.bindings import driver as cu; print(int(cu.cuInit(0)[0]))"
    program = [sys.executable, "-c", init]
    environment = device_environment(tmp_path)
    first = subprocess.run(program, env=environment, capture_output=True, check=True)
    assert first.stdout == b"0\n"
    with (tmp_path / "flowgpu-emu.sock.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                second.communicate(timeout=1.0)
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert second.communicate(timeout=SECONDS)[0] == b"0\n"
        finally:
            second.kill()


def test_the_library_exports_the_driver_api_and_nothing_else() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(emulated_driver())], capture_output=True, text=True
    ).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert len(names) > 500
    assert {"cuInit", "cuGetProcAddress_v2", "cuMemcpyHtoD_v2_ptds", "cuGraphLaunch"} <= names
    assert all(re.fullmatch(r"cu[A-Z]\w+", name) for name in names)
    needed = subprocess.run(
        ["readelf", "-d", str(emulated_driver())], capture_output=True, text=True
    ).stdout
    assert "Library soname: [libcuda.so.1]" in needed
    assert not re.search(r"NEEDED.*(libstdc|libcuda)", needed)


@pytest.fixture(scope="module")
def real_cases() -> Iterator[Forks]:
    with forks(MODULE, os.environ) as running:
        yield running


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(n for n, case in CASES.items() if not case.emulated))
def test_real_driver(name: str, real_cases: Forks) -> None:
    code, said = real_cases.run(name, os.environ)
    assert said.endswith("passed\n"), said
    assert code == 0, said
