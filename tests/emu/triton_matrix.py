"""Triton kernels of matrix products: tensor cores in every type of compute capability 8.0,
pipelines of several stages, attention."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.emu.triton_lib import compiled

ALIGNED_16 = "*fp16:16 *fp16:16 *fp16:16 i32 i32:16 i32:16"
ALIGNED_B16 = "*bf16:16 *bf16:16 *bf16:16 i32 i32:16 i32:16"
ALIGNED_32 = "*fp32:16 *fp32:16 *fp32:16 i32 i32:16 i32:16"
BYTES = "*i32:16 *i8:16 *i8:16 i32 i32:16 i32:16"


@compiled(ALIGNED_16, name="matmul_f16", M=64, N=64, K=32, PRECISION="ieee")
@compiled(ALIGNED_16, name="matmul_f16_1_stage", M=32, N=32, K=16, PRECISION="ieee", stages=1)
@compiled(
    ALIGNED_16, name="matmul_f16_4_stages", M=64, N=32, K=32, PRECISION="ieee", stages=4, warps=8
)
@compiled(ALIGNED_B16, name="matmul_bf16", M=32, N=64, K=32, PRECISION="ieee", stages=2)
@compiled(ALIGNED_B16, name="matmul_bf16_8_warps", M=64, N=128, K=64, PRECISION="ieee", warps=8)
@compiled(ALIGNED_32, name="matmul_tf32", M=32, N=32, K=32, PRECISION="tf32")
@compiled(ALIGNED_32, name="matmul_tf32_3_products", M=32, N=32, K=16, PRECISION="tf32x3")
@compiled(ALIGNED_32, name="matmul_bf16_3_products", M=32, N=32, K=16, PRECISION="bf16x3")
@compiled(ALIGNED_32, name="matmul_f32", M=16, N=32, K=16, PRECISION="ieee", stages=2)
@compiled(
    "*fp32 *fp32 *fp32 i32 i32 i32", name="matmul_unaligned", M=32, N=16, K=16, PRECISION="tf32"
)
@compiled(
    "*fp16 *fp16 *fp16 i32 i32 i32",
    name="matmul_f16_unaligned",
    M=16,
    N=16,
    K=16,
    PRECISION="ieee",
    warps=1,
)
@compiled(BYTES, name="matmul_s8", M=32, N=64, K=64, PRECISION="ieee")
@compiled(BYTES, name="matmul_s8_8_warps", M=64, N=64, K=32, PRECISION="ieee", warps=8, stages=4)
@compiled(
    "*fp64:16 *fp64:16 *fp64:16 i32 i32:16 i32:16",
    name="matmul_f64",
    M=32,
    N=32,
    K=16,
    PRECISION="ieee",
    stages=2,
)
@compiled(
    "*fp32:16 *fp8e5:16 *fp8e5:16 i32 i32:16 i32:16",
    name="matmul_of_8_bit_floats",
    M=32,
    N=32,
    K=32,
    PRECISION="ieee",
)
@triton.jit
def matmul(
    out, a, b, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):
    # Neighbouring programs share columns: groups of two rows of tiles.
    row, column = tl.swizzle2d(
        tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), 2
    )
    r = row * M + tl.arange(0, M)
    c = column * N + tl.arange(0, N)
    d = tl.arange(0, K)
    left = a + r[:, None] * k + d[None, :]
    right = b + d[:, None] * n + c[None, :]
    if out.dtype.element_ty == tl.int32:
        total = tl.zeros([M, N], tl.int32)
    elif out.dtype.element_ty == tl.float64:
        total = tl.zeros([M, N], tl.float64)
    else:
        total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        x = tl.load(left, (r < m)[:, None] & (start + d < k)[None, :], other=0.0)
        y = tl.load(right, (start + d < k)[:, None] & (c < n)[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION, out_dtype=total.dtype)
        left += K
        right += K * n
    inside = (r < m)[:, None] & (c < n)[None, :]
    tl.store(out + r[:, None] * n + c[None, :], total.to(out.dtype.element_ty), inside)


# relu(a @ b.T + bias)
@compiled(
    "*fp16:16 *fp16:16 *fp16:16 *fp16:16 i32:16 i32:16 i32:16", name="linear_f16", M=32, N=32, K=32
)
@compiled(
    "*bf16:16 *bf16:16 *bf16:16 *bf16:16 i32:16 i32:16 i32:16",
    name="linear_bf16",
    M=64,
    N=32,
    K=32,
    stages=4,
)
@triton.jit
def linear(out, a, b, bias, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    r = tl.program_id(0) * M + tl.arange(0, M)
    c = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        d = start + tl.arange(0, K)
        x = tl.load(a + r[:, None] * k + d[None, :], (r < m)[:, None] & (d < k)[None, :], other=0.0)
        y = tl.load(b + c[:, None] * k + d[None, :], (c < n)[:, None] & (d < k)[None, :], other=0.0)
        total += tl.dot(x, y.T)
    total += tl.load(bias + c, c < n, other=0.0).to(tl.float32)[None, :]
    inside = (r < m)[:, None] & (c < n)[None, :]
    value = tl.maximum(total, 0.0).to(out.dtype.element_ty)
    tl.store(out + r[:, None] * n + c[None, :], value, inside)


@compiled("*fp16:16 *fp16:16 *fp16:16", M=32, N=32, K=64)
@triton.jit
def product_summed_in_f16(out, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    r = tl.arange(0, M)[:, None]
    c = tl.arange(0, N)[None, :]
    x = tl.load(a + r * K + tl.arange(0, K)[None, :])
    y = tl.load(b + tl.arange(0, K)[:, None] * N + c)
    tl.store(out + r * N + c, tl.dot(x, y, out_dtype=tl.float16))


# Both factors lie the other way round.
@compiled("*fp32:16 *fp16:16 *fp16:16", name="transposed_factors_f16", M=32, N=32, K=64)
@compiled("*fp32:16 *fp32:16 *fp32:16", name="transposed_factors_tf32", M=32, N=32, K=32)
@compiled("*i32:16 *i8:16 *i8:16", name="transposed_factors_s8", M=32, N=32, K=64)
@compiled(
    "*fp32:16 *fp8e5:16 *fp8e5:16",
    name="transposed_factors_8_bit_floats",
    M=64,
    N=64,
    K=64,
    warps=8,
)
@triton.jit
def transposed_factors(out, a, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    r = tl.arange(0, M)
    c = tl.arange(0, N)
    d = tl.arange(0, K)
    x = tl.load(a + d[:, None] * M + r[None, :]).T
    y = tl.load(b + c[:, None] * K + d[None, :]).T
    tl.store(out + r[:, None] * N + c[None, :], tl.dot(x, y, out_dtype=out.dtype.element_ty))


@compiled("*fp32:16 *fp16:16 *fp16:16 i32:16 i32:16 i32:16 i32:16", M=32, N=32, K=32)
@triton.jit
def product_with_split_depth(
    out, a, b, m, n, k, part, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    r = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    c = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    first = tl.program_id(2) * part
    total = tl.zeros([M, N], tl.float32)
    for start in range(first, tl.minimum(first + part, k), K):
        d = start + tl.arange(0, K)
        x = tl.load(a + r * k + d[None, :], (r < m) & (d < k)[None, :], other=0.0)
        y = tl.load(b + d[:, None] * n + c, (d < k)[:, None] & (c < n), other=0.0)
        total = tl.dot(x, y, total)
    tl.atomic_add(out + r * n + c, total, (r < m) & (c < n), sem="relaxed")


@compiled("*fp32:16 *fp16:16 *fp16:16", BATCH=4, SIZE=16, DEPTH=32)
@triton.jit
def products_in_a_batch(out, a, b, BATCH: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    i = tl.arange(0, BATCH)[:, None, None]
    r = tl.arange(0, SIZE)
    d = tl.arange(0, DEPTH)
    x = tl.load(a + i * SIZE * DEPTH + r[None, :, None] * DEPTH + d[None, None, :])
    y = tl.load(b + i * SIZE * DEPTH + d[None, :, None] * SIZE + r[None, None, :])
    tl.store(out + i * SIZE * SIZE + r[None, :, None] * SIZE + r[None, None, :], tl.dot(x, y))


# Weights of 8 bits with a scale for each column, turned into f16 on the way to the tensor cores.
@compiled("*fp16:16 *fp16:16 *i8:16 *fp16:16 i32 i32:16 i32:16", M=32, N=64, K=32)
@triton.jit
def product_with_quantised_weights(
    out, a, b, scales, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    r = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    c = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        d = start + tl.arange(0, K)
        x = tl.load(a + r * k + d[None, :], (r < m) & (d < k)[None, :], other=0.0)
        y = tl.load(b + d[:, None] * n + c[None, :], (d < k)[:, None] & (c < n)[None, :], other=0)
        total = tl.dot(x, y.to(tl.float16), total)
    total *= tl.load(scales + c, c < n, other=0.0).to(tl.float32)[None, :]
    tl.store(out + r * n + c[None, :], total.to(tl.float16), (r < m) & (c < n)[None, :])


# Programs stay and take one tile after the other.
@compiled("*fp16:16 *fp16:16 *fp16:16 i32:16 i32:16 i32:16", TILE=32, K=32)
@triton.jit
def product_by_few_programs(out, a, b, m, n, k, TILE: tl.constexpr, K: tl.constexpr):
    across = tl.cdiv(n, TILE)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(m, TILE) * across, tl.num_programs(0), flatten=True
    ):
        r = tile // across * TILE + tl.arange(0, TILE)
        c = tile % across * TILE + tl.arange(0, TILE)
        total = tl.zeros([TILE, TILE], tl.float32)
        for start in tl.range(0, k, K, num_stages=3):
            d = start + tl.arange(0, K)
            x = tl.load(a + (r % m)[:, None] * k + d[None, :], (d < k)[None, :], other=0.0)
            y = tl.load(b + d[:, None] * n + (c % n)[None, :], (d < k)[:, None], other=0.0)
            total = tl.dot(x, y, total)
        inside = (r < m)[:, None] & (c < n)[None, :]
        tl.store(out + r[:, None] * n + c[None, :], total.to(tl.float16), inside)


@compiled("*fp16:16 *fp16:16 *fp16:16 i32:16 i32:16 i32:16", M=32, N=32, K=32)
@triton.jit
def product_of_described_tiles(
    out, a, b, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [k, n], [n, 1], [K, N])
    target = tl.make_tensor_descriptor(out, [m, n], [n, 1], [M, N])
    r = tl.program_id(0) * M
    c = tl.program_id(1) * N
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        total = tl.dot(left.load([r, start]), right.load([start, c]), total)
    target.store([r, c], total.to(tl.float16))


# Blocks of 32 values share an exponent; the left ones have 4 bits, two in a byte.
@compiled("*fp32:16 *u8:16 *u8:16 *bf16:16", M=32, N=32, K=64)
@triton.jit
def product_of_scaled_4_bit_floats(
    out, a, scales, b, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    r = tl.arange(0, M)[:, None]
    c = tl.arange(0, N)[None, :]
    x = tl.load(a + r * (K // 2) + tl.arange(0, K // 2)[None, :])
    s = tl.load(scales + r * (K // 32) + tl.arange(0, K // 32)[None, :])
    y = tl.load(b + tl.arange(0, K)[:, None] * N + c)
    tl.store(out + r * N + c, tl.dot_scaled(x, s, "e2m1", y, None, "bf16"))


@compiled(
    "*fp16:16 *fp32:16 *fp16:16 *fp16:16 *fp16:16 fp32 i32",
    name="attention_f16",
    ROWS=32,
    KEYS=32,
    WIDTH=32,
    CAUSAL=True,
)
@compiled(
    "*bf16:16 *fp32:16 *bf16:16 *bf16:16 *bf16:16 fp32 i32:16",
    name="attention_bf16",
    ROWS=64,
    KEYS=32,
    WIDTH=64,
    CAUSAL=False,
    stages=2,
    warps=8,
)
@triton.jit
def attention(
    out,
    logs,
    q,
    k,
    v,
    scale,
    n,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    head = tl.program_id(1) * n * WIDTH
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    query = tl.load(q + head + r[:, None] * WIDTH + d[None, :], (r < n)[:, None], other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    value = tl.zeros([ROWS, WIDTH], tl.float32)
    end = tl.minimum(n, (tl.program_id(0) + 1) * ROWS) if CAUSAL else n
    for start in range(0, end, KEYS):
        c = start + tl.arange(0, KEYS)
        key = tl.load(k + head + c[None, :] * WIDTH + d[:, None], (c < n)[None, :], other=0.0)
        score = tl.dot(query, key) * (scale * 1.4426950408889634)
        seen = (c < n)[None, :]
        if CAUSAL:
            seen = seen & (r[:, None] >= c[None, :])
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        part = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(part, 1)
        values = tl.load(v + head + c[:, None] * WIDTH + d[None, :], (c < n)[:, None], other=0.0)
        value = tl.dot(part.to(values.dtype), values, value * shrink[:, None])
        top = higher
    value = value / total[:, None]
    inside = (r < n)[:, None]
    tl.store(out + head + r[:, None] * WIDTH + d[None, :], value.to(out.dtype.element_ty), inside)
    tl.store(logs + tl.program_id(1) * n + r, top + tl.log2(total), r < n)


# Convolution as a product: rows are pixels, the depth is channels by window.
@compiled("*fp32:16 *fp16:16 *fp16:16 i32 i32 i32 i32", PIXELS=32, FILTERS=16, K=16)
@triton.jit
def convolution(
    out,
    x,
    weights,
    height,
    width,
    channels,
    filters,
    PIXELS: tl.constexpr,
    FILTERS: tl.constexpr,
    K: tl.constexpr,
):
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    f = tl.arange(0, FILTERS)
    row = pixel // width
    column = pixel % width
    depth = channels * 9
    total = tl.zeros([PIXELS, FILTERS], tl.float32)
    for start in range(0, depth, K):
        d = start + tl.arange(0, K)
        channel = d // 9
        y = row[:, None] + (d % 9 // 3 - 1)[None, :]
        z = column[:, None] + (d % 3 - 1)[None, :]
        near = (y >= 0) & (y < height) & (z >= 0) & (z < width) & (d < depth)[None, :]
        patch = tl.load(x + (channel[None, :] * height + y) * width + z, near, other=0.0)
        w = tl.load(
            weights + f[None, :] * depth + d[:, None],
            (d < depth)[:, None] & (f < filters)[None, :],
            other=0.0,
        )
        total = tl.dot(patch, w, total)
    inside = (pixel < height * width)[:, None] & (f < filters)[None, :]
    tl.store(out + f[None, :] * height * width + pixel[:, None], total, inside)
