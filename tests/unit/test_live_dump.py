"""Which jobs that are left running keep CUDA while they are dumped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.control_state import LIVE_ON_GPU, Live, Native, Replay, of_running_job
from coordinator.tasks import CAN_LEND
from flowgpu.errors import CriuMissing


class Plugins:
    def plugins(self) -> Path:
        return Path("/plugins")


class NoPlugins(Plugins):
    def plugins(self) -> Path:
        raise CriuMissing(reason="another version")


def chosen(
    engine: type[Native | Replay], gpu: str, can: int = CAN_LEND, criu: Plugins | None = None
) -> type:
    job: Any = SimpleNamespace(gpu=gpu, channel=None)
    group: Any = SimpleNamespace(tasks=[SimpleNamespace(hello=SimpleNamespace(replay=can))])
    one: Any = criu or Plugins()
    return type(of_running_job(engine(job, None), job, None, one, group))  # type: ignore[arg-type]


def test_a_prepared_job_on_the_emulated_gpu_does() -> None:
    assert chosen(Replay, "emulated") is Live


def test_one_on_a_real_gpu_has_to_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIVE_ON_GPU, raising=False)
    assert chosen(Replay, "nvidia") is Replay
    monkeypatch.setenv(LIVE_ON_GPU, "1")
    assert chosen(Replay, "nvidia") is Live


def test_others_end_cuda_or_are_checkpointed_by_the_driver() -> None:
    assert chosen(Native, "emulated") is Native
    assert chosen(Replay, "emulated", can=1) is Replay
    assert chosen(Replay, "emulated", criu=NoPlugins()) is Replay
