"""What the operations of a drawn program share: the driver by ctypes, objects by number, images.

A program is a list of operations, each a list of a name and plain values, so it can be kept as
JSON. It names objects by the number of the operation of that kind that made them: 0 is the first
stream, and a stream that could not be made has a number too. Nothing that a driver chooses freely,
as an address or a handle, is in a program or in its trace.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict
from typing import Any

NULL, GARBAGE, LEGACY, PER_THREAD = -1, -2, -3, -4  # instead of an object's number
SPECIAL = {NULL: 0, GARBAGE: 0x12345600, LEGACY: 1, PER_THREAD: 2}
SUCCESS, NOT_READY = 0, 600
SCRATCH = 1 << 22  # bytes that a copy from or to the process's own memory may be long
RECTANGLE = 1 << 16  # of these, what a copy of rectangles may reach

Trace = list[Any]

HEAD = ".version 7.0\n.target sm_70\n.address_size 64\n"
INC = """.visible .entry inc(.param .u64 p, .param .u32 n) {
    .reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1; @%p ret;
    mul.wide.u32 %rd2, %r5, 4; add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r6, [%rd3]; add.u32 %r6, %r6, 1; st.global.u32 [%rd3], %r6; ret;
}
"""
GOOD = (
    HEAD
    + """
