"""Round trips of CUDA graphs: captured, made node by node, changed, and their executables."""

from __future__ import annotations

from dataclasses import dataclass

from tests.emu.replay_cases import Case
from tests.emu.replay_cases_arrays import HELPERS as ARRAYS

_MODE = "cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE"

# In front of a setup: what makes nodes, and a graph of one of each kind.
HELPERS = """
from tests.emu.driver_cases_graphs import (
    add_copy, add_fill, add_kernel, copy_params, edges_of, fill_params, inc_params, nodes_of, run,
    types_of, zeros,
)
where = ok(cu.cuStreamCreate(1))
inc = function(b"inc")
data, other = zeros(8), zeros(8)
def words(address=data):
    return [int(word) for word in download(address, 8)]
def made_of(graph):
    return ok(cu.cuGraphInstantiate(graph, 0))
def launched(executable, address=data):
    run(executable, where)
    return words(address)
def placed(some, known):
    known = [int(node) for node in known]
    return [known.index(int(node)) for node in some]
def first_word(params):
    pointers = (ctypes.c_void_p * 1).from_address(int(params.kernelParams))
    return ctypes.c_uint64.from_address(pointers[0]).value
"""
_MADE = (
    HELPERS
    + """
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
late = inc_params(0, data, 2)
late.kern = ok(cu.cuLibraryGetKernel(library, b"inc"))
before, after = (ok(cu.cuEventCreate(2)) for _ in range(2))
ok(cu.cuEventRecord(before, where))
seen = []
called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: seen.append(number))
host_params = cu.CUDA_HOST_NODE_PARAMS()
host_params.fn = cu.CUhostFn(ctypes.cast(called, ctypes.c_void_p).value)
host_params.userData = 9
graph = ok(cu.cuGraphCreate(0))
fill = add_fill(graph, [], fill_params(data, 5, 8))
kernel = add_kernel(graph, [fill], inc_params(inc, data, 8))
by_library = add_kernel(graph, [kernel], late)
copy = add_copy(graph, [by_library], copy_params(other, data, 32))
waits = ok(cu.cuGraphAddEventWaitNode(graph, [copy], 1, before))
host = ok(cu.cuGraphAddHostNode(graph, [waits], 1, host_params))
records = ok(cu.cuGraphAddEventRecordNode(graph, [host], 1, after))
empty = ok(cu.cuGraphAddEmptyNode(graph, [records, fill], 2))
nodes = [fill, kernel, by_library, copy, waits, host, records, empty]
def with_kernel_of(node):
    params = ok(cu.cuGraphKernelNodeGetParams(node))
    assert int(params.func) or int(params.kern)
    ok(cu.cuGraphKernelNodeSetParams(node, params))
    return made_of(graph)
made = made_of(graph)
"""
)
_VALUES = [7, 7, 6, 6, 6, 6, 6, 6]

