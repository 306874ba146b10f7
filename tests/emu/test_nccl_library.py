"""The emulated GPU's libnccl.so.2: each case in processes of its own, on a device of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emu.nccl_cases import CASES
from tests.emu.test_driver import ROOT, device_environment, nothing_is_left
from tests.patience import SECONDS

ONE_PROCESS = "one_process_has_all_gpus"
# Four ranks where what is between two is not all that a case can show.
RANKS = {"children_have_the_ranks_that_were_asked_for": 4, "every_collective_moves_its_parts": 3}


@pytest.mark.parametrize("name", CASES)
def test_nccl_of_the_emulated_gpu(name: str, tmp_path: Path) -> None:
    passes(name, tmp_path, hosts=1)


@pytest.mark.parametrize("name", [name for name in CASES if name != ONE_PROCESS])
def test_nccl_of_the_emulated_gpu_between_hosts(name: str, tmp_path: Path) -> None:
    """Some of more than two ranks are on one host."""
    passes(name, tmp_path, hosts=2)


def passes(name: str, tmp_path: Path, hosts: int) -> None:
    ranks = RANKS.get(name, 2)
    environment = device_environment(tmp_path) | {"FLOWGPU_EMU_DEVICES": "2"}
    command = [sys.executable, "-m", "tests.emu.nccl_cases", name, str(tmp_path)]
    programs = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)],
            env=environment
            | {
                "NCCL_HOSTID": f"host{rank % hosts}",
                "NCCL_SOCKET_IFNAME": "=no,lo" if rank else "l",
            },
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(1 if name == ONE_PROCESS else ranks)
    ]
    try:
        said = [program.communicate(timeout=SECONDS)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    log = tmp_path / "device.log"
    assert said == ["passed\n"] * len(programs), "\n".join([*said, log.read_text()])
    nothing_is_left(log)