.visible .global .align 4 .u32 counter = 5;
.visible .const .align 4 .u32 table[2] = {11, 22};
.extern .shared .align 4 .b8 dynamic[];
"""
    + INC
    + """.visible .entry bump() {
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [counter]; add.u32 %r2, %r1, 1; st.global.u32 [counter], %r2; ret;
}
.visible .entry turn(.param .u64 p, .param .u32 n) {
    .reg .b64 %rd<8>; .reg .b32 %r<8>; .reg .pred %p<3>;
    ld.param.u64 %rd1, [p]; ld.param.u32 %r7, [n];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, 0;
    setp.lt.u32 %p1, %r1, %r7; setp.eq.and.u32 %p1, %r2, 0, %p1;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
    @%p1 ld.global.u32 %r3, [%rd3];
    mov.u64 %rd4, dynamic; add.s64 %rd5, %rd4, %rd2; @%p1 st.shared.u32 [%rd5], %r3;
    bar.sync 0;
    sub.u32 %r4, %r7, %r1; sub.u32 %r4, %r4, 1; mul.wide.u32 %rd6, %r4, 4;
    add.s64 %rd7, %rd4, %rd6; @%p1 ld.shared.u32 %r5, [%rd7]; @%p1 st.global.u32 [%rd3], %r5; ret;
}
.visible .entry stop(.param .u64 p, .param .u32 n) { trap; }
"""
)
IMAGES: dict[str, bytes] = {
    "good": GOOD.encode(),
    "opcode": (HEAD + ".visible .entry k() { .reg .b32 %r<3>; frobnicate.u32 %r1, %r2; }").encode(),
    "register": (HEAD + ".visible .entry k() { .reg .b32 %r<2>; mov.u32 %r7, 1; ret; }").encode(),
    "symbol": (
        HEAD + ".visible .entry k() { .reg .b32 %r<2>; ld.global.u32 %r1, [nowhere]; ret; }"
    ).encode(),
    "cut": GOOD[: len(GOOD) // 2].encode(),
    "version": GOOD.replace("version 7.0", "version 77.0").encode(),
    "target": GOOD.replace("sm_70", "sm_777").encode(),
    "future": GOOD.replace("sm_70", "sm_120").encode(),
    "headless": GOOD.replace(HEAD, "").encode(),
    "bare": HEAD.encode(),
    "empty": b"",
    "text": b"no image at all",
    "machine": b"\x7fELF" + bytes(60),
}
KERNELS = ("inc", "bump", "turn", "stop")
NAMES = (*KERNELS, "none", "")


def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class Objects:
    """The driver, and what a program has made so far."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver = driver
        self.made: dict[str, list[int]] = defaultdict(list)  # handles or addresses, 0: failed
        self.sizes: dict[str, list[int]] = defaultdict(list)  # of what has addresses
        self.streams_of: list[int] = []  # the context of each stream
        self.ended: set[int] = set()  # streams that were destroyed
        self.started = False  # a call of cuInit has succeeded
        self.last_stream = NULL
        self.kept: list[Any] = []  # memory that a call may use after it has returned
        self.scratch = ctypes.create_string_buffer(SCRATCH)
        self.sources: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.calls: list[int] = []  # what host functions were given, in the order in which they ran

    def call(self, name: str, *values: Any) -> int:
        """Integers go as 64 bits each: every argument has a register or eight bytes of stack."""
        given = [ctypes.c_uint64(v & (2**64 - 1)) if isinstance(v, int) else v for v in values]
        return int(getattr(self.driver, name)(*given))

    def keep(self, value: Any) -> Any:
        self.kept.append(value)
        return value

    # -- objects by number

    def get(self, kind: str, number: int) -> int:
        if number < 0:
            return SPECIAL[number]
        return self.made[kind][number] if number < len(self.made[kind]) else 0

    def make(self, kind: str, name: str, *values: Any, size: int = 0) -> Trace:
        """A call whose first argument is where to put a new object."""
        out = ctypes.c_uint64(0)
        code = self.call(name, ctypes.byref(out), *values)
        self.made[kind].append(out.value if code == SUCCESS else 0)
        self.sizes[kind].append(size)
        return [code]

    def number(self, kind: str, handle: int) -> int:
        """Which object of the program this is: its last number, since some are made twice."""
        found = [i for i, known in enumerate(self.made[kind]) if known == handle and handle]
        return found[-1] if found else NULL if handle == 0 else GARBAGE

    def ask(self, kind: Any, name: str, *values: Any) -> tuple[int, int]:
        """A call whose first argument is where to put an answer of a ctypes type."""
        out = kind(0)
        code = self.call(name, ctypes.byref(out), *values)
        return code, out.value

    def answer(self, kind: Any, name: str, *values: Any) -> Trace:
        code, value = self.ask(kind, name, *values)
        return [code, value] if code == SUCCESS else [code]

    # -- addresses

    def address(self, where: list[Any]) -> int:
        """[kind, number, offset]: of "m" allocations, "v" reservations, "h" host memory, "g" module
        variables, or of nothing ("n")."""
        kind, number, offset = where
        base = 0 if kind == "n" else self.get(kind, number)
        return (base + int(offset)) & (2**64 - 1)

    def host(self, where: list[Any], target: bool = False) -> int:
        """An address, or memory of the process: ["b", seed, offset], which is empty as a target."""
        if where[0] != "b":
            return self.address(where)
        if target:
            ctypes.memset(self.scratch, 0, RECTANGLE)
            return ctypes.addressof(self.scratch) + int(where[2])
        if where[1] not in self.sources:
            self.sources[where[1]] = pattern(where[1], SCRATCH)
        return ctypes.addressof(self.sources[where[1]]) + int(where[2])

    def current(self) -> int:
        return self.ask(ctypes.c_uint64, "cuCtxGetCurrent")[1]

    # -- order

    def settle(self) -> None:
        """All work of the current context is done, as far as it can be."""
        self.call("cuCtxSynchronize")
        self.last_stream = NULL

    def on_stream(self, number: int) -> int:
        """The handle of a stream for work; work of another stream before it is done."""
        if number != self.last_stream:
            self.settle()
        self.last_stream = number
        return self.get("stream", number)

    def after_work(self, number: int) -> None:
        """A stream of another context would not be waited for by `settle`."""
        ours = number >= 0 and number < len(self.streams_of) and number not in self.ended
        if ours and self.streams_of[number] != self.current():
            self.call("cuStreamSynchronize", self.get("stream", number))


def pattern(seed: int, size: int) -> ctypes.Array[ctypes.c_char]:
    """Bytes that a seed determines, without a period of a power of two."""
    unit = bytes((seed * 31 + i * 7 + (i >> 3)) & 255 for i in range(251))
    return ctypes.create_string_buffer((unit * (size // len(unit) + 1))[:size], size)


def pages(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size)