GRAPH_CASES = (
    Case(
        "user_objects",
        (
            *("cuUserObjectCreate", "cuUserObjectRetain", "cuUserObjectRelease"),
            *("cuGraphRetainUserObject", "cuGraphReleaseUserObject"),
        ),
        HELPERS
        + """
import time
gone = []
called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(gone.append)
destroy = cu.CUhostFn(ctypes.cast(called, ctypes.c_void_p).value)
def user(number, count=1):
    return ok(cu.cuUserObjectCreate(number, destroy, count, 1))
def ends(*numbers):
    deadline = time.monotonic() + 300
    while sorted(gone) != sorted(numbers) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)  # and no more
    return sorted(gone)
graph = ok(cu.cuGraphCreate(0))
add_kernel(graph, [add_fill(graph, [], fill_params(data, 5, 8))], inc_params(inc, data, 8))
both, plan, lone, spare = user(1, 2), user(2), user(3), user(4)
ok(cu.cuGraphRetainUserObject(graph, both, 1, 0))
ok(cu.cuGraphRetainUserObject(graph, plan, 1, 1))  # the program has none any more
ok(cu.cuGraphRetainUserObject(graph, spare, 2, 0))
ok(cu.cuGraphReleaseUserObject(graph, spare, 1))
ok(cu.cuUserObjectRetain(both, 3))
ok(cu.cuUserObjectRelease(both, 4))
copy, executable = ok(cu.cuGraphClone(graph)), made_of(graph)
parent = ok(cu.cuGraphCreate(0))
ok(cu.cuGraphAddChildGraphNode(parent, [], 0, copy))
ok(cu.cuGraphDestroy(copy))
# As NCCL does, in a capture.
ok(cu.cuStreamBeginCapture(where, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
ok(cu.cuGraphRetainUserObject(ok(cu.cuStreamGetCaptureInfo(where))[2], user(5), 1, 1))
ok(launch_inc(inc, other, 8, where))
captured = ok(cu.cuStreamEndCapture(where))
of_capture = made_of(captured)
ok(cu.cuGraphDestroy(captured))
# The references of what it is updated from take the place of its own.
newer = ok(cu.cuGraphClone(graph))
ok(cu.cuGraphRetainUserObject(newer, user(6), 1, 1))
updated = made_of(newer)
ok(cu.cuGraphDestroy(newer))
ok(cu.cuGraphExecUpdate(updated, graph))
ends(6)
gone.clear()
""",
        {"launched(executable)": [6] * 8, "ends()": []},
        {
            "name(cu.cuGraphExecDestroy(of_capture))": "CUDA_SUCCESS",
            "ends(5)": [5],
            "name(cu.cuGraphExecDestroy(updated))": "CUDA_SUCCESS",
            "name(cu.cuGraphReleaseUserObject(graph, spare, 1))": "CUDA_SUCCESS",
            "name(cu.cuGraphDestroy(graph))": "CUDA_SUCCESS",
            "launched(executable)": [6] * 8,
            "name(cu.cuGraphExecDestroy(executable))": "CUDA_SUCCESS",
            "name(cu.cuUserObjectRelease(lone, 1))": "CUDA_SUCCESS",
            "ends(3, 5)": [3, 5],
            "name(cu.cuGraphDestroy(parent))": "CUDA_SUCCESS",
            "ends(2, 3, 5)": [2, 3, 5],
            "name(cu.cuUserObjectRelease(both, 1))": "CUDA_SUCCESS",
            "name(cu.cuUserObjectRelease(spare, 1))": "CUDA_SUCCESS",
            "ends(1, 2, 3, 4, 5)": [1, 2, 3, 4, 5],
        },
    ),
    Case(
        "captured_graphs",
        (
            *("cuStreamEndCapture", "cuStreamGetCaptureInfo", "cuGraphClone", "cuGraphDestroy"),
            *("cuGraphInstantiate", "cuGraphInstantiateWithFlags", "cuGraphInstantiateWithParams"),
            *("cuGraphExecDestroy", "cuGraphExecUpdate"),
        ),
        f"""
one, two = (ok(cu.cuStreamCreate(1)) for _ in range(2))
forked, joined, outside = (ok(cu.cuEventCreate(2)) for _ in range(3))
kernel = function(b"inc")
library = ok(cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
late = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"inc"))))
data, other = (int(ok(cu.cuMemAlloc(4096))) for _ in range(2))
pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))
counted = np.ctypeslib.as_array((ctypes.c_uint32 * 64).from_address(pinned))
counted[:] = 0
seen = []
called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda number: seen.append(number))
info = ctypes.c_int(), ctypes.c_uint64()
def captured(value, launches=2):
    ok(cu.cuStreamBeginCapture(one, {_MODE}_RELAXED))
    assert lib.cuStreamGetCaptureInfo(ctypes.c_void_p(int(one)), *map(ctypes.byref, info)) == 0
    ok(cu.cuMemsetD32Async(data, value, 64, one))
    ok(cu.cuEventRecord(forked, one))
    ok(cu.cuStreamWaitEvent(two, forked, 0))
    ok(cu.cuMemsetD32Async(other, value + 100, 64, two))
    ok(launch_inc(late, other, 64, two))
    for _ in range(launches):
        ok(launch_inc(kernel, data, 64, one))
    ok(cu.cuEventRecord(joined, two))
    ok(cu.cuStreamWaitEvent(one, joined, 0))
    ok(cu.cuMemcpyDtoHAsync(pinned, data, 256, one))
    assert lib.cuLaunchHostFunc(ctypes.c_void_p(int(one)), called, value) == 0
    ok(cu.cuEventRecordWithFlags(outside, one, 1))
    return ok(cu.cuStreamEndCapture(one))
def launched(executable):
    seen.clear()
    counted[:] = 0
    ok(cu.cuGraphLaunch(executable, one))
    assert lib.cuEventSynchronize(ctypes.c_void_p(int(outside))) == 0
    assert lib.cuStreamSynchronize(ctypes.c_void_p(int(one))) == 0
    return [int(counted[0]), int(download(other, 64)[63]), *seen]
def capture_more(launches):
    ok(cu.cuStreamBeginCapture(two, {_MODE}_RELAXED))
    for _ in range(launches):
        ok(launch_inc(kernel, data, 64, two))
    return ok(cu.cuStreamEndCapture(two))
graph = captured(10)
made = ok(cu.cuGraphInstantiate(graph, 0))
gone = ok(cu.cuGraphInstantiate(graph, 0))
ok(cu.cuGraphExecDestroy(gone))
clone = ok(cu.cuGraphClone(graph))
updated = ok(cu.cuGraphInstantiateWithParams(clone, cu.CUDA_GRAPH_INSTANTIATE_PARAMS()))
renewed = captured(30)
ok(cu.cuGraphExecUpdate(updated, renewed))
ok(cu.cuGraphDestroy(renewed))
inner = capture_more(3)
flagged, old = ctypes.c_void_p(), ctypes.c_void_p()
again = ctypes.c_void_p(int(captured(50)))
assert lib.cuGraphInstantiateWithFlags(ctypes.byref(flagged), again, ctypes.c_uint64(8)) == 0
assert lib.cuGraphInstantiate(ctypes.byref(old), ctypes.c_void_p(int(graph)), None, None, 0) == 0
flagged, old = cu.CUgraphExec(flagged.value), cu.CUgraphExec(old.value)
""",
        {
            "[launched(e) for e in (made, updated, flagged, old)]": [
                [12, 111, 10],
                [32, 131, 30],
                [52, 151, 50],
                [12, 111, 10],
            ],
            "[ok(cu.cuGraphGetNodes(g))[1] for g in (graph, clone)]": [8, 8],
            "ok(cu.cuGraphGetRootNodes(inner))[1], ok(cu.cuGraphGetEdges(inner))[3]": [1, 2],
            "launched(ok(cu.cuGraphInstantiate(clone, 0)))": [12, 111, 10],
            "launched(ok(cu.cuGraphInstantiate(captured(70), 0)))": [72, 171, 70],
            "int(ok(cu.cuGraphExecGetFlags(flagged)))": 0,
            "name(cu.cuGraphExecUpdate(made, inner))": "GRAPH_EXEC_UPDATE_FAILURE",
        },
        {
            "name(cu.cuGraphExecDestroy(made))": "CUDA_SUCCESS",
            "[name(cu.cuGraphDestroy(g)) for g in (graph, clone)]": ["CUDA_SUCCESS"] * 2,
        },
        {"name(cu.cuGraphLaunch(gone, one)) != 'CUDA_SUCCESS'": True},
    ),
    Case(
        "graphs_made_by_hand",
        (
            *("cuGraphCreate", "cuGraphGetNodes", "cuGraphGetRootNodes", "cuGraphGetEdges"),
            *("cuGraphNodeGetDependencies", "cuGraphNodeGetDependentNodes"),
            "cuGraphKernelNodeGetParams",
        ),
        _MADE,
        {
            "launched(made, other), seen.pop(), len(seen)": [_VALUES, 9, 0],
            "launched(made_of(graph), other), seen.pop()": [_VALUES, 9],
            "sorted(placed(nodes_of(graph), nodes))": list(range(8)),
            "types_of(graph)": [
                *("EMPTY", "EVENT_RECORD", "HOST", "KERNEL", "KERNEL"),
                *("MEMCPY", "MEMSET", "WAIT_EVENT"),
            ],
            "sorted(placed(edge, nodes) for edge in edges_of(graph))": [
                *([0, 1], [0, 7]),
                *([i, i + 1] for i in range(1, 7)),
            ],
            "placed(ok(cu.cuGraphGetRootNodes(graph, 1))[0], nodes)": [0],
            "sorted(placed(ok(cu.cuGraphNodeGetDependencies(empty, 2))[0], nodes))": [0, 6],
            "sorted(placed(ok(cu.cuGraphNodeGetDependentNodes(fill, 2))[0], nodes))": [1, 7],
            "ok(cu.cuGraphMemsetNodeGetParams(fill)).value": 5,
            "same(ok(cu.cuGraphKernelNodeGetParams(kernel)).func, inc)": True,
            "same(first_word(ok(cu.cuGraphKernelNodeGetParams(kernel))), data)": True,
            # A node of a library's kernel may have the kernel's handle, or its function's.
            "launched(with_kernel_of(by_library)), seen.pop()": [_VALUES, 9],
            "same(ok(cu.cuGraphMemcpyNodeGetParams(copy)).srcDevice, data)": True,
            "same(ok(cu.cuGraphEventWaitNodeGetEvent(waits)), before)": True,
            "same(ok(cu.cuGraphEventRecordNodeGetEvent(records)), after)": True,
            "name(cu.cuGraphMemsetNodeGetParams(kernel))": "INVALID_VALUE",
        },
        {
            "name(cu.cuGraphDestroy(graph))": "CUDA_SUCCESS",
            "launched(made, other)": _VALUES,
        },
    ),
    Case(
        "graphs_that_are_changed",
        (
            *("cuGraphAddNode", "cuGraphDestroyNode", "cuGraphNodeSetParams"),
            *("cuGraphKernelNodeSetAttribute", "cuGraphClone", "cuGraphNodeFindInClone"),
        ),
        HELPERS
        + """
context = ok(cu.cuCtxGetCurrent())
cooperative = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
def any_fill(value):
    params = cu.CUgraphNodeParams()
    params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    params.memset.dst, params.memset.value = cu.CUdeviceptr(data), value
    params.memset.elementSize, params.memset.width, params.memset.height = 4, 8, 1
    params.memset.ctx = context
    return params
graph = ok(cu.cuGraphCreate(0))
gone = ok(cu.cuGraphAddEmptyNode(graph, None, 0))
fill = ok(cu.cuGraphAddNode(graph, [gone], None, 1, any_fill(10)))
one = add_kernel(graph, [fill], inc_params(inc, data, 8))
two = add_kernel(graph, [], inc_params(inc, data, 4))
earlier = made_of(graph)  # of another structure
ok(cu.cuGraphDestroyNode(gone))
ok(cu.cuGraphAddDependencies(graph, [one], [two], None, 1))
value = ok(cu.cuGraphKernelNodeGetAttribute(one, cooperative))
value.cooperative = 1
ok(cu.cuGraphKernelNodeSetAttribute(one, cooperative, value))
clone = ok(cu.cuGraphClone(graph))
twin = ok(cu.cuGraphNodeFindInClone(fill, clone))
ok(cu.cuGraphNodeSetParams(twin, any_fill(20)))
def is_cooperative(node):
    return ok(cu.cuGraphKernelNodeGetAttribute(node, cooperative)).cooperative
def set_to(value):
    ok(cu.cuGraphNodeSetParams(fill, any_fill(value)))
    return launched(made_of(graph))
def grown():
    # Three more, for as long as this runs.
    more = [add_kernel(graph, [two], inc_params(inc, data, 8))]
    for _ in range(2):
        more.append(add_kernel(graph, [more[-1]], inc_params(inc, data, 8)))
    found = launched(made_of(graph)), len(nodes_of(graph)), len(edges_of(graph))
    for node in more:
        ok(cu.cuGraphDestroyNode(node))
    return found
def apart():
    ok(cu.cuGraphRemoveDependencies(graph, [one], [two], None, 1))
    found = [len(edges_of(graph)), ok(cu.cuGraphGetRootNodes(graph))[1]]
    ok(cu.cuGraphAddDependencies(graph, [one], [two], None, 1))
    return found
""",
        {
            "launched(made_of(graph))": [12] * 4 + [11] * 4,
            "launched(made_of(clone))": [22] * 4 + [21] * 4,
            "name(cu.cuGraphLaunch(earlier, where))": "CUDA_SUCCESS",
            "set_to(70)": [72] * 4 + [71] * 4,
            "set_to(10)": [12] * 4 + [11] * 4,
            "grown()": [[15] * 4 + [14] * 4, 6, 5],
            "apart()": [1, 2],
            "sorted(placed(nodes_of(graph), [fill, one, two]))": [0, 1, 2],
            "is_cooperative(one), is_cooperative(two)": [1, 0],
            "ok(cu.cuGraphMemsetNodeGetParams(twin)).value": 20,
        },
        {
            "name(cu.cuGraphDestroy(graph))": "CUDA_SUCCESS",
            "launched(made_of(clone))": [22] * 4 + [21] * 4,
        },
        {
            "name(cu.cuGraphNodeGetType(gone))": "INVALID_VALUE",
            "name(cu.cuGraphNodeGetType(fill))": "INVALID_VALUE",
        },
    ),
    Case(
        "child_graphs",
        (
            *("cuGraphAddChildGraphNode", "cuGraphChildGraphNodeGetGraph"),
            "cuGraphExecChildGraphNodeSetParams",
        ),
        HELPERS
        + """
def rising(count, address=data):
    graph, last = ok(cu.cuGraphCreate(0)), []
    last = [add_fill(graph, [], fill_params(address, 10 * count, 8))]
    for _ in range(count):
        last = [add_kernel(graph, last, inc_params(inc, address, 8))]
    return graph
inner, middle, graph = rising(2), ok(cu.cuGraphCreate(0)), ok(cu.cuGraphCreate(0))
in_middle = ok(cu.cuGraphAddChildGraphNode(middle, None, 0, inner))
add_kernel(middle, [in_middle], inc_params(inc, data, 8))
child = ok(cu.cuGraphAddChildGraphNode(graph, None, 0, middle))
last = add_kernel(graph, [child], inc_params(inc, data, 1))
untouched = made_of(graph)
embedded = ok(cu.cuGraphChildGraphNodeGetGraph(child))
nested = next(
    cu.CUgraphNode(n) for n in nodes_of(embedded)
    if ok(cu.cuGraphNodeGetType(cu.CUgraphNode(n))).name.endswith("_GRAPH")
)
lowest = ok(cu.cuGraphChildGraphNodeGetGraph(nested))
fill = ok(cu.cuGraphGetRootNodes(lowest, 1))[0][0]
ok(cu.cuGraphMemsetNodeSetParams(fill, fill_params(data, 50, 8)))
ok(cu.cuGraphDestroy(inner))
ok(cu.cuGraphDestroy(middle))
outer = ok(cu.cuGraphCreate(0))
only = ok(cu.cuGraphAddChildGraphNode(outer, None, 0, rising(3)))
given = made_of(outer)
def give(executable, address):
    # The bindings' form of it, for any driver.
    child = rising(3, address)
    result = cu.cuGraphExecChildGraphNodeSetParams(executable, only, child)
    ok(cu.cuGraphDestroy(child))
    return name(result)
give(given, other)
moved, around = rising(1), ok(cu.cuGraphCreate(0))
params = cu.CUgraphNodeParams()
params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
params.graph.graph = moved
params.graph.ownership = cu.CUgraphChildGraphNodeOwnership.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
mover = ok(cu.cuGraphAddNode(around, None, None, 0, params))
by_move = made_of(around)
add_kernel(moved, ok(cu.cuGraphGetNodes(moved, 2))[0], inc_params(inc, data, 2))
""",
        {
            "launched(made_of(graph))": [54] + [53] * 7,
            "launched(untouched)": [24] + [23] * 7,
            "same(ok(cu.cuGraphChildGraphNodeGetGraph(child)), embedded)": True,
            "same(ok(cu.cuGraphChildGraphNodeGetGraph(nested)), lowest)": True,
            "types_of(embedded), types_of(lowest)": [
                ["GRAPH", "KERNEL"],
                ["KERNEL", "KERNEL", "MEMSET"],
            ],
            "ok(cu.cuGraphMemsetNodeGetParams(fill)).value": 50,
            "launched(given, other)": [33] * 8,
            "launched(by_move)": [11] * 8,
            "types_of(moved), same(ok(cu.cuGraphChildGraphNodeGetGraph(mover)), moved)": [
                ["KERNEL", "KERNEL", "MEMSET"],
                True,
            ],
            "name(cu.cuGraphDestroy(moved)) != 'CUDA_SUCCESS'": True,
            "name(cu.cuGraphInstantiate(moved, 0)) != 'CUDA_SUCCESS'": True,
            "launched(made_of(around))": [12, 12, *[11] * 6],
            "give(given, data), launched(given)": ["CUDA_SUCCESS", [33] * 8],
            "give(given, other), launched(made_of(outer))": ["CUDA_SUCCESS", [33] * 8],
        },
        {
            "name(cu.cuGraphDestroyNode(child))": "CUDA_SUCCESS",
            "launched(untouched)": [24] + [23] * 7,
            "types_of(graph)": ["KERNEL"],
        },
        {"name(cu.cuGraphNodeGetType(fill))": "INVALID_VALUE"},
    ),
    Case(
        "executables_that_are_changed",
        (
            *("cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams"),
            *("cuGraphExecMemsetNodeSetParams", "cuGraphExecHostNodeSetParams"),
            *("cuGraphExecEventRecordNodeSetEvent", "cuGraphExecEventWaitNodeSetEvent"),
            *("cuGraphExecNodeSetParams", "cuGraphNodeSetEnabled", "cuGraphNodeGetEnabled"),
        ),
        _MADE
        + """
context = ok(cu.cuCtxGetCurrent())
third = zeros(8)
later, never = (ok(cu.cuEventCreate(2)) for _ in range(2))
def set_host(executable, number):
    params = cu.CUDA_HOST_NODE_PARAMS()
    params.fn, params.userData = host_params.fn, number
    ok(cu.cuGraphExecHostNodeSetParams(executable, host, params))
def change(executable, to, value, number):
    ok(cu.cuGraphExecMemsetNodeSetParams(executable, fill, fill_params(third, value, 8), context))
    ok(cu.cuGraphExecKernelNodeSetParams(executable, kernel, inc_params(inc, third, 3)))
    ok(cu.cuGraphExecMemcpyNodeSetParams(executable, copy, copy_params(to, third, 32), context))
    ok(cu.cuGraphExecEventRecordNodeSetEvent(executable, records, later))
    ok(cu.cuGraphExecEventWaitNodeSetEvent(executable, waits, never))
    set_host(executable, number)
    any_kind = cu.CUgraphNodeParams()
    any_kind.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    any_kind.kernel.func = inc
    any_kind.kernel.gridDimX = any_kind.kernel.gridDimY = any_kind.kernel.gridDimZ = 1
    any_kind.kernel.blockDimX, any_kind.kernel.blockDimY, any_kind.kernel.blockDimZ = 64, 1, 1
    any_kind.kernel.kernelParams = ((third, 1), (ctypes.c_uint64, ctypes.c_uint32))
    ok(cu.cuGraphExecNodeSetParams(executable, by_library, any_kind))
changed, less, orphan = made_of(graph), made_of(graph), made_of(graph)
change(changed, other, 40, 11)
ok(cu.cuGraphNodeSetEnabled(less, kernel, 0))
ok(cu.cuGraphNodeSetEnabled(less, by_library, 0))
ok(cu.cuGraphNodeSetEnabled(less, by_library, 1))
lone = ok(cu.cuGraphClone(graph))
alone = made_of(lone)
kernel_of_lone = ok(cu.cuGraphNodeFindInClone(kernel, lone))
ok(cu.cuGraphExecKernelNodeSetParams(alone, kernel_of_lone, inc_params(inc, data, 1)))
ok(cu.cuGraphDestroy(lone))  # an executable that nobody can change any more
def updated():
    fresh, by_update = ok(cu.cuGraphClone(graph)), made_of(graph)
    twin = ok(cu.cuGraphNodeFindInClone(fill, fresh))
    ok(cu.cuGraphMemsetNodeSetParams(twin, fill_params(data, 90, 8)))
    ok(cu.cuGraphExecUpdate(by_update, fresh))
    ok(cu.cuGraphDestroy(fresh))
    return by_update
after_update = updated()
ok(cu.cuGraphExecKernelNodeSetParams(after_update, kernel, inc_params(inc, data, 0)))
def events():
    return [name(cu.cuEventQuery(e)) for e in (after, later, never)]
def once_more(value):
    change(changed, data, value, 12)
    return launched(changed), seen.pop()
def back():
    change(changed, other, 40, 11)
    return launched(changed, other), seen.pop()
def enabled():
    return [ok(cu.cuGraphNodeGetEnabled(e, kernel)) for e in (made, changed, less)]
def switched():
    ok(cu.cuGraphNodeSetEnabled(less, kernel, 1))
    found = [*enabled(), *launched(less, other)]
    ok(cu.cuGraphNodeSetEnabled(less, kernel, 0))
    return found
""",
        {
            "launched(made, other), seen.pop()": [_VALUES, 9],
            "launched(changed, other), seen.pop()": [[42, 41, 41, *[40] * 5], 11],
            "launched(less, other)": [6, 6, *[5] * 6],
            "launched(alone, other)": [7, 6, *[5] * 6],
            "launched(after_update, other)": [91, 91, *[90] * 6],
            "events()": ["CUDA_SUCCESS"] * 3,
            "enabled()": [1, 1, 0],
            "switched()": [1, 1, 1, *_VALUES],
            "once_more(60)": [[62, 61, 61, *[60] * 5], 12],
            "back()": [[42, 41, 41, *[40] * 5], 11],
            "name(cu.cuGraphExecKernelNodeSetParams(made, fill, inc_params(inc, data)))": (
                "INVALID_VALUE"
            ),
            "launched(updated(), other)": [92, 92, *[91] * 6],
        },
        {
            "name(cu.cuGraphExecDestroy(changed))": "CUDA_SUCCESS",
            "name(cu.cuGraphDestroy(graph))": "CUDA_SUCCESS",
            "launched(less, other)": [6, 6, *[5] * 6],
        },
    ),
    Case(
        "captures_into_graphs",
        ("cuStreamEndCapture", "cuStreamGetCaptureInfo", "cuStreamUpdateCaptureDependencies"),
        HELPERS
        + f"""
def capture_into(graph, after, launches):
    edges = [cu.CUgraphEdgeData() for _ in after]
    ok(cu.cuStreamBeginCaptureToGraph(where, graph, after, edges, len(after), {_MODE}_RELAXED))
    for _ in range(launches):
        ok(launch_inc(inc, data, 8, where))
    status, number, found, frontier, _, count = ok(cu.cuStreamGetCaptureInfo(where))
    assert int(found) == int(graph) and count == 1
    assert int(ok(cu.cuStreamEndCapture(where))) == int(graph)
    return frontier[0]
graph = ok(cu.cuGraphCreate(0))
fill = add_fill(graph, [], fill_params(data, 5, 8))
last = capture_into(graph, [fill], 2)
made = made_of(graph)
then = add_kernel(graph, [last], inc_params(inc, data, 1))
# One that the program knows by its capture, into which it puts a node of its own.
ok(cu.cuStreamBeginCapture(where, {_MODE}_RELAXED))
ok(cu.cuMemsetD32Async(data, 30, 8, where))
_, _, captured, frontier, _, _ = ok(cu.cuStreamGetCaptureInfo(where))
own = add_kernel(captured, [frontier[0]], inc_params(inc, data, 8))
replace = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
ok(cu.cuStreamUpdateCaptureDependencies(where, [own], [cu.CUgraphEdgeData()], 1, replace))
ok(launch_inc(inc, data, 8, where))
assert int(ok(cu.cuStreamEndCapture(where))) == int(captured)
made_captured = made_of(captured)
# A capture that fails takes its graph with it.
ok(cu.cuStreamBeginCapture(where, {_MODE}_RELAXED))
_, _, lost, _, _, _ = ok(cu.cuStreamGetCaptureInfo(where))
cu.cuStreamSynchronize(where)
failed = name(cu.cuStreamEndCapture(where))
def more():
    grown = ok(cu.cuGraphClone(graph))
    capture_into(grown, [ok(cu.cuGraphNodeFindInClone(then, grown))], 3)
    return launched(made_of(grown))
""",
        {
            "failed": "STREAM_CAPTURE_INVALIDATED",
            "launched(made)": [7] * 8,
            "launched(made_of(graph))": [8] + [7] * 7,
            "launched(made_captured), launched(made_of(captured))": [[32] * 8] * 2,
            "{int(n) for n in (fill, last, then)} < set(nodes_of(graph)), len(nodes_of(graph))": [
                True,
                4,
            ],
            "len(nodes_of(captured)), len(edges_of(captured))": [3, 2],
            "more()": [11] + [10] * 7,
            "ok(cu.cuGraphNodeGetType(own)).name": "CU_GRAPH_NODE_TYPE_KERNEL",
            "name(cu.cuGraphExecKernelNodeSetParams(made, last, inc_params(inc, data, 8)))": (
                "CUDA_SUCCESS"
            ),
        },
        {
            "name(cu.cuGraphDestroy(captured))": "CUDA_SUCCESS",
            "launched(made_captured)": [32] * 8,
        },
    ),
)


