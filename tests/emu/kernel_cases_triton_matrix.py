"""What Triton compiles: matrix products on tensor cores, pipelines, attention (triton_matrix).

Sums of the tensor cores have no defined order (kernel_cases_matrix), so `part` of the sum of the
magnitudes is allowed.
"""

from __future__ import annotations

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
    i4,
    to_bf16,
    u1,
    u4,
)
from tests.emu.triton_kept import KEPT, add_triton, triton

Generator = np.random.Generator
SUM = 2**-19


def tf32(x: Array) -> Array:
    """Nearest, of f32."""
    return ((x.astype(f4).view(u4) + u4(0x1000)) & ~u4(0x1FFF)).view(f4)


def stored(x: Array, kind: str) -> tuple[Array, Array]:
    """In the type, and what that is in f64."""
    if kind == "bf16":
        return to_bf16(x.astype(f4)), from_bf16(to_bf16(x.astype(f4))).astype(f8)
    if kind == "tf32":
        return tf32(x), tf32(x).astype(f8)
    if kind == "e5m2":
        bits = ((x.astype(f2).view("u2").astype(u4) + 0x80) >> 8).astype(u1)
        return bits, (bits.astype("u2") << 8).view(f2).astype(f8)
    return x.astype(kind), x.astype(kind).astype(f8)


def product(a: Array, b: Array, kind: str, part: float = SUM) -> Out:
    size = float((np.abs(a) @ np.abs(b)).max())
    ulps = 0.51 if kind in ("f2", "bf16") else 0
    return Out(a @ b, kind, ulps=ulps, absolute=size * part)


