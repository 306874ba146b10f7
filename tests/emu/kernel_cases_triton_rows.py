"""What Triton compiles: reductions, softmax, normalisations, scans, sorting and random numbers
(triton_rows)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Generator,
    Out,
    f2,
    f4,
    f8,
    from_bf16,
    i1,
    i2,
    i4,
    i8,
    rows,
    to_bf16,
    u1,
    u4,
    u8,
)
from tests.emu.triton_kept import add_triton, triton


def stored(x: Array, kind: str) -> tuple[Array, Array]:
    """In the type, and what that is in f64."""
    if kind == "bf16":
        return to_bf16(x), from_bf16(to_bf16(x)).astype(f8)
    return x.astype(kind), x.astype(kind).astype(f8)


def softmax_of(v: Array) -> Array:
    e = np.exp(v - v.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def add_softmax(name: str, kind: str, columns: int) -> None:
    def arguments(rng: Generator) -> Arguments:
        x = rows(rng, 4, columns)
        x[1, 5:] = -np.inf
        x[2, 3] = 60
        held, v = stored(x, kind)
        error: dict[str, Any] = {"relative": 2**-16} if kind == "f4" else {"ulps": 0.51}
        return [Out(softmax_of(v), kind, **error), held, i4(columns), i4(columns)]

    add_triton(name, 4, arguments)


add_softmax("softmax_f32", "f4", 111)
add_softmax("softmax_f32_8_warps", "f4", 1616)
add_softmax("softmax_f16", "f2", 400)
add_softmax("softmax_bf16_1_warp", "bf16", 112)


@triton(2)
def online_softmax(rng: Generator) -> Arguments:
    x = rows(rng, 11, 203)
    x[3, :70] = -60
    return [Out(softmax_of(x.astype(f8)), "f4", relative=2**-15), x, i4(11), i4(203)]


def add_layer_norm(name: str, kind: str, columns: int) -> None:
    def arguments(rng: Generator) -> Arguments:
        held = [stored(rows(rng, *shape), kind) for shape in ((4, columns), (columns,), (columns,))]
        v, gain, bias = (wide for _, wide in held)
        mean, variance = v.mean(1, keepdims=True), v.var(1, keepdims=True)
        normal = (v - mean) / np.sqrt(variance + f8(f4(1e-5)))
        scale = np.abs(normal * gain) + np.abs(bias) + np.abs(gain)
        size = np.abs(v).mean(1)
        return [
            Out(normal * gain + bias, kind, ulps=16 if kind == "f4" else 0.51, scale=scale),
            Out(mean[:, 0], "f4", ulps=8, scale=size),
            Out(1 / np.sqrt(variance[:, 0] + 1e-5), "f4", ulps=16),
            *(each for each, _ in held), i4(columns), f4(1e-5),
        ]  # fmt: skip

    add_triton(name, 4, arguments)


add_layer_norm("layer_norm_f32", "f4", 300)
add_layer_norm("layer_norm_f16", "f2", 400)


@triton(9)
def layer_norm_gradient(rng: Generator) -> Arguments:
    n = 101
    dy, x, gain = rows(rng, 9, n), rows(rng, 9, n), rows(rng, n)
    v = x.astype(f8)
    means, scales = v.mean(1).astype(f4), (1 / np.sqrt(v.var(1) + 1e-5)).astype(f4)
    scale = scales.astype(f8)[:, None]
    normal = (v - means[:, None]) * scale
    weighted = dy.astype(f8) * gain
    along = (weighted * normal).mean(1, keepdims=True)
    level = weighted.mean(1, keepdims=True)
    size = np.abs(weighted * normal).mean(1, keepdims=True) * np.abs(normal)
    size += np.abs(weighted) + np.abs(weighted).mean(1, keepdims=True)
    summed = dy * normal
    return [
        Out((weighted - level - normal * along) * scale, "f4", ulps=16, scale=size * scale),
        Out(summed.sum(0), "f4", ulps=16, scale=np.abs(summed).sum(0)),
        Out(dy.astype(f8).sum(0), "f4", ulps=16, scale=np.abs(dy).sum(0)),
        Out(np.zeros(1, i4)), dy, x, gain, means, scales, i4(n),
    ]  # fmt: skip


@triton(3)
def rms_norm(rng: Generator) -> Arguments:
    (x, v), (gain, g) = stored(rows(rng, 12, 112), "bf16"), stored(rows(rng, 112), "bf16")
    want = v / np.sqrt((v * v).mean(1, keepdims=True) + 1e-6) * g
    return [Out(want, "bf16", ulps=0.51), x, gain, i4(112), f4(1e-6)]


def reductions(kind: Any, shape: tuple[int, int], axis: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        limits = np.iinfo(kind)
        x = rng.integers(limits.min, limits.max, shape, kind, True)
        with np.errstate(over="ignore"):
            want = [x.sum(axis, kind), x.max(axis), x.min(axis), np.bitwise_xor.reduce(x, axis),
                    x.argmax(axis).astype(kind), x.argmin(axis).astype(kind),
                    np.bitwise_or.reduce(x, axis),
                    (x | kind(1)).prod(axis, kind)]  # fmt: skip
        return [Out(np.stack(want)), x]

    return arguments


add_triton("reductions_of_rows_s32", 1, reductions(i4, (16, 64), 1))
add_triton("reductions_of_columns_s32", 1, reductions(i4, (64, 32), 0))
add_triton("reductions_of_rows_s64", 1, reductions(i8, (4, 128), 1))
add_triton("reductions_of_columns_s16", 1, reductions(i2, (32, 32), 0))
add_triton("reductions_of_rows_u8", 1, reductions(u1, (8, 256), 1))


def extremes(kind: Any, columns: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        x = rng.integers(-90, 90, (5, columns)).astype(kind)  # many are equal
        where = np.stack([x.argmax(1), x.min(1)]).astype(i4)
        return [Out(np.stack([x.max(1), x.max(1)])), Out(where), x, i4(columns)]

    return arguments


add_triton("extremes_f32", 5, extremes(f4, 201))
add_triton("extremes_f16", 5, extremes(f2, 208))


@triton(4)
def welford_moments(rng: Generator) -> Arguments:
    x = rows(rng, 4, 201) + f4(4)
    v = x.astype(f8)
    return [Out(np.stack([v.mean(1), v.var(1)], 1), "f4", ulps=16), x, i4(201)]


@triton(5)
def sum_of_all(rng: Generator) -> Arguments:
    x = rng.integers(-999, 999, 2400).astype(f4)
    sums = np.pad(x, (0, 160)).reshape(5, 512).sum(1)
    after = Out(np.concatenate([x, sums]), start=np.pad(x, (0, 5)))
    return [Out(sums.sum(keepdims=True)), after, Out(np.array([5], i4)), i4(2400)]


@triton(9)
def cross_entropy(rng: Generator) -> Arguments:
    x, labels = rows(rng, 9, 50), rng.integers(0, 50, 9).astype(i8)
    labels[4] = -100  # is ignored
    p = softmax_of(x.astype(f8))
    used = (labels >= 0)[:, None]
    loss = np.where(labels >= 0, -np.log(p[np.arange(9), labels % 50]), 0)
    slope = np.where(used, p - np.eye(50)[labels % 50], 0)
    return [Out(loss, "f4", absolute=2**-17), Out(slope, "f4", absolute=2**-19), x, labels, i4(50)]


def scans(kind: Any, shape: tuple[int, int], axis: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        limits = np.iinfo(kind)
        x = rng.integers(limits.min, limits.max, shape, kind, True)
        x = np.where(rng.random(shape) < 0.5, x, kind(1) << rng.integers(0, 30, shape).astype(kind))
        with np.errstate(over="ignore"):
            back = np.flip(np.cumsum(np.flip(x, axis), axis, kind), axis)
            want = [np.cumsum(x, axis, kind), back, np.cumprod(x | kind(1), axis, kind),
                    np.bitwise_or.accumulate(x, axis)]  # fmt: skip
        return [Out(np.stack(want)), x]

    return arguments


add_triton("scans_of_rows_s32", 1, scans(i4, (8, 128), 1))
add_triton("scans_of_columns_s32", 1, scans(i4, (64, 8), 0))
add_triton("scans_of_rows_s64", 1, scans(i8, (2, 256), 1))


# Whole numbers, so that the order does not matter.
@triton(3)
def linear_recurrence(rng: Generator) -> Arguments:
    gains = rng.choice(np.array([1, -1], f4), (3, 201))
    x = rng.integers(1, 100, (3, 201)).astype(f4)
    y = x.copy()
    for t in range(1, 201):
        y[:, t] += gains[:, t] * y[:, t - 1]
    return [Out(np.stack([y, np.maximum.accumulate(x, 1)])), gains, x, i4(201)]


@triton(6)
def scan_across_blocks(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 20), 1 << 20, 1401).astype(i4)
    want = np.cumsum(x, dtype=i4)
    ends = want[np.minimum(np.arange(1, 7) * 256, 1401) - 1]
    return [Out(want), Out(np.stack([np.ones(6, i4), ends], 1)), x, i4(1401)]


def sorted_rows(kind: Any, shape: tuple[int, int]) -> Any:
    def arguments(rng: Generator) -> Arguments:
        if kind is f4:
            x = rows(rng, *shape)
            x[0, :4] = [np.inf, -np.inf, 1, 1]
        else:
            limits = np.iinfo(kind)
            x = rng.integers(limits.min, limits.max, shape, kind, True)
            x[0, :6] = [limits.max, limits.min, 1, 1, 0, limits.max]
        up = np.sort(x, 1)
        return [Out(np.stack([up, up[:, ::-1], x[:, ::-1]])), x]

    return arguments


add_triton("sort_f32", 1, sorted_rows(f4, (4, 64)))
add_triton("sort_s32", 1, sorted_rows(i4, (2, 128)))
add_triton("sort_s16", 1, sorted_rows(i2, (2, 64)))
add_triton("sort_u64", 1, sorted_rows(u8, (2, 32)))


@triton(1)
def best_of_rows(rng: Generator) -> Arguments:
    x = rows(rng, 4, 128)
    return [Out(np.ascontiguousarray(np.sort(x, 1)[:, :-9:-1])), x]


def philox(seed: int, at: Array, rounds: int = 10) -> list[Array]:
    """Four words of each counter."""
    c = [at.astype(u8), *(np.zeros(len(at), u8) for _ in range(3))]
    low, keys = u8(0xFFFFFFFF), [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        a, b = u8(0xD2511F53) * c[0], u8(0xCD9E8D57) * c[2]
        c = [b >> u8(32) ^ c[1] ^ u8(keys[0]), b & low, a >> u8(32) ^ c[3] ^ u8(keys[1]), a & low]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [each.astype(u4) for each in c]


def uniform(words: Array) -> Array:
    """As Triton makes floats of them, in [0, 1)."""
    signed = words.view(i4)
    return np.where(signed < 0, ~signed, signed).astype(f4) * f4(4.6566127342e-10)


@triton(1)
def random_numbers(rng: Generator) -> Arguments:
    seed, first = int(rng.integers(0, 1 << 63)), 1000
    at = first + np.arange(128)
    words = philox(seed, at)
    a, b = (uniform(each).astype(f8) for each in words[:2])
    normal = np.sqrt(-2 * np.log(np.maximum(a, 1e-7))) * np.cos(6.283185307179586 * b)
    return [
        Out(np.concatenate(words)), Out(uniform(words[0])),
        Out(normal, "f4", absolute=2**-12),  # cos.approx beyond pi
        Out(philox(seed, at, 7)[0].view(i4)), u8(seed), i4(first),
    ]  # fmt: skip


@triton(2)
def dropout(rng: Generator) -> Arguments:
    x, p, seed = rows(rng, 401), f4(0.3), 12345
    kept = uniform(philox(seed, np.arange(401))[0]) > p
    want = np.where(kept, x / (1 - f8(p)), 0)
    return [Out(want, "f4", ulps=3), x, i4(401), p, i4(seed)]


@triton(6)
def quantised_rows(rng: Generator) -> Arguments:
    x = rows(rng, 6, 112).astype(f2)
    v = x.astype(f4)
    scales = np.abs(v).max(1) / f4(127)
    q = v / scales[:, None]
    q = np.where(q >= 0, np.floor(q + f4(0.5)), np.ceil(q - f4(0.5)))
    return [Out(q.astype(i1)), Out(scales), x, i4(112)]


@triton(3)
def values_of_4_bits(rng: Generator) -> Arguments:
    packed = rng.integers(-(1 << 31), 1 << 31, (3, 48)).astype(i4)
    scales = rng.standard_normal(3).astype(f2)
    q = (packed[:, :, None] >> np.arange(0, 32, 4).astype(i4) & 15) - 8
    return [Out(q.astype(f2) * scales[:, None, None]), packed, scales, i4(48)]
