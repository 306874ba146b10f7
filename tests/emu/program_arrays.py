"""Operations on arrays, texture and surface objects, and how they are drawn. See program_lib.

What a number means is looked at by kernels; the number itself is the driver's affair. An object is
named by it, so one that has ended is never named: another may have its number by then.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from typing import Any

from tests.emu.program_build import MAKERS, Builder, Dice
from tests.emu.program_lib import HEAD, NULL, SUCCESS, Objects, Trace, pattern

U64, U32, SIZE = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
WORD = 3  # CU_AD_FORMAT_UNSIGNED_INT32
LAYERED, STORED = 1, 2
HOST, ARRAY, LINEAR = 1, 3, 2
# Width, height, depth, flags, and how kernels name the dimensions.
SHAPES = (
    (16, 4, 0, STORED, "2d"),
    (33, 0, 0, STORED, "1d"),
    (8, 4, 3, STORED, "3d"),
    (8, 4, 3, STORED | LAYERED, "a2d"),
    (32, 32, 0, 0, "2d"),
)
LINE = "line"  # device memory without rows
AT = {
    "1d": "{%r1}",
    "2d": "{%r1, %r1}",
    "3d": "{%r1, %r1, %r1, %r1}",
    "a2d": "{%r1, %r1, %r1, %r1}",
}


def _entry(name: str, body: str) -> str:
    return f"""
