"""Triton kernels that treat each element alone."""

from __future__ import annotations

import triton
import triton.language as tl

from tests.emu.triton_lib import compiled


@compiled("*fp32 *fp32 *fp32 fp32 i32", name="affine_f32", BLOCK=512)
@compiled("*fp32:16 *fp32:16 *fp32:16 fp32 i32:16", name="affine_f32_vectors", BLOCK=1024)
@compiled("*fp64:16 *fp64:16 *fp64:16 fp64 i32:16", name="affine_f64", BLOCK=512)
@compiled("*fp16:16 *fp16:16 *fp16:16 fp32 i32:16", name="affine_f16", BLOCK=1024)
@compiled("*bf16:16 *bf16:16 *bf16:16 fp32 i32:16", name="affine_bf16", BLOCK=1024, warps=8)
@triton.jit
def affine(out, x, y, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, inside) * scale + tl.load(y + at, inside)
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@compiled("*fp16:16 *fp16:16 *fp16:16 i32", name="narrow_f16", BLOCK=256)
@compiled("*bf16:16 *bf16:16 *bf16:16 i32:16", name="narrow_bf16", BLOCK=256)
@triton.jit
def narrow_floats(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=1.0)
    b = tl.load(y + at, mask=inside, other=2.0)
    tl.store(out + at, a + b, inside)
    tl.store(out + n + at, a - b, inside)
    tl.store(out + 2 * n + at, a * b, inside)
    tl.store(out + 3 * n + at, tl.maximum(a, b), inside)
    tl.store(out + 4 * n + at, tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL), inside)
    tl.store(out + 5 * n + at, tl.where(a < b, tl.abs(a), -b), inside)
    tl.store(out + 6 * n + at, tl.clamp(a, -1.0, 1.5), inside)


