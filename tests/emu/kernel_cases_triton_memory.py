"""What Triton compiles: kernels that move data, count, and meet at atomics (triton_memory)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emu.kernel_lib import Arguments, Out, f2, f4, f8, i1, i2, i4, i8, to_bf16, u4
from tests.emu.triton_kept import add_triton, triton

Generator = np.random.Generator


def histogram(n: int, bins: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        x = rng.integers(0, bins, n).astype(i4)
        x[: n // 3] = 5
        return [Out(np.bincount(x, minlength=bins).astype(i4)), x, i4(n)]

    return arguments


add_triton("histogram_32", 2, histogram(701, 32))
add_triton("histogram_256", 2, histogram(1616, 256))


@triton(3)
def atomic_sums(rng: Generator) -> Arguments:
    n = 301
    x = rng.integers(0, 1 << 24, n).astype(i8)
    bucket = np.arange(n) % 8
    bits = np.zeros((3, 8), u4)
    bits[2] = 0xFFFFFFFF
    start = bits.copy()
    for at, value in zip(bucket, x.astype(u4), strict=True):
        bits[0, at] |= value
        bits[1, at] ^= value
        bits[2, at] &= value | u4(0xFF)
    sums = [np.bincount(bucket, v, 8) for v in (x, x % 64, x % 4)]
    return [
        Out(sums[0].astype(i4)), Out(sums[0].astype(i8)), Out(sums[1].astype(f4)),
        Out(sums[2].astype(f2)), Out(np.array([n], i4)), Out(bits, start=start), x, i4(n),
    ]  # fmt: skip


@triton(3)
def atomic_extremes(rng: Generator) -> Arguments:
    n = 301
    x = (rng.standard_normal(n) * 100).astype(f4)
    y = rng.integers(-(1 << 40), 1 << 40, n).astype(i8)
    bucket = np.arange(n) % 4

    def both(values: Any) -> Out:
        groups = [values[bucket == at] for at in range(4)]
        want = np.array([[v.max() for v in groups], [v.min() for v in groups]], values.dtype)
        return Out(want, start=np.tile(values[:4], (2, 1)))

    return [*map(both, (y.astype(i4), y.astype(u4), x, y)), x, y, i4(n)]


@triton(5)
def tickets(rng: Generator) -> Arguments:
    lines = rng.integers(-1000, 1000, 320).astype(i4)
    at = np.arange(320).astype(i4)
    after = np.concatenate([lines + 1, lines + at])
    return [
        Out(np.arange(5).astype(i4) + i4(7)), Out(np.array([5], i4)), Out(np.array([15], i8)),
        Out(after, start=np.concatenate([lines, np.zeros(320, i4)])),
    ]  # fmt: skip


def transpose(kind: Any, rows: int, columns: int) -> Any:
    def arguments(rng: Generator) -> Arguments:
        x = rng.integers(-128, 128, (rows, columns)).astype(kind)
        return [Out(np.ascontiguousarray(x.T)), x, i4(rows), i4(columns)]

    return arguments


add_triton("transpose_f32", (2, 3), transpose(f4, 45, 71))
add_triton("transpose_f16", (2, 2), transpose(f2, 80, 112))
add_triton("transpose_s8", (2, 2), transpose(i1, 80, 112))
add_triton("transpose_s64", (2, 3), transpose(i8, 32, 48))


@triton(1)
def permuted_axes(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 15), 1 << 15, (4, 8, 32)).astype(i2)
    return [Out(np.ascontiguousarray(x.transpose(2, 0, 1))), x]


@triton(1)
def joined_and_split(rng: Generator) -> Arguments:
    x, y = rng.standard_normal(256).astype(f2), rng.standard_normal(128).astype(f2)
    both = [x[:128], y]
    want = [np.stack(both, 1).reshape(-1), x[::2], x[1::2], *both, *both]
    return [Out(np.concatenate(want)), x, y]


@triton((20, 2))
def embedding(rng: Generator) -> Arguments:
    table, index = rng.standard_normal((30, 100)).astype(f4), rng.integers(-30, 30, 20).astype(i8)
    return [Out(table[index]), table, index, i4(30), i4(100)]


@triton(6)
def rotary(rng: Generator) -> Arguments:
    x, angle = rng.standard_normal((6, 64)).astype(f4), rng.uniform(0, 6, (6, 32))
    s, c = np.sin(angle).astype(f4), np.cos(angle).astype(f4)
    a, b = np.split(x.astype(f8), 2, axis=1)
    want = np.concatenate([a * c - b * s, b * c + a * s], 1)
    scale = np.concatenate([np.abs(a * c) + np.abs(b * s), np.abs(b * c) + np.abs(a * s)], 1)
    return [Out(want, "f4", ulps=1.5, scale=scale), x, s, c, i4(64)]


@triton(1)
def gathered_columns(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, (16, 32)).astype(i4)
    index = rng.integers(0, 32, (16, 32)).astype(i4)
    return [Out(np.take_along_axis(x, index, 1)), x, index]


@triton(1)
def gathered_rows(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, (64, 4)).astype(i4)
    index = rng.integers(0, 64, (64, 4)).astype(i4)
    return [Out(np.take_along_axis(x, index, 0)), x, index]


@triton(40)
def scattered_sums(rng: Generator) -> Arguments:
    index, x = rng.integers(0, 6, 40).astype(i4), rng.integers(-99, 99, (40, 48)).astype(f4)
    want = np.zeros((6, 48), f4)
    np.add.at(want, index, x)
    return [Out(want), index, x, i4(48)]


@triton((3, 2))
def stencil(rng: Generator) -> Arguments:
    x = rng.integers(-99, 99, (48, 32)).astype(f4)
    wide = np.pad(x, 1)
    want = sum(wide[r : r + 48, c : c + 32] for r in range(3) for c in range(3))
    return [Out(np.asarray(want, f4)), x, i4(48), i4(32)]


@triton(2)
def described_tiles(rng: Generator) -> Arguments:
    x = rng.standard_normal((45, 80)).astype(f4)
    return [Out(x * f4(2)), x, i4(45), i4(80)]


@triton(1)
def atomic_sums_of_floats(rng: Generator) -> Arguments:
    x = rng.integers(0, 4, 256).astype(i4)
    sums = np.bincount(np.arange(256) % 4, x, 4)
    each = rng.integers(0, 9, 256).astype(f2)
    narrow = Out(to_bf16(sums.astype(f4)))
    return [Out(sums), narrow, Out(each + x.astype(f2), start=each), x]


@triton(9)
def chain_of_flags(rng: Generator) -> Arguments:
    x = rng.integers(-99, 99, 9).astype(i4)
    return [Out(np.cumsum(x, dtype=i4)), Out(np.ones(9, i4)), x]
