"""Checkpoints and restores as spans of OpenTelemetry, where its variables ask for that.

The command exports them, not the coordinator: a collector that does not answer keeps no job
waiting. The package is optional (`pip install flowgpu[otel]`), and imported only here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from flowgpu import __version__, timeline
from flowgpu.jobs import Job, Registry
from flowgpu.timeline import Operation

ASKING = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
"""Variables of OpenTelemetry of which one that is set asks for spans."""
EXPORTERS = "opentelemetry_traces_exporter"
"""Group of entry points in which packages offer exporters."""
TIMEOUT_VARIABLES = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
TIMEOUT_SECONDS = 2
"""For a collector, where no variable says how long; a command waits for it."""
SHOWN = ("engine", "ghost", "mode", "gpu", "image", "pause_seconds", "restore_seconds")
"""What of a report is an attribute, beside bytes."""
NANO = 1e9


def wanted() -> bool:
    """True if the environment asks for spans."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    none = os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    return not off and not none and any(map(os.environ.get, ASKING))


def export(registry: Registry, job: Job, since: float) -> str:
    """Export the newest operation of a job, if it began after `since` (seconds since 1970).

    Gives what kept it from that, in words, or nothing.
    """
    if not wanted():
        return ""
    operation = timeline.read(registry.dir(job.id).timeline)
    if operation is None or operation.timeline.began < since:
        return ""
    try:
        return "" if _export(job.name, operation) else "the collector did not take them"
    except ImportError:
        return "OpenTelemetry is not installed (pip install 'flowgpu[otel]')"
    except Exception as error:  # a monitor's trouble is none of the job's
        return f"{type(error).__name__}: {error}"


def _export(job: str, operation: Operation) -> bool:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    # What it has to say of a collector is said by the caller, in a line.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "flowgpu"}))
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("flowgpu", __version__)
    line = operation.timeline

    def at(seconds: float) -> int:
        return round((line.began + seconds) * NANO)

    whole = tracer.start_span(
        operation.kind, start_time=at(0.0), attributes=dict(_attributes(job, operation))
    )
    inside = set_span_in_context(whole)
    for span in line.spans:
        attributes: dict[str, str | int] = {"flowgpu.track": span.track}
        if span.bytes:
            attributes["flowgpu.bytes"] = span.bytes
        part = tracer.start_span(
            f"{span.track}: {span.name}", inside, attributes=attributes, start_time=at(span.begin)
        )
        part.end(at(span.end))
    if operation.error:
        whole.set_status(Status(StatusCode.ERROR, operation.error))
    whole.end(at(line.seconds))
    spans = kept.get_finished_spans()
    results = [exporter.export(spans) for exporter in _exporters()]
    return all(result is SpanExportResult.SUCCESS for result in results)


def _attributes(job: str, operation: Operation) -> Iterator[tuple[str, Any]]:
    yield "flowgpu.job", job
    for name, value in operation.result.items():
        if (name in SHOWN or "bytes" in name) and isinstance(value, str | int | float):
            yield f"flowgpu.{name}", value


def _exporters() -> Iterator[Any]:
    """The exporters that OTEL_TRACES_EXPORTER names, as packages offer them. Raises ImportError."""
    for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        offered = name.strip()
        if offered == "otlp":
            protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
            offered = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
        found = list(entry_points(group=EXPORTERS, name=offered))
        if not found:
            raise ImportError(offered)
        made = found[0].load()
        if offered == "console":
            yield made(out=sys.stderr)
        elif any(map(os.environ.get, TIMEOUT_VARIABLES)):
            yield made()
        else:
            yield made(timeout=TIMEOUT_SECONDS) if offered.startswith("otlp") else made()