@dataclass(frozen=True)
class Unreadable:
    """A graph that cannot be made again once `end` has run: "a graph `why`"."""

    why: str
    setup: str
    end: str


_LONE = HELPERS + "graph = ok(cu.cuGraphCreate(0))\n"
UNREADABLE = (
    Unreadable(
        "with a copy of an array that has ended",
        _LONE
        + ARRAYS
        + """
array = ok(cu.cuArray3DCreate(described(8)))
flat = copy_params(other, data, 4)
flat.srcMemoryType, flat.srcArray = ARRAY, array
add_copy(graph, [], flat)
""",
        "ok(cu.cuArrayDestroy(array))",
    ),
    Unreadable(
        "with a kernel that has ended or was not asked for by name",
        _LONE
        + """
module = ok(cu.cuModuleLoadData(PTX))
add_kernel(graph, [], inc_params(ok(cu.cuModuleGetFunction(module, b"inc")), data))
""",
        "ok(cu.cuModuleUnload(module))",
    ),
    Unreadable(
        "with an event that has ended",
        _LONE
        + """
event = ok(cu.cuEventCreate(2))
ok(cu.cuGraphAddEventRecordNode(graph, None, 0, event))
""",
        "ok(cu.cuEventDestroy(event))",
    ),
    Unreadable(
        "with memory that has ended",
        _LONE
        + """
large = int(ok(cu.cuMemAlloc(4 * MIB)))
child = ok(cu.cuGraphCreate(0))
add_fill(child, [], fill_params(large, 1, 8))
ok(cu.cuGraphAddChildGraphNode(graph, None, 0, child))
ok(cu.cuGraphDestroy(child))
""",
        "ok(cu.cuMemFree(large))",
    ),
    Unreadable(
        "with a node in a context that is not known or has ended",
        _LONE
        + """
mine = ok(cu.cuCtxCreate(None, 0, device))
add_fill(graph, [], fill_params(data, 1, 8))
ok(cu.cuCtxPopCurrent())
""",
        "ok(cu.cuCtxDestroy(mine))",
    ),
    Unreadable(
        "with nodes in several contexts, which was copied or captured",
        _LONE
        + """
mine = ok(cu.cuCtxCreate(None, 0, device))
parts = ok(cu.cuGraphCreate(0))
add_fill(parts, [], fill_params(data, 1, 8))
ok(cu.cuCtxPopCurrent())
add_fill(parts, [], fill_params(data, 1, 8))
""",
        "ok(cu.cuGraphAddChildGraphNode(graph, None, 0, parts))",
    ),
)

