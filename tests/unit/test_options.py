"""What a checkpoint can be asked for: the same on both sides of the control socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowgpu.errors import FlowError
from flowgpu.options import CheckpointOptions

OUTPUT = Path("/image")
GIVEN = CheckpointOptions(
    OUTPUT,
    leave_running=True,
    timeout=7.5,
    engine="replay",
    base=Path("/before"),
    without=("zero", "dedup"),
    wait_minimum=0.0,
    compress=True,
    tcp="close",
)


@pytest.mark.parametrize("options", [CheckpointOptions(OUTPUT), GIVEN])
def test_options_come_through_a_request_as_they_were_given(options: CheckpointOptions) -> None:
    fields = json.loads(json.dumps(options.to_fields()))
    assert CheckpointOptions.from_fields(fields) == options


def test_a_request_has_what_it_does_not_name_by_default() -> None:
    assert CheckpointOptions.from_fields({"output": "/image"}) == CheckpointOptions(OUTPUT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output", "image"),
        ("timeout", 0),
        ("timeout", -1.0),
        ("timeout", "soon"),
        ("engine", "steam"),
        ("without", ["zero", "one"]),
        ("without", 7),
        ("wait_minimum", -0.5),
        ("tcp", "open"),
        ("color", "red"),
    ],
)
def test_a_request_for_what_cannot_be_is_refused_by_the_name_of_the_option(
    field: str, value: Any
) -> None:
    with pytest.raises(FlowError, match=field):
        CheckpointOptions.from_fields({"output": "/image", field: value})


def test_a_request_without_output_is_refused() -> None:
    with pytest.raises(FlowError, match="output"):
        CheckpointOptions.from_fields({})


@pytest.mark.parametrize(
    ("timeout", "prepare", "pause"), [(None, 120.0, 60.0), (2.0, 5.0, 2.0), (90.0, 90.0, 90.0)]
)
def test_a_timeout_is_for_the_pause_and_for_the_preparation_which_needs_some(
    timeout: float | None, prepare: float, pause: float
) -> None:
    options = CheckpointOptions(OUTPUT, timeout=timeout)
    assert (options.prepare_seconds, options.pause_seconds) == (prepare, pause)
