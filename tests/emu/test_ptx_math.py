"""Arithmetic of CUDA C expressions, bit for bit against numpy where the result is defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_cases import NO_FMA, Array, elementwise, f4, f8, floats, i4, i8, rng, same, u4
from ptx_runner import run


def test_saxpy_with_a_partial_last_block() -> None:
    x, y = floats(1000), floats(1000, 2)
    want = (x.astype(f8) * f8(f4(2.5)) + y).astype(f4)
    run(
        """extern "C" __global__ void saxpy(float* y, const float* x, float a, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) y[i] = a * x[i] + y[i];
        }""",
        "saxpy", 4, 256, [y, x, f4(2.5), i4(1000)],
    )  # fmt: skip
    same(y, want)


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("a[i] + b[i]", lambda a, b: a + b),
        ("a[i] - b[i]", lambda a, b: a - b),
        ("a[i] * b[i]", lambda a, b: a * b),
        ("a[i] / b[i]", lambda a, b: a / b),
        ("sqrtf(fabsf(a[i]))", lambda a, b: np.sqrt(np.abs(a))),
        ("fminf(a[i], b[i])", np.fmin),
        ("fmaxf(a[i], b[i])", np.fmax),
        ("floorf(a[i])", lambda a, b: np.floor(a)),
        ("ceilf(a[i])", lambda a, b: np.ceil(a)),
        ("truncf(a[i])", lambda a, b: np.trunc(a)),
        ("rintf(a[i])", lambda a, b: np.rint(a)),
        ("copysignf(a[i], b[i])", np.copysign),
        ("fmodf(a[i], b[i])", np.fmod),
        ("a[i] < b[i] ? -a[i] : b[i]", lambda a, b: np.where(a < b, -a, b)),
    ],
)
def test_float_arithmetic(body: str, reference: Any) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.0], f4)
    a = np.concatenate([floats(500), np.repeat(special, len(special))])
    b = np.concatenate([floats(500, 2), np.tile(special, len(special))])
    out = np.zeros_like(a)
    elementwise(body, len(a), out, a, b, options=NO_FMA)
    with np.errstate(all="ignore"):
        want = reference(a, b).astype(f4)
    if "fmin" in body or "fmax" in body:  # numpy leaves the sign of a zero open
        zero = (a == 0) & (b == 0)
        pick = np.signbit(a) | np.signbit(b) if "fmin" in body else np.signbit(a) & np.signbit(b)
        want[zero] = np.where(pick, f4(-0.0), f4(0.0))[zero]
    same(out, want)


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("a[i] + b[i] * 3.0", lambda a, b: a + b * 3.0),
        ("a[i] / b[i]", lambda a, b: a / b),
        ("1.0 / a[i]", lambda a, b: 1.0 / a),
        ("sqrt(a[i] * a[i])", lambda a, b: np.sqrt(a * a)),
        ("floor(a[i]) - trunc(b[i])", lambda a, b: np.floor(a) - np.trunc(b)),
        ("fmin(a[i], b[i])", np.fmin),
        ("fmod(a[i], b[i])", np.fmod),
        ("(double)(float)a[i]", lambda a, b: a.astype(f4).astype(f8)),
        ("(double)(long long)(a[i] * 1e6)", lambda a, b: (a * 1e6).astype(i8).astype(f8)),
    ],
)
def test_double_arithmetic(body: str, reference: Any) -> None:
    a, b = rng(3).standard_normal(700) * 100, rng(4).standard_normal(700)
    out = np.zeros(700)
    elementwise(body, 700, out, a, b, options=NO_FMA)
    same(out, reference(a, b))


@pytest.mark.parametrize(
    ("body", "reference", "ulps"),
    [
        ("expf(a[i])", np.exp, 2),
        ("logf(fabsf(a[i]))", lambda a: np.log(np.abs(a)), 2),
        ("sinf(a[i])", np.sin, 2),
        ("cosf(a[i] * 100000.f)", lambda a: np.cos((a.astype(f4) * f4(1e5)).astype(f8)), 2),
        ("tanhf(a[i])", np.tanh, 2),
        ("rsqrtf(fabsf(a[i]))", lambda a: 1 / np.sqrt(np.abs(a)), 2),
        ("powf(fabsf(a[i]), 1.7f)", lambda a: np.abs(a) ** f8(f4(1.7)), 8),
        ("erff(a[i])", None, 0),
    ],
)
def test_float_functions_stay_within_their_documented_error(
    body: str, reference: Any, ulps: int
) -> None:
    a = floats(2000, 5)
    out = np.zeros_like(a)
    elementwise(body, 2000, out, a)
    if reference is None:
        assert np.all(np.abs(out) <= 1) and np.all(np.sign(out) == np.sign(a))
        return
    want = reference(a.astype(f8))
    spacing = np.spacing(np.maximum(np.abs(want), 1e-30).astype(f4)).astype(f8)
    assert np.max(np.abs(out - want) / spacing) <= ulps


@pytest.mark.parametrize("body", ["exp(a[i])", "log(fabs(a[i]))", "sin(a[i])", "cos(a[i] * 1e9)"])
def test_double_functions_stay_within_two_ulps(body: str) -> None:
    a = rng(6).standard_normal(500) * 20
    out = np.zeros_like(a)
    elementwise(body, 500, out, a)
    name = body[:3]
    x = np.abs(a) if name == "log" else a * 1e9 if name == "cos" else a
    want = getattr(np, name)(x)
    assert np.max(np.abs(out - want) / np.spacing(np.abs(want))) <= 2


def _shifts(a: Array, b: Array) -> Array:
    return (a << (b & u4(31))) ^ (a >> u4(3))


@pytest.mark.parametrize(
    ("dtype", "body", "reference"),
    [
        ("i4", "a[i] / b[i]", lambda a, b: np.trunc(a / b)),
        ("i4", "a[i] % b[i]", np.fmod),
        ("u4", "a[i] / b[i]", lambda a, b: a // b),
        ("u4", "a[i] % b[i]", lambda a, b: a % b),
        ("u8", "a[i] / b[i]", lambda a, b: a // b),
        ("u8", "a[i] % b[i]", lambda a, b: a % b),
        ("u4", "__umulhi(a[i], b[i])", lambda a, b: (a.astype("u8") * b) >> np.uint64(32)),
        ("i4", "__mulhi(a[i], b[i])", lambda a, b: (a.astype("i8") * b) >> np.int64(32)),
        ("u4", "__popc(a[i]) + __clz(b[i])", None),
        ("u4", "__brev(a[i])", None),
        ("u4", "__byte_perm(a[i], b[i], 0x5140)", None),
        ("u4", "__funnelshift_l(a[i], b[i], b[i] & 63)", None),
        ("u4", "__usad(a[i], b[i], 7u)", lambda a, b: np.maximum(a, b) - np.minimum(a, b) + u4(7)),
        ("i4", "abs(a[i]) + min(a[i], b[i])", lambda a, b: np.abs(a) + np.minimum(a, b)),
        ("i8", "a[i] * b[i] + (a[i] >> 7)", lambda a, b: a * b + (a >> 7)),
        ("u4", "(a[i] << (b[i] & 31)) ^ (a[i] >> 3)", _shifts),
    ],
)  # fmt: skip
def test_integer_arithmetic(dtype: str, body: str, reference: Any) -> None:
    info = np.iinfo(dtype)
    a = rng(7).integers(info.min, info.max, 600, dtype=dtype, endpoint=True)
    b = rng(8).integers(info.min, info.max, 600, dtype=dtype, endpoint=True)
    b[b == 0] = 1
    out = np.zeros_like(a)
    elementwise(body, 600, out, a, b)
    with np.errstate(over="ignore"):
        want = (reference or INTEGER_REFERENCES[body])(a, b)
    same(out, np.asarray(want).astype(dtype))


def _byte_perm(a: Array, b: Array) -> Array:
    pair = a.astype("u8") | b.astype("u8") << np.uint64(32)
    parts = [(pair >> np.uint64(8 * s) & np.uint64(255)) << np.uint64(8 * k)
             for k, s in enumerate((0, 4, 1, 5))]  # fmt: skip
    return np.bitwise_or.reduce(parts)


def _funnel(a: Array, b: Array) -> Array:
    pair = b.astype("u8") << np.uint64(32) | a
    return (pair << (b & u4(31)).astype("u8")) >> np.uint64(32)


INTEGER_REFERENCES: dict[str, Any] = {
    "__popc(a[i]) + __clz(b[i])": lambda a, b: np.array(
        [int(x).bit_count() + 32 - int(y).bit_length() for x, y in zip(a, b, strict=True)]
    ),
    "__brev(a[i])": lambda a, b: np.array([int(f"{x:032b}"[::-1], 2) for x in a]),
    "__byte_perm(a[i], b[i], 0x5140)": _byte_perm,
    "__funnelshift_l(a[i], b[i], b[i] & 63)": _funnel,
}


def test_small_integers_are_sign_extended() -> None:
    a = rng(9).integers(-128, 127, 300, dtype="i1")
    b = rng(9).integers(0, 65535, 300, dtype="u2")
    out = np.zeros(300, "i2")
    elementwise("(short)(a[i] * 3 - b[i])", 300, out, a, b)
    same(out, (a.astype(i4) * 3 - b.astype(i4)).astype("i2"))


def test_half_precision_arithmetic() -> None:
    a = rng(5).standard_normal(512).astype("f2")
    b = rng(6).standard_normal(512).astype("f2")
    a[:6] = [65504, 6e-8, -6e-8, np.inf, 0, 2048]
    b[:6] = [65504, 0.5, 0.5, 1, -0.0, 1]
    out = np.zeros((5, 512), "f2")
    run(
        """#include <cuda_fp16.h>
        extern "C" __global__ void k(__half* o, const __half* a, const __half* b) {
            int t = threadIdx.x;
            o[t] = __hadd_rn(a[t], b[t]);
            o[512 + t] = __hmul_rn(a[t], b[t]);
            o[1024 + t] = __hsub_rn(a[t], b[t]);
            o[1536 + t] = a[t] / b[t];
            __half2 s = __hadd2_rn(__halves2half2(a[t], b[t]), __float2half2_rn(1.5f));
            o[2048 + t] = __hgt(a[t], b[t]) ? __low2half(s) : __high2half(s);
        }""",
        "k", 1, 512, [out, a, b],
    )  # fmt: skip
    with np.errstate(all="ignore"):
        larger = np.where(a > b, a, b) + np.float16(1.5)
        want = np.array([a + b, a * b, a - b, a / b, larger], "f2")
    same(out, want)


def test_half_conversions_and_fused_multiply_add() -> None:
    x = np.concatenate([floats(300), np.array([65519.9, 65520, 1e-8, 3e-8, 2**-24, 1e30], f4)])
    out = np.zeros((3, len(x)), f4)
    run(
        """#include <cuda_fp16.h>
        #include <cuda_bf16.h>
        extern "C" __global__ void k(float* o, const float* x, int n) {
            int t = threadIdx.x;
            if (t >= n) return;
            o[t] = __half2float(__float2half_rn(x[t]));
            o[n + t] = __bfloat162float(__float2bfloat16_rn(x[t]));
            __half h = __float2half_rn(x[t]);
            o[2 * n + t] = __half2float(__hfma(h, h, __float2half(0.125f)));
        }""",
        "k", 1, 320, [out, x, i4(len(x))],
    )  # fmt: skip
    with np.errstate(all="ignore"):
        half = x.astype("f2")
        bits = x.view(u4)
        brain = ((bits + 0x7FFF + (bits >> 16 & 1)) & u4(0xFFFF0000)).view(f4)
        fused = (half.astype(np.longdouble) ** 2 + np.longdouble(0.125)).astype("f2")
        same(out, np.array([half.astype(f4), brain, fused.astype(f4)], f4))


def test_float_to_integer_conversions_saturate() -> None:
    x = np.array([0.5, -0.5, 1.5, 2.5, -2.5, 3e9, -3e9, 5e9, np.nan, np.inf, -np.inf, 1e20], f4)
    n = len(x)
    out = np.zeros((4, n), i8)
    run(
        """extern "C" __global__ void k(long long* o, const float* x, int n) {
            int t = threadIdx.x;
            o[t] = __float2int_rn(x[t]); o[n + t] = __float2uint_rz(x[t]);
            o[2 * n + t] = __float2ll_rd(x[t]); o[3 * n + t] = __float2int_ru(x[t]);
        }""",
        "k", 1, n, [out, x, i4(n)],
    )  # fmt: skip

    def clamp(v: Array, low: int, high: int, nan: int) -> list[int]:
        return [nan if np.isnan(e) else int(min(max(float(e), low), high)) for e in v]

    top = 2**63 - 1
    want = [
        clamp(np.rint(x), -(2**31), 2**31 - 1, 0),
        clamp(np.trunc(x), 0, 2**32 - 1, 0),
        [min(v, top) for v in clamp(np.floor(x), -(2**63), 2**63, -(2**63))],
        clamp(np.ceil(x), -(2**31), 2**31 - 1, 0),
    ]
    same(out, np.array(want, i8))


@pytest.mark.parametrize("mode", ["rn", "rz", "ru", "rd"])
def test_directed_rounding(mode: str) -> None:
    a, b = floats(400), floats(400, 2)
    out = np.zeros((4, 400), f4)
    run(
        f"""extern "C" __global__ void k(float* o, const float* a, const float* b) {{
            int t = threadIdx.x;
            o[t] = __fadd_{mode}(a[t], b[t]); o[400 + t] = __fmul_{mode}(a[t], b[t]);
            o[800 + t] = __fdiv_{mode}(a[t], b[t]);
            o[1200 + t] = __double2float_{mode}((double)a[t] / 3.0);
        }}""",
        "k", 1, 400, [out, a, b],
    )  # fmt: skip
    x, y = a.astype(np.longdouble), b.astype(np.longdouble)
    for got, exact in zip(out, (x + y, x * y, x / y, (a.astype(f8) / 3.0)), strict=True):
        near = exact.astype(f4)
        below = np.where(near.astype(np.longdouble) > exact, np.nextafter(near, f4(-np.inf)), near)
        above = np.where(near.astype(np.longdouble) < exact, np.nextafter(near, f4(np.inf)), near)
        toward = np.where(exact < 0, above, below)
        same(got.copy(), {"rn": near, "rz": toward, "ru": above, "rd": below}[mode].astype(f4))


def test_flush_to_zero_is_only_done_when_asked_for() -> None:
    a = np.array([1e-39, -1e-39, 1e-20, 2e-38], f4)
    b = np.array([1, 1, 1e-20, -1.5e-38], f4)
    for options, flushed in (((), False), (("--ftz=true",), True)):
        out = np.zeros((2, 4), f4)
        run(
            """extern "C" __global__ void k(float* o, const float* a, const float* b) {
                int t = threadIdx.x; o[t] = a[t] * b[t]; o[4 + t] = a[t] + b[t];
            }""",
            "k", 1, 4, [out, a, b], options=options,
        )  # fmt: skip
        want = np.array([a * b, a + b], f4)
        if flushed:
            tiny = np.abs(want) < np.finfo(f4).tiny
            want[tiny] = np.copysign(f4(0), want[tiny])
        same(out, want)
