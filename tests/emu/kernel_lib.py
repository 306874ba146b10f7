"""What the kernel cases share: their registry, how a case runs, how its results are compared.

A case is a kernel, as CUDA C or as PTX, with a launch shape and the list of its arguments. An `Out`
argument says what the kernel must leave there, computed on the CPU, and how near it must come: with
equal bits (any NaN equals any other), or within the errors that it names. A run says how near each
came. The cases call the driver API alone, so they run on whichever GPU cuInit finds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from tests.emu.cuda_source import compile_cuda
from tests.emu.driver_lib import ok

Array = np.ndarray[Any, Any]
Shape = int | Sequence[int]
Arguments = list[Any]
NO_FMA = ("--fmad=false",)  # the compiler may fuse what only looks like two roundings
GUARD = 64  # bytes behind each buffer, which no kernel may change
UNTOUCHED = 0xA5
f2, f4, f8 = np.float16, np.float32, np.float64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
# Bits of the mantissa, exponents of the smallest and largest normal numbers. bf16 is kept in u2.
FORMATS = {
    "f2": (10, -14, 15),
    "bf16": (7, -126, 127),
    "f4": (23, -126, 127),
    "f8": (52, -1022, 1023),
}


def to_bf16(x: Array) -> Array:
    """Nearest bf16 of f32 values, as u2."""
    bits = np.asarray(x, f4).view(u4)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(u2)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(u4) << 16).view(f4)


@dataclass(frozen=True)
class Near:
    """How near an output came: its largest error in units of the last place, and the largest part
    of what its element was allowed. Both are 0 where the bits must be equal."""

    ulps: float = 0.0
    share: float = 0.0


Generator = np.random.Generator


def rows(rng: Generator, *shape: int) -> Array:
    """Normal numbers of three times the usual width."""
    return (rng.standard_normal(shape) * 3).astype(f4)


@dataclass(frozen=True)
class Out:
    """An output: `want` in the type that is stored, or in f8 together with `kind`.

    ulps: error in units of the last place, of `want` or of `scale` where that is larger; relative
    and absolute: further errors, the largest of the three counts. `start`: what the buffer holds
    before.
    """

    want: Array
    kind: str = ""
    ulps: float = 0
    scale: Array | float = 0.0
    relative: float = 0
    absolute: float = 0
    start: Array | None = None

    def stored(self) -> Any:
        return np.dtype(u2 if self.kind == "bf16" else self.kind or self.want.dtype)

    def allowed(self) -> dict[str, float]:
        """The errors by name, in the order of the class; none where the bits must be equal."""
        errors = {"ulps": self.ulps, "relative": self.relative, "absolute": self.absolute}
        return {name: float(error) for name, error in errors.items() if error}

    def check(self, got: Array) -> Near:
        if not self.allowed():
            same_bits(got, self.want)
            return Near()
        kind = self.kind or self.want.dtype.str[1:]
        value = (from_bf16(got) if kind == "bf16" else got).astype(f8)
        want = self.want.astype(f8)
        mantissa, _, highest = FORMATS[kind]
        overflows = np.abs(want) >= np.ldexp(2.0 - 2.0 ** -(mantissa + 1), highest)
        want = np.where(overflows, np.copysign(np.inf, want), want)
        last_place = unit(np.maximum(np.abs(want), self.scale), kind)
        special = ~np.isfinite(want)
        with np.errstate(all="ignore"):
            room = np.maximum(
                self.ulps * last_place,
                np.maximum(self.relative * np.abs(want), self.absolute),
            )
            error = np.abs(value - want)
            good = np.where(special, (value == want) | (np.isnan(value) & np.isnan(want)),
                            error <= room)  # fmt: skip
            places, shares = error / last_place, error / room
        report(good, value, want)
        wrong = ~special & (error > 0)  # elsewhere there may be no room at all
        return Near(*(float(np.max(x, where=wrong, initial=0.0)) for x in (places, shares)))


@dataclass(frozen=True)
class Bound:
    """An argument that is a number: `make` gives it, and what looks at and ends all behind it."""

    about: str
    make: Callable[[], tuple[int, Callable[[], None]]]


def unit(magnitude: Array, kind: str) -> Array:
    """One unit of the last place of numbers of that size."""
    mantissa, lowest, _ = FORMATS[kind]
    finite = np.where(np.isfinite(magnitude), magnitude, 1.0)
    exponent = np.frexp(np.maximum(finite, 2.0**lowest))[1] - 1
    return np.asarray(np.ldexp(1.0, exponent - mantissa))


def same_bits(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, want.dtype, want.shape)
    good = got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}")
    if got.dtype.kind == "f":
        good |= np.isnan(got) & np.isnan(want)
    report(good, got, want)


def report(good: Array, got: Array, want: Array) -> None:
    if good.all():
        return
    wrong = np.argwhere(~good)
    some = wrong[:: -(-len(wrong) // 8)]  # from all over the output
    shown = "; ".join(
        f"{tuple(map(int, at))}: {got[tuple(at)]!r} is not {want[tuple(at)]!r}" for at in some
    )
    raise AssertionError(f"{len(wrong)} of {good.size} differ: {shown}")


@dataclass(frozen=True)
class Case:
    source: str
    grid: Shape
    block: Shape
    arguments: Callable[[np.random.Generator], Arguments]
    entry: str
    shared: int
    options: tuple[str, ...]
    ptx: str = ""  # in place of a source


CASES: dict[str, Case] = {}


def add(
    name: str,
    source: str,
    grid: Shape,
    block: Shape,
    arguments: Callable[[np.random.Generator], Arguments],
    *,
    entry: str = "k",
    shared: int = 0,
    options: tuple[str, ...] = (),
    ptx: str = "",
) -> None:
    assert name not in CASES, name
    CASES[name] = Case(source, grid, block, arguments, entry, shared, options, ptx)


def kernel(
    source: str,
    grid: Shape,
    block: Shape,
    *,
    entry: str = "k",
    shared: int = 0,
    options: tuple[str, ...] = (),
) -> Callable[
    [Callable[[np.random.Generator], Arguments]], Callable[[np.random.Generator], Arguments]
]:
    """Registers the function below, which makes the arguments, as a case of its name."""

    def register(
        body: Callable[[np.random.Generator], Arguments],
    ) -> Callable[[np.random.Generator], Arguments]:
        add(
            body.__name__,
            source,
            grid,
            block,
            body,
            entry=entry,
            shared=shared,
            options=options,
        )
        return body

    return register


def triple(shape: Shape) -> tuple[int, int, int]:
    parts = (shape,) if isinstance(shape, int) else tuple(shape)
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


class Buffer:
    """Device memory with the bytes of an array, and a guard behind it."""

    def __init__(self, data: Array) -> None:
        self.size = data.nbytes
        host = np.concatenate(
            [np.ascontiguousarray(data).reshape(-1).view(u1), np.full(GUARD, UNTOUCHED, u1)]
        )
        self.address = int(ok(cu.cuMemAlloc(host.nbytes)))
        ok(cu.cuMemcpyHtoD(self.address, host.ctypes.data, host.nbytes))

    def read(self) -> Array:
        host = np.zeros(self.size + GUARD, u1)
        ok(cu.cuMemcpyDtoH(host.ctypes.data, self.address, host.nbytes))
        assert (host[self.size :] == UNTOUCHED).all(), "written past the end of a buffer"
        return host[: self.size]


def described(argument: Any) -> str:
    """The type of a kernel's argument, and its shape if it is a buffer: "f4[32, 8]"."""
    if isinstance(argument, Out):
        kind = "bf16" if argument.kind == "bf16" else argument.stored().str[1:]
        return f"out {kind}{list(argument.want.shape)}"
    if isinstance(argument, Bound):
        return argument.about
    array = np.asarray(argument)
    kind = array.dtype.str[1:]
    if array.ndim:
        return f"{kind}{list(array.shape)}"
    value = array.item()
    return f"{kind} {value:.6g}" if isinstance(value, float) else f"{kind} {value}"


