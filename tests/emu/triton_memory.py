"""Triton kernels that move data, count, and meet at atomic operations."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.emu.triton_lib import compiled


@compiled("*i32 *i32 i32", name="histogram_32", BLOCK=512, BINS=32)
@compiled("*i32:16 *i32:16 i32:16", name="histogram_256", BLOCK=1024, BINS=256, warps=8)
@triton.jit
def histogram(out, x, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    counts = tl.histogram(tl.load(x + at, inside, other=0), BINS, mask=inside)
    tl.atomic_add(out + tl.arange(0, BINS), counts)


@compiled("*i32 *i64 *fp32 *fp16 *i32 *u32 *i64 i32", BLOCK=128)
@triton.jit
def atomic_sums(i, j, f, h, seen, u, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside, other=0)
    bucket = at % 8
    old = tl.atomic_add(i + bucket, v.to(tl.int32), inside, sem="relaxed")
    tl.atomic_add(seen, tl.sum((inside & (old >= 0)).to(tl.int32)), sem="acq_rel")
    tl.atomic_add(j + bucket, v, inside, scope="sys")
    tl.atomic_add(f + bucket, (v % 64).to(tl.float32), inside, sem="release", scope="cta")
    tl.atomic_add(h + bucket, (v % 4).to(tl.float16), inside)
    tl.atomic_or(u + bucket, v.to(tl.uint32), inside)
    tl.atomic_xor(u + 8 + bucket, v.to(tl.uint32), inside)
    tl.atomic_and(u + 16 + bucket, v.to(tl.uint32) | 0xFF, inside)


@compiled("*i32 *u32 *fp32 *i64 *fp32 *i64 i32", BLOCK=128)
@triton.jit
def atomic_extremes(i, u, f, j, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside)
    w = tl.load(y + at, inside)
    bucket = at % 4
    tl.atomic_max(i + bucket, w.to(tl.int32), inside)
    tl.atomic_min(i + 4 + bucket, w.to(tl.int32), inside)
    tl.atomic_max(u + bucket, w.to(tl.uint32), inside)
    tl.atomic_min(u + 4 + bucket, w.to(tl.uint32), inside)
    tl.atomic_max(f + bucket, v, inside)
    tl.atomic_min(f + 4 + bucket, v, inside)
    tl.atomic_max(j + bucket, w, inside)
    tl.atomic_min(j + 4 + bucket, w, inside)


# Each program takes a ticket and leaves its mark there; element-wise exchanges beside it.
@compiled("*i32 *i32 *i64 *i32:16", BLOCK=64)
@triton.jit
def tickets(marks, counter, wide, lines, BLOCK: tl.constexpr):
    ticket = tl.atomic_add(counter, 1)
    tl.store(marks + ticket, ticket + 7)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = tl.atomic_xchg(lines + at, at)
    again = tl.atomic_cas(lines + at, at, old + 1)
    tl.store(lines + tl.num_programs(0) * BLOCK + at, old + again)
    expected = tl.atomic_add(wide, 0)
    found = tl.atomic_cas(wide, expected, expected + 3)
    while found != expected:
        expected = found
        found = tl.atomic_cas(wide, expected, expected + 3)


@compiled("*fp32 *fp32 i32 i32", name="transpose_f32", BLOCK=32)
@compiled("*fp16:16 *fp16:16 i32:16 i32:16", name="transpose_f16", BLOCK=64)
@compiled("*i8:16 *i8:16 i32:16 i32:16", name="transpose_s8", BLOCK=64, warps=8)
@compiled("*i64:16 *i64:16 i32:16 i32:16", name="transpose_s64", BLOCK=16, warps=1)
@triton.jit
def transpose(out, x, rows, columns, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + r[:, None] * columns + c[None, :], (r < rows)[:, None] & (c < columns)[None, :])
    inside = (c < columns)[:, None] & (r < rows)[None, :]
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(v), inside)


@compiled("*i16:16 *i16:16", A=4, B=8, C=32)
@triton.jit
def permuted_axes(out, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    v = tl.load(x + tl.arange(0, A * B * C)).reshape(A, B, C)
    tl.store(out + tl.arange(0, A * B * C), tl.permute(v, (2, 0, 1)).reshape(A * B * C))


@compiled("*fp16:16 *fp16:16 *fp16:16", BLOCK=128)
@triton.jit
def joined_and_split(out, x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    twice = tl.arange(0, 2 * BLOCK)
    tl.store(out + twice, tl.interleave(a, b))
    even, odd = tl.split(tl.load(x + twice).reshape(BLOCK, 2))
    tl.store(out + 2 * BLOCK + at, even)
    tl.store(out + 3 * BLOCK + at, odd)
    tl.store(out + 4 * BLOCK + twice, tl.cat(a, b, can_reorder=False))
    tl.store(out + 6 * BLOCK + twice, tl.join(a, b).permute(1, 0).reshape(2 * BLOCK))


# Rows chosen by 64-bit indices; negative ones count from the end.
@compiled("*fp32 *fp32 *i64 i32 i32", BLOCK=64)
@triton.jit
def embedding(out, table, index, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.load(index + row)
    i = tl.where(i < 0, i + rows, i)
    tl.device_assert((i >= 0) & (i < rows), "no such row")
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    tl.store(out + row * columns + at, tl.load(table + i * columns + at, inside), inside)


@compiled("*fp32:16 *fp32:16 *fp32:16 *fp32:16 i32:16", HALF=32)
@triton.jit
def rotary(out, x, sines, cosines, width, HALF: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, HALF)
    a = tl.load(x + row * width + at)
    b = tl.load(x + row * width + HALF + at)
    s = tl.load(sines + row * HALF + at)
    c = tl.load(cosines + row * HALF + at)
    tl.store(out + row * width + at, a * c - b * s)
    tl.store(out + row * width + HALF + at, b * c + a * s)


@compiled("*i32:16 *i32:16 *i32:16", name="gathered_columns", ROWS=16, COLUMNS=32, AXIS=1)
@compiled("*i32:16 *i32:16 *i32:16", name="gathered_rows", ROWS=64, COLUMNS=4, AXIS=0)
@triton.jit
def gathered(out, x, index, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.gather(tl.load(x + at), tl.load(index + at), AXIS))


# A row added to others that atomics choose, as the gradient of an embedding is.
@compiled("*fp32:16 *i32 *fp32:16 i32:16", BLOCK=64)
@triton.jit
def scattered_sums(out, index, x, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    to = tl.load(index + row)
    tl.atomic_add(out + to * columns + at, tl.load(x + row * columns + at, inside), inside)


@compiled("*fp32:16 *fp32:16 i32:16 i32:16", BLOCK=16)
@triton.jit
def stencil(out, x, rows, columns, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for dr in tl.static_range(-1, 2):
        for dc in tl.static_range(-1, 2):
            y = r + dr
            z = c + dc
            near = (y >= 0) & (y < rows) & (z >= 0) & (z < columns)
            total += tl.load(x + y * columns + z, near, other=0.0)
    tl.store(out + r * columns + c, total, (r < rows) & (c < columns))


@compiled("*fp32:16 *fp32:16 i32 i32:16", BLOCK=32)
@triton.jit
def described_tiles(out, x, rows, columns, BLOCK: tl.constexpr):
    shape = [rows, columns]
    source = tl.make_tensor_descriptor(x, shape, [columns, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, shape, [columns, 1], [BLOCK, BLOCK])
    r = tl.program_id(0) * BLOCK
    for c in range(0, columns, BLOCK):
        target.store([r, c], source.load([r, c]) * 2.0)


# Before compute capability 9.0 bf16 has no such instruction: a loop compares and swaps.
@compiled("*fp64 *bf16 *fp16:16 *i32:16", BLOCK=256)
@triton.jit
def atomic_sums_of_floats(wide, narrow, each, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at)
    tl.atomic_add(wide + at % 4, v.to(tl.float64))
    tl.atomic_add(narrow + at % 4, v.to(tl.bfloat16))
    tl.atomic_add(each + at, v.to(tl.float16))


# One program after the other.
@compiled("*i32 *i32 *i32")
@triton.jit
def chain_of_flags(out, flags, x):
    program = tl.program_id(0)
    value = tl.load(x + program)
    if program > 0:
        tl.atomic_poll(flags + program - 1, 1, sem="acquire")
        value += tl.load(out + program - 1, cache_modifier=".cv")
    tl.store(out + program, value)
    tl.debug_barrier()
    tl.atomic_store(flags + program, 1, sem="release")