.visible .entry {name}(.param .u64 p, .param .u64 t) {{
    .reg .b64 %rd<3>; .reg .b32 %r<6>;
    ld.param.u64 %rd1, [p]; ld.param.u64 %rd2, [t]; mov.u32 %r1, 1;
    {body} st.global.u32 [%rd1], %r2; ret;
}}
"""


def _reads(dims: str, at: str) -> str:
    tex = f"tex.{dims}.v4.u32.s32 {{%r2, %r3, %r4, %r5}}, [%rd2, {at}];"
    x = at.replace("%r1", "%r3", 1) if dims != "a2d" else at.replace("%r1, %r1", "%r1, %r3", 1)
    surf = f"mov.u32 %r3, 4; suld.b.{dims}.b32.trap {{%r2}}, [%rd2, {x}];"
    return _entry(f"tex_{dims}", tex) + _entry(f"surf_{dims}", surf)


READERS = (HEAD + "".join(_reads(*one) for one in AT.items())).encode() + b"\0"


class About(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = (
        *((name, SIZE) for name in ("width", "height", "depth")),
        *((name, U32) for name in ("format", "channels", "flags")),
    )


_END = ("x", "y", "z", "lod")


class Solid(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = tuple(
        (side + name, kind)
        for side in ("src", "dst")
        for name, kind in (
            *((name, SIZE) for name in _END),
            ("type", U64),
            *((name, U64) for name in ("host", "device", "array", "reserved")),
            *((name, SIZE) for name in ("pitch", "height")),
        )
    ) + tuple((name, SIZE) for name in ("width", "height", "depth"))


class Resource(ctypes.Structure):
    """CUDA_RESOURCE_DESC."""

    _fields_ = (
        ("type", U64),
        ("place", U64),
        ("format", U32),
        ("channels", U32),
        ("size", SIZE),
        ("rest", U64 * 14),
    )


class ArrayOperations(Objects):
    def __init__(self, driver: ctypes.CDLL) -> None:
        super().__init__(driver)
        self.readers: dict[int, tuple[int, int]] = {}  # by context: a module, a word
        self.seen_in: dict[int, int] = {}  # the context of a texture object, while that lives

    def ending(self, trace: Trace) -> Trace:
        """A context may have ended, with what was in it."""
        if trace[0] == SUCCESS:
            self.readers.clear()
            self.seen_in.clear()
        return super().ending(trace)  # type: ignore[misc]

    # -- arrays

    def about(self, array: int) -> About | None:
        found = About()
        code = self.call("cuArray3DGetDescriptor_v2", ctypes.byref(found), array)
        return found if code == SUCCESS else None

    def whole(self, array: int, memory: Any, back: bool = False) -> int:
        """Copy all of an array from the process's own memory, or back."""
        about = self.about(array) or About(width=1)
        near, far = ("dst", "src") if back else ("src", "dst")
        copy = Solid(width=4 * about.width, height=max(1, about.height), depth=max(1, about.depth))
        setattr(copy, f"{near}type", HOST)
        setattr(copy, f"{near}host", ctypes.addressof(memory))
        setattr(copy, f"{near}pitch", copy.width)
        setattr(copy, f"{near}height", copy.height)
        setattr(copy, f"{far}type", ARRAY)
        setattr(copy, f"{far}array", array)
        return self.call("cuMemcpy3D_v2", ctypes.byref(copy))

    def op_array(self, shape: int) -> Trace:
        width, height, depth, flags, _ = SHAPES[shape]
        about = About(width, height, depth, WORD, 1, flags)
        trace = self.make("array", "cuArray3DCreate_v2", ctypes.byref(about))
        if trace[0] == SUCCESS:
            self.whole(self.made["array"][-1], pattern(shape, 1 << 12))
        return trace

    def op_end_array(self, array: int) -> Trace:
        self.settle()
        return [self.call("cuArrayDestroy", self.get("array", array))]

    def op_put(self, array: int, seed: int) -> Trace:
        self.settle()
        return [self.whole(self.get("array", array), pattern(seed, 1 << 12))]

    def op_got(self, array: int) -> Trace:
        self.settle()
        memory = ctypes.create_string_buffer(1 << 12)
        code = self.whole(self.get("array", array), memory, back=True)
        return [code, zlib.crc32(memory.raw)] if code == SUCCESS else [code]

    def op_shape(self, array: int) -> Trace:
        found = self.about(self.get("array", array))
        names = [name for name, *_ in About._fields_]
        return [[getattr(found, name) for name in names] if found else None]

    def op_across(self, to: int, source: int) -> Trace:
        self.settle()
        ends = [self.get("array", one) for one in (to, source)]
        return [self.call("cuMemcpyAtoA_v2", ends[0], 0, ends[1], 4, 16)]

    def op_mipmap(self, levels: int) -> Trace:
        about = About(32, 32, 0, WORD, 1, 0)
        trace = self.make("mipmap", "cuMipmappedArrayCreate", ctypes.byref(about), levels)
        for level in range(levels if trace[0] == SUCCESS else 0):
            code, array = self.ask(U64, "cuMipmappedArrayGetLevel", self.made["mipmap"][-1], level)
            if code == SUCCESS:
                self.whole(array, pattern(level, 1 << 12))
        return trace

    def op_end_mipmap(self, mipmap: int) -> Trace:
        self.settle()
        return [self.call("cuMipmappedArrayDestroy", self.get("mipmap", mipmap))]

    def op_level(self, mipmap: int, level: int) -> Trace:
        return self.make("array", "cuMipmappedArrayGetLevel", self.get("mipmap", mipmap), level)

    # -- texture and surface objects

    def op_texture(self, array: int) -> Trace:
        return self.texture(Resource(type=0, place=self.get("array", array)))

    def op_line(self, where: Trace, words: int) -> Trace:
        """Make a texture object of device memory."""
        line = Resource(
            type=LINEAR, place=self.address(where), format=WORD, channels=1, size=4 * words
        )
        return self.texture(line)

    def texture(self, resource: Resource) -> Trace:
        how = (U32 * 32)()
        how[4] = 1  # CU_TRSF_READ_AS_INTEGER
        return self.made_here("cuTexObjectCreate", ctypes.byref(resource), how, 0)

    def made_here(self, name: str, *values: Any) -> Trace:
        trace = self.make("texture", name, *values)
        if trace[0] == SUCCESS:
            self.seen_in[len(self.made["texture"]) - 1] = self.current()
        return trace

    def is_here(self, number: int) -> bool:
        return self.current() != 0 and self.seen_in.get(number) == self.current()

    def op_surface(self, array: int) -> Trace:
        resource = Resource(type=0, place=self.get("array", array))
        return self.made_here("cuSurfObjectCreate", ctypes.byref(resource))

    def op_end_texture(self, number: int, surface: int) -> Trace:
        if not self.is_here(number):
            return [None]
        self.settle()
        name = "cuSurfObjectDestroy" if surface else "cuTexObjectDestroy"
        return [self.call(name, self.get("texture", number))]

    def op_seen(self, kernel: str, number: int) -> Trace:
        """What a kernel reads, at 1 of each dimension."""
        if not self.is_here(number):
            return [None]
        self.settle()
        context = self.current()
        if context not in self.readers:
            _, word = self.ask(U64, "cuMemAlloc_v2", 4)
            _, module = self.ask(U64, "cuModuleLoadData", READERS)
            self.readers[context] = (module, word)
        module, word = self.readers[context]
        code, function = self.ask(U64, "cuModuleGetFunction", module, kernel.encode())
        if code != SUCCESS:
            return [code]
        values = (U64(word), U64(self.get("texture", number)))
        given = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in values))
        code = self.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, given, 0)
        out = U32(0)
        done = self.call("cuCtxSynchronize")
        read = self.call("cuMemcpyDtoH_v2", ctypes.byref(out), word, 4)
        return [code, done, read, out.value]


