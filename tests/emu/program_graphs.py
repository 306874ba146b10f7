"""Operations on graphs, their nodes and executables, and how they are drawn. See program_lib.

Nodes work on a few words of memory that no other operation reaches. Each comes after all earlier
ones of its graph but empty ones, so that what the words are is not a matter of time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from tests.emu.program_build import MAKERS, Builder, Dice
from tests.emu.program_lib import IMAGES, NULL, SUCCESS, Trace
from tests.emu.program_work import WorkOperations

WORDS = 16
GONE = "gone"  # the words are, with their context
NODES, ROOTS, EDGES = "cuGraphGetNodes", "cuGraphGetRootNodes", "cuGraphGetEdges"
U64 = ctypes.c_uint64


class GraphOperations(WorkOperations):
    words = 0
    kernel = 0  # inc, of a module that is not unloaded
    gone = False

    def op_end_context(self, context: int) -> Trace:
        return self.ending(super().op_end_context(context))

    def op_release_primary(self, device: int) -> Trace:
        return self.ending(super().op_release_primary(device))

    def op_reset_primary(self, device: int) -> Trace:
        return self.ending(super().op_reset_primary(device))

    def ending(self, trace: Trace) -> Trace:
        self.gone = self.gone or trace[0] == SUCCESS
        return trace

    def word(self, place: int) -> int:
        if not self.words:
            _, self.words = self.ask(U64, "cuMemAlloc_v2", 4 * WORDS)
            self.call("cuMemsetD32_v2", self.words, 0, WORDS)
            self.settle()
            _, module = self.ask(U64, "cuModuleLoadData", IMAGES["good"])
            _, self.kernel = self.ask(U64, "cuModuleGetFunction", module, b"inc")
        return self.words + 4 * place

    # -- parameters

    def filling(self, place: int, value: int) -> Any:
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst, params.value = cu.CUdeviceptr(self.word(place)), value
        params.elementSize, params.width, params.height = 4, WORDS - place, 1
        return self.pointer(params)

    def copying(self, to: int, source: int) -> Any:
        params = cu.CUDA_MEMCPY3D()
        device = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.dstMemoryType = params.srcMemoryType = device
        params.dstDevice = cu.CUdeviceptr(self.word(to))
        params.srcDevice = cu.CUdeviceptr(self.word(source))
        params.WidthInBytes, params.Height, params.Depth = 4, 1, 1
        return self.pointer(params)

    def launching(self, place: int, count: int) -> Any:
        """The structure as a driver has it: the bindings ask what a function is."""
        pointer = self.keep(U64(self.word(place)))
        number = self.keep(ctypes.c_uint32(min(count, WORDS - place)))
        values = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(number))
        params = (ctypes.c_uint64 * 9)(self.kernel)
        sizes = (ctypes.c_uint32 * 7).from_buffer(params, 8)
        sizes[:] = [1, 1, 1, WORDS, 1, 1, 0]
        params[5] = ctypes.addressof(self.keep(values))
        return self.keep(params)

    def moving(self, graph: int) -> Any:
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
        params.graph.graph = cu.CUgraph(self.get("graph", graph))
        kinds = cu.CUgraphChildGraphNodeOwnership
        params.graph.ownership = kinds.CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE
        return self.pointer(params)

    def pointer(self, params: Any) -> int:
        self.keep(params)
        return int(params.getPtr())

    # -- graphs

    def op_graph(self) -> Trace:
        return self.make("graph", "cuGraphCreate", 0)

    def op_clone(self, graph: int) -> Trace:
        return self.make("graph", "cuGraphClone", self.get("graph", graph))

    def op_end_graph(self, graph: int) -> Trace:
        return [self.call("cuGraphDestroy", self.get("graph", graph))]

    def op_contents(self, what: str, graph: int) -> Trace:
        """Which nodes, by their numbers."""
        count = U64(64)
        lists = [(U64 * 64)() for _ in range(2 if what == EDGES else 1)]
        code = self.call(what, self.get("graph", graph), *lists, ctypes.byref(count))
        if code != SUCCESS:
            return [code]
        found = [[self.number("node", n) for n in one[: count.value]] for one in lists]
        return [code, *sorted(zip(*found, strict=True))]

    # -- nodes

    def add(self, name: str, graph: int, after: list[int], *values: Any) -> Trace:
        handles = [h for h in (self.get("node", node) for node in after) if h]
        array = (U64 * max(1, len(handles)))(*handles)
        return self.make("node", name, self.get("graph", graph), array, len(handles), *values)

    def op_node(self, kind: str, graph: int, after: list[int], *choices: int) -> Trace:
        if self.gone:
            self.made["node"].append(0)
            return [GONE]
        if kind == "fill":
            return self.add(
                "cuGraphAddMemsetNode", graph, after, self.filling(*choices), self.current()
            )
        if kind == "copy":
            return self.add(
                "cuGraphAddMemcpyNode", graph, after, self.copying(*choices), self.current()
            )
        if kind == "kernel":
            return self.add("cuGraphAddKernelNode_v2", graph, after, self.launching(*choices))
        if kind == "child":
            return self.add("cuGraphAddChildGraphNode", graph, after, self.get("graph", choices[0]))
        if kind == "moved":
            return self.add("cuGraphAddNode", graph, after, self.moving(*choices))
        return self.add("cuGraphAddEmptyNode", graph, after)

    def op_end_node(self, node: int) -> Trace:
        return [self.call("cuGraphDestroyNode", self.get("node", node))]

    def op_node_type(self, node: int) -> Trace:
        """Ask for a node's type, which the second argument gets."""
        kind = ctypes.c_int32(-1)
        code = self.call("cuGraphNodeGetType", self.get("node", node), ctypes.byref(kind))
        return [code, kind.value] if code == SUCCESS else [code]

    def op_twin(self, node: int, graph: int) -> Trace:
        given = self.get("node", node), self.get("graph", graph)
        return self.make("node", "cuGraphNodeFindInClone", *given)

    def op_inside(self, node: int) -> Trace:
        """The graph in a node, as one of the program's, and its first node."""
        graph, first, count = U64(0), (U64 * 1)(), U64(1)
        name = "cuGraphChildGraphNodeGetGraph"
        code = self.call(name, self.get("node", node), ctypes.byref(graph))
        if code == SUCCESS:
            self.call(NODES, graph.value, first, ctypes.byref(count))
        self.made["graph"].append(graph.value)
        self.made["node"].append(first[0])
        return [code, count.value]

    def op_link(self, how: str, graph: int, one: int, other: int) -> Trace:
        nodes = [(U64 * 1)(self.get("node", node)) for node in (one, other)]
        return [self.call(f"cuGraph{how}Dependencies", self.get("graph", graph), *nodes, 1)]

    def op_set_node(self, kind: str, node: int, *choices: int) -> Trace:
        if self.gone:
            return [GONE]
        given = self.get("node", node)
        if kind == "fill":
            return [self.call("cuGraphMemsetNodeSetParams", given, self.filling(*choices))]
        if kind == "copy":
            return [self.call("cuGraphMemcpyNodeSetParams", given, self.copying(*choices))]
        return [self.call("cuGraphKernelNodeSetParams_v2", given, self.launching(*choices))]

    # -- executables

    def op_instantiate(self, graph: int) -> Trace:
        return self.make("exec", "cuGraphInstantiateWithFlags", self.get("graph", graph), 0)

    def op_end_exec(self, executable: int) -> Trace:
        self.settle()
        return [self.call("cuGraphExecDestroy", self.get("exec", executable))]

    def op_update(self, executable: int, graph: int) -> Trace:
        info = (U64 * 3)()
        given = self.get("exec", executable), self.get("graph", graph)
        return [self.call("cuGraphExecUpdate_v2", *given, info)]

    def op_set_exec(self, kind: str, executable: int, node: int, *choices: int) -> Trace:
        if self.gone:
            return [GONE]
        given = self.get("exec", executable), self.get("node", node)
        if kind == "fill":
            params = self.filling(*choices), self.current()
            return [self.call("cuGraphExecMemsetNodeSetParams", *given, *params)]
        if kind == "copy":
            params = self.copying(*choices), self.current()
            return [self.call("cuGraphExecMemcpyNodeSetParams", *given, *params)]
        if kind == "child":
            child = self.get("graph", choices[0])
            return [self.call("cuGraphExecChildGraphNodeSetParams", *given, child)]
        name = "cuGraphExecKernelNodeSetParams_v2"
        return [self.call(name, *given, self.launching(*choices))]

    def op_enable(self, executable: int, node: int, enabled: int) -> Trace:
        given = self.get("exec", executable), self.get("node", node)
        return [self.call("cuGraphNodeSetEnabled", *given, enabled)]

    def op_run(self, executable: int, stream: int) -> Trace:
        """What the words are afterwards."""
        if self.gone:
            return [GONE]
        self.settle()
        given = self.get("exec", executable), self.get("stream", stream)
        code = self.call("cuGraphLaunch", *given)
        self.after_work(stream)
        if code != SUCCESS:
            return [code]
        self.settle()
        words = (ctypes.c_uint32 * WORDS)()
        return [code, self.call("cuMemcpyDtoH_v2", words, self.word(0), 4 * WORDS), *words]