def run(name: str) -> dict[str, Any]:
    """Run a case in the current context; AssertionError when a result is wrong.

    The answer has what it was given (`inputs`, as `described`), and for each output, in their
    order, the errors that are allowed and how near it came."""
    case = CASES[name]
    arguments = case.arguments(np.random.default_rng(zlib.crc32(name.encode())))
    ptx = case.ptx or compile_cuda(case.source, case.options)
    module = ok(cu.cuModuleLoadData(ptx.encode() + b"\0"))
    function = ok(cu.cuModuleGetFunction(module, case.entry.encode()))
    buffers: list[tuple[Buffer, Out | Array]] = []
    ends: list[Callable[[], None]] = []
    values = bytearray()
    places = []
    for argument in arguments:
        value = argument
        if isinstance(argument, Out):
            empty = np.zeros(argument.want.shape, argument.stored())
            data = empty if argument.start is None else argument.start
            assert data.dtype == argument.stored() and data.shape == argument.want.shape
            buffers.append((Buffer(data), argument))
            value = u8(buffers[-1][0].address)
        elif isinstance(argument, Bound):
            number, end = argument.make()
            ends.append(end)
            value = u8(number)
        elif isinstance(argument, np.ndarray) and argument.ndim > 0:
            buffers.append((Buffer(argument), argument))
            value = u8(buffers[-1][0].address)
        places.append(len(values))
        values += value.tobytes() + bytes(-value.nbytes % 16)
    block = np.frombuffer(bytes(values) or b"\0", u1).copy()
    pointers = np.array([block.ctypes.data + at for at in places], u8)
    if case.shared > 48 << 10:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(function, attribute, case.shared))
    grid, shape = triple(case.grid), triple(case.block)
    ok(cu.cuLaunchKernel(function, *grid, *shape, case.shared, 0, pointers.ctypes.data, 0))
    ok(cu.cuCtxSynchronize())
    outputs = []
    for buffer, argument in buffers:
        got = buffer.read()
        if isinstance(argument, Out):
            near = argument.check(got.view(argument.stored()).reshape(argument.want.shape))
            outputs.append({"allowed": argument.allowed(), **asdict(near)})
        else:
            same_bits(got, np.ascontiguousarray(argument).reshape(-1).view(u1))
        ok(cu.cuMemFree(buffer.address))
    for end in ends:
        end()
    ok(cu.cuModuleUnload(module))
    return {"inputs": [described(argument) for argument in arguments], "outputs": outputs}
