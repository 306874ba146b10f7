"""`flowgpu trace`: events by the rules of the Trace Event Format, whatever the spans are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_lib import check_trace

from flowgpu.jobs import Registry
from flowgpu.report.source import NothingToShow
from flowgpu.report.trace import Source, events, find
from flowgpu.timeline import COORDINATOR, CRIU, GHOST, JOB, MOVE, Span, Timeline

GOLDEN = Path(__file__).parents[1] / "golden" / "image-v2"


def source(*spans: Span, job: str = "train", began: float = 100.0) -> Source:
    return Source(job, "000001", Timeline(began, spans), 4096)


MOMENT = st.floats(0, 100, allow_nan=False)
SPANS = st.lists(
    st.tuples(st.sampled_from([GHOST, COORDINATOR, "task 7"]), MOMENT, MOMENT).map(
        lambda one: Span(one[0], "a", min(one[1:]), max(one[1:]))
    ),
    min_size=1,
    max_size=40,
)


@given(SPANS, SPANS)
def test_any_spans_make_a_trace_in_which_spans_of_a_thread_nest(
    first: list[Span], second: list[Span]
) -> None:
    trace = events([source(*first), source(*second, began=120.0), source(*second, job="b")])
    check_trace(trace)
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(shown) == len(first) + 2 * len(second)


def test_times_are_those_of_the_spans() -> None:
    late = source(Span(GHOST, MOVE, 1.0, 3.0, 8), began=102.5)
    trace = events([late, source(Span(JOB, "paused", 0.5, 1.0))])
    (move,) = [one for one in trace["traceEvents"] if one["name"] == MOVE]
    assert (move["ts"], move["dur"]) == (3.5e6, 2e6)
    assert move["args"] == {"image": "000001", "bytes": 8, "bytes_per_second": 4}
    assert trace["otherData"]["began"] == 100.0


def test_names_are_one_line_of_text() -> None:
    trace = events([source(Span("a\nb", "c\x1b", 0.0, 1.0), job="d\ne")])
    check_trace(trace)
    assert "\x1b" not in json.dumps(trace, ensure_ascii=False)


def test_processes_are_in_the_order_of_the_report() -> None:
    spans = [Span(track, "a", 0.0, 1.0) for track in ("task 7", CRIU, GHOST, COORDINATOR, JOB)]
    trace = events([source(*spans)])
    rows = trace["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in rows if one["name"] == "process_name"}
    order = [
        (one["args"]["sort_index"], names[one["pid"]])
        for one in rows
        if one["name"] == "process_sort_index"
    ]
    assert [name for _, name in sorted(order)] == [JOB, COORDINATOR, GHOST, CRIU, "task 7"]


def test_an_image_from_before_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(NothingToShow, match="has no times"):
        find(str(GOLDEN), Registry(tmp_path))
