"""Elementwise kernels: arithmetic, bits, approximations, functions of the math library."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emu.kernel_lib import (
    NO_FMA,
    Arguments,
    Array,
    Out,
    add,
    f4,
    f8,
    i4,
    i8,
    kernel,
    u1,
    u4,
)

Generator = np.random.Generator
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 1.17549435e-38,
     3.4028235e38, -3.4028235e38, 1 + 2**-23, 1 - 2**-24, 16777217.0, 0.1, -0.5],
    f4,
)  # fmt: skip


def floats(rng: Generator, n: int, low: int = -20, high: int = 20) -> Array:
    """f32 of all sizes between 2**low and 2**high, both signs."""
    sign = rng.choice(np.array([-1, 1]), n)
    return (sign * (1 + rng.random(n)) * 2.0 ** rng.integers(low, high, n)).astype(f4)


def pairs(rng: Generator, n: int) -> tuple[Array, Array]:
    """n random pairs, then each special value with each."""
    count = len(SPECIAL)
    a, b = np.repeat(SPECIAL, count), np.tile(SPECIAL, count)
    return np.concatenate([floats(rng, n), a]), np.concatenate([floats(rng, n), b])


def elementwise(types: str, body: str, prelude: str = "") -> str:
    """A kernel `o[i] = body` for i below n; types of the output and of the inputs a, b, c."""
    out, *inputs = types.split(",")
    names = "".join(f", const {t}* a{k}" for k, t in enumerate(inputs))
    loads = "".join(f"{t} {'abc'[k]} = a{k}[i]; " for k, t in enumerate(inputs))
    return f"""{prelude}