# -- how they are drawn


def graph(b: Builder, d: Dice) -> list[Any]:
    b.made("graph")
    return ["graph"]


def clone(b: Builder, d: Dice) -> list[Any]:
    given = b.old("graph", d)
    b.copies[b.made("graph")] = given
    return ["clone", given]


def instantiate(b: Builder, d: Dice) -> list[Any]:
    given = b.old("graph", d)
    b.executables[b.made("exec")] = given
    return ["instantiate", given]


def choices(b: Builder, kind: str, d: Dice) -> list[int]:
    if kind in ("child", "moved"):
        return [b.old("graph", d)]
    return [d.byte() % WORDS, d.byte() % WORDS] if kind != "empty" else []


def own_graph(b: Builder, d: Dice) -> int:
    """A graph whose nodes are all known."""
    gone = b.gone.get("graph", set()) | set(b.copies)
    if d.rarely():
        return d.pick([NULL, *sorted(b.gone.get("graph", set()))])
    live = [n for n in range(b.counts.get("graph", 0)) if n not in gone]
    if not live:
        b.program.append(graph(b, d))
        live = [b.counts["graph"] - 1]
    return d.pick(live[::-1])


def nodes_in(b: Builder, graph: int) -> list[int]:
    gone = b.gone.get("node", set())
    return [n for n, (_, within) in b.nodes.items() if within == graph and n not in gone]


