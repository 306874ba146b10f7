"""Graphs: made node by node, changed, instantiated, launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.driver_lib import (
    R,
    case,
    download,
    function,
    launch_wait,
    libcuda,
    ok,
    refuses,
    start,
)

NON_BLOCKING = 1
Types = cu.CUgraphNodeType
Updates = cu.CUgraphExecUpdateResult


def zeros(count: int = 1) -> int:
    address = int(ok(cu.cuMemAlloc(4 * count)))
    ok(cu.cuMemsetD32(address, 0, count))
    ok(cu.cuCtxSynchronize())
    return address


def stream() -> Any:
    return ok(cu.cuStreamCreate(NON_BLOCKING))


def kernel_params(kernel: Any, values: tuple[Any, ...], types: tuple[Any, ...]) -> Any:
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = kernel
    params.gridDimX = params.gridDimY = params.gridDimZ = 1
    params.blockDimX, params.blockDimY, params.blockDimZ = 64, 1, 1
    params.kernelParams = (values, types)
    return params


def inc_params(kernel: Any, address: int, count: int = 1) -> Any:
    return kernel_params(kernel, (address, count), (ctypes.c_uint64, ctypes.c_uint32))


def fill_params(address: int, value: int, count: int = 1) -> Any:
    params = cu.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value, params.elementSize = cu.CUdeviceptr(address), value, 4
    params.width, params.height = count, 1
    return params


def copy_params(to: int, source: int, size: int, kind: str = "DEVICE DEVICE") -> Any:
    params = cu.CUDA_MEMCPY3D()
    params.dstMemoryType, params.srcMemoryType = (
        getattr(cu.CUmemorytype, f"CU_MEMORYTYPE_{word}") for word in kind.split()
    )
    if kind.startswith("HOST"):
        params.dstHost = to
    else:
        params.dstDevice = cu.CUdeviceptr(to)
    if kind.endswith("HOST"):
        params.srcHost = source
    else:
        params.srcDevice = cu.CUdeviceptr(source)
    params.WidthInBytes, params.Height, params.Depth = size, 1, 1
    return params


def add_kernel(graph: Any, after: Sequence[Any], params: Any) -> Any:
    return ok(cu.cuGraphAddKernelNode(graph, list(after) or None, len(after), params))


def add_fill(graph: Any, after: Sequence[Any], params: Any) -> Any:
    context = ok(cu.cuCtxGetCurrent())
    return ok(cu.cuGraphAddMemsetNode(graph, list(after) or None, len(after), params, context))


def add_copy(graph: Any, after: Sequence[Any], params: Any) -> Any:
    context = ok(cu.cuCtxGetCurrent())
    return ok(cu.cuGraphAddMemcpyNode(graph, list(after) or None, len(after), params, context))


def run(executable: Any, where: Any) -> None:
    ok(cu.cuGraphLaunch(executable, where))
    # ctypes frees the interpreter's lock, which host functions of a graph need.
    assert libcuda().cuStreamSynchronize(ctypes.c_void_p(int(where))) == 0


def nodes_of(graph: Any) -> list[int]:
    _, count = ok(cu.cuGraphGetNodes(graph))
    return [int(node) for node in ok(cu.cuGraphGetNodes(graph, count))[0]]


def types_of(graph: Any) -> list[str]:
    """Sorted, without CU_GRAPH_NODE_TYPE_."""
    kinds = [ok(cu.cuGraphNodeGetType(cu.CUgraphNode(node))) for node in nodes_of(graph)]
    return sorted(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_") for kind in kinds)


def edges_of(graph: Any) -> set[tuple[int, int]]:
    count = ok(cu.cuGraphGetEdges(graph))[3]
    from_, to, _, found = ok(cu.cuGraphGetEdges(graph, count))
    assert found == count
    return {(int(a), int(b)) for a, b in zip(from_, to, strict=True)}


@case()
def a_graph_runs_in_the_order_of_its_edges() -> None:
    start()
    inc, where = function(b"inc"), stream()
    data, copy = zeros(8), zeros(8)
    host = ctypes.addressof(ctypes.c_uint32.from_address(int(ok(cu.cuMemHostAlloc(32, 0)))))
    graph = ok(cu.cuGraphCreate(0))
    set_to_5 = add_fill(graph, [], fill_params(data, 5, 8))
    first = add_kernel(graph, [set_to_5], inc_params(inc, data, 8))
    second = add_kernel(graph, [first], inc_params(inc, data, 4))
    copied = add_copy(graph, [second], copy_params(copy, data, 32))
    out = add_copy(graph, [copied], copy_params(host, copy, 32, "HOST DEVICE"))
    empty = ok(cu.cuGraphAddEmptyNode(graph, [copied, second], 2))
    assert set(nodes_of(graph)) == {int(n) for n in (set_to_5, first, second, copied, out, empty)}
    assert edges_of(graph) == {
        (int(a), int(b))
        for a, b in (
            (set_to_5, first), (first, second), (second, copied), (copied, out), (copied, empty),
            (second, empty),
        )
    }  # fmt: skip
    assert [int(n) for n in ok(cu.cuGraphGetRootNodes(graph, 1))[0]] == [int(set_to_5)]
    kinds = [ok(cu.cuGraphNodeGetType(n)) for n in (first, copied, set_to_5, empty)]
    assert kinds == [
        Types.CU_GRAPH_NODE_TYPE_KERNEL,
        Types.CU_GRAPH_NODE_TYPE_MEMCPY,
        Types.CU_GRAPH_NODE_TYPE_MEMSET,
        Types.CU_GRAPH_NODE_TYPE_EMPTY,
    ]
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))  # an executable does not need it
    ok(cu.cuGraphUpload(executable, where))
    for _ in range(3):
        ok(cu.cuMemsetD32Async(data, 100, 8, where))
        run(executable, where)
        found = np.ctypeslib.as_array((ctypes.c_uint32 * 8).from_address(host))
        assert list(found) == [7] * 4 + [6] * 4
    ok(cu.cuGraphExecDestroy(executable))


@case()
def a_launch_is_ordered_in_its_stream() -> None:
    start()
    wait, inc = function(b"wait_for"), function(b"inc")
    flag, data = zeros(), zeros()
    where, helper = stream(), stream()
    graph = ok(cu.cuGraphCreate(0))
    add_kernel(graph, [], inc_params(inc, data))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(launch_wait(wait, flag, where))
    for _ in range(4):
        ok(cu.cuGraphLaunch(executable, where))
    ok(cu.cuMemsetD32Async(data, 50, 1, where))
    ok(cu.cuGraphLaunch(executable, where))
    refuses(cu.cuStreamQuery(where), "NOT_READY")
    ok(cu.cuGraphExecDestroy(executable))  # freed when its launches are over
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    ok(cu.cuStreamSynchronize(where))
    assert download(data, 1)[0] == 51


@case(emulated=True)
def branches_of_a_graph_run_at_the_same_time() -> None:
    start()
    wait, where = function(b"wait_for"), stream()
    flag, data = zeros(), zeros()
    graph = ok(cu.cuGraphCreate(0))
    held = kernel_params(wait, (flag,), (ctypes.c_uint64,))
    held.blockDimX = 1
    waiting = add_kernel(graph, [], held)
    add_fill(graph, [], fill_params(flag, 1))  # or the kernel would never end
    add_kernel(graph, [waiting], inc_params(function(b"inc"), data))
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert download(data, 1)[0] == 1


@case()
def arguments_are_copied_when_a_node_is_made() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros(2)
    graph = ok(cu.cuGraphCreate(0))
    packed = (ctypes.c_uint64 * 2)(data, 1)
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_void_p * 5)(
        1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0
    )  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
    params = inc_params(inc, data)
    params.kernelParams = 0
    params.extra = ctypes.addressof(extra)
    node = add_kernel(graph, [], params)
    pointed = inc_params(inc, data + 4)
    add_kernel(graph, [], pointed)
    packed[0] = 0
    ctypes.memset(ctypes.addressof(extra), 0xFF, ctypes.sizeof(extra))
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert list(download(data, 2)) == [1, 1]
    both = inc_params(inc, data)
    packed[0] = data
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
    both.extra = ctypes.addressof(extra)
    refuses(cu.cuGraphAddKernelNode(graph, None, 0, both), "INVALID_VALUE")
    found = ok(cu.cuGraphKernelNodeGetParams(node))
    assert int(found.func) == int(inc) and found.blockDimX == 64
    given = (ctypes.c_void_p * 4).from_address(int(found.extra))
    assert ctypes.c_uint64.from_address(given[given[:].index(1) + 1]).value == data


@case()
def parameters_of_nodes_are_read_and_changed() -> None:
    start()
    inc, where, data, other = function(b"inc"), stream(), zeros(2), zeros(2)
    graph = ok(cu.cuGraphCreate(0))
    fill = add_fill(graph, [], fill_params(data, 7, 2))
    kernel = add_kernel(graph, [fill], inc_params(inc, data))
    copy = add_copy(graph, [kernel], copy_params(other, data, 8))
    assert ok(cu.cuGraphMemsetNodeGetParams(fill)).value == 7
    found = ok(cu.cuGraphMemcpyNodeGetParams(copy))
    assert (int(found.dstDevice), int(found.srcDevice), found.WidthInBytes) == (other, data, 8)
    params = ok(cu.cuGraphKernelNodeGetParams(kernel))
    values = (ctypes.c_void_p * 2).from_address(int(params.kernelParams))
    assert ctypes.c_uint64.from_address(values[0]).value == data
    assert ctypes.c_uint32.from_address(values[1]).value == 1
    cooperative = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    value = ok(cu.cuGraphKernelNodeGetAttribute(kernel, cooperative))
    assert value.cooperative == 0
    value.cooperative = 1
    ok(cu.cuGraphKernelNodeSetAttribute(kernel, cooperative, value))
    assert ok(cu.cuGraphKernelNodeGetAttribute(kernel, cooperative)).cooperative == 1
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphKernelNodeSetParams(kernel, inc_params(inc, data, 2)))
    ok(cu.cuGraphMemsetNodeSetParams(fill, fill_params(data, 20, 2)))
    ok(cu.cuGraphMemcpyNodeSetParams(copy, copy_params(other, data, 4)))
    assert cu.cuGraphKernelNodeSetParams(fill, inc_params(inc, data))[0] != R.CUDA_SUCCESS
    run(executable, where)  # made before
    assert list(download(other, 2)) == [8, 7]
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert list(download(data, 2)) == [21, 21] and list(download(other, 2)) == [21, 7]


@case()
def edges_are_added_and_removed() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    graph, other = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
    later = add_kernel(graph, [], inc_params(inc, data))
    first = add_fill(graph, [], fill_params(data, 10))
    ok(cu.cuGraphAddDependencies(graph, [first], [later], None, 1))
    assert cu.cuGraphAddDependencies(graph, [first], [later], None, 1)[0] != R.CUDA_SUCCESS
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    run(executable, where)
    assert download(data, 1)[0] == 11
    assert [int(n) for n in ok(cu.cuGraphNodeGetDependencies(later, 1))[0]] == [int(first)]
    assert [int(n) for n in ok(cu.cuGraphNodeGetDependentNodes(first, 1))[0]] == [int(later)]
    ok(cu.cuGraphRemoveDependencies(graph, [first], [later], None, 1))
    assert edges_of(graph) == set()
    assert cu.cuGraphRemoveDependencies(graph, [first], [later], None, 1)[0] != R.CUDA_SUCCESS
    foreign = add_kernel(other, [], inc_params(inc, data))
    assert cu.cuGraphAddDependencies(graph, [first], [foreign], None, 1)[0] != R.CUDA_SUCCESS
    misplaced = cu.cuGraphAddKernelNode(graph, [foreign], 1, inc_params(inc, data))
    assert misplaced[0] != R.CUDA_SUCCESS
    ok(cu.cuGraphDestroyNode(first))
    assert nodes_of(graph) == [int(later)]


@case(emulated=True)
def a_cycle_is_no_graph_that_runs() -> None:
    start()
    graph = ok(cu.cuGraphCreate(0))
    one = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    two = ok(cu.cuGraphAddEmptyNode(graph, [one], 1))
    ok(cu.cuGraphAddDependencies(graph, [two], [one], None, 1))
    refuses(cu.cuGraphInstantiate(graph, 0), "INVALID_VALUE")
    params = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
    refuses(cu.cuGraphInstantiateWithParams(graph, params), "INVALID_VALUE")


@case()
def a_clone_is_a_graph_of_its_own() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    graph = ok(cu.cuGraphCreate(0))
    fill = add_fill(graph, [], fill_params(data, 1))
    kernel = add_kernel(graph, [fill], inc_params(inc, data))
    clone = ok(cu.cuGraphClone(graph))
    twin = ok(cu.cuGraphNodeFindInClone(fill, clone))
    assert int(twin) in nodes_of(clone) and int(twin) not in nodes_of(graph)
    ok(cu.cuGraphMemsetNodeSetParams(twin, fill_params(data, 40)))
    ok(cu.cuGraphDestroyNode(kernel))
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert download(data, 1)[0] == 1
    ok(cu.cuGraphDestroy(graph))
    run(ok(cu.cuGraphInstantiate(clone, 0)), where)
    assert download(data, 1)[0] == 41


@case()
def a_child_graph_is_copied_into_its_node() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    child, graph = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
    for _ in range(2):
        add_kernel(child, [], inc_params(inc, data))
    fill = add_fill(graph, [], fill_params(data, 10))
    inside = ok(cu.cuGraphAddChildGraphNode(graph, [fill], 1, child))
    assert ok(cu.cuGraphNodeGetType(inside)) == Types.CU_GRAPH_NODE_TYPE_GRAPH
    add_kernel(graph, [inside], inc_params(inc, data))
    embedded = ok(cu.cuGraphChildGraphNodeGetGraph(inside))
    first, second = ok(cu.cuGraphGetNodes(embedded, 2))[0]
    ok(cu.cuGraphAddDependencies(embedded, [first], [second], None, 1))
    assert len(edges_of(embedded)) == 1 and edges_of(child) == set()
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    run(executable, where)
    assert download(data, 1)[0] == 13
    other = zeros()
    for node in ok(cu.cuGraphGetNodes(child, 2))[0]:
        ok(cu.cuGraphKernelNodeSetParams(node, inc_params(inc, other)))
    # Its nodes have no edge, as those of the executable's do.
    assert cu.cuGraphExecChildGraphNodeSetParams(executable, inside, child)[0] != R.CUDA_SUCCESS
    one, two = ok(cu.cuGraphGetNodes(child, 2))[0]
    ok(cu.cuGraphAddDependencies(child, [one], [two], None, 1))
    ok(cu.cuGraphExecChildGraphNodeSetParams(executable, inside, child))
    assert cu.cuGraphExecChildGraphNodeSetParams(executable, fill, child)[0] != R.CUDA_SUCCESS
    ok(cu.cuGraphDestroy(child))
    run(executable, where)
    assert (download(data, 1)[0], download(other, 1)[0]) == (11, 2)
    ok(cu.cuGraphDestroy(graph))


@case()
def a_child_graph_is_moved_to_its_node() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    child, graph = ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
    add_kernel(child, [], inc_params(inc, data))
    params = cu.CUgraphNodeParams()
    params.type = Types.CU_GRAPH_NODE_TYPE_GRAPH
    params.graph.graph = child
    params.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
    inside = ok(cu.cuGraphAddNode(graph, None, None, 0, params))
    assert int(ok(cu.cuGraphChildGraphNodeGetGraph(inside))) == int(child)
    for result in (
        cu.cuGraphDestroy(child),
        cu.cuGraphInstantiate(child, 0),
        cu.cuGraphAddChildGraphNode(graph, None, 0, child),
    ):
        assert result[0] != R.CUDA_SUCCESS
    add_kernel(child, ok(cu.cuGraphGetNodes(child, 1))[0], inc_params(inc, data))
    run(ok(cu.cuGraphInstantiate(graph, 0)), where)
    assert download(data, 1)[0] == 2
    run(ok(cu.cuGraphInstantiate(ok(cu.cuGraphClone(graph)), 0)), where)
    assert download(data, 1)[0] == 4
    ok(cu.cuGraphDestroy(graph))


@case()
def an_executable_is_given_other_parameters() -> None:
    start()
    inc, bump, where = function(b"inc"), function(b"bump"), stream()
    data, other, out = zeros(4), zeros(4), zeros(4)
    graph = ok(cu.cuGraphCreate(0))
    fill = add_fill(graph, [], fill_params(data, 3, 4))
    kernel = add_kernel(graph, [fill], inc_params(inc, data, 4))
    copy = add_copy(graph, [kernel], copy_params(out, data, 16))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    context = ok(cu.cuCtxGetCurrent())
    ok(cu.cuGraphExecMemsetNodeSetParams(executable, fill, fill_params(other, 8, 4), context))
    ok(cu.cuGraphExecKernelNodeSetParams(executable, kernel, inc_params(inc, other, 2)))
    ok(cu.cuGraphExecMemcpyNodeSetParams(executable, copy, copy_params(out, other, 16), context))
    run(executable, where)
    assert list(download(out, 4)) == [9, 9, 8, 8] and list(download(data, 4)) == [0] * 4
    assert ok(cu.cuGraphMemsetNodeGetParams(fill)).value == 3
    params = kernel_params(bump, (), ())
    params.kernelParams = 0
    params.blockDimX = 1
    ok(cu.cuGraphExecKernelNodeSetParams(executable, kernel, params))
    run(executable, where)
    assert list(download(out, 4)) == [8] * 4
    ok(cu.cuGraphNodeSetEnabled(executable, fill, 0))
    assert ok(cu.cuGraphNodeGetEnabled(executable, fill)) == 0
    ok(cu.cuMemsetD32Async(other, 77, 4, where))
    run(executable, where)
    assert list(download(out, 4)) == [77] * 4


def not_updated(executable: Any, graph: Any, reason: Any) -> None:
    """Ask by ctypes, because the bindings keep the reason of a failure to themselves."""
    info = (ctypes.c_uint64 * 3)()
    handles = (ctypes.c_void_p(int(handle)) for handle in (executable, graph))
    code = libcuda().cuGraphExecUpdate_v2(*handles, info)
    assert code == int(R.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE), code
    assert info[0] & 0xFFFFFFFF == int(reason), info[0]


@case()
def an_executable_takes_over_a_graph_of_its_shape() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros(4)

    def made(value: int, count: int, kernels: int) -> Any:
        graph = ok(cu.cuGraphCreate(0))
        last = add_fill(graph, [], fill_params(data, value, 4))
        for _ in range(kernels):
            last = add_kernel(graph, [last], inc_params(inc, data, count))
        return graph

    executable = ok(cu.cuGraphInstantiate(made(1, 4, 2), 0))
    ok(cu.cuGraphExecUpdate(executable, made(30, 2, 2)))
    run(executable, where)
    assert list(download(data, 4)) == [32, 32, 30, 30]
    not_updated(executable, made(0, 1, 3), Updates.CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED)
    changed = ok(cu.cuGraphCreate(0))
    last = add_kernel(changed, [], inc_params(inc, data))
    for _ in range(2):
        last = add_kernel(changed, [last], inc_params(inc, data))
    not_updated(executable, changed, Updates.CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED)
    run(executable, where)
    assert list(download(data, 4)) == [32, 32, 30, 30]  # as before


@case()
def events_and_host_functions_are_nodes() -> None:
    start()
    inc, where, other, data = function(b"inc"), stream(), stream(), zeros()
    before, after = ok(cu.cuEventCreate(2)), ok(cu.cuEventCreate(2))
    seen: list[int] = []
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: seen.append(number or 0))
    graph = ok(cu.cuGraphCreate(0))
    waits = ok(cu.cuGraphAddEventWaitNode(graph, None, 0, before))
    kernel = add_kernel(graph, [waits], inc_params(inc, data))
    params = cu.CUDA_HOST_NODE_PARAMS()
    params.fn = cu.CUhostFn(ctypes.cast(call, ctypes.c_void_p).value)
    params.userData = 9
    host = ok(cu.cuGraphAddHostNode(graph, [kernel], 1, params))
    records = ok(cu.cuGraphAddEventRecordNode(graph, [host], 1, after))
    assert int(ok(cu.cuGraphEventWaitNodeGetEvent(waits))) == int(before)
    assert int(ok(cu.cuGraphEventRecordNodeGetEvent(records))) == int(after)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    flag, helper = zeros(), stream()
    ok(launch_wait(function(b"wait_for"), flag, other))
    ok(cu.cuEventRecord(before, other))
    ok(cu.cuGraphLaunch(executable, where))
    refuses(cu.cuStreamQuery(where), "NOT_READY")
    assert seen == []
    ok(cu.cuMemsetD32Async(flag, 1, 1, helper))
    assert libcuda().cuStreamSynchronize(ctypes.c_void_p(int(where))) == 0
    ok(cu.cuEventQuery(after))
    assert seen == [9] and download(data, 1)[0] == 1


@case()
def any_kind_of_node_is_added_by_its_type() -> None:
    context = start()
    inc, where, data = function(b"inc"), stream(), zeros()
    graph = ok(cu.cuGraphCreate(0))
    fill = cu.CUgraphNodeParams()
    fill.type = Types.CU_GRAPH_NODE_TYPE_MEMSET
    fill.memset.dst, fill.memset.value = cu.CUdeviceptr(data), 6
    fill.memset.elementSize, fill.memset.width, fill.memset.height = 4, 1, 1
    fill.memset.ctx = context
    first = ok(cu.cuGraphAddNode(graph, None, None, 0, fill))
    kernel = cu.CUgraphNodeParams()
    kernel.type = Types.CU_GRAPH_NODE_TYPE_KERNEL
    kernel.kernel.func = inc
    kernel.kernel.gridDimX = kernel.kernel.gridDimY = kernel.kernel.gridDimZ = 1
    kernel.kernel.blockDimX = kernel.kernel.blockDimY = kernel.kernel.blockDimZ = 1
    kernel.kernel.kernelParams = ((data, 1), (ctypes.c_uint64, ctypes.c_uint32))
    ok(cu.cuGraphAddNode(graph, [first], None, 1, kernel))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    run(executable, where)
    assert download(data, 1)[0] == 7
    fill.memset.value = 60
    ok(cu.cuGraphExecNodeSetParams(executable, first, fill))
    run(executable, where)
    assert download(data, 1)[0] == 61


@case(emulated=True)
def handles_of_graphs_that_are_gone_are_refused() -> None:
    start()
    inc, where, data = function(b"inc"), stream(), zeros()
    graph = ok(cu.cuGraphCreate(0))
    node = add_kernel(graph, [], inc_params(inc, data))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphExecDestroy(executable))
    refuses(cu.cuGraphLaunch(executable, where), "INVALID_VALUE")
    refuses(cu.cuGraphExecDestroy(executable), "INVALID_VALUE")
    ok(cu.cuGraphDestroy(graph))
    for result in (
        cu.cuGraphDestroy(graph),
        cu.cuGraphInstantiate(graph, 0),
        cu.cuGraphNodeGetType(node),
        cu.cuGraphKernelNodeGetParams(node),
        cu.cuGraphAddEmptyNode(graph, None, 0),
    ):
        refuses(result, "INVALID_VALUE")