@compiled("*i8 *i8 *i8 i32", name="integers_s8", BLOCK=256)
@compiled("*u8:16 *u8:16 *u8:16 i32:16", name="integers_u8", BLOCK=512)
@compiled("*i16:16 *i16:16 *i16:16 i32:16", name="integers_s16", BLOCK=512)
@compiled("*i32:16 *i32:16 *i32:16 i32:16", name="integers_s32", BLOCK=512)
@compiled("*u32 *u32 *u32 i32", name="integers_u32", BLOCK=256)
@compiled("*i64:16 *i64:16 *i64:16 i32:16", name="integers_s64", BLOCK=256)
@compiled("*u64 *u64 *u64 i32", name="integers_u64", BLOCK=256)
@triton.jit
def integers(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, mask=inside, other=0)
    b = tl.load(y + at, mask=inside, other=1)
    kind = out.dtype.element_ty
    shift = (b & 7).to(kind)
    tl.store(out + at, a + b, inside)
    tl.store(out + n + at, a - b, inside)
    tl.store(out + 2 * n + at, a * b, inside)
    tl.store(out + 3 * n + at, a // b, inside)
    tl.store(out + 4 * n + at, a % b, inside)
    tl.store(out + 5 * n + at, (a << shift) | (a >> shift), inside)
    tl.store(out + 6 * n + at, (a & b) ^ ~a, inside)
    tl.store(out + 7 * n + at, tl.minimum(a, b), inside)
    tl.store(out + 8 * n + at, tl.maximum(a, b), inside)
    tl.store(out + 9 * n + at, tl.where(a == b, a, tl.abs(b)), inside)


@compiled("*u32 *u64 *u32 *u64 *u32 *u64 i32", BLOCK=256)
@triton.jit
def high_halves(out4, out8, x4, x8, y4, y8, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    high = tl.umulhi(tl.load(x4 + at, inside), tl.load(y4 + at, inside))
    tl.store(out4 + at, high, inside)
    tl.store(out8 + at, tl.umulhi(tl.load(x8 + at, inside), tl.load(y8 + at, inside)), inside)


@triton.jit
def hyperbolic_tangent(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@compiled("*fp32:16 *fp32:16 i32:16", name="activations_f32", BLOCK=512)
@compiled("*fp16:16 *fp16:16 i32:16", name="activations_f16", BLOCK=512)
@compiled("*bf16 *bf16 i32", name="activations_bf16", BLOCK=256, warps=2)
@triton.jit
def activations(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside).to(tl.float32)
    kind = out.dtype.element_ty
    inner = 0.7978845608 * (v + 0.044715 * v * v * v)
    tl.store(out + at, (0.5 * v * (1.0 + hyperbolic_tangent(inner))).to(kind), inside)
    tl.store(out + n + at, tl.sigmoid(v).to(kind), inside)
    tl.store(out + 2 * n + at, (v * tl.sigmoid(v)).to(kind), inside)
    soft = tl.maximum(v, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(v)))
    tl.store(out + 3 * n + at, soft.to(kind), inside)
    tl.store(out + 4 * n + at, tl.where(v > 0, v, tl.exp(v) - 1.0).to(kind), inside)


@compiled("*fp32:16 *fp32:16 i32:16", BLOCK=256)
@triton.jit
def functions(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside, other=1.0)
    tl.store(out + at, tl.exp(v), inside)
    tl.store(out + n + at, tl.exp2(v), inside)
    tl.store(out + 2 * n + at, tl.log(tl.abs(v)), inside)
    tl.store(out + 3 * n + at, tl.log2(tl.abs(v)), inside)
    tl.store(out + 4 * n + at, tl.sin(v), inside)
    tl.store(out + 5 * n + at, tl.cos(v), inside)
    tl.store(out + 6 * n + at, tl.sqrt(tl.abs(v)), inside)
    tl.store(out + 7 * n + at, tl.rsqrt(tl.abs(v)), inside)
    tl.store(out + 8 * n + at, 3.0 / v, inside)


@compiled("*fp32:16 *fp32:16 *fp32:16 i32:16", name="rounded_f32", BLOCK=256)
@triton.jit
def rounded_functions(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, inside)
    b = tl.load(y + at, inside)
    tl.store(out + at, tl.sqrt_rn(tl.abs(a)), inside)
    tl.store(out + n + at, tl.div_rn(a, b), inside)
    tl.store(out + 2 * n + at, tl.fma(a, b, a), inside)
    tl.store(out + 3 * n + at, tl.floor(a), inside)
    tl.store(out + 4 * n + at, tl.ceil(a), inside)
    tl.store(out + 5 * n + at, a % b, inside)


@compiled("*fp64 *fp64 *fp64 i32", BLOCK=128)
@triton.jit
def doubles(out, x, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, inside)
    b = tl.load(y + at, inside)
    tl.store(out + at, a / b, inside)
    tl.store(out + n + at, tl.sqrt(tl.abs(a)), inside)
    tl.store(out + 2 * n + at, tl.fma(a, b, b), inside)
    tl.store(out + 3 * n + at, tl.maximum(a, tl.floor(b)), inside)
    tl.store(out + 4 * n + at, (a > b).to(tl.float64), inside)


@compiled("*i8 *i16 *i32 *i64 *u8 *fp16 *bf16 *fp64 *fp32 i32", BLOCK=256)
@triton.jit
def conversions_of_f32(o1, o2, o4, o8, u1, h, b, d, x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside)
    tl.store(o1 + at, v.to(tl.int8), inside)
    tl.store(o2 + at, v.to(tl.int16), inside)
    tl.store(o4 + at, v.to(tl.int32), inside)
    tl.store(o8 + at, v.to(tl.int64), inside)
    tl.store(u1 + at, tl.abs(v).to(tl.uint8), inside)
    tl.store(h + at, v.to(tl.float16), inside)
    tl.store(b + at, v.to(tl.bfloat16), inside)
    tl.store(d + at, v.to(tl.float64), inside)
    tl.store(h + n + at, v.to(tl.float16, fp_downcast_rounding="rtz"), inside)


@compiled("*fp32 *fp16 *bf16 *fp32 *fp32 *i8:16 *i16:16 *i64:16 *u32:16 i32:16", BLOCK=512)
@triton.jit
def conversions_of_integers(o1, o2, b2, o8, o4, x1, x2, x8, x4, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    tl.store(o1 + at, tl.load(x1 + at, inside).to(tl.float32), inside)
    tl.store(o2 + at, tl.load(x2 + at, inside).to(tl.float16), inside)
    tl.store(b2 + at, tl.load(x1 + at, inside).to(tl.bfloat16), inside)
    tl.store(o8 + at, tl.load(x8 + at, inside).to(tl.float32), inside)
    tl.store(o4 + at, tl.load(x4 + at, inside).to(tl.float32), inside)


# Compute capability 8.0 has no 8-bit floats: Triton shifts and masks their bits.
@compiled(
    "*fp8e5:16 *fp8e5:16 *fp16:16 *fp32:16 *bf16:16 *fp16:16 *fp32:16 *fp8e5:16 i32:16", BLOCK=512
)
@triton.jit
def floats_of_8_bits(o1, p1, o2, o4, b2, x2, x4, x1, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    tl.store(o1 + at, tl.load(x2 + at, inside).to(tl.float8e5), inside)
    tl.store(p1 + at, tl.load(x4 + at, inside).to(tl.float8e5, fp_downcast_rounding="rtne"), inside)
    v = tl.load(x1 + at, inside)
    tl.store(o2 + at, v.to(tl.float16), inside)
    tl.store(o4 + at, v.to(tl.float32), inside)
    tl.store(b2 + at, v.to(tl.bfloat16), inside)


@compiled("*fp8e4b15:16 *fp16:16 *fp16:16 *fp8e4b15:16", BLOCK=256)
@triton.jit
def floats_of_8_bits_with_bias_15(o1, o2, x2, x1, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(o1 + at, tl.load(x2 + at).to(tl.float8e4b15))
    tl.store(o2 + at, tl.load(x1 + at).to(tl.float16))


@compiled("*i1 *i32 *fp32 *fp32 *i1 i32", BLOCK=256)
@triton.jit
def predicates(out, count, x, y, given, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(x + at, inside, other=0.0)
    b = tl.load(y + at, inside, other=0.0)
    g = tl.load(given + at, inside, other=0)
    r = ((a < b) | (a != a)) & ~(g & (b >= 1.0)) ^ (a == b)
    tl.store(out + at, r, inside)
    tl.store(count, tl.sum((r & inside).to(tl.int32)))


@compiled("*fp32:16 *fp32:16 *fp32:16 *fp32:16 *fp32:16 fp32 fp32 fp32 fp32 i32:16", BLOCK=256)
@triton.jit
def adam(p, m, v, g, p_start, rate, beta1, beta2, epsilon, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gradient = tl.load(g + at, inside, eviction_policy="evict_first")
    first = tl.load(m + at, inside, eviction_policy="evict_last")
    second = tl.load(v + at, inside, volatile=True)
    first = beta1 * first + (1.0 - beta1) * gradient
    second = beta2 * second + (1.0 - beta2) * gradient * gradient
    start = tl.load(p_start + at, inside, cache_modifier=".cg")
    step = rate * first / (tl.sqrt(second) + epsilon)
    tl.store(m + at, first, inside, cache_modifier=".cs")
    tl.store(v + at, second, inside, cache_modifier=".wt")
    tl.store(p + at, start - step, inside, eviction_policy="evict_first")


@compiled("*i32 *i32 i32", BLOCK=128)
@triton.jit
def collatz_steps(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside, other=1)
    steps = tl.zeros([BLOCK], tl.int32)
    while tl.max(v) > 1:
        odd = (v & 1) == 1
        steps += (v > 1).to(tl.int32)
        v = tl.where(v > 1, tl.where(odd, 3 * v + 1, v >> 1), v)
    tl.store(out + at, steps, inside)


@triton.jit(noinline=True)
def power(base, exponent):
    result = base * 0 + 1
    while exponent > 0:
        if exponent & 1:
            result = result * base
        base = base * base
        exponent = exponent >> 1
    return result


@compiled("*i64 *i64 i32 i32", BLOCK=32)
@triton.jit
def powers_by_a_function(out, x, first, second, BLOCK: tl.constexpr):
    base = tl.load(x + tl.program_id(0))
    tl.store(out + 2 * tl.program_id(0), power(base, first))
    tl.store(out + 2 * tl.program_id(0) + 1, power(base + 1, second))


@compiled("*i8:16 *i8:16 *i8:16 *i32:16", BLOCK=512)
@triton.jit
def packed_assembly(out, x, y, bits, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    # Four bytes in a register, as the constraint says.
    mean = tl.inline_asm_elementwise(
        """{
        .reg .b32 t;
        and.b32 t, $1, $2;
        xor.b32 $0, $1, $2;
        and.b32 $0, $0, 0xfefefefe;
        shr.u32 $0, $0, 1;
        add.u32 $0, $0, t;
        }""",
        "=r,r,r",
        [a, b],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )
    tl.store(out + at, mean)
    word = tl.load(bits + at)
    count, zeros = tl.inline_asm_elementwise(
        "popc.b32 $0, $2; clz.b32 $1, $2;",
        "=&r,=r,r",
        [word],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tl.store(bits + BLOCK + at, count + 100 * zeros)


@compiled("*fp32 *fp32 i32", BLOCK=128, options={"debug": True})
@triton.jit
def checked_reciprocals(out, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + at, inside, other=1.0)
    tl.device_assert(v != 0.0, "there is no reciprocal of zero", mask=inside)
    tl.store(out + at, tl.div_rn(1.0, v), inside)


@compiled("*i8 *i32 *i64 *fp32 *fp64 *bf16 *fp16 *bf16 *fp64", BLOCK=128)
@triton.jit
def conversions_of_floats(o1, o4, o8, f4, f8, b2, x2, y2, x8, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    h = tl.load(x2 + at)
    b = tl.load(y2 + at)
    d = tl.load(x8 + at)
    tl.store(o1 + at, h.to(tl.int8))
    tl.store(o4 + at, b.to(tl.int32))
    tl.store(o8 + at, d.to(tl.int64))
    tl.store(o8 + BLOCK + at, h.to(tl.int64))
    tl.store(f4 + at, d.to(tl.float32))
    tl.store(f4 + BLOCK + at, b.to(tl.float32))
    tl.store(f8 + at, h.to(tl.float64))
    tl.store(f8 + BLOCK + at, b.to(tl.float64))
    tl.store(b2 + at, h.to(tl.bfloat16))
    tl.store(b2 + BLOCK + at, h.to(tl.float32).to(tl.bfloat16, fp_downcast_rounding="rtz"))


@triton.jit
def larger_twice_or_difference(a, b):
    if a > b:  # noqa: SIM108 -- Triton makes a branch of it
        result = a * 2
    else:
        result = b - a
    return result


@compiled("*i32:16 *i32:16 *i32:16", BLOCK=256)
@triton.jit
def branches_of_elements(out, x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.map_elementwise(larger_twice_or_difference, tl.load(x + at), tl.load(y + at))
    tl.store(out + at, v)
