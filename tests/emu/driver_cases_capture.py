"""Stream capture: what a graph is made of, and what captures forbid."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from cuda.bindings import driver as cu

from tests.emu.driver_cases_graphs import (
    Types,
    add_fill,
    edges_of,
    fill_params,
    nodes_of,
    run,
    stream,
    types_of,
    zeros,
)
from tests.emu.driver_lib import (
    R,
    case,
    download,
    function,
    launch_inc,
    libcuda,
    ok,
    refuses,
    start,
)

Modes = cu.CUstreamCaptureMode
GLOBAL, THREAD_LOCAL, RELAXED = (
    Modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
    Modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    Modes.CU_STREAM_CAPTURE_MODE_RELAXED,
)
Status = cu.CUstreamCaptureStatus


@case()
def a_captured_stream_is_a_graph() -> None:
    start()
    inc, where, data, other = function(b"inc"), stream(), zeros(4), zeros(4)
    ok(cu.cuStreamBeginCapture(where, GLOBAL))
    assert ok(cu.cuStreamIsCapturing(where)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    ok(cu.cuMemsetD32Async(data, 2, 4, where))
    for _ in range(3):
        ok(launch_inc(inc, data, 4, where))
    ok(cu.cuMemcpyDtoDAsync(other, data, 16, where))
    status, identity, graph, frontier, *_, count = ok(cu.cuStreamGetCaptureInfo(where))
    assert status == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE and int(identity) > 0
    assert count == 1 and int(frontier[0]) in nodes_of(graph)
    made = ok(cu.cuStreamEndCapture(where))
    assert int(made) == int(graph) and len(nodes_of(made)) == 5 and len(edges_of(made)) == 4
    assert ok(cu.cuStreamIsCapturing(where)) == Status.CU_STREAM_CAPTURE_STATUS_NONE
    ok(cu.cuStreamSynchronize(where))
    assert list(download(other, 4)) == [0] * 4  # nothing has run
    executable = ok(cu.cuGraphInstantiate(made, 0))
    ok(cu.cuGraphDestroy(made))
    for _ in range(2):
        ok(cu.cuMemsetD32Async(data, 50, 4, where))
        run(executable, where)
        assert list(download(other, 4)) == [5] * 4


@case()
def a_capture_forks_and_joins_through_events() -> None:
    start()
    inc, data, other = function(b"inc"), zeros(), zeros()
    one, two = stream(), stream()
    forked, joined = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
    ok(cu.cuStreamBeginCapture(one, GLOBAL))
    ok(cu.cuMemsetD32Async(data, 5, 1, one))
    ok(cu.cuEventRecord(forked, one))
    ok(cu.cuStreamWaitEvent(two, forked, 0))
    assert ok(cu.cuStreamIsCapturing(two)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    ok(cu.cuMemsetD32Async(other, 7, 1, two))
    ok(launch_inc(inc, data, 1, one))
    ok(cu.cuEventRecord(joined, two))
    ok(cu.cuStreamWaitEvent(one, joined, 0))
    ok(launch_inc(inc, other, 1, one))
    graph = ok(cu.cuStreamEndCapture(one))
    assert ok(cu.cuStreamIsCapturing(two)) == Status.CU_STREAM_CAPTURE_STATUS_NONE
    assert types_of(graph) == ["KERNEL", "KERNEL", "MEMSET", "MEMSET"]
    edges = edges_of(graph)
    (root,) = {a for a, _ in edges} - {b for _, b in edges}
    (last,) = {b for _, b in edges} - {a for a, _ in edges}
    between = set(nodes_of(graph)) - {root, last}
    assert edges == {(root, n) for n in between} | {(n, last) for n in between}
    run(ok(cu.cuGraphInstantiate(graph, 0)), two)
    assert (download(data, 1)[0], download(other, 1)[0]) == (6, 8)


@case()
def what_a_capture_leaves_unjoined_is_refused() -> None:
    start()
    data, one, two = zeros(), stream(), stream()
    forked = ok(cu.cuEventCreate(2))
    for ended, code in ((two, "UNMATCHED"), (one, "UNJOINED")):
        ok(cu.cuStreamBeginCapture(one, GLOBAL))
        ok(cu.cuEventRecord(forked, one))
        ok(cu.cuStreamWaitEvent(two, forked, 0))
        ok(cu.cuMemsetD32Async(data, 7, 1, two))
        refuses(cu.cuStreamEndCapture(ended), f"STREAM_CAPTURE_{code}")
        cu.cuStreamEndCapture(one)
        assert ok(cu.cuStreamIsCapturing(two)) == Status.CU_STREAM_CAPTURE_STATUS_NONE


def ends_invalid(where: Any) -> None:
    """The capture is broken: the stream is of no use before its end, and after it again."""
    status = ok(cu.cuStreamIsCapturing(where))
    assert status == Status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    code, graph = cu.cuStreamEndCapture(where)
    assert code == R.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert graph is None or int(graph) == 0
    assert ok(cu.cuStreamIsCapturing(where)) == Status.CU_STREAM_CAPTURE_STATUS_NONE
    ok(cu.cuStreamSynchronize(where))


@case()
def what_waits_for_a_capturing_stream_breaks_the_capture() -> None:
    start()
    data, where = zeros(), stream()
    event = ok(cu.cuEventCreate(2))
    for conflict in (
        lambda: cu.cuStreamSynchronize(where),
        lambda: cu.cuStreamQuery(where),
        lambda: cu.cuCtxSynchronize(),
    ):
        ok(cu.cuStreamBeginCapture(where, RELAXED))
        refuses(conflict(), "STREAM_CAPTURE_UNSUPPORTED")
        refuses(cu.cuMemsetD32Async(data, 1, 1, where), "STREAM_CAPTURE_INVALIDATED")
        ends_invalid(where)
    ok(cu.cuStreamBeginCapture(where, RELAXED))
    ok(cu.cuEventRecord(event, where))
    refuses(cu.cuEventQuery(event), "CAPTURED_EVENT")
    cu.cuStreamEndCapture(where)
    ok(cu.cuEventRecord(event, where))
    ok(cu.cuEventSynchronize(event))


@case()
def the_legacy_stream_is_no_part_of_a_capture() -> None:
    start()
    data, blocking = zeros(), ok(cu.cuStreamCreate(0))
    assert cu.cuStreamBeginCapture(cu.CUstream(1), RELAXED)[0] != R.CUDA_SUCCESS
    ok(cu.cuStreamBeginCapture(blocking, RELAXED))
    refuses(cu.cuStreamIsCapturing(cu.CUstream(1)), "STREAM_CAPTURE_IMPLICIT")
    assert ok(cu.cuStreamIsCapturing(blocking)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    refuses(cu.cuMemsetD32Async(data, 1, 1, cu.CUstream(1)), "STREAM_CAPTURE_IMPLICIT")
    ends_invalid(blocking)
    free = stream()
    ok(cu.cuStreamBeginCapture(free, RELAXED))
    ok(cu.cuMemsetD32Async(data, 1, 1, cu.CUstream(1)))
    ok(cu.cuStreamEndCapture(free))


@case()
def allocations_are_refused_where_a_capture_would_not_see_them() -> None:
    context = start()
    where = stream()
    ok(cu.cuStreamBeginCapture(where, GLOBAL))
    refuses(cu.cuMemAlloc(4), "STREAM_CAPTURE_UNSUPPORTED")
    ends_invalid(where)
    ok(cu.cuStreamBeginCapture(where, RELAXED))
    ok(cu.cuMemAlloc(4))
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(where))))
    ok(cu.cuStreamBeginCapture(where, THREAD_LOCAL))
    before = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    assert before == GLOBAL
    ok(cu.cuMemAlloc(4))
    assert ok(cu.cuThreadExchangeStreamCaptureMode(before)) == RELAXED

    found: list[Any] = []

    def elsewhere(work: Any) -> None:
        def body() -> None:
            ok(cu.cuCtxSetCurrent(context))
            found.append(work()[0])

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    elsewhere(lambda: cu.cuMemAlloc(4))  # a thread's own capture does not concern another
    elsewhere(lambda: cu.cuStreamEndCapture(where))
    assert found == [R.CUDA_SUCCESS, R.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD]
    cu.cuStreamEndCapture(where)
    ok(cu.cuStreamBeginCapture(where, GLOBAL))
    elsewhere(lambda: cu.cuMemAlloc(4))
    assert found[-1] == R.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    ends_invalid(where)


@case()
def frees_are_refused_where_a_capture_would_not_see_them() -> None:
    start()
    where, data = stream(), zeros()
    for mode in (GLOBAL, THREAD_LOCAL):
        ok(cu.cuStreamBeginCapture(where, mode))
        refuses(cu.cuMemFree(data), "STREAM_CAPTURE_UNSUPPORTED")
        ends_invalid(where)
    ok(cu.cuMemsetD32(data, 1, 1))  # it is still there
    ok(cu.cuStreamBeginCapture(where, RELAXED))
    ok(cu.cuMemFree(data))
    ok(cu.cuGraphDestroy(ok(cu.cuStreamEndCapture(where))))
    refuses(cu.cuMemFree(data), "INVALID_VALUE")


@case()
def captures_do_not_mix_with_each_other_or_with_other_work() -> None:
    start()
    data, one, two = zeros(), stream(), stream()
    event = ok(cu.cuEventCreate(2))
    ok(cu.cuStreamBeginCapture(one, RELAXED))
    assert cu.cuStreamBeginCapture(one, RELAXED)[0] != R.CUDA_SUCCESS
    ok(cu.cuStreamEndCapture(one))
    assert cu.cuStreamEndCapture(one)[0] != R.CUDA_SUCCESS
    ok(cu.cuEventRecord(event, two))
    ok(cu.cuStreamBeginCapture(one, RELAXED))
    refuses(cu.cuStreamWaitEvent(one, event, 0), "STREAM_CAPTURE_ISOLATION")
    cu.cuStreamEndCapture(one)
    ok(cu.cuStreamBeginCapture(one, RELAXED))
    ok(cu.cuStreamBeginCapture(two, RELAXED))
    ok(cu.cuEventRecord(event, two))
    refuses(cu.cuStreamWaitEvent(one, event, 0), "STREAM_CAPTURE_MERGE")
    for where in (one, two):
        cu.cuStreamEndCapture(where)
    ok(cu.cuMemsetD32Async(data, 3, 1, two))
    ok(cu.cuStreamSynchronize(two))


@case()
def a_launch_of_a_graph_breaks_a_capture() -> None:
    start()
    where, data = stream(), zeros()
    executable = ok(cu.cuGraphInstantiate(ok(cu.cuGraphCreate(0)), 0))
    for mode in (GLOBAL, RELAXED):
        ok(cu.cuStreamBeginCapture(where, mode))
        ok(cu.cuMemsetD32Async(data, 1, 1, where))
        refuses(cu.cuGraphLaunch(executable, where), "STREAM_CAPTURE_UNSUPPORTED")
        refuses(cu.cuMemsetD32Async(data, 1, 1, where), "STREAM_CAPTURE_INVALIDATED")
        refuses(cu.cuStreamEndCapture(where), "STREAM_CAPTURE_INVALIDATED")
    run(executable, where)


@case()
def a_capture_goes_on_in_a_graph_that_there_is() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    graph = ok(cu.cuGraphCreate(0))
    fill, plain = add_fill(graph, [], fill_params(data, 20)), cu.CUgraphEdgeData()
    ok(cu.cuStreamBeginCaptureToGraph(where, graph, [fill], [plain], 1, GLOBAL))
    ok(launch_inc(inc, data, 1, where))
    flag = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
    ok(cu.cuStreamUpdateCaptureDependencies(where, [fill], [plain], 1, flag))
    ok(cu.cuMemcpyDtoDAsync(zeros_of_capture(), data, 4, where))
    assert int(ok(cu.cuStreamEndCapture(where))) == int(graph)
    assert types_of(graph) == ["KERNEL", "MEMCPY", "MEMSET"]
    assert edges_of(graph) == {(int(fill), n) for n in nodes_of(graph) if n != int(fill)}
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert download(data, 1)[0] == 21


def zeros_of_capture() -> int:
    """Memory that is made while the thread may make it, in a capture or not."""
    before = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    made = int(ok(cu.cuMemAlloc(4)))
    ok(cu.cuThreadExchangeStreamCaptureMode(before))
    return made


@case()
def external_events_of_a_capture_are_nodes() -> None:
    start()
    inc, where, other, data = function(b"inc"), stream(), stream(), zeros()
    before, after = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
    external = 1
    ok(cu.cuStreamBeginCapture(where, GLOBAL))
    ok(cu.cuStreamWaitEvent(where, before, external))
    ok(launch_inc(inc, data, 1, where))
    ok(cu.cuEventRecordWithFlags(after, where, external))
    graph = ok(cu.cuStreamEndCapture(where))
    assert types_of(graph) == ["EVENT_RECORD", "KERNEL", "WAIT_EVENT"]
    ok(cu.cuEventRecord(before, other))
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    ok(cu.cuEventQuery(after))
    assert download(data, 1)[0] == 1


@case()
def host_functions_of_a_capture_are_nodes() -> None:
    start()
    where, data = stream(), zeros()
    seen: list[int] = []
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: seen.append(number or 0))
    library = libcuda()
    ok(cu.cuStreamBeginCapture(where, GLOBAL))
    ok(cu.cuMemsetD32Async(data, 4, 1, where))
    assert library.cuLaunchHostFunc(ctypes.c_void_p(int(where)), call, 5) == 0
    graph = ok(cu.cuStreamEndCapture(where))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    assert seen == []
    for _ in range(2):
        run(executable, where)
    assert seen == [5, 5] and download(data, 1)[0] == 4


@case(emulated=True)
def what_graphs_lack_is_refused_by_name() -> None:
    start()
    where = stream()
    ok(cu.cuStreamBeginCapture(where, RELAXED))
    refuses(cu.cuMemAllocAsync(4, where), "NOT_SUPPORTED")
    refuses(cu.cuStreamEndCapture(where), "STREAM_CAPTURE_INVALIDATED")
    graph = ok(cu.cuGraphCreate(0))
    ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    launch = cu.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH
    refuses(cu.cuGraphInstantiate(graph, int(launch)), "NOT_SUPPORTED")
    params = cu.CUgraphNodeParams()
    params.type = Types.CU_GRAPH_NODE_TYPE_MEM_ALLOC
    refuses(cu.cuGraphAddNode(graph, None, None, 0, params), "NOT_SUPPORTED")
    edge = cu.CUgraphEdgeData()
    edge.type = 1  # programmatic
    first = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    second = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    refuses(cu.cuGraphAddDependencies(graph, [first], [second], [edge], 1), "NOT_SUPPORTED")
