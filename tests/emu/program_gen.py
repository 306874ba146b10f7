"""Draws programs of driver calls, mostly sound ones, with misuse of every kind in between.

A step is the name of an operation and a few bytes for its choices (program_build).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.emu.program_arrays import ARRAYS
from tests.emu.program_build import Builder, Dice
from tests.emu.program_graphs import GRAPHS
from tests.emu.program_memory import ATTRIBUTES
from tests.emu.program_words import WORDS

Step = tuple[str, bytes]
BYTES = 10  # that a step may use up
FUNCTION_KEYS = (0, 1, 2, 3, 4, 8, 9, 99)

# Operations that need no more than an object or two.
PLAIN: dict[str, Callable[[Builder, Dice], list[Any]]] = {
    "range": lambda b, d: ["range", b.where(d)[0]],
    "attribute": lambda b, d: ["attribute", d.pick(tuple(ATTRIBUTES)), b.where(d)[0]],
    "attributes": lambda b, d: ["attributes", b.where(d)[0]],
    "checkpoint": lambda b, d: ["checkpoint"],
    "info": lambda b, d: ["info"],
    "allowed": lambda b, d: ["allowed", b.piece(d)[0], b.device(d)],
    "granularity": lambda b, d: ["granularity", b.device(d), d.pick((0, 1, 7))],
    "properties": lambda b, d: ["properties", b.old("handle", d)],
    "close": lambda b, d: ["close", b.end("fd", b.old("fd", d))],
    "pool_current": lambda b, d: ["pool_current", b.device(d)],
    "pool_destroy": lambda b, d: ["pool_destroy", b.end("pool", b.old("pool", d))],
    "pool_use": lambda b, d: ["pool_use", b.device(d), b.old("pool", d)],
    "pool_get": lambda b, d: ["pool_get", b.old("pool", d), d.pick((1, 2, 3, 4, 5, 6, 7, 8, 77))],
    "pool_set": lambda b, d: ["pool_set", b.old("pool", d), d.pick((4, 1, 6, 5, 77)), d.byte() % 2],
    "pool_trim": lambda b, d: ["pool_trim", b.old("pool", d), 0],
    "device": lambda b, d: ["device", d.pick((0, 99, -1))],
    "release_primary": lambda b, d: ["release_primary", b.device(d)],
    "reset_primary": lambda b, d: ["reset_primary", b.device(d)],
    "primary_state": lambda b, d: ["primary_state", b.device(d)],
    "use": lambda b, d: ["use", b.old("ctx", d)],
    "push": lambda b, d: ["push", b.old("ctx", d)],
    "pop": lambda b, d: ["pop"],
    "current": lambda b, d: ["current"],
    "current_device": lambda b, d: ["current_device"],
    "synchronize": lambda b, d: ["synchronize"],
    "context_flags": lambda b, d: ["context_flags"],
    "api_version": lambda b, d: ["api_version", b.old("ctx", d)],
    "limit": lambda b, d: ["limit", d.pick((0, 1, 2, 3, 4, 5, 6, 99))],
    "set_limit": lambda b, d: ["set_limit", *d.pick(((0, 1024), (2, 16 << 20), (99, 1)))],
    "end_stream": lambda b, d: ["end_stream", b.end("stream", b.old("stream", d))],
    "wait_stream": lambda b, d: ["wait_stream", b.stream(d)],
    "query_stream": lambda b, d: ["query_stream", b.stream(d)],
    "stream_info": lambda b, d: [
        "stream_info",
        d.pick(("Flags", "Priority", "Ctx", "Device")),
        b.stream(d),
    ],
    "capturing": lambda b, d: ["capturing", b.stream(d)],
    "end_event": lambda b, d: ["end_event", b.end("event", b.old("event", d))],
    "record": lambda b, d: ["record", b.old("event", d), b.stream(d)],
    "follow": lambda b, d: ["follow", b.stream(d), b.old("event", d)],
    "wait_event": lambda b, d: ["wait_event", b.old("event", d)],
    "query_event": lambda b, d: ["query_event", b.old("event", d)],
    "elapsed": lambda b, d: ["elapsed", b.recorded(d), b.recorded(d)],
    "host_function": lambda b, d: ["host_function", b.stream(d), d.byte()],
    "callback": lambda b, d: ["callback", b.stream(d), d.byte(), int(d.rarely())],
    "no_function": lambda b, d: ["no_function", b.stream(d)],
    "called": lambda b, d: ["called"],
    "unload": lambda b, d: ["unload", b.end("module", b.old("module", d))],
    "end_library": lambda b, d: ["end_library", b.end("library", b.old("library", d))],
    "kernel_count": lambda b, d: ["kernel_count", b.old("library", d)],
    "function_attribute": lambda b, d: ["function_attribute", d.pick(FUNCTION_KEYS), b.ready(d)],
    "set_function": lambda b, d: [
        "set_function",
        b.ready(d),
        *d.pick(((8, 64 << 10), (8, 1 << 30), (8, -1), (9, 50), (9, 101), (0, 1))),
    ],
    "function_name": lambda b, d: ["function_name", b.ready(d)],
    "parameter": lambda b, d: ["parameter", b.ready(d), d.pick((0, 1, 2))],
    "occupancy": lambda b, d: ["occupancy", b.ready(d), d.pick((64, 1024, 2048, 0)), 0],
    **ARRAYS,
    **GRAPHS,
    **WORDS,
}

# What a program is about, and how often each of its operations is drawn.
THEMES: dict[str, str] = {
    "memory": "alloc alloc alloc alloc_pitch free free range attribute attributes info h2d h2d d2h "
    "d2d set set2d copy2d copy2d unified read read checkpoint",
    "host": "host_alloc host_alloc host_register host_register host_end host_end host_ask "
    "attribute attributes alloc h2d h2d d2h d2h unified read checkpoint",
    "mappings": "map_all map_all reserve unreserve create create map map unmap unmap allow allow "
    "allowed granularity release retain properties export import close set h2d d2d read read range "
    "attribute launch checkpoint checkpoint",
    "pools": "alloc_async alloc_async free_async pool_default pool_create pool_create "
    "pool_destroy pool_current pool_use pool_get pool_set pool_trim new_stream set h2d read free "
    "attribute alloc checkpoint",
    "arrays": "array array array end_array put put got got shape across mipmap end_mipmap level "
    "texture texture texture line surface surface end_texture end_texture seen seen seen seen "
    "alloc set free use synchronize checkpoint checkpoint checkpoint",
    "streams": "new_stream new_stream end_stream wait_stream query_stream stream_info capturing "
    "event event end_event record record follow wait_event query_event elapsed host_function "
    "callback no_function called alloc set set h2d d2h d2d start start read context use checkpoint",
    "kernels": "module module unload function function variable library end_library kernel_count "
    "function_attribute set_function function_name parameter occupancy alloc alloc launch launch "
    "launch start read read free synchronize new_stream checkpoint",
    "contexts": "retain_primary release_primary reset_primary primary_state context context "
    "end_context use use push pop current current_device synchronize context_flags api_version "
    "limit set_limit device alloc set read free new_stream event record wait_stream module launch "
    "map_all checkpoint",
    "words": "new_stream new_stream end_stream stream_info stream_attribute stream_attribute "
    "set_stream set_stream set_stream_as set_stream_as word word word copies copies alloc set h2d "
    "read read alloc_async pool_create pool_allow pool_allowed context use checkpoint checkpoint",
    "graphs": "graph clone end_graph contents contents node node node node node node end_node "
    "node_type twin inside link link set_node set_node instantiate instantiate instantiate "
    "end_exec update set_exec set_exec set_exec enable run run run run run run checkpoint",
}
ALIASES = {"import": "import_"}
STARTS: tuple[list[list[Any]], ...] = (
    *([[["init", 0], ["retain_primary", 0], ["use", 0]]] * 28),
    [["init", 0], ["context", 0, 0]],
    [["init", 0]],
    [["init", 1]],
    [],
)


def names_of(theme: str) -> list[str]:
    return THEMES[theme].split()


def build(start: int, steps: Sequence[Step]) -> list[list[Any]]:
    """The program of these steps; 0 is the usual start."""
    b = Builder()
    b.program += STARTS[start]
    for operation in b.program:
        if operation[0] in ("retain_primary", "context"):
            b.made("ctx")
    for name, data in steps:
        d = Dice(data)
        make = PLAIN.get(name) or getattr(Builder, ALIASES.get(name, name))
        b.program.append(make(b, d))
    return b.program


def draw(random: Random, of: Sequence[str] = tuple(THEMES)) -> list[list[Any]]:
    """A program as long as a person can read; mostly about one of these themes."""
    themes = list(THEMES)
    about = names_of(random.choice(of))
    steps = []
    for _ in range(random.randint(4, 20)):
        names = about if random.random() < 0.85 else names_of(random.choice(themes))
        steps.append((random.choice(names), random.randbytes(BYTES)))
    return build(random.randrange(len(STARTS)), steps)
