"""Operations on attributes of streams, words that a stream writes and waits for, batches of copies
and access to pools, and how they are drawn. See program_lib."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tests.emu.program_build import Builder, Dice
from tests.emu.program_lib import SUCCESS, Objects, Trace

POLICY, PRIORITY, DOMAIN = 3, 8, 10  # CUlaunchAttributeID
WAIT_32, WRITE_32, WAIT_64, WRITE_64 = 1, 2, 4, 5  # CUstreamBatchMemOpType
WAIT_EQUAL = 1


class Attribute(ctypes.Union):
    """CUstreamAttrValue."""

    _fields_ = [("number", ctypes.c_int), ("pad", ctypes.c_char * 64)]


class WordOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write."""

    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    ]


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("order", ctypes.c_int),
        ("source", Location),
        ("target", Location),
        ("flags", ctypes.c_uint),
    ]


class WordOperations(Objects):
    def op_stream_attribute(self, stream: int, attribute: int) -> Trace:
        value = Attribute()
        name = "cuStreamGetAttribute"
        code = self.call(name, self.get("stream", stream), attribute, ctypes.byref(value))
        return [code, value.number] if code == SUCCESS else [code]

    def op_set_stream(self, stream: int, attribute: int, number: int) -> Trace:
        self.settle()
        value = Attribute(number=number)
        name = "cuStreamSetAttribute"
        return [self.call(name, self.get("stream", stream), attribute, ctypes.byref(value))]

    def op_set_stream_as(self, to: int, source: int) -> Trace:
        self.settle()
        handles = self.get("stream", to), self.get("stream", source)
        return [self.call("cuStreamCopyAttributes", *handles)]

    def op_word(self, stream: int, where: Trace, value: int, wide: bool, flags: int) -> Trace:
        """Written, and waited for by the same stream, which no other is beside."""
        handle, address = self.on_stream(stream), self.address(where)
        kinds = (WRITE_64, WAIT_64) if wide else (WRITE_32, WAIT_32)
        both = (WordOperation * 2)(
            WordOperation(kinds[0], address, value), WordOperation(kinds[1], address, value, flags)
        )
        trace = [self.call("cuStreamBatchMemOp_v2", handle, 2, both, 0)]
        self.after_work(stream)
        return trace

    def op_copies(self, stream: int, copies: list[Trace], order: int, first: int) -> Trace:
        handle = self.on_stream(stream)
        targets, sources, sizes = (
            (ctypes.c_uint64 * len(copies))(*values)
            for values in zip(
                *((self.address(to), self.address(by), size) for to, by, size in copies),
                strict=True,
            )
        )
        attributes = CopyAttributes(order)
        firsts = ctypes.c_uint64(first)
        given = targets, sources, sizes, len(copies)
        how = ctypes.byref(attributes), ctypes.byref(firsts), 1
        trace = [self.call("cuMemcpyBatchAsync_v2", *given, *how, handle)]
        self.after_work(stream)
        return trace

    def op_pool_allow(self, pool: int, device: int, flags: int) -> Trace:
        self.settle()
        access = Access(Location(1, device), flags)
        name = "cuMemPoolSetAccess"
        return [self.call(name, self.get("pool", pool), ctypes.byref(access), 1)]

    def op_pool_allowed(self, pool: int, device: int) -> Trace:
        where = Location(1, device)
        name = "cuMemPoolGetAccess"
        return self.answer(ctypes.c_int, name, self.get("pool", pool), ctypes.byref(where))


def word(b: Builder, d: Dice) -> list[Any]:
    where, there = b.where(d)
    # The driver decides if a word may reach past an allocation. In a pool's memory it may not, but
    # after a checkpoint by replay the memory is a pool's no more, and it may.
    if there < 4 or (where[0] == "m" and b.areas[where[1]].of_pool):
        where, there = b.nowhere(d), 8
    wide = d.byte() % 2 == 1 and there >= 8
    step = 8 if wide else 4
    if not d.rarely():
        where = [*where[:2], where[2] // step * step]
    flags = WAIT_EQUAL if not d.rarely() else d.pick((9, 1 << 20))
    return ["word", b.stream(d), where, d.byte(), wide, flags]


def copies(b: Builder, d: Dice) -> list[Any]:
    pairs = []
    for _ in range(d.pick((1, 2))):
        to, there = b.where(d)
        source, here = b.where(d)
        size = b.extent(d, min(there, here))
        # Copies that depend on each other are done in any order; one of nothing is refused.
        touched = [where[:2] for pair in pairs for where in pair[:2]]
        if to[:2] == source[:2] or to[:2] in touched or source[:2] in touched:
            size = 0
        pairs.append([to, source, size])
    first = 0 if not d.rarely() else d.pick((1, 5))
    return ["copies", b.stream(d), pairs, d.pick((1, 2, 3)) if not d.rarely() else 0, first]


def set_stream(b: Builder, d: Dice) -> list[Any]:
    attribute, numbers = d.pick(((POLICY, (1, 2, 3, 4)), (PRIORITY, (0, -1, -9)), (DOMAIN, (0, 1))))
    number = d.pick(numbers) if not d.rarely() else d.pick((0, 77))
    return ["set_stream", b.stream(d), attribute if not d.rarely() else 99, number]


WORDS: dict[str, Callable[[Builder, Dice], list[Any]]] = {
    "stream_attribute": lambda b, d: [
        "stream_attribute",
        b.stream(d),
        d.pick((POLICY, PRIORITY, DOMAIN, 99)),
    ],
    "set_stream": set_stream,
    "set_stream_as": lambda b, d: ["set_stream_as", b.stream(d), b.stream(d)],
    "word": word,
    "copies": copies,
    "pool_allow": lambda b, d: ["pool_allow", b.old("pool", d), b.device(d), d.pick((3, 1, 0, 7))],
    "pool_allowed": lambda b, d: ["pool_allowed", b.old("pool", d), b.device(d)],
}