# What the emulated driver does not have.
_ANY_KIND = """
graph = ok(cu.cuGraphCreate(0))
context = ok(cu.cuCtxGetCurrent())
params = cu.CUgraphNodeParams()
memory = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
for pool in (memory.poolProps, params.alloc.poolProps):
    pool.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    pool.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
memory.bytesize = params.alloc.bytesize = 1 << 20
"""
REFUSED_ON_A_GPU = {
    "cuGraphAddMemAllocNode": _ANY_KIND + "ok(cu.cuGraphAddMemAllocNode(graph, None, 0, memory))",
    "cuGraphAddNode_v2": _ANY_KIND
    + """
params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEM_ALLOC
ok(cu.cuGraphAddNode(graph, None, None, 0, params))
""",
    "cuGraphConditionalHandleCreate": _ANY_KIND
    + "ok(cu.cuGraphConditionalHandleCreate(graph, context, 1, 1))",
    "cuGraphKernelNodeSetAttribute": _ANY_KIND
    + """
node = add_kernel(graph, [], inc_params(inc, data))
attribute = cu.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
value = cu.CUkernelNodeAttrValue()
value.deviceUpdatableKernelNode.deviceUpdatable = 1
ok(cu.cuGraphKernelNodeSetAttribute(node, attribute, value))
""",
}