# How they are drawn. An array and a texture object keep what kernels need to know of them.


def array(b: Builder, d: Dice) -> list[Any]:
    shape = d.byte() % len(SHAPES)
    number = b.made("array")
    b.shapes[number] = SHAPES[shape][4]
    if SHAPES[shape][3] & STORED:
        b.stored.add(number)
    return ["array", shape]


def level(b: Builder, d: Dice) -> list[Any]:
    mipmap = b.old("mipmap", d)
    number = b.made("array")
    b.shapes[number] = "2d"
    b.levels[number] = mipmap
    return ["level", mipmap, d.pick((0, 1, 2, 3))]


def texture(b: Builder, d: Dice) -> list[Any]:
    of = b.old("array", d)
    number = b.made("texture")
    b.readers[number] = f"tex_{b.shapes.get(of, '2d')}"
    b.seen_of[number] = of
    return ["texture", of]


def surface(b: Builder, d: Dice) -> list[Any]:
    of = b.old("array", d)
    number = b.made("texture")
    b.readers[number] = f"surf_{b.shapes.get(of, '2d')}"
    b.seen_of[number] = of
    return ["surface", of]


def line(b: Builder, d: Dice) -> list[Any]:
    where, there = b.where(d)
    number = b.made("texture")
    b.readers[number] = "tex_1d"
    if where[0] == "m":
        b.lines[number] = where[1]
    return ["line", where, d.pick((max(1, there // 4), 2, 0))]


def number_of(b: Builder, d: Dice) -> int:
    """One that lives, since an ended one's number may be another's by now.

    Nor one of an allocation that has ended: ours may be there as long as its block is. A real
    driver reads an array that has ended, too, and writes surfaces of arrays that are for none.
    """
    gone = b.gone.get("texture", set()) | {n for n, m in b.lines.items() if not b.areas[m].live}
    arrays, mipmaps = (b.gone.get(kind, set()) for kind in ("array", "mipmap"))
    for n, of in b.seen_of.items():
        plain = "surf" in b.readers[n] and of not in b.stored
        if plain or of in arrays or b.levels.get(of) in mipmaps:
            gone.add(n)
    live = [n for n in range(b.counts.get("texture", 0)) if n not in gone]
    if not live:
        b.program.append(texture(b, Dice(b"")))
        live = [b.counts["texture"] - 1]
    return NULL if d.rarely(24) else d.pick(live[::-1])


def end_texture(b: Builder, d: Dice) -> list[Any]:
    number = number_of(b, d)
    return ["end_texture", b.end("texture", number), int("surf" in b.readers.get(number, ""))]


def seen(b: Builder, d: Dice) -> list[Any]:
    number = number_of(b, d)
    return ["seen", b.readers.get(number, "tex_2d"), number]


def mipmap(b: Builder, d: Dice) -> list[Any]:
    b.made("mipmap")
    return ["mipmap", d.pick((3, 1, 2))]


ARRAYS: dict[str, Callable[[Builder, Dice], list[Any]]] = {
    "array": array,
    "end_array": lambda b, d: ["end_array", b.end("array", b.old("array", d))],
    "put": lambda b, d: ["put", b.old("array", d), d.byte() % 4],
    "got": lambda b, d: ["got", b.old("array", d)],
    "shape": lambda b, d: ["shape", b.old("array", d)],
    "across": lambda b, d: ["across", b.old("array", d), b.old("array", d)],
    "mipmap": mipmap,
    "end_mipmap": lambda b, d: ["end_mipmap", b.end("mipmap", b.old("mipmap", d))],
    "level": level,
    "texture": texture,
    "line": line,
    "surface": surface,
    "end_texture": end_texture,
    "seen": seen,
}
MAKERS |= {"array": array, "mipmap": mipmap}
