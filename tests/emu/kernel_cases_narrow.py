"""f16 and bf16 arithmetic, alone and in pairs, and conversions between all types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Out,
    add,
    f2,
    f4,
    f8,
    from_bf16,
    i4,
    i8,
    kernel,
    to_bf16,
    u1,
    u2,
    u4,
)

Generator = np.random.Generator
SPECIAL = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 6.1e-5, 65504, 0.333], f2)


def halves(rng: Generator, n: int) -> Array:
    """f16 of every size and class, subnormals included."""
    values = rng.integers(0, 1 << 16, n, dtype=u2).view(f2)
    values[: len(SPECIAL)] = SPECIAL
    return values


HALF = """#include <cuda_fp16.h>
extern "C" __global__ void k(__half* o, const __half* pa, const __half* pb, const __half* pc) {
    int t = threadIdx.x;
    __half a = pa[t], b = pb[t], c = pc[t];
    o[t] = __hadd_rn(a, b); o[512 + t] = __hsub_rn(a, b); o[1024 + t] = __hmul_rn(a, b);
    o[1536 + t] = __hfma(a, b, c); o[2048 + t] = __hfma_sat(a, b, c);
    o[2560 + t] = __hfma_relu(a, b, c); o[3072 + t] = __hadd_sat(a, b);
    o[3584 + t] = __habs(__hneg(a));
}"""


@kernel(HALF, 1, 512)
def f16_arithmetic(rng: Generator) -> Arguments:
    a, b, c = (halves(rng, 512) for _ in range(3))
    b[:12] = np.roll(SPECIAL, 5)
    # Just above the middle of two f16, by less than f32 can tell.
    a[12], b[12], c[12] = 683 / 512, 0.75, 2.0**-24
    with np.errstate(all="ignore"):
        fused = (a.astype(f8) * b + c).astype(f2)  # from longdouble, numpy rounds twice
        saturated = np.where(fused > 0, np.minimum(fused, f2(1)), f2(0))
        relu = np.where(fused <= 0, f2(0), fused)
        total = a + b
        top = np.where(total > 0, np.minimum(total, f2(1)), f2(0))
        want = [total, a - b, a * b, fused, saturated, relu, top, np.abs(a)]
    return [Out(np.stack(want).astype(f2)), a, b, c]


@kernel(
    """#include <cuda_fp16.h>
    extern "C" __global__ void k(__half2* o, unsigned* flags, const __half2* pa,
                                 const __half2* pb) {
        int t = threadIdx.x;
        __half2 a = pa[t], b = pb[t];
        o[t] = __hadd2_rn(a, b); o[256 + t] = __hmul2_rn(a, b); o[512 + t] = __hmin2_nan(a, b);
        o[768 + t] = __hmax2(a, b); o[1024 + t] = __hgt2(a, b); o[1280 + t] = __hneu2(a, b);
        o[1536 + t] = __hisnan2(a); o[1792 + t] = __hneg2(__lowhigh2highlow(a));
        flags[t] = __hgt2_mask(a, b);
        flags[256 + t] = __hbgeu2(a, b) * 2 + __hgt(__low2half(a), __high2half(b));
    }""",
    1,
    256,
)
def f16_pairs(rng: Generator) -> Arguments:
    a, b = halves(rng, 512).reshape(-1, 2), halves(rng, 512).reshape(-1, 2)
    b[:12] = a[:12]
    nan = np.isnan(a) | np.isnan(b)
    with np.errstate(all="ignore"):
        zero = (a == 0) & (b == 0)
        low = np.where(nan, f2(np.nan), np.where(zero & np.signbit(a), a, np.minimum(a, b)))
        high = np.where(zero & ~np.signbit(a), a, np.fmax(a, b))
        high = np.where(zero & np.signbit(a), b, high)
        rows = [a + b, a * b, low, high, (a > b).astype(f2), (~(a == b)).astype(f2)]
        rows += [np.isnan(a).astype(f2), (-a)[:, ::-1]]
        mask = np.where(a > b, 0xFFFF, 0).astype(u2)
        flags = (~(a < b)).all(1) * 2 + (a[:, 0] > b[:, 1])
    want = np.stack([row.astype(f2) for row in rows])
    return [Out(want), Out(np.stack([mask.view(u4)[:, 0], flags.astype(u4)])), a, b]


def add_f16_function(name: str, body: str, reference: Callable[[Array], Array],
                     low: float, high: float, **errors: Any) -> None:  # fmt: skip
    source = f"""#include <cuda_fp16.h>
    __device__ __half f(__half a) {{
        unsigned short r, x = __half_as_ushort(a);
        asm("{body}.f16 %0, %1;" : "=h"(r) : "h"(x)); return __ushort_as_half(r); }}
    extern "C" __global__ void k(__half* o, const __half* a) {{
        int t = threadIdx.x; o[t] = {"f(a[t])" if "." in body else f"{body}(a[t])"}; }}"""

    def arguments(rng: Generator) -> Arguments:
        a = rng.uniform(low, high, 512).astype(f2)
        return [Out(reference(a.astype(f8)), "f2", **errors), a]

    add(f"f16_{name}", source, 1, 512, arguments)


add_f16_function("ex2", "ex2.approx", np.exp2, -12, 15, relative=2**-9.9)
add_f16_function("tanh", "tanh.approx", np.tanh, -5, 5, absolute=2**-10.987)
add_f16_function("exponential", "hexp", np.exp, -8, 10, ulps=1)
add_f16_function("logarithm", "hlog", np.log, 0.01, 60000, ulps=1, absolute=2**-11)
add_f16_function("root", "hsqrt", np.sqrt, 0, 60000, ulps=1)
add_f16_function("sine", "hsin", np.sin, -3, 3, ulps=2)


@kernel(
    """#include <cuda_bf16.h>
    extern "C" __global__ void k(unsigned* o, const unsigned* pa, const unsigned* pb,
                                 const unsigned* pc) {
        int t = threadIdx.x;
        unsigned a = pa[t], b = pb[t], c = pc[t], r;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); o[t] = r;
        asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
        o[256 + t] = r;
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); o[512 + t] = r;
        asm("neg.bf16x2 %0, %1;" : "=r"(r) : "r"(a)); o[768 + t] = r;
        asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(a)); o[1024 + t] = r;
        __nv_bfloat162 s = __hmul2(*(__nv_bfloat162*)&a, *(__nv_bfloat162*)&b);
        o[1280 + t] = *(unsigned*)&s;
    }""",
    1,
    256,
)
def bf16_pairs(rng: Generator) -> Arguments:
    def values() -> Array:
        return to_bf16((rng.standard_normal(512) * 2.0 ** rng.integers(-12, 12, 512)).astype(f4))

    a, b, c = values(), values(), values()
    a[:4], b[:4] = [0x7F80, 0, 0x8000, 0x0001], [0, 0x7FC0, 0x3F80, 0x3F80]
    # Just below the middle of two bf16, by less than f32 can tell.
    a[4], b[4], c[4] = to_bf16(np.array([37 / 32, 7 / 8, -(2.0**-26)], f4))
    x, y, z = from_bf16(a).astype(f8), from_bf16(b).astype(f8), from_bf16(c).astype(f8)

    def once(exact: Array) -> Array:  # f64 to bf16 without a second rounding
        near = exact.astype(f4)
        bits = near.view(u4)
        tied = (bits & 0xFFFF) == 0x8000
        away = np.where(exact > near, 1, -1) * np.where(near < 0, -1, 1)
        bits = np.where(tied & (exact != near), bits + away.astype(u4), bits)
        return np.where(np.isnan(exact), u2(0x7FFF), to_bf16(bits.astype(u4).view(f4)))

    with np.errstate(all="ignore"):
        fused, product = once(x * y + z), once(x * y)
        relu = np.where((fused & 0x8000) != 0, u2(0), fused)
        most = np.where(np.isnan(x) | np.isnan(y), u2(0x7FFF), np.where(x > y, a, b))
    zero = (x == 0) & (y == 0)
    most = np.where(zero, a & b, most)
    want = [fused, relu, most, a ^ u2(0x8000), a & u2(0x7FFF), product]
    pairs = [np.ascontiguousarray(w.astype(u2)).view(u4) for w in want]
    return [Out(np.stack(pairs)), a.view(u4), b.view(u4), c.view(u4)]


# Conversions: for each the instruction, the C type and constraint of its result, and a reference.
def to_narrow(x: Array, kind: str, mode: str) -> Array:
    """Bits of the f16 or bf16 that f32 values round to."""
    values = np.arange(0x7C01 if kind == "f16" else 0x7F81, dtype=u2)
    every = (values.view(f2) if kind == "f16" else from_bf16(values)).astype(f8)
    top = len(every) - 1
    every[top] = 2 * every[top - 1] - every[top - 2]  # where the next number would be
    magnitude = np.abs(x.astype(f8))
    below = np.clip(np.searchsorted(every, magnitude, side="right") - 1, 0, top - 1)
    rest, gap = magnitude - every[below], every[below + 1] - every[below]
    negative = np.signbit(x)
    up = {
        "rn": (rest * 2 > gap) | ((rest * 2 == gap) & (below % 2 == 1)),
        "rz": np.zeros(len(x), bool),
        "ru": (rest > 0) & ~negative,
        "rd": (rest > 0) & negative,
    }[mode]
    bits = np.where(np.isinf(x), top, np.minimum(below + up, top))
    return np.where(np.isnan(x), 0x7FFF, bits | negative * 0x8000).astype(u2)


def wide_range(rng: Generator, n: int) -> Array:
    x = (rng.standard_normal(n) * 2.0 ** rng.integers(-30, 20, n)).astype(f4)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, -65536, 3.4e38, 2**-25, 3e-8,
             1.0009765625, 1.00048828125, -1.00146484375, 1e-40]  # fmt: skip
    x[: len(edges)] = edges
    return x


@kernel(
    """#include <cuda_fp16.h>
    extern "C" __global__ void k(__half* o, const float* x) {
        int t = threadIdx.x;
        o[t] = __float2half_rn(x[t]); o[512 + t] = __float2half_rz(x[t]);
        o[1024 + t] = __float2half_ru(x[t]); o[1536 + t] = __float2half_rd(x[t]);
    }""",
    1,
    512,
)
def conversion_of_f32_to_f16(rng: Generator) -> Arguments:
    x = wide_range(rng, 512)
    return [Out(np.stack([to_narrow(x, "f16", m) for m in ("rn", "rz", "ru", "rd")]).view(f2)), x]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const float* x) {
        int t = threadIdx.x;
        float a = x[t], b = x[511 - t];
        unsigned r;
        unsigned short h;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b)); o[t] = r;
        asm("cvt.rz.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b)); o[512 + t] = r;
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b)); o[1024 + t] = r;
        asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(a), "f"(b)); o[1536 + t] = r;
        asm("cvt.rz.relu.bf16.f32 %0, %1;" : "=h"(h) : "f"(a)); o[2048 + t] = h;
    }""",
    1,
    512,
)
def conversion_of_f32_to_packed_pairs(rng: Generator) -> Arguments:
    x = wide_range(rng, 512)

    def pair(bits: Array) -> Array:
        return bits.astype(u4) << 16 | bits[::-1]

    half = to_narrow(x, "f16", "rn")
    # What rounds to a negative number or to zero becomes +0; NaN stays.
    relu = np.where((half & 0x8000) != 0, u2(0), half)
    limited = np.where((half & 0x7FFF) == 0x7C00, half - u2(1), half)
    truncated = to_narrow(x, "bf16", "rz")
    want = [pair(to_narrow(x, "bf16", "rn")), pair(truncated), pair(relu), pair(limited)]
    want.append(np.where((truncated & 0x8000) != 0, u2(0), truncated).astype(u4))
    return [Out(np.stack(want)), x]


