"""Triton kernels of reductions, softmax, normalisations, scans, sorting and random numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.emu.triton_lib import compiled


@compiled("*fp32 *fp32 i32 i32", name="softmax_f32", BLOCK=128)
@compiled("*fp32:16 *fp32:16 i32:16 i32:16", name="softmax_f32_8_warps", BLOCK=2048, warps=8)
@compiled("*fp16:16 *fp16:16 i32:16 i32:16", name="softmax_f16", BLOCK=512)
@compiled("*bf16:16 *bf16:16 i32:16 i32", name="softmax_bf16_1_warp", BLOCK=128, warps=1)
@triton.jit
def softmax(out, x, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * stride + at, inside, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * stride + at, (e / tl.sum(e, axis=0)).to(out.dtype.element_ty), inside)


@compiled("*fp32:16 *fp32:16 i32 i32", ROWS=8, BLOCK=64)
@triton.jit
def online_softmax(out, x, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    top = tl.full([ROWS, 1], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 1], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (at < columns)
        v = tl.load(x + row * columns + at, inside, other=-float("inf"))
        higher = tl.maximum(top, tl.max(v, axis=1, keep_dims=True))
        higher = tl.where(row < rows, higher, 0.0)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(v - higher), axis=1, keep_dims=True)
        top = higher
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        inside = (row < rows) & (at < columns)
        v = tl.load(x + row * columns + at, inside)
        tl.store(out + row * columns + at, tl.exp(v - top) / total, inside)


@compiled("*fp32 *fp32 *fp32 *fp32 *fp32 *fp32 i32 fp32", name="layer_norm_f32", BLOCK=128)
@compiled(
    "*fp16:16 *fp32:16 *fp32:16 *fp16:16 *fp16:16 *fp16:16 i32:16 fp32",
    name="layer_norm_f16",
    BLOCK=256,
    warps=8,
)
@triton.jit
def layer_norm(out, means, scales, x, gain, bias, columns, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row * columns
    out += row * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + at, at < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < columns, other=0.0).to(tl.float32)
        centred = tl.where(at < columns, v - mean, 0.0)
        squares += centred * centred
    scale = tl.rsqrt(tl.sum(squares) / columns + epsilon)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        v = tl.load(x + at, inside, other=0.0).to(tl.float32)
        y = (v - mean) * scale * tl.load(gain + at, inside) + tl.load(bias + at, inside)
        tl.store(out + at, y.to(out.dtype.element_ty), inside)


# Gradients of the input by row; those of gain and bias are summed up behind a lock.
@compiled("*fp32 *fp32 *fp32 *i32 *fp32 *fp32 *fp32 *fp32 *fp32 i32", BLOCK=128)
@triton.jit
def layer_norm_gradient(
    dx, dgain, dbias, lock, dy, x, gain, means, scales, columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    mean = tl.load(means + row)
    scale = tl.load(scales + row)
    upper = tl.load(dy + row * columns + at, inside, other=0.0)
    v = tl.load(x + row * columns + at, inside, other=0.0)
    normal = tl.where(inside, (v - mean) * scale, 0.0)
    weighted = upper * tl.load(gain + at, inside, other=0.0)
    along = tl.sum(weighted * normal, axis=0) / columns
    level = tl.sum(weighted, axis=0) / columns
    tl.store(dx + row * columns + at, (weighted - level - normal * along) * scale, inside)
    while tl.atomic_cas(lock, 0, 1, sem="acquire") == 1:
        pass
    tl.store(dgain + at, tl.load(dgain + at, inside) + upper * normal, inside)
    tl.store(dbias + at, tl.load(dbias + at, inside) + upper, inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release")


@compiled("*bf16:16 *bf16:16 *bf16:16 i32:16 fp32", ROWS=4, BLOCK=128)
@triton.jit
def rms_norm(out, x, gain, columns, epsilon, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (at < columns)[None, :]
    place = row[:, None] * columns + at[None, :]
    v = tl.load(x + place, inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, axis=1) / columns + epsilon)
    y = v * scale[:, None] * tl.load(gain + at, at < columns, other=0.0)[None, :].to(tl.float32)
    tl.store(out + place, y.to(tl.bfloat16), inside)


@triton.jit
def or_of(a, b):
    return a | b


@triton.jit
def product_of(a, b):
    return a * b


@compiled("*i32:16 *i32:16", name="reductions_of_rows_s32", ROWS=16, COLUMNS=64, AXIS=1)
@compiled("*i32:16 *i32:16", name="reductions_of_columns_s32", ROWS=64, COLUMNS=32, AXIS=0)
@compiled("*i64:16 *i64:16", name="reductions_of_rows_s64", ROWS=4, COLUMNS=128, AXIS=1, warps=8)
@compiled("*i16:16 *i16:16", name="reductions_of_columns_s16", ROWS=32, COLUMNS=32, AXIS=0)
@compiled("*u8:16 *u8:16", name="reductions_of_rows_u8", ROWS=8, COLUMNS=256, AXIS=1)
@triton.jit
def reductions(out, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    v = tl.load(x + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    KEPT: tl.constexpr = COLUMNS if AXIS == 0 else ROWS
    kind = out.dtype.element_ty
    at = out + tl.arange(0, KEPT)
    tl.store(at, tl.sum(v, axis=AXIS).to(kind))
    tl.store(at + KEPT, tl.max(v, axis=AXIS))
    tl.store(at + 2 * KEPT, tl.min(v, axis=AXIS))
    tl.store(at + 3 * KEPT, tl.xor_sum(v, axis=AXIS))
    tl.store(at + 4 * KEPT, tl.argmax(v, axis=AXIS).to(kind))
    tl.store(at + 5 * KEPT, tl.argmin(v, axis=AXIS).to(kind))
    tl.store(at + 6 * KEPT, tl.reduce(v, AXIS, or_of))
    tl.store(at + 7 * KEPT, tl.reduce(v | 1, AXIS, product_of))


@triton.jit
def larger_or_nan(a, b):
    return tl.where((a > b) | (a != a), a, b)


@compiled("*fp32 *i32 *fp32 i32", name="extremes_f32", BLOCK=256)
@compiled("*fp16:16 *i32:16 *fp16:16 i32:16", name="extremes_f16", BLOCK=256, warps=2)
@triton.jit
def extremes(out, where, x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, at < columns, other=-float("inf"))
    top, place = tl.max(v, axis=0, return_indices=True)
    tl.store(out + row, top)
    tl.store(where + row, place)
    last = tl.argmin(tl.where(at < columns, v, float("inf")), axis=0, tie_break_left=False)
    tl.store(where + rows + row, tl.load(x + row * columns + last).to(tl.int32))
    tl.store(out + rows + row, tl.reduce(v, 0, larger_or_nan))


@triton.jit
def merged_moments(n, mean, m2, other_n, other_mean, other_m2):
    both = n + other_n
    part = tl.where(both == 0.0, 0.0, other_n / both)
    delta = other_mean - mean
    return both, mean + delta * part, m2 + other_m2 + delta * delta * n * part


@compiled("*fp32:16 *fp32:16 i32", BLOCK=256)
@triton.jit
def welford_moments(out, x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, inside, other=0.0)
    n, mean, m2 = tl.reduce((inside.to(tl.float32), v, tl.zeros_like(v)), 0, merged_moments)
    tl.store(out + 2 * row, mean)
    tl.store(out + 2 * row + 1, m2 / n)


@compiled("*fp32:16 *fp32:16 *i32 i32", BLOCK=512, warps=8)
@triton.jit
def sum_of_all(out, partial, done, n, BLOCK: tl.constexpr):
    # `partial` holds the input, and behind it the sums of the blocks.
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial + n + block, tl.sum(tl.load(partial + at, at < n, other=0.0)))
    if tl.atomic_add(done, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        each = tl.arange(0, 16)
        sums = tl.load(
            partial + n + each, each < tl.num_programs(0), other=0.0, cache_modifier=".cv"
        )
        tl.store(out, tl.sum(sums))


@compiled("*fp32 *fp32 *fp32:16 *i64 i32", BLOCK=64)
@triton.jit
def cross_entropy(loss, gradient, x, labels, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    label = tl.load(labels + row)
    v = tl.load(x + row * columns + at, inside, other=-float("inf"))
    top = tl.max(v)
    e = tl.exp(v - top)
    total = tl.sum(e)
    if label >= 0:
        tl.store(loss + row, tl.log(total) + top - tl.load(x + row * columns + label))
    else:
        tl.store(loss + row, 0.0)
    hot = tl.where(at == label, 1.0, 0.0)
    slope = tl.where(label >= 0, e / total - hot, 0.0)
    tl.store(gradient + row * columns + at, slope, inside)


@compiled("*i32:16 *i32:16", name="scans_of_rows_s32", ROWS=8, COLUMNS=128, AXIS=1)
@compiled("*i32:16 *i32:16", name="scans_of_columns_s32", ROWS=64, COLUMNS=8, AXIS=0)
@compiled("*i64:16 *i64:16", name="scans_of_rows_s64", ROWS=2, COLUMNS=256, AXIS=1, warps=8)
@triton.jit
def scans(out, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    v = tl.load(x + at)
    SIZE: tl.constexpr = ROWS * COLUMNS
    tl.store(out + at, tl.cumsum(v, axis=AXIS))
    tl.store(out + SIZE + at, tl.cumsum(v, axis=AXIS, reverse=True))
    tl.store(out + 2 * SIZE + at, tl.cumprod(v | 1, axis=AXIS))
    tl.store(out + 3 * SIZE + at, tl.associative_scan(v, AXIS, or_of))


@triton.jit
def recurrence(gain, value, other_gain, other_value):
    return gain * other_gain, value * other_gain + other_value


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@compiled("*fp32 *fp32 *fp32 i32", BLOCK=256)
@triton.jit
def linear_recurrence(out, gains, x, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gains + row * n + at, inside, other=1.0)
    v = tl.load(x + row * n + at, inside, other=0.0)
    _, y = tl.associative_scan((g, v), 0, recurrence)
    tl.store(out + row * n + at, y, inside)
    top = tl.associative_scan(v, 0, larger)
    tl.store(out + (tl.num_programs(0) + row) * n + at, top, inside)


# A scan longer than a block: each waits for the one before it.
@compiled("*i32 *i32 *i32 i32", BLOCK=256)
@triton.jit
def scan_across_blocks(out, state, x, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0)
    before = 0
    if block > 0:
        while tl.atomic_add(state + 2 * block - 2, 0, sem="acquire") == 0:
            pass
        before = tl.load(state + 2 * block - 1, volatile=True)
    tl.store(state + 2 * block + 1, before + tl.sum(v))
    tl.debug_barrier()
    tl.atomic_xchg(state + 2 * block, 1, sem="release")
    tl.store(out + at, before + tl.cumsum(v), at < n)


@compiled("*fp32:16 *fp32:16", name="sort_f32", ROWS=4, COLUMNS=64)
@compiled("*i32:16 *i32:16", name="sort_s32", ROWS=2, COLUMNS=128)
@compiled("*i16:16 *i16:16", name="sort_s16", ROWS=2, COLUMNS=64, warps=1)
@compiled("*u64:16 *u64:16", name="sort_u64", ROWS=2, COLUMNS=32)
@triton.jit
def sort(out, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    v = tl.load(x + at)
    SIZE: tl.constexpr = ROWS * COLUMNS
    tl.store(out + at, tl.sort(v))
    tl.store(out + SIZE + at, tl.sort(v, descending=True))
    tl.store(out + 2 * SIZE + at, tl.flip(v, dim=1))


@compiled("*fp32:16 *fp32:16", ROWS=4, COLUMNS=128, BEST=8)
@triton.jit
def best_of_rows(out, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BEST: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None]
    v = tl.load(x + row * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    tl.store(out + row * BEST + tl.arange(0, BEST)[None, :], tl.topk(v, BEST))


@compiled("*u32:16 *fp32:16 *fp32:16 *i32:16 u64 i32", BLOCK=128)
@triton.jit
def random_numbers(words, uniform, normal, integers, seed, first, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(seed, first + at)
    tl.store(words + at, a)
    tl.store(words + BLOCK + at, b)
    tl.store(words + 2 * BLOCK + at, c)
    tl.store(words + 3 * BLOCK + at, d)
    tl.store(uniform + at, tl.rand(seed, first + at))
    tl.store(normal + at, tl.randn(seed, first + at))
    tl.store(integers + at, tl.randint(seed, first + at, n_rounds=7).to(tl.int32, bitcast=True))


@compiled("*fp32:16 *fp32:16 i32 fp32 i32", BLOCK=256)
@triton.jit
def dropout(out, x, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    kept = tl.rand(seed, at) > p
    v = tl.load(x + at, inside)
    tl.store(out + at, tl.where(kept, v / (1.0 - p), 0.0), inside)


# Rows as 8-bit integers with a scale each, halves rounded away from zero.
@compiled("*i8:16 *fp32 *fp16:16 i32:16", BLOCK=128)
@triton.jit
def quantised_rows(out, scales, x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    v = tl.load(x + row * columns + at, inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(v)), 127.0)
    q = tl.div_rn(v, scale)
    q = tl.where(q >= 0, tl.floor(q + 0.5), tl.ceil(q - 0.5))
    tl.store(scales + row, scale)
    tl.store(out + row * columns + at, q.to(tl.int8), inside)


@compiled("*fp16:16 *i32:16 *fp16:16 i32:16", BLOCK=64)
@triton.jit
def values_of_4_bits(out, packed, scales, words, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    nibble = tl.arange(0, 8)
    inside = (at < words)[:, None]
    word = tl.load(packed + row * words + at, at < words, other=0)
    q = ((word[:, None] >> (4 * nibble)[None, :]) & 15) - 8
    value = q.to(tl.float16) * tl.load(scales + row)
    tl.store(out + (row * words + at[:, None]) * 8 + nibble[None, :], value, inside)
