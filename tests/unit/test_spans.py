"""Spans of OpenTelemetry: only where they are asked for, and never a job's trouble."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowgpu import spans, timeline
from flowgpu.jobs import Job, Registry
from flowgpu.timeline import CRIU, GHOST, MOVE, Recorder

BEGAN = 1.7e9


@pytest.fixture
def registry(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    for name in (*spans.ASKING, *spans.TIMEOUT_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLOWGPU_RUNTIME_DIR", str(runtime_dir))
    return Registry()


@pytest.fixture
def job(registry: Registry) -> Job:
    return registry.create(command=["true"], cwd="/", gpu="emulated", name="train")


def done(registry: Registry, job: Job, error: str = "") -> None:
    """A checkpoint that has ended."""
    recorder = Recorder(100.0)
    recorder._began = BEGAN
    recorder.add(CRIU, "dump", 101.0, 103.0)
    recorder.add(GHOST, MOVE, 101.5, 102.0, 64)
    report: dict[str, Any] = {"engine": "replay", "cpu_bytes": 7, "mode": None, "phases": {}}
    timeline.note(registry.dir(job.id).timeline, "checkpoint", recorder, report, error)


def exported(text: str) -> dict[str, Any]:
    """What the console's exporter has printed, by name."""
    decoder, found = json.JSONDecoder(), {}
    while text := text.strip():
        one, end = decoder.raw_decode(text)
        found[one["name"]] = one
        text = text[end:]
    return found


def test_a_checkpoint_is_a_span_with_its_steps_in_it(
    registry: Registry,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    done(registry, job)
    assert spans.export(registry, job, 0.0) == ""
    out, err = capsys.readouterr()
    assert out == ""  # which is the command's
    found = exported(err)
    assert set(found) == {"checkpoint", "criu: dump", "ghost: move"}
    whole, move = found["checkpoint"], found["ghost: move"]
    assert whole["attributes"] == {
        "flowgpu.job": "train",
        "flowgpu.engine": "replay",
        "flowgpu.cpu_bytes": 7,
    }
    assert whole["resource"]["attributes"]["service.name"] == "flowgpu"
    assert whole["status"]["status_code"] == "UNSET"
    assert move["parent_id"] == whole["context"]["span_id"]
    assert move["attributes"] == {"flowgpu.track": GHOST, "flowgpu.bytes": 64}
    assert (move["start_time"], move["end_time"]) == (
        "2023-11-14T22:13:21.500000Z",
        "2023-11-14T22:13:22.000000Z",
    )


def test_a_failure_is_an_error_and_the_service_has_its_own_name(
    registry: Registry,
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    done(registry, job, "the disk is full")
    assert spans.export(registry, job, 0.0) == ""
    whole = exported(capsys.readouterr().err)["checkpoint"]
    assert whole["status"] == {"status_code": "ERROR", "description": "the disk is full"}
    assert whole["resource"]["attributes"]["service.name"] == "mine"


def test_nothing_is_exported_that_nobody_asked_for_or_that_is_old(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(spans, "_export", never)
    done(registry, job)
    assert spans.export(registry, job, 0.0) == ""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert spans.export(registry, job, 0.0) == ""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert spans.export(registry, job, BEGAN + 1.0) == ""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert spans.export(registry, job, 0.0) == ""


def test_what_keeps_spans_back_is_said_and_raises_nothing(
    registry: Registry, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(registry, job)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "no-such-exporter")
    assert "is not installed" in spans.export(registry, job, 0.0)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")

    class Broken:
        def __init__(self, **_: object) -> None:
            raise ValueError("a bad address")

    class Entry:
        load = staticmethod(lambda: Broken)

    monkeypatch.setattr(spans, "entry_points", lambda **_: [Entry])
    assert spans.export(registry, job, 0.0) == "ValueError: a bad address"
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert "is not installed" in spans.export(registry, job, 0.0)
