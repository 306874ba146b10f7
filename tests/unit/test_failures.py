"""Which error a failure becomes: one that nobody meant is named with its class and place."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from coordinator import server
from coordinator.failures import FailedPhase, explain
from coordinator.ghost_client import GhostError
from coordinator.phases import Phase
from flowgpu.errors import (
    CheckpointFailed,
    FlowError,
    GpuFull,
    InternalError,
    is_internal,
    words_of,
)
from flowgpu.host import criu_images
from flowgpu.options import CheckpointOptions

OPTIONS = CheckpointOptions(Path("/image"))


def internal() -> Exception:
    """A mistake of ours, in flowgpu/host/criu_images.py."""
    with pytest.raises(IndexError) as raised:
        criu_images._varint(b"", 0)
    return raised.value


def place() -> str:
    line = internal().__traceback__.tb_next.tb_lineno  # type: ignore[union-attr]
    return f"criu_images.py:{line}"


def test_an_error_that_nobody_meant_has_class_and_place() -> None:
    error = internal()
    assert is_internal(error)
    assert words_of(error) == f"IndexError: {error} ({place()})"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOENT, "no such file"), RuntimeError("no plan"), GhostError("it failed")],
)
def test_an_error_that_somebody_meant_has_its_own_words(error: Exception) -> None:
    assert not is_internal(error)
    assert words_of(error) == str(error)


@pytest.mark.parametrize("error", [RecursionError("deep"), KeyError("x"), ValueError("y")])
def test_errors_of_python_are_internal(error: Exception) -> None:
    assert is_internal(error)
    assert words_of(error).startswith(f"{type(error).__name__}: ")


def test_a_checkpoint_that_failed_by_a_mistake_of_ours_says_so() -> None:
    def named(error: Exception, late: bool = False) -> FlowError:
        return explain(FailedPhase("checkpoint", error, Phase.CAPTURE, late), "train", OPTIONS)

    error = named(internal())
    assert type(error) is InternalError
    assert str(error).startswith(
        "FlowGPU made an error of its own in the checkpoint of job 'train'"
    )
    assert "phase CAPTURE: IndexError: " in str(error) and place() in str(error)
    assert type(named(RuntimeError("a task has mapped less"))) is CheckpointFailed


def test_a_suspension_on_a_full_gpu_is_not_called_a_checkpoint() -> None:
    error = GhostError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY")
    told = explain(FailedPhase("suspension", error, Phase.PREPARE, late=False), "train", OPTIONS)
    assert type(told) is GpuFull
    assert "checkpoint" not in f"{told} {told.hint}"


def test_a_request_that_fails_by_a_mistake_of_ours_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[tuple[str, Any]] = []

    class Client:
        def send(self, event: str, fields: dict[str, Any]) -> None:
            sent.append((event, FlowError.from_dict(fields)))

    def handler(_client: object, _fields: object) -> None:
        raise internal()

    server.client_answer(Client(), {"verb": "status"}, {"status": handler})  # type: ignore[arg-type]
    ((event, error),) = sent
    assert (event, type(error)) == ("error", InternalError)
    assert "in the request status: IndexError: " in str(error) and place() in str(error)
    assert "Traceback" in caplog.text