def node(b: Builder, d: Dice) -> list[Any]:
    kind = d.pick(("fill", "kernel", "kernel", "copy", "empty", "child", "moved"))
    given = own_graph(b, d)
    earlier = [n for n in nodes_in(b, given) if b.nodes[n][0] != "empty"]
    what = choices(b, kind, d)
    b.nodes[b.made("node")] = kind, given
    return ["node", kind, given, earlier if kind != "empty" else earlier[:1], *what]


def any_node(b: Builder, d: Dice, graph: int | None = None, kinds: tuple[str, ...] = ()) -> int:
    """Mostly one of the graph and of those kinds."""
    gone = b.gone.get("node", set())
    fitting = [
        n
        for n, (kind, within) in b.nodes.items()
        if n not in gone and graph in (None, within) and (not kinds or kind in kinds)
    ]
    return b.old("node", d) if not fitting or d.rarely(8) else d.pick(fitting[::-1])


def twin(b: Builder, d: Dice) -> list[Any]:
    copy = d.pick(tuple(b.copies)) if b.copies else b.old("graph", d)
    given = any_node(b, d, b.copies.get(copy))
    b.nodes[b.made("node")] = b.nodes.get(given, ("fill", 0))[0], copy
    return ["twin", given, copy]


def inside(b: Builder, d: Dice) -> list[Any]:
    given = any_node(b, d, kinds=("child", "moved"))
    inner = b.made("graph")
    b.copies[inner] = NULL
    b.nodes[b.made("node")] = "fill", inner
    return ["inside", given]


def link(b: Builder, d: Dice) -> list[Any]:
    """Add or remove an edge of an empty node."""
    one = any_node(b, d, kinds=("empty",))
    kind, within = b.nodes.get(one, ("", 0))
    if kind != "empty":
        return node(b, d)
    pair = [one, any_node(b, d, within)]
    return ["link", d.pick(("Add", "Remove")), within, *(pair if d.byte() % 2 else pair[::-1])]


def set_node(b: Builder, d: Dice) -> list[Any]:
    given = any_node(b, d, kinds=("fill", "kernel", "copy"))
    kind = b.nodes.get(given, ("fill", 0))[0]
    kind = kind if kind in ("kernel", "copy") else "fill"
    return ["set_node", kind, given, *choices(b, kind, d)]


def executable_and_node(b: Builder, d: Dice, *kinds: str) -> tuple[int, int]:
    executable = b.old("exec", d)
    return executable, any_node(b, d, b.executables.get(executable), kinds)


def set_exec(b: Builder, d: Dice) -> list[Any]:
    executable, given = executable_and_node(b, d, "fill", "kernel", "copy", "child")
    kind = b.nodes.get(given, ("fill", 0))[0]
    kind = kind if kind in ("kernel", "copy", "child") else "fill"
    return ["set_exec", kind, executable, given, *choices(b, kind, d)]


def enable(b: Builder, d: Dice) -> list[Any]:
    return ["enable", *executable_and_node(b, d, "fill", "kernel", "copy"), d.pick((0, 1))]


MAKERS |= {"graph": graph, "node": node, "exec": instantiate}
GRAPHS: dict[str, Callable[[Builder, Dice], list[Any]]] = {
    "graph": graph,
    "clone": clone,
    "end_graph": lambda b, d: ["end_graph", b.end("graph", b.old("graph", d))],
    "contents": lambda b, d: ["contents", d.pick((NODES, ROOTS, EDGES)), b.old("graph", d)],
    "node": node,
    "end_node": lambda b, d: ["end_node", b.end("node", b.old("node", d))],
    "node_type": lambda b, d: ["node_type", b.old("node", d)],
    "twin": twin,
    "inside": inside,
    "link": link,
    "set_node": set_node,
    "instantiate": instantiate,
    "end_exec": lambda b, d: ["end_exec", b.end("exec", b.old("exec", d))],
    "update": lambda b, d: ["update", b.old("exec", d), b.old("graph", d)],
    "set_exec": set_exec,
    "enable": enable,
    "run": lambda b, d: ["run", b.old("exec", d), b.stream(d)],
}
