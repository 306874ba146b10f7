"""PyTorch's NCCL communicators are counted until they have ended."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowgpu import launch, wire
from flowgpu.wire import Engine, Message, Status
from tests.emu import intercept_lib as lib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not here"),
]
PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)
one = torch.ones(4, device="cuda")
dist.all_reduce(one)
print(one.tolist(), flush=True)
input()
dist.destroy_process_group()
print("ended", flush=True)
input()
"""


@pytest.mark.parametrize("engine", [Engine.NATIVE, Engine.REPLAY])
def test_a_process_group_is_counted_while_it_lives(engine: Engine, tmp_path: Path) -> None:
    environment = dict(os.environ) | {
        "LD_PRELOAD": launch.preloaded(),
        "FLOWGPU_REAL_LIBCUDA": str(launch.choose_driver("nvidia").libcuda),
        "FLOWGPU_SOCKET": str(tmp_path / "task.sock"),
        "NCCL_NVLS_ENABLE": "0",
    }
    if engine == Engine.REPLAY:
        environment["FLOWGPU_REPLAY"] = "1"
    with (
        lib.Coordinator(tmp_path / "task.sock") as coordinator,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path / "store"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin and process.stdout
        try:
            assert process.stdout.readline() == "[1.0, 1.0, 1.0, 1.0]\n"
            connection = coordinator.accept()
            ask = wire.Ask(engine).pack()
            assert connection.nccl
            (end,) = connection.nccl.view().ends
            # It was made, and an all-reduce issued.
            assert (end.rank, end.ranks, end.made) == (0, 1, True)
            assert end.entered >= 2
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"
            assert connection.nccl.header().living == 0
            reply = connection.ask(Message.ASK, ask)
            assert (reply.status, reply.detail) == (Status.OK, "")
        finally:
            process.kill()
