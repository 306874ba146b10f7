"""Compares two drivers' answers to a program, where CUDA says what the answer is.

An access behind the end of an allocation, or after its end, is undefined: what a driver sees of it
depends on how it lays memory out. So is a graph after its end, which driver 580 reads all the same,
and one that is moved into itself. Drivers may answer such an operation differently, and if a driver
carried it out, nothing after it can be compared. Where a driver crashes, for a handle that is none,
another may refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.emu.program_lib import SUCCESS
from tests.emu.program_run import CRASHED

Where = list[Any]
ILLEGAL_ADDRESS = 700


@dataclass
class Memory:
    size: int
    live: bool
    reused: bool = False  # its addresses may be another's by now


@dataclass
class Layout:
    """Allocations, host memory, reservations and variables of a program, by its trace."""

    areas: dict[str, list[Memory]] = field(
        default_factory=lambda: {"m": [], "h": [], "v": [], "g": []}
    )
    owners: list[list[Any]] = field(default_factory=list)  # what ends each variable
    ended: set[int] = field(default_factory=set)  # graphs
    moved: dict[int, int] = field(default_factory=dict)  # graphs, and that which each is in
    # The graph of each node, None in one that no number names.
    nodes: list[int | None] = field(default_factory=list)

    def follow(self, operation: list[Any], answer: Any) -> None:
        name, *values = operation
        made = answer is not None and answer[0] == SUCCESS
        if name == "end_graph" and made:
            self.ended.add(values[0])
        elif name == "inside":
            self.nodes.append(None)
        elif name in NODES:
            self.nodes.append(values[NODES[name]])
            if made and values[0] == "moved":
                self.moved[values[3]] = values[1]
        if name in ("alloc", "alloc_async", "alloc_pool", "alloc_pitch"):
            size = answer[-1] * values[1] if name == "alloc_pitch" and made else values[0]
            self.add("m", size, made)
        elif name in ("host_alloc", "host_register"):
            self.add("h", values[0], made)
        elif name == "reserve":
            self.add("v", values[0], made)
        elif name in ENDING:
            self.areas["g"].append(Memory(answer[1] if made else 0, made))
            self.owners.append([ENDING[name], values[0]])
            if name in TAKING:
                self.reuse()
        elif made and operation in self.owners:
            for number, owner in enumerate(self.owners):
                if owner == operation:
                    self.end(["g", number, 0])
        elif name in TAKING:
            self.reuse()
        elif made and name in ("free", "free_async", "host_free", "host_unregister", "unreserve"):
            self.end(values[0])
        elif made and name in ("end_context", "release_primary", "reset_primary"):
            for kind in ("m", "h", "g"):
                for number in range(len(self.areas[kind])):
                    self.end([kind, number, 0])

    def reuse(self) -> None:
        """Something is new, and may be where something was."""
        for areas in self.areas.values():
            for area in areas:
                area.reused = area.reused or not area.live

    def add(self, kind: str, size: int, made: bool) -> None:
        self.reuse()
        self.areas[kind].append(Memory(size, made))

    def end(self, where: Where) -> None:
        if where[0] in self.areas and where[1] < len(self.areas[where[0]]):
            self.areas[where[0]][where[1]].live = False

    def of(self, where: Where | None) -> Memory | None:
        if where is None or where[0] not in self.areas:
            return None
        known = self.areas[where[0]]
        return known[where[1]] if 0 <= where[1] < len(known) else None

    def graphs(self, name: str, values: list[Any]) -> Iterator[int | None]:
        """Graphs that an operation names, or names a node of."""
        if name == "node":
            yield values[1]
            if values[0] in ("child", "moved"):
                yield values[3]
        if name in ON_GRAPHS:
            yield values[ON_GRAPHS[name]]
        nodes = [values[ON_NODES[name]]] if name in ON_NODES else []
        nodes += values[2:] if name == "link" else values[2] if name == "node" else []
        for node in nodes:
            if 0 <= node < len(self.nodes):
                yield self.nodes[node]

    def around(self, graph: int) -> Iterator[int]:
        """It, and those that it has been moved into."""
        yield graph
        while graph in self.moved:
            graph = self.moved[graph]
            yield graph

    def undefined(self, operation: list[Any]) -> bool:
        """True if the operation reaches memory, or a graph, that is not the program's."""
        name, *values = operation
        if name == "node" and values[0] == "moved" and values[3] in self.around(values[1]):
            return True
        if self.ended & set(self.graphs(name, values)):
            return True
        for where, size in accesses(name, values):
            area = self.of(where)
            if area and (not area.live or where[2] < 0 or where[2] + size > area.size):
                return True
        if name in ASKING:
            area = self.of(values[ASKING[name]])
            return area is not None and area.reused
        return False