def tiles(name: str, m: int, n: int) -> tuple[int, int]:
    constants = KEPT["kernels"][name]["constants"]
    return -(-m // constants["M"]), -(-n // constants["N"])


def add_matmul(
    name: str, kind: str, m: int, n: int, k: int, *, out: str = "", part: float = SUM
) -> None:
    def arguments(rng: Generator) -> Arguments:
        (a, x), (b, y) = (stored(rng.standard_normal(s), kind) for s in ((m, k), (k, n)))
        return [product(x, y, out or kind, part), a, b, i4(m), i4(n), i4(k)]

    add_triton(name, tiles(name, m, n), arguments)


add_matmul("matmul_f16", "f2", 80, 80, 112)
add_matmul("matmul_f16_1_stage", "f2", 45, 48, 64)
add_matmul("matmul_f16_4_stages", "f2", 80, 48, 208)
add_matmul("matmul_f16_unaligned", "f2", 21, 19, 35)
add_matmul("matmul_bf16", "bf16", 45, 80, 112)
add_matmul("matmul_bf16_8_warps", "bf16", 70, 80, 208)
add_matmul("matmul_tf32", "tf32", 45, 48, 112, out="f4")
add_matmul("matmul_tf32_3_products", "f4", 45, 48, 64)
add_matmul("matmul_bf16_3_products", "f4", 45, 48, 64, part=2**-15)
add_matmul("matmul_unaligned", "tf32", 45, 19, 35, out="f4")
add_matmul("matmul_f32", "f4", 21, 48, 64, part=2**-20)
add_matmul("matmul_f64", "f8", 45, 48, 48, part=2**-48)
add_matmul("matmul_of_8_bit_floats", "e5m2", 45, 48, 64, out="f4")


def add_bytes(name: str, m: int, n: int, k: int) -> None:
    def arguments(rng: Generator) -> Arguments:
        a, b = rng.integers(-128, 128, (m, k), i1), rng.integers(-128, 128, (k, n), i1)
        return [Out(a.astype(i4) @ b.astype(i4)), a, b, i4(m), i4(n), i4(k)]

    add_triton(name, tiles(name, m, n), arguments)


add_bytes("matmul_s8", 45, 80, 144)
add_bytes("matmul_s8_8_warps", 70, 80, 208)


def add_linear(name: str, kind: str, m: int, n: int, k: int) -> None:
    def arguments(rng: Generator) -> Arguments:
        shapes = ((m, k), (n, k), (n,))
        (a, x), (b, y), (bias, z) = (stored(rng.standard_normal(s), kind) for s in shapes)
        size = float((np.abs(x) @ np.abs(y.T) + np.abs(z)).max())
        want = Out(np.maximum(x @ y.T + z, 0), kind, ulps=0.51, absolute=size * SUM)
        return [want, a, b, bias, i4(m), i4(n), i4(k)]

    add_triton(name, tiles(name, m, n), arguments)


add_linear("linear_f16", "f2", 48, 48, 80)
add_linear("linear_bf16", "bf16", 80, 48, 144)


def add_transposed(name: str, kind: str) -> None:
    constants = KEPT["kernels"][name]["constants"]
    m, n, k = (constants[size] for size in "MNK")

    def arguments(rng: Generator) -> Arguments:
        if kind == "i1":
            a, b = rng.integers(-128, 128, (k, m), i1), rng.integers(-128, 128, (n, k), i1)
            return [Out(a.T.astype(i4) @ b.T.astype(i4)), a, b]
        (a, x), (b, y) = (stored(rng.standard_normal(s), kind) for s in ((k, m), (n, k)))
        return [product(x.T, y.T, "f4"), a, b]

    add_triton(name, 1, arguments)


add_transposed("transposed_factors_f16", "f2")
add_transposed("transposed_factors_tf32", "tf32")
add_transposed("transposed_factors_s8", "i1")
add_transposed("transposed_factors_8_bit_floats", "e5m2")


# So small that sums in f16 are exact.
@triton(1)
def product_summed_in_f16(rng: Generator) -> Arguments:
    a, b = rng.integers(-3, 4, (32, 64)).astype(f4), rng.integers(-3, 4, (64, 32)).astype(f4)
    return [Out((a @ b).astype(f2)), a.astype(f2), b.astype(f2)]


@triton((2, 2, 3))
def product_with_split_depth(rng: Generator) -> Arguments:
    a, b = (rng.integers(-50, 50, s).astype(f4) for s in ((48, 160), (160, 48)))
    return [Out(a @ b), a.astype(f2), b.astype(f2), i4(48), i4(48), i4(160), i4(64)]


@triton(1)
def products_in_a_batch(rng: Generator) -> Arguments:
    a, b = (rng.integers(-50, 50, s).astype(f4) for s in ((4, 16, 32), (4, 32, 16)))
    return [Out(a @ b), a.astype(f2), b.astype(f2)]


@triton((2, 2))
def product_with_quantised_weights(rng: Generator) -> Arguments:
    m, n, k = 45, 80, 112
    a, b = rng.standard_normal((m, k)).astype(f2), rng.integers(-128, 128, (k, n), i1)
    scales = (np.abs(rng.standard_normal(n)) / 100).astype(f2)
    x, y = a.astype(f8), b.astype(f8) * scales.astype(f8)
    return [product(x, y, "f2"), a, b, scales, i4(m), i4(n), i4(k)]


@triton(3)
def product_by_few_programs(rng: Generator) -> Arguments:
    m, n, k = 80, 80, 80
    (a, x), (b, y) = (stored(rng.standard_normal(s), "f2") for s in ((m, k), (k, n)))
    return [product(x, y, "f2"), a, b, i4(m), i4(n), i4(k)]


@triton((2, 2))
def product_of_described_tiles(rng: Generator) -> Arguments:
    m, n, k = 48, 48, 80
    (a, x), (b, y) = (stored(rng.standard_normal(s), "f2") for s in ((m, k), (k, n)))
    return [product(x, y, "f2"), a, b, i4(m), i4(n), i4(k)]


@triton(1)
def product_of_scaled_4_bit_floats(rng: Generator) -> Arguments:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes, exponents = rng.integers(0, 16, (32, 64)), rng.integers(124, 131, (32, 2))
    signs = np.where(codes & 8, -1.0, 1.0)
    x = signs * values[codes & 7] * np.repeat(2.0 ** (exponents - 127), 32, 1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(u1)
    b, y = stored(rng.standard_normal((64, 32)), "bf16")
    return [product(x, y, "f4"), packed, exponents.astype(u1), b]


def add_attention(name: str, kind: str, n: int, width: int, causal: bool) -> None:
    def arguments(rng: Generator) -> Arguments:
        held = [stored(rng.standard_normal((2, n, width)), kind) for _ in range(3)]
        q, k, v = (wide for _, wide in held)
        scale = f4(width**-0.5)
        score = q @ k.swapaxes(1, 2) * f8(scale)
        if causal:
            score[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        top = score.max(2, keepdims=True)
        e = np.exp(score - top)
        total = e.sum(2, keepdims=True)
        # The weights are rounded to the type before they are multiplied.
        room = float(np.abs(v).max()) * (2**-10 if kind == "f2" else 2**-7)
        logs = (top + np.log(total))[:, :, 0] / np.log(2)
        return [
            Out(e / total @ v, kind, absolute=room), Out(logs, "f4", absolute=2**-16),
            *(each for each, _ in held), scale, i4(n),
        ]  # fmt: skip

    rows = KEPT["kernels"][name]["constants"]["ROWS"]
    add_triton(name, (-(-n // rows), 2), arguments)


add_attention("attention_f16", "f2", 75, 32, True)
add_attention("attention_bf16", "bf16", 80, 64, False)


@triton(4)
def convolution(rng: Generator) -> Arguments:
    channels, filters, height, width = 3, 10, 9, 13
    x = rng.integers(-9, 10, (channels, height, width)).astype(f2)
    weights = rng.integers(-9, 10, (filters, channels, 3, 3)).astype(f2)
    wide = np.pad(x.astype(f4), ((0, 0), (1, 1), (1, 1)))
    want = np.zeros((filters, height, width), f4)
    for r in range(3):
        for c in range(3):
            patch = wide[:, r : r + height, c : c + width]
            want += np.einsum("fc,chw->fhw", weights[:, :, r, c].astype(f4), patch)
    sizes = (i4(height), i4(width), i4(channels), i4(filters))
    return [Out(want), x, weights, *sizes]