extern "C" __global__ void k({out}* o, int n{names}) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {{ {loads} o[i] = {body}; }}
}}"""


def add_elementwise(
    name: str,
    types: str,
    body: str,
    arguments: Callable[[Generator], tuple[Out, tuple[Array, ...]]],
    prelude: str = "",
    options: tuple[str, ...] = (),
) -> None:
    """A case with 1000 random elements at most, and a last block that is not full."""

    def complete(rng: Generator) -> Arguments:
        out, inputs = arguments(rng)
        return [out, i4(out.want.size), *inputs]

    source = elementwise(types, body, prelude)
    add(name, source, 12, 160, complete, options=options)


# Single operations of IEEE arithmetic: the bits are defined.
def fmin(a: Array, b: Array) -> Array:
    signed = np.where(np.signbit(a), a, b)  # numpy leaves the sign of a zero open
    return np.where((a == 0) & (b == 0), signed, np.fmin(a, b))


EXACT: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "add": ("a + b", lambda a, b: a + b),
    "subtract": ("a - b", lambda a, b: a - b),
    "multiply": ("a * b", lambda a, b: a * b),
    "divide": ("a / b", lambda a, b: a / b),
    "square_root": ("sqrtf(a)", lambda a, b: np.sqrt(a)),
    "reciprocal": ("__frcp_rn(b)", lambda a, b: f4(1) / b),
    "minimum": ("fminf(a, b)", fmin),
    "compare_and_select": ("a < b ? a : (a != b ? b : -a)",
                           lambda a, b: np.where(a < b, a, np.where(a != b, b, -a))),
    "floor_and_remainder": ("floorf(a) - fmodf(a, b)", lambda a, b: np.floor(a) - np.fmod(a, b)),
    "clamp": ("__saturatef(a * b)",
              lambda a, b: np.where((p := a * b) > 0, np.minimum(p, f4(1)), f4(0))),
}  # fmt: skip


def add_exact(name: str, body: str, reference: Callable[[Array, Array], Array]) -> None:
    def arguments(rng: Generator) -> tuple[Out, tuple[Array, ...]]:
        a, b = pairs(rng, 700)
        with np.errstate(all="ignore"):
            return Out(reference(a, b).astype(f4)), (a, b)

    add_elementwise(f"f32_{name}", "float,float,float", body, arguments, options=NO_FMA)


for _name, (_body, _reference) in EXACT.items():
    add_exact(_name, _body, _reference)


def nearest(exact: Fraction, mode: str) -> float:
    """The f32 that an exact value rounds to; no overflow, no subnormals."""
    if exact == 0:
        return 0.0
    magnitude, exponent = abs(exact), 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - 23)
    kept, rest = divmod(magnitude, step)
    negative = exact < 0
    up = {"rn": rest * 2 > step or (rest * 2 == step and kept % 2 == 1), "rz": False,
          "ru": rest > 0 and not negative, "rd": rest > 0 and negative}[mode]  # fmt: skip
    value = float((kept + up) * step)
    return -value if negative else value


def directed(operation: str, exact: Callable[..., Fraction]) -> None:
    modes = ("rn", "rz", "ru", "rd")
    body = (
        f"""extern "C" __global__ void k(float* o, const float* a, const float* b,
        const float* c) {{
        int t = threadIdx.x;
        {"".join(f"o[{m} * 256 + t] = __f{operation}_{name};" for m, name in enumerate(modes))}
    }}""".replace("_rn;", "_rn(ARGS);")
        .replace("_rz;", "_rz(ARGS);")
        .replace("_ru;", "_ru(ARGS);")
    )
    body = body.replace("_rd;", "_rd(ARGS);").replace(
        "ARGS", "a[t], b[t], c[t]" if operation == "maf" else "a[t], b[t]"
    )

    def arguments(rng: Generator) -> Arguments:
        a, b, c = (floats(rng, 256, -4, 4) for _ in range(3))
        # Sums that cancel, and addends far below the product: only one rounding gets them right.
        c[:64] = -(a[:64].astype(f8) * b[:64]).astype(f4)
        c[64:128] *= f4(2.0**-30)
        rows = [tuple(map(Fraction, map(float, row))) for row in zip(a, b, c, strict=True)]
        want = [[nearest(exact(*row), mode) for row in rows] for mode in modes]
        zero = np.array(want, f4)
        if operation == "maf":
            zero[3][zero[3] == 0] = -0.0  # a sum that cancels is -0 when rounded down
        return [Out(zero), a, b, c]

    add(f"f32_rounding_of_{operation}", body, 1, 256, arguments)


directed("add", lambda a, b, c: a + b)
directed("mul", lambda a, b, c: a * b)
directed("div", lambda a, b, c: a / b)
directed("maf", lambda a, b, c: a * b + c)


# Approximations: the errors are those of the PTX ISA.
def add_approximation(
    name: str,
    instruction: str,
    reference: Callable[..., Array],
    inputs: Callable[[Generator], tuple[Array, ...]],
    **errors: Any,
) -> None:
    def arguments(rng: Generator) -> tuple[Out, tuple[Array, ...]]:
        values = inputs(rng)
        with np.errstate(all="ignore"):
            want = reference(*(x.astype(f8) for x in values))
        return Out(np.asarray(want, f8), "f4", **errors), values

    count = instruction.count("%") - 1
    operands = ", ".join(f'"f"({x})' for x in "ab"[:count])
    prelude = f"""__device__ float f(float a, float b) {{
        float r; asm("{instruction}" : "=f"(r) : {operands}); return r; }}"""
    types = "float" + ",float" * count
    add_elementwise(f"approximate_{name}", types, f"f(a, {'ab'[count - 1]})", arguments, prelude)


def positive(rng: Generator) -> tuple[Array]:
    extra = np.array([0, np.inf, np.nan, 1, 4, 0.25, 3.4e38, 1.2e-38], f4)
    return (np.concatenate([np.abs(floats(rng, 900, -120, 120)), extra]),)


def any_size(rng: Generator) -> tuple[Array]:
    extra = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5], f4)
    return (np.concatenate([floats(rng, 900, -100, 100), extra]),)


def between(low: float, high: float) -> Callable[[Generator], tuple[Array]]:
    def inputs(rng: Generator) -> tuple[Array]:
        return (np.concatenate([rng.uniform(low, high, 900), [0, low, high, np.nan]]).astype(f4),)

    return inputs


def quotients(rng: Generator) -> tuple[Array, Array]:
    return floats(rng, 900, -60, 60), floats(rng, 900, -60, 60)


add_approximation("ex2", "ex2.approx.f32 %0, %1;", np.exp2, between(-125, 127), relative=2**-22)
add_approximation("ex2_flushed", "ex2.approx.ftz.f32 %0, %1;",
                  lambda a: np.where(a < -126, 0, np.exp2(a)), between(-150, 140),
                  relative=2**-22)  # fmt: skip
add_approximation("lg2", "lg2.approx.f32 %0, %1;", np.log2, positive,
                  relative=2**-22, absolute=2**-22)  # fmt: skip
add_approximation("rsqrt", "rsqrt.approx.f32 %0, %1;", lambda a: 1 / np.sqrt(a), positive,
                  relative=2**-22.4)  # fmt: skip
add_approximation("sqrt", "sqrt.approx.f32 %0, %1;", np.sqrt, positive, relative=2**-22)
add_approximation("rcp", "rcp.approx.f32 %0, %1;", lambda a: 1 / a, any_size, ulps=1)
add_approximation("sin", "sin.approx.f32 %0, %1;", np.sin, between(-3.14, 3.14), absolute=2**-20.5)
add_approximation("cos", "cos.approx.f32 %0, %1;", np.cos, between(-3.14, 3.14), absolute=2**-20.5)
add_approximation("tanh", "tanh.approx.f32 %0, %1;", np.tanh, between(-12, 12), relative=2**-10.98)
add_approximation("division", "div.approx.f32 %0, %1, %2;", lambda a, b: a / b, quotients, ulps=2)
add_approximation("full_division", "div.full.f32 %0, %1, %2;", lambda a, b: a / b, quotients,
                  ulps=2)  # fmt: skip

# Functions of the math library: the errors are those of the CUDA C++ guide, which compares with the
# rounded result, so half a unit more than the exact value is meant.
FUNCTIONS: dict[str, tuple[str, Callable[[Array], Array], float, float, float]] = {
    "expf": ("expf(a)", np.exp, -80, 80, 2),
    "logf": ("logf(a)", np.log, 1e-30, 1e30, 1),
    "log1pf": ("log1pf(a)", np.log1p, -0.99, 100, 1),
    "expm1f": ("expm1f(a)", np.expm1, -10, 10, 1),
    "tanhf": ("tanhf(a)", np.tanh, -9, 9, 2),
    "sinf": ("sinf(a)", np.sin, -1e6, 1e6, 2),
    "cosf": ("cosf(a)", np.cos, -10, 10, 2),
    "atanf": ("atanf(a)", np.arctan, -50, 50, 2),
    "cbrtf": ("cbrtf(a)", np.cbrt, -1e20, 1e20, 1),
    "sigmoid": ("1.f / (1.f + expf(-a))", lambda a: 1 / (1 + np.exp(-a)), -20, 20, 4),
}  # fmt: skip


def add_function(name: str, body: str, reference: Any, low: float, high: float, n: float) -> None:
    def arguments(rng: Generator) -> tuple[Out, tuple[Array, ...]]:
        a = rng.uniform(low, high, 1000).astype(f4)
        return Out(reference(a.astype(f8)), "f4", ulps=n + 0.5), (a,)

    add_elementwise(f"function_{name}", "float,float", body, arguments)


for _name, (_body, _function, _low, _high, _ulps) in FUNCTIONS.items():
    add_function(_name, _body, _function, _low, _high, _ulps)


@kernel(
    """extern "C" __global__ void k(double* o, const double* x) {
        int t = blockIdx.x * 128 + threadIdx.x;
        double v = x[t];
        o[t] = exp(v); o[512 + t] = log(fabs(v)); o[1024 + t] = sin(v); o[1536 + t] = tanh(v);
        o[2048 + t] = cbrt(v); o[2560 + t] = rsqrt(fabs(v)); o[3072 + t] = pow(fabs(v), 1.25);
    }""",
    4,
    128,
)
def f64_functions(rng: Generator) -> Arguments:
    x = rng.standard_normal(512) * 30
    p = np.abs(x)
    want = [np.exp(x), np.log(p), np.sin(x), np.tanh(x), np.cbrt(x), 1 / np.sqrt(p), p**1.25]
    return [Out(np.stack(want), ulps=3), x]


@kernel(
    """extern "C" __global__ void k(double* o, const double* a, const double* b) {
        int t = blockIdx.x * 128 + threadIdx.x;
        o[t] = a[t] / b[t]; o[512 + t] = sqrt(fabs(a[t])); o[1024 + t] = __drcp_rn(b[t]);
        o[1536 + t] = __dadd_rn(__dmul_rn(a[t], b[t]), 1.0); o[2048 + t] = fmod(a[t], b[t]);
        o[2560 + t] = rint(a[t]) + trunc(b[t]);
    }""",
    4,
    128,
    options=NO_FMA,
)
def f64_arithmetic(rng: Generator) -> Arguments:
    a, b = rng.standard_normal(512) * 1e5, rng.standard_normal(512)
    a[:3], b[:3] = [np.inf, 5e-324, 1e308], [2, 3, 1e-300]
    with np.errstate(all="ignore"):
        want = [
            a / b,
            np.sqrt(np.abs(a)),
            1 / b,
            a * b + 1,
            np.fmod(a, b),
            np.rint(a) + np.trunc(b),
        ]
    return [Out(np.stack(want)), a, b]


@kernel(
    """extern "C" __global__ void k(float* y, const float* x, float a, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
            y[i] = __fmaf_rn(a, x[i], y[i]);
    }""",
    3,
    96,
)
def saxpy_with_a_grid_stride(rng: Generator) -> Arguments:
    x, y = floats(rng, 1003, -10, 10), floats(rng, 1003, -10, 10)
    want = (x.astype(np.longdouble) * f8(f4(2.7)) + y).astype(f4)
    return [Out(want, start=y), x, f4(2.7), i4(1003)]


@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int n) {
        int i = blockIdx.x * 128 + threadIdx.x;
        if (i < n) o[i] = 0.5f * x[i] * (1.f + erff(x[i] * 0.70710678f));
    }""",
    8,
    128,
)
def gelu(rng: Generator) -> Arguments:
    from math import erf

    x = np.concatenate([rng.uniform(-4, 8, 990), [0, -0.0, np.inf, np.nan]]).astype(f4)
    half = 0.5 * x.astype(f8)
    with np.errstate(invalid="ignore"):
        want = half * np.array([1 + erf(v * f4(0.70710678)) for v in x])
    return [Out(want, "f4", ulps=8, scale=np.abs(half)), x, i4(len(x))]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const unsigned* a, const unsigned* b) {
        int t = blockIdx.x * 128 + threadIdx.x;
        unsigned x = a[t], y = b[t], r = 0, s = 0, d = 0;
        r ^= __popc(x) * 3u ^ __clz(y) * 5u ^ __brev(x) ^ __ffs(y);
        r += __byte_perm(x, y, 0x2471) + __funnelshift_l(x, y, y) + __funnelshift_rc(x, y, 40);
        asm("bfe.s32 %0, %1, %2, 7;" : "=r"(s) : "r"(x), "r"(y & 31u));
        asm("bfi.b32 %0, %1, %2, 9, 12;" : "=r"(d) : "r"(x), "r"(y));
        r ^= s; r += d;
        asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(s) : "r"(x), "r"(y), "r"(r));
        asm("bfind.shiftamt.s32 %0, %1;" : "=r"(d) : "r"(x));
        o[t] = s + d;
    }""",
    4,
    128,
)
def bit_manipulation(rng: Generator) -> Arguments:
    a, b = (rng.integers(0, 1 << 32, 512, dtype=u4) for _ in range(2))
    a[:4], b[:4] = [0, 0xFFFFFFFF, 0x80000000, 1], [0, 1, 0xFFFFFFFF, 0x80000000]

    def one(x: int, y: int) -> int:
        mask = 0xFFFFFFFF
        r = x.bit_count() * 3 ^ (32 - y.bit_length()) * 5 ^ int(f"{x:032b}"[::-1], 2)
        r ^= (y & -y).bit_length()
        both = (y << 32 | x).to_bytes(8, "little")
        r += int.from_bytes(bytes([both[1], both[7], both[4], both[2]]), "little")
        r += ((y << 32 | x) << (y & 31)) >> 32 & mask
        r = (r + y) & mask
        at = y & 31
        top = x >> min(at + 6, 31) & 1
        field = sum((x >> at + k & 1 if at + k < 32 else top) << k for k in range(7))
        r ^= field - (top << 7) & mask
        r = (r + (y & ~(0xFFF << 9) | (x & 0xFFF) << 9)) & mask
        chosen = x & y | ~x & r
        found = ~x & mask if x >> 31 else x
        return (chosen + (32 - found.bit_length() if found else mask)) & mask

    want = [one(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return [Out(np.array(want, u4)), a, b]


@kernel(
    """extern "C" __global__ void k(int* o, const int* a, const int* b) {
        int t = threadIdx.x, x = a[t], y = b[t];
        o[t] = __dp4a(x, y, 7);
        o[256 + t] = (int)__dp4a((unsigned)x, (unsigned)y, 9u);
        o[512 + t] = __dp2a_lo(x, y, 1);
        o[768 + t] = (int)__dp2a_hi((unsigned)x, (unsigned)y, 2u);
        o[1024 + t] = (int)__vsadu4(x, y);
        o[1280 + t] = (int)__vabsdiffu4(x, y);
        o[1536 + t] = (int)__vsadu2(x, y);
        o[1792 + t] = (int)__vaddss2(x, y);
    }""",
    1,
    256,
)
def packed_integers(rng: Generator) -> Arguments:
    a, b = (rng.integers(-(1 << 31), 1 << 31, 256).astype(i4) for _ in range(2))
    s, t = a.view(np.int8).reshape(-1, 4).astype(i8), b.view(np.int8).reshape(-1, 4).astype(i8)
    p, q = a.view(u1).reshape(-1, 4).astype(i8), b.view(u1).reshape(-1, 4).astype(i8)
    m, n = a.view(np.int16).reshape(-1, 2).astype(i8), b.view(np.int16).reshape(-1, 2).astype(i8)
    v, w = a.view(np.uint16).reshape(-1, 2).astype(i8), b.view(np.uint16).reshape(-1, 2).astype(i8)
    difference = np.abs(p - q)
    want = [
        (s * t).sum(1) + 7, (p * q).sum(1) + 9, (m * t[:, :2]).sum(1) + 1,
        (v * q[:, 2:]).sum(1) + 2, difference.sum(1), difference.astype(u1).view(i4)[:, 0],
        np.abs(v - w).sum(1), np.clip(m + n, -32768, 32767).astype(np.int16).view(i4)[:, 0],
    ]  # fmt: skip
    return [Out(np.stack([x.astype(i4) for x in want])), a, b]


@kernel(
    """extern "C" __global__ void k(int* o, const int* a, const int* b) {
        int t = threadIdx.x;
        int x = a[t], n = b[t], r;
        o[t] = (int)__fns(x, n & 31, n % 5);
        asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(r) : "r"(n & 63), "r"(x & 63)); o[256 + t] = r;
        asm("bmsk.wrap.b32 %0, %1, %2;" : "=r"(r) : "r"(n), "r"(x)); o[512 + t] = r;
        asm("szext.clamp.s32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(n & 63)); o[768 + t] = r;
        asm("szext.wrap.u32 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(n)); o[1024 + t] = r;
        asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(r) : "r"(x >> 10), "r"(n)); o[1280 + t] = r;
        asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x >> 20), "r"(n), "r"(x));
        o[1536 + t] = r;
        asm("mad24.hi.sat.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(n), "r"(x)); o[1792 + t] = r;
    }""",
    1,
    256,
)
def masks_and_packing(rng: Generator) -> Arguments:
    a = rng.integers(-(1 << 31), 1 << 31, 256).astype(i4)
    b = rng.integers(-200, 400, 256).astype(i4)

    def c_remainder(n: int, d: int) -> int:
        return abs(n) % d * (1 if n >= 0 else -1)

    def nth(x: int, base: int, n: int) -> int:
        bits = [k for k in (range(base, 32) if n >= 0 else range(base, -1, -1)) if x >> k & 1]
        if n == 0:
            return base if x >> base & 1 else -1
        return bits[abs(n) - 1] if len(bits) >= abs(n) else -1

    def extend(x: int, width: int, is_signed: bool) -> int:
        low = x & (1 << width) - 1
        return low - (1 << width) if is_signed and width and low >> (width - 1) else low

    def low24(v: int) -> int:
        return (v & 0xFFFFFF) - ((v & 0x800000) << 1)

    def one(x: int, n: int) -> list[int]:
        wide = low24(x) * low24(n) >> 16
        return [
            nth(x & 0xFFFFFFFF, n & 31, c_remainder(n, 5)),
            ((1 << min(x & 63, 32)) - 1) << min(n & 63, 32),
            ((1 << (x & 31)) - 1) << (n & 31),
            extend(x, min(n & 63, 32), True),
            extend(x, n & 31, False),
            (min(max(x >> 10, -32768), 32767) & 0xFFFF) << 16 | min(max(n, -32768), 32767) & 0xFFFF,
            x << 16 | min(max(x >> 20, 0), 255) << 8 | min(max(n, 0), 255),
            min(max(wide + x, -(1 << 31)), (1 << 31) - 1),
        ]

    rows = [one(x, n) for x, n in zip(a.tolist(), b.tolist(), strict=True)]
    want = np.array([[v & 0xFFFFFFFF for v in row] for row in rows], u4).T
    return [Out(np.ascontiguousarray(want).view(i4)), a, b]


@kernel(
    """extern "C" __global__ void k(long long* o, const long long* a, const long long* b) {
        int t = threadIdx.x;
        long long x = a[t], y = b[t];
        unsigned long long u = x, v = y;
        o[t] = x / y; o[256 + t] = x % y; o[512 + t] = (long long)(u / v);
        o[768 + t] = (long long)(u % v); o[1024 + t] = __mul64hi(x, y);
        o[1280 + t] = (long long)__umul64hi(u, v);
        o[1536 + t] = (x << (y & 63)) ^ (x >> (y & 63)) ^ (long long)(u >> (v & 63));
        o[1792 + t] = __popcll(u) + __clzll(x) * 100 + __ffsll(x) * 10000;
    }""",
    1,
    256,
)
def integers_of_64_bits(rng: Generator) -> Arguments:
    a = rng.integers(-(1 << 63), 1 << 63, 256)
    b = rng.integers(-(1 << 63), 1 << 63, 256) >> rng.integers(0, 62, 256)
    b[b == 0] = 3
    a[:3], b[:3] = [-(1 << 63), 0, (1 << 63) - 1], [7, -5, 1]
    full = (1 << 64) - 1

    def one(x: int, y: int) -> list[int]:
        u, v, n = x & full, y & full, y & 63
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return [
            quotient, x - quotient * y, u // v, u % v, x * y >> 64, u * v >> 64,
            (x << n) ^ (x >> n) ^ (u >> n),
            u.bit_count() + (64 - u.bit_length()) * 100 + (u & -u).bit_length() * 10000,
        ]  # fmt: skip

    rows = [[v & full for v in one(x, y)] for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return [Out(np.ascontiguousarray(np.array(rows, np.uint64).T).view(i8)), a, b]