# Operations that give a node, and which of their values is its graph.
NODES = {"node": 1, "twin": 1}
# Operations on graphs and nodes, and which of their values these are.
ON_GRAPHS = {"contents": 1, "clone": 0, "instantiate": 0, "update": 1, "twin": 1, "link": 1}
ON_NODES = {"set_node": 1, "set_exec": 2, "enable": 1, "end_node": 0, "node_type": 0, "twin": 0}

# Operations that give the address of a variable, and those that end it.
ENDING = {"global": "unload", "library_global": "end_library"}

# Operations that bring a module's variables into a context, or memory of another kind.
TAKING = (
    *("module", "library", "kernel", "library_global", "function_attribute"),
    *("occupancy", "launch", "create"),
)

# Operations that name an address without reaching its bytes, and where in their values.
ASKING = {
    "range": 0,
    "attribute": 1,
    "attributes": 0,
    "free": 0,
    "free_async": 0,
    "host_free": 0,
    "host_unregister": 0,
    "host_flags": 0,
    "host_register_again": 0,
    "map": 0,
    "unmap": 0,
    "allow": 0,
    "allowed": 0,
    "retain": 0,
    "unreserve": 0,
}


def accesses(name: str, values: list[Any]) -> Iterator[tuple[Where, int]]:
    """The addresses that an operation reaches, each with the number of bytes."""
    if name in ("h2d", "d2h", "d2d", "unified"):
        yield values[0], values[2]
        yield values[1], values[2]
    elif name == "read":
        yield values[0], values[1]
    elif name == "set":
        yield values[1], values[3] * values[0] // 8
    elif name == "set2d":
        bits, where, pitch, _, width, height = values
        yield where, max(height - 1, 0) * pitch + width * bits // 8
    elif name == "copy2d":
        _, to, source, width, height, _ = values
        for where, pitch, x, y in (to, source):
            yield where, max(y + height - 1, 0) * (pitch or width) + x + width
    elif name == "launch" and values[4] is not None:
        yield values[4], 4 * values[5]
    elif name == "start":
        yield values[2], 4 * values[3]
    elif name == "word":
        yield values[1], 8 if values[3] else 4
    elif name == "copies":
        for to, source, size in values[1]:
            yield to, size
            yield source, size


def refused(answer: Any) -> bool:
    return answer == CRASHED or bool(answer and answer[0])


def difference(program: list[Any], first: list[Any], second: list[Any]) -> int | None:
    """The first operation that was answered differently and must not be, None if there is none."""
    layout = Layout()
    for at, (operation, one, other) in enumerate(zip(program, first, second, strict=False)):
        if layout.undefined(operation):
            if one != other or not (refused(one) or one[1:2] == [ILLEGAL_ADDRESS]):
                return None
        elif one != other:  # None: a driver that crashed in some runs
            return None if one is None or (one == CRASHED and refused(other)) else at
        layout.follow(operation, one)
    return None


def described(program: list[Any], first: list[Any], second: list[Any]) -> str:
    """The program up to the difference, and what each said of it."""
    at = difference(program, first, second)
    assert at is not None
    return f"{program[at]}: {first[at]} and {second[at]}, at the end of\n{program[: at + 1]}"