@kernel(
    """extern "C" __global__ void k(float* o, const double* x) {
        int t = threadIdx.x;
        o[t] = __double2float_rn(x[t]); o[256 + t] = __double2float_rz(x[t]);
        o[512 + t] = __double2float_ru(x[t]); o[768 + t] = __double2float_rd(x[t]);
    }""",
    1,
    256,
)
def conversion_of_f64_to_f32(rng: Generator) -> Arguments:
    x = rng.standard_normal(256) * 2.0 ** rng.integers(-140, 100, 256)
    x[:6] = [0, -0.0, np.inf, np.nan, 1 + 2**-24, 1 + 2**-24 + 2**-50]
    near = x.astype(f4)
    wide = near.astype(f8)
    low = np.where(wide > x, np.nextafter(near, f4(-np.inf)), near)
    high = np.where(wide < x, np.nextafter(near, f4(np.inf)), near)
    return [Out(np.stack([near, np.where(x < 0, high, low), high, low])), x]


INTEGERS = [(name, np.dtype(f"{name[0].replace('s', 'i')}{int(name[1:]) // 8}"))
            for name in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")]  # fmt: skip
ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_integers(source: str, constraint: str) -> str:
    """Every rounding to every integer type; saturating, as all these conversions are."""
    statements = ""
    for row, (name, kind) in enumerate(INTEGERS):
        letter, c = ("l", "long long") if kind.itemsize == 8 else ("r", "int")
        for mode in ROUNDINGS:
            statements += f"""{{ {c} r;
                asm("cvt.{mode}.{name}.{source} %0, %1;" : "={letter}"(r) : "{constraint}"(v));
                o[{row * 4 + list(ROUNDINGS).index(mode)} * n + t] = r; }}\n"""
    c = {"f": "float", "d": "double", "h": "unsigned short"}[constraint]
    return f"""extern "C" __global__ void k(long long* o, const {c}* x, int n) {{
        int t = threadIdx.x; if (t >= n) return; {c} v = x[t];\n{statements} }}"""


def add_float_to_integers(
    source: str, constraint: str, values: Callable[[Generator], Array]
) -> None:
    def arguments(rng: Generator) -> Arguments:
        x = values(rng)
        exact = x.astype(f8)
        rows = []
        for _, kind in INTEGERS:
            low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
            for rounding in ROUNDINGS.values():
                rounded = [min(max(int(v), low), high) for v in rounding(exact)]
                if kind.itemsize < 8:  # a register of 32 bits, extended with its sign
                    rounded = [((v & 0xFFFFFFFF) ^ 1 << 31) - (1 << 31) for v in rounded]
                rows.append([v & (1 << 64) - 1 for v in rounded])
        return [Out(np.array(rows, np.uint64).view(i8)), x, i4(len(x))]

    add(f"conversion_of_{source}_to_integers", float_to_integers(source, constraint), 1, 256,
        arguments)  # fmt: skip


def numbers(rng: Generator, kind: Any) -> Array:
    sizes = 2.0 ** rng.integers(-3, 15 if kind is f2 else 70, 240)
    x = (rng.standard_normal(240) * sizes).astype(kind)
    x[:8] = np.array([0, -0.0, 0.5, 1.5, -2.5, 127.5, -128.5, 255.5], kind)
    return x


add_float_to_integers("f32", "f", lambda rng: numbers(rng, f4))
add_float_to_integers("f64", "d", lambda rng: numbers(rng, f8))
add_float_to_integers("f16", "h", lambda rng: numbers(rng, f2))


@kernel(
    """extern "C" __global__ void k(float* o, const long long* s, const int* i) {
        int t = threadIdx.x;
        unsigned long long u = s[t];
        o[t] = __ll2float_rn(s[t]); o[256 + t] = __ll2float_rz(s[t]);
        o[512 + t] = __ull2float_ru(u); o[768 + t] = __ull2float_rd(u);
        o[1024 + t] = __int2float_rn(i[t]); o[1280 + t] = __int2float_rd(i[t]);
        o[1536 + t] = __uint2float_ru(i[t]); o[1792 + t] = __uint2float_rz(i[t]);
        float r;
        asm("cvt.rn.sat.f32.s32 %0, %1;" : "=f"(r) : "r"(i[t] >> 30)); o[2048 + t] = r;
    }""",
    1,
    256,
)
def conversion_of_integers_to_f32(rng: Generator) -> Arguments:
    s = rng.integers(-(1 << 63), 1 << 63, 256) >> rng.integers(0, 60, 256)
    i = rng.integers(-(1 << 31), 1 << 31, 256).astype(i4)
    s[:3], i[:3] = [0, -(1 << 63), (1 << 63) - 1], [0, -(1 << 31), (1 << 31) - 1]

    def rounded(x: Array, mode: str) -> Array:
        near = x.astype(np.longdouble).astype(f4)
        wide, exact = near.astype(np.longdouble), x.astype(np.longdouble)
        low = np.where(wide > exact, np.nextafter(near, f4(-np.inf)), near)
        high = np.where(wide < exact, np.nextafter(near, f4(np.inf)), near)
        return {"rn": near, "rd": low, "ru": high, "rz": np.where(exact < 0, high, low)}[mode]

    u, j = s.view(np.uint64), i.view(u4)
    want = [rounded(s, "rn"), rounded(s, "rz"), rounded(u, "ru"), rounded(u, "rd"),
            rounded(i, "rn"), rounded(i, "rd"), rounded(j, "ru"), rounded(j, "rz"),
            np.clip(i >> 30, 0, 1)]  # fmt: skip
    return [Out(np.stack(want).astype(f4)), s, i]


@kernel(
    """extern "C" __global__ void k(unsigned short* o, const int* i) {
        int t = threadIdx.x, v = i[t];
        unsigned short h;
        asm("cvt.rn.f16.s32 %0, %1;" : "=h"(h) : "r"(v)); o[t] = h;
        asm("cvt.rz.f16.s32 %0, %1;" : "=h"(h) : "r"(v)); o[256 + t] = h;
        asm("cvt.rp.f16.s32 %0, %1;" : "=h"(h) : "r"(v)); o[512 + t] = h;
        asm("cvt.rn.sat.f16.s32 %0, %1;" : "=h"(h) : "r"(v)); o[768 + t] = h;
        unsigned short low = v, finite = v & 0x7bff;
        asm("cvt.rni.f16.f16 %0, %1;" : "=h"(h) : "h"(finite)); o[1024 + t] = h;
        asm("cvt.sat.f16.f16 %0, %1;" : "=h"(h) : "h"(low)); o[1280 + t] = h;
    }""",
    1,
    256,
)
def conversion_of_integers_to_f16(rng: Generator) -> Arguments:
    i = (rng.integers(-(1 << 31), 1 << 31, 256) >> rng.integers(8, 31, 256)).astype(i4)
    i[:4] = [0, 1, 70000, -70000]
    x = i.astype(f4)  # exact: no more than 24 bits
    half = (i & 0x7BFF).astype(u2).view(f2)
    own = (i & 0xFFFF).astype(u2).view(f2)
    with np.errstate(invalid="ignore"):
        saturated = np.where(own > 0, np.minimum(own, f2(1)), f2(0))
    want = [to_narrow(x, "f16", "rn"), to_narrow(x, "f16", "rz"), to_narrow(x, "f16", "ru"),
            np.clip(i, 0, 1).astype(f2).view(u2), np.rint(half).view(u2),
            saturated.astype(f2).view(u2)]  # fmt: skip
    return [Out(np.stack(want)), i]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const float* x) {
        int t = threadIdx.x;
        unsigned r;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x[t])); o[t] = r;
        asm("cvt.rna.satfinite.tf32.f32 %0, %1;" : "=r"(r) : "f"(x[t])); o[256 + t] = r;
    }""",
    1,
    256,
)
def conversion_of_f32_to_tf32(rng: Generator) -> Arguments:
    x = (rng.standard_normal(256) * 2.0 ** rng.integers(-100, 100, 256)).astype(f4)
    x[:4] = np.array([0x3F801000, 0x3F800FFF, 0xBF803000, 0x7F7FFFFF], u4).view(f4)
    bits = x.view(u4) + 0x1000 & u4(0xFFFFE000)
    return [Out(np.stack([bits, np.where(bits == 0x7F800000, 0x7F7FE000, bits).astype(u4)])), x]


@kernel(
    """extern "C" __global__ void k(unsigned char* o, const float* x, const float* scale, int n) {
        int i = blockIdx.x * 128 + threadIdx.x;
        if (i < n) { int v = __float2int_rn(x[i] / *scale) + 128; o[i] = max(0, min(255, v)); }
    }""",
    4,
    128,
)
def quantisation_to_bytes(rng: Generator) -> Arguments:
    x = (rng.standard_normal(501) * 3).astype(f4)
    scale = np.array([0.021], f4)
    return [Out(np.clip(np.rint(x / scale) + 128, 0, 255).astype(u1)), x, scale, i4(501)]
