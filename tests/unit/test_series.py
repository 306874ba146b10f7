"""What a series beside a job says, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import ENDING, Busy, FlowError, JobEnded, Unsupported
from flowgpu.image.store import Store
from flowgpu.jobs import JobDir
from flowgpu.series import Series

UNSUPPORTED = Unsupported(name="a drum")
BUSY = Busy(job="train", action="a checkpoint")
ENDS = (Busy(job="train", action=ENDING), JobEnded("train", "checkpoint", "GATE"))


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ((UNSUPPORTED, UNSUPPORTED, BUSY, UNSUPPORTED), (UNSUPPORTED, BUSY, UNSUPPORTED)),
        ((UNSUPPORTED, *ENDS), (UNSUPPORTED,)),
        (ENDS, ()),
    ],
)
def test_what_fails_is_said_once_and_the_end_of_the_job_is_no_failure(
    errors: tuple[FlowError, ...],
    told: tuple[FlowError, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    series = Series(
        Store(tmp_path), period=None, keep=0, signals=(), say=said.append, report=lambda event: None
    )
    left = list(errors)

    def fails(*_: Any, **__: Any) -> None:
        raise left.pop(0)

    monkeypatch.setattr(series, "_image", fails)
    for _ in errors:
        series._add(JobDir(tmp_path), None)  # type: ignore[arg-type]
    assert said == [f"flowgpu: no image this time: {error}" for error in told]
