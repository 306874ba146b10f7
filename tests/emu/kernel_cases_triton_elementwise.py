"""What Triton compiles: kernels that treat each element alone (triton_elementwise)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Out,
    f2,
    f4,
    f8,
    from_bf16,
    i1,
    i2,
    i4,
    i8,
    to_bf16,
    u1,
    u2,
    u4,
    u8,
)
from tests.emu.triton_kept import add_triton, triton

Generator = np.random.Generator


def add_affine(name: str, kind: str, n: int, grid: int) -> None:
    """scale * x + y, with one rounding or two."""

    def arguments(rng: Generator) -> Arguments:
        x, y = rng.standard_normal(n) * 3, rng.standard_normal(n) * 3
        factor = 0.703125
        if kind == "bf16":
            stored = [to_bf16(v.astype(f4)) for v in (x, y)]
            x, y = (from_bf16(v).astype(f8) for v in stored)
        else:
            stored = [v.astype(kind) for v in (x, y)]
            x, y = (v.astype(f8) for v in stored)
        scale = np.abs(x * factor) + np.abs(y)
        scalar = f8(factor) if kind == "f8" else f4(factor)
        ulps = 2 if kind == "f8" else 1  # the reference is rounded too
        return [Out(x * factor + y, kind, ulps=ulps, scale=scale), *stored, scalar, i4(n)]

    add_triton(name, grid, arguments)


add_affine("affine_f32", "f4", 1001, 2)
add_affine("affine_f32_vectors", "f4", 1616, 2)
add_affine("affine_f64", "f8", 912, 2)
add_affine("affine_f16", "f2", 1616, 2)
add_affine("affine_bf16", "bf16", 1616, 2)


def larger(a: Array, b: Array) -> Array:
    """The number, if one is none; +0 is larger than -0."""
    first = (a > b) | ((a == b) & ~np.signbit(a)) | np.isnan(b)
    return np.where(first, a, b)


def narrow_floats(a: Array, b: Array) -> Array:
    """In f32, which holds sums and products of either type well enough for a second rounding."""
    with np.errstate(all="ignore"):
        smaller = np.where(np.isnan(a) | np.isnan(b), np.nan, -larger(-a, -b))
        clamped = -larger(-larger(a, np.full_like(a, -1)), np.full_like(a, -1.5))
        chosen = np.where(a < b, np.abs(a), -b)
        return np.stack([a + b, a - b, a * b, larger(a, b), smaller, chosen, clamped])


EDGES = [0.0, -0.0, 1.0, -1.0, 1.5, np.inf, -np.inf, np.nan]


def pairs(rng: Generator, n: int) -> tuple[Array, Array]:
    x, y = np.meshgrid(np.array(EDGES, f4), np.array(EDGES, f4))
    more = (rng.standard_normal((2, n - x.size)) * 3).astype(f4)
    return np.concatenate([x.reshape(-1), more[0]]), np.concatenate([y.reshape(-1), more[1]])


@triton(2, "narrow_f16")
def narrow_f16(rng: Generator) -> Arguments:
    a, b = (x.astype(f2) for x in pairs(rng, 401))
    with np.errstate(over="ignore"):
        return [Out(narrow_floats(a.astype(f4), b.astype(f4)).astype(f2)), a, b, i4(401)]


@triton(2, "narrow_bf16")
def narrow_bf16(rng: Generator) -> Arguments:
    a, b = (to_bf16(x) for x in pairs(rng, 400))
    want = narrow_floats(from_bf16(a), from_bf16(b))
    return [Out(want, "bf16", ulps=0.5), a, b, i4(400)]  # as a NaN may be any


def quotient(a: Array, b: Array) -> Array:
    """Towards zero."""
    if a.dtype.kind == "u":
        return a // b
    down = a // b
    return down + ((down * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def integers(kind: Any, n: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        limits = np.iinfo(kind)
        a, b = (rng.integers(limits.min, limits.max, n, kind, True) for _ in range(2))
        small = np.array([0, 1, 2, 3, limits.max, limits.max - 1, limits.min, limits.min + 1])
        a[:64], b[:64] = np.repeat(small.astype(kind), 8), np.tile(small.astype(kind), 8)
        b[n // 2 :] >>= limits.bits // 2
        b[(b == 0) | ((a == limits.min) & (a != 0) & (b + 1 == 0))] = 3  # nobody says what it is
        with np.errstate(over="ignore"):
            q, shift = quotient(a, b), (b & 7).astype(kind)
            want = [a + b, a - b, a * b, q, a - q * b, (a << shift) | (a >> shift), (a & b) ^ ~a,
                    np.minimum(a, b), np.maximum(a, b),
                    np.where(a == b, a, np.abs(b))]  # fmt: skip
        return [Out(np.stack(want).astype(kind)), a, b, i4(n)]

    return arguments


add_triton("integers_s8", 2, integers(i1, 301))
add_triton("integers_u8", 2, integers(u1, 784))
add_triton("integers_s16", 2, integers(i2, 784))
add_triton("integers_s32", 2, integers(i4, 784))
add_triton("integers_u32", 2, integers(u4, 301))
add_triton("integers_s64", 2, integers(i8, 400))
add_triton("integers_u64", 2, integers(u8, 301))


@triton(1)
def high_halves(rng: Generator) -> Arguments:
    n = 201
    x4, y4 = rng.integers(0, 1 << 32, (2, n), u4)
    x8, y8 = rng.integers(0, 1 << 64, (2, n), u8)
    x4[0] = y4[0] = x8[0] = y8[0] = 0
    x4[1], y4[1], x8[1], y8[1] = ~u4(0), ~u4(0), ~u8(0), ~u8(0)
    o4 = [int(a) * int(b) >> 32 for a, b in zip(x4, y4, strict=True)]
    o8 = [int(a) * int(b) >> 64 for a, b in zip(x8, y8, strict=True)]
    return [Out(np.array(o4, u4)), Out(np.array(o8, u8)), x4, x8, y4, y8, i4(n)]


def activations(kind: str, n: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        x = (rng.standard_normal(n) * 3).astype(f4)
        stored = to_bf16(x) if kind == "bf16" else x.astype(kind)
        v = (from_bf16(stored) if kind == "bf16" else stored).astype(f8)
        sigmoid = 1 / (1 + np.exp(-v))
        inner = 0.7978845608 * (v + 0.044715 * v**3)
        want = np.stack([0.5 * v * (1 + np.tanh(inner)), sigmoid, v * sigmoid,
                         np.maximum(v, 0) + np.log1p(np.exp(-np.abs(v))),
                         np.where(v > 0, v, np.exp(v) - 1)])  # fmt: skip
        if kind == "f4":  # differences of numbers near 1, times x
            return [Out(want, kind, ulps=16, scale=np.maximum(np.abs(v), 1)), stored, i4(n)]
        return [Out(want, kind, ulps=0.6, absolute=2**-17), stored, i4(n)]

    return arguments


add_triton("activations_f32", 2, activations("f4", 784))
add_triton("activations_f16", 2, activations("f2", 784))
add_triton("activations_bf16", 2, activations("bf16", 301))


# The instructions' own errors (kernel_cases_elementwise has them one by one) and that of log2(e) x.
@triton(2)
def functions(rng: Generator) -> Arguments:
    x = rng.uniform(-3, 3, 400).astype(f4)
    x[:8] = [1, -1, 2, 0.5, 3, -3, 1e-3, -1e-3]
    v, a = x.astype(f8), np.abs(x).astype(f8)
    want = [np.exp(v), np.exp2(v), np.log(a), np.log2(a), np.sin(v), np.cos(v), np.sqrt(a),
            1 / np.sqrt(a), 3 / v]  # fmt: skip
    return [Out(np.stack(want), "f4", relative=2**-20, absolute=2**-20.5), x, i4(400)]


# Few bits, so that f64 holds the products' sums and no quotient rounds to an integer.
@triton(2, "rounded_f32")
def rounded_functions(rng: Generator) -> Arguments:
    a = (rng.integers(-2047, 2048, 400) / 8).astype(f4)
    b = (rng.integers(8, 2048, 400) / 8).astype(f4)
    b[::3] *= -1
    wide = a.astype(f8)
    want = [np.sqrt(np.abs(a)), a / b, (wide * b + wide).astype(f4), np.floor(a), np.ceil(a),
            np.fmod(a, b) + f4(0)]  # fmt: skip
    return [Out(np.stack(want)), a, b, i4(400)]


@triton(1)
def doubles(rng: Generator) -> Arguments:
    a = rng.integers(-(1 << 20), 1 << 20, 101) / 512
    b = rng.integers(1, 1 << 20, 101) / -512
    b[::2] *= -1
    want = [a / b, np.sqrt(np.abs(a)), a * b + b, np.maximum(a, np.floor(b)), (a > b).astype(f8)]
    return [Out(np.stack(want)), a, b, i4(101)]


def toward_zero(x: Array) -> Array:
    near = x.astype(f2)
    past = np.abs(near.astype(f8)) > np.abs(x.astype(f8))
    return np.where(past, np.nextafter(near, f2(0)), near)


@triton(1)
def conversions_of_f32(rng: Generator) -> Arguments:
    x = (rng.standard_normal(201) * 2.0 ** rng.integers(-30, 6, 201)).clip(-127, 127).astype(f4)
    x[:9] = [0, -0.0, 0.5, -0.5, 126.99999, -127, 1.5, 2.0**-24, 3 * 2.0**-26]
    want: list[Array] = [x.astype(kind) for kind in (i1, i2, i4, i8)]
    want += [np.abs(x).astype(u1), np.concatenate([x.astype(f2), toward_zero(x)]), to_bf16(x)]
    return [*map(Out, want), Out(x.astype(f8)), x, i4(201)]


@triton(1)
def conversions_of_integers(rng: Generator) -> Arguments:
    n = 400
    x1, x2 = rng.integers(-128, 128, n, i1), rng.integers(-(1 << 15), 1 << 15, n, i2)
    x8 = rng.integers(-(1 << 63), 1 << 63, n, i8) >> rng.integers(0, 63, n)
    x4 = rng.integers(0, 1 << 32, n, u4)
    x4[:2] = [~u4(0), 1 << 31]
    want = [x1.astype(f4), x2.astype(f2), to_bf16(x1.astype(f4)), x8.astype(f4), x4.astype(f4)]
    return [*map(Out, want), x1, x2, x8, x4, i4(n)]


def to_e5m2(x: Array) -> Array:
    """Nearest of f16 values that are no NaN: the first byte of the f16, rounded to even."""
    bits = x.view(u2).astype(u4)
    return ((bits + 0x7F + (bits >> 8 & 1)) >> 8).astype(u1)


@triton(1)
def floats_of_8_bits(rng: Generator) -> Arguments:
    n = 512
    x2 = (rng.standard_normal(n) * 2.0 ** rng.integers(-22, 13, n)).astype(f2)
    x2[:7] = [0, -0.0, 57344, -57344, 1.125, 1.375, 2.0**-17]
    x1 = np.tile(np.arange(256), 2).astype(u1)
    x1[(x1 & 0x7F) > 0x7B] = 0  # infinities and NaNs
    v = (x1.astype(u2) << 8).view(f2)
    want = [to_e5m2(x2), to_e5m2(x2), v, v.astype(f4), to_bf16(v.astype(f4))]
    return [*map(Out, want), x2, x2.astype(f4), x1, i4(n)]


# The bits of an f16 without its first of the exponent and its last of the mantissa. Nothing
# becomes the largest.
@triton(1)
def floats_of_8_bits_with_bias_15(rng: Generator) -> Arguments:
    x1 = np.arange(256).astype(u1)
    bits = (x1.astype(u2) & 0x80) << 8 | (x1.astype(u2) & 0x7F) << 7
    want = np.where(x1 & 0x7F == 0x7F, x1 - u1(1), x1)
    return [Out(want), Out(bits.view(f2)), bits.view(f2), x1]


@triton(1)
def predicates(rng: Generator) -> Arguments:
    a, b = rng.integers(-3, 4, (2, 201)).astype(f4)
    a[::17] = np.nan
    given = rng.integers(0, 2, 201).astype(u1)
    want = ((a < b) | (a != a)) & ~((given == 1) & (b >= 1)) ^ (a == b)
    count = np.array([want.sum()], i4)
    return [Out(want.astype(u1)), Out(count), a, b, given, i4(201)]


@triton(2)
def adam(rng: Generator) -> Arguments:
    p, m, g = (rng.standard_normal(400).astype(f4) for _ in range(3))
    v = np.abs(rng.standard_normal(400)).astype(f4)
    rate, beta1, beta2, epsilon = f4(0.01), f4(0.9), f4(0.99), f4(1e-6)
    b1, b2, wide = f8(beta1), f8(beta2), g.astype(f8)
    first = b1 * m + (1 - b1) * wide
    second = b2 * v + (1 - b2) * wide * wide
    step = rate * first / (np.sqrt(second) + f8(epsilon))
    small = np.abs(b1 * m) + np.abs((1 - b1) * wide)
    return [
        Out(p - step, "f4", ulps=2, scale=np.abs(p) + 8 * np.abs(rate * small / np.sqrt(second))),
        Out(first, "f4", ulps=4, scale=small, start=m),
        Out(second, "f4", ulps=8, start=v),
        g, p, rate, beta1, beta2, epsilon, i4(400),
    ]  # fmt: skip


@triton(2)
def collatz_steps(rng: Generator) -> Arguments:
    x = rng.integers(1, 200, 201).astype(i4)

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(3 * n + 1 if n & 1 else n >> 1)

    return [Out(np.array([steps(int(n)) for n in x], i4)), x, i4(201)]


@triton(7)
def powers_by_a_function(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 40), 1 << 40, 7).astype(i8)
    want = [[pow(int(v) + k, e, 1 << 64) for k, e in ((0, 5), (1, 18))] for v in x]
    return [Out(np.array(want, u8).view(i8)), x, i4(5), i4(18)]


@triton(1)
def packed_assembly(rng: Generator) -> Arguments:
    a, b = rng.integers(0, 256, (2, 512)).astype(u1)
    words = (rng.integers(0, 1 << 32, 512, u4) >> rng.integers(0, 32, 512).astype(u4)).astype(u4)
    words[0] = 0
    counts = [int(w).bit_count() + 100 * (32 - int(w).bit_length()) for w in words]
    after = np.concatenate([words.view(i4), np.array(counts, i4)])
    before = np.concatenate([words.view(i4), np.zeros(512, i4)])
    return [Out((a & b) + ((a ^ b) >> 1)), a, b, Out(after, start=before)]


@triton(2)
def checked_reciprocals(rng: Generator) -> Arguments:
    x = (rng.standard_normal(201) * 100).astype(f4)
    return [Out(f4(1) / x), x, i4(201)]


@triton(1)
def conversions_of_floats(rng: Generator) -> Arguments:
    h, b = (rng.uniform(-120, 120, 128).astype(f2), to_bf16(rng.uniform(-1e9, 1e9, 128)))
    d = rng.standard_normal(128) * 2.0 ** rng.integers(-140, 60, 128)
    h[:4] = [0, -0.0, 2.0**-24, -0.9990234]
    wide, single = from_bf16(b), h.astype(f4)
    want: list[Array] = [
        h.astype(i1), wide.astype(i4), np.stack([d.astype(i8), h.astype(i8)]),
        np.stack([d.astype(f4), wide]), np.stack([h, wide]).astype(f8),
        np.stack([to_bf16(single), (single.view(u4) >> 16).astype(u2)]),
    ]  # fmt: skip
    return [*map(Out, want), h, b, d]


@triton(1)
def branches_of_elements(rng: Generator) -> Arguments:
    x, y = rng.integers(-99, 99, (2, 256)).astype(i4)
    return [Out(np.where(x > y, x * 2, y - x)), x, y]
