"""Which jobs that are left running keep CUDA while they are dumped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coordinator.control_state import Live, Native, Replay, of_running_job
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


def test_a_prepared_job_does() -> None:
    assert chosen(Replay, "emulated") is Live
    assert chosen(Replay, "nvidia") is Live


def test_others_end_cuda_or_are_checkpointed_by_the_driver() -> None:
    assert chosen(Native, "emulated") is Native
    assert chosen(Replay, "emulated", can=1) is Replay
    assert chosen(Replay, "emulated", criu=NoPlugins()) is Replay
