"""Ordinary CUDA kernels through NVRTC and the PTX interpreter, bit for bit against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_runner import Kernel, compile_cuda, run

Array = np.ndarray[Any, Any]
NO_FMA = ("--fmad=false",)
f4, f8, i4, u4, i8 = np.float32, np.float64, np.int32, np.uint32, np.int64


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def floats(n: int, seed: int = 1) -> Array:
    return (rng(seed).standard_normal(n) * 10).astype(f4)


def same(got: Array, want: Array) -> None:
    """Equal bits; NaNs of any payload are equal."""
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)
    if got.dtype.kind == "f":
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


def elementwise(body: str, n: int, out: Array, *inputs: Array, block: int = 128, **kw: Any) -> None:
    """Run `out[i] = body` over i; inputs are named a, b, c."""
    types = {
        "f4": "float", "f8": "double", "i4": "int", "u4": "unsigned", "i8": "long long",
        "u8": "unsigned long long", "i2": "short", "u2": "unsigned short", "u1": "unsigned char",
        "i1": "signed char",
    }  # fmt: skip
    names = [types[x.dtype.str[1:]] for x in (out, *inputs)]
    params = "".join(f", const {t}* {v}" for t, v in zip(names[1:], "abc", strict=False))
    prelude = kw.pop("prelude", "")
    source = f"""{prelude}
    extern "C" __global__ void k({names[0]}* out, int n{params}) {{
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = {body};
    }}"""
    run(source, "k", (n + block - 1) // block, block, [out, i4(n), *inputs], **kw)


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
        ("u4", "(a[i] << (b[i] & 31)) ^ (a[i] >> 3)", lambda a, b: (a << (b & u4(31))) ^ (a >> u4(3))),
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


def test_grid_stride_loop() -> None:
    x = floats(10007)
    out = np.zeros_like(x)
    run(
        """extern "C" __global__ void k(float* o, const float* x, int n) {
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
                o[i] = x[i] * 2.f + 1.f;
        }""",
        "k", 3, 96, [out, x, i4(len(x))],
    )  # fmt: skip
    same(out, (x.astype(f8) * 2 + 1).astype(f4))


REDUCE = """extern "C" __global__ void k(float* o, const float* x) {
    __shared__ float s[256];
    int t = threadIdx.x;
    s[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    for (int d = 128; d > 0; d >>= 1) {
        if (t < d) s[t] += s[t + d];
        __syncthreads();
    }
    if (t == 0) o[blockIdx.x] = s[0];
}"""


def test_block_reduction_in_shared_memory() -> None:
    x = floats(256 * 9)
    out = np.zeros(9, f4)
    run(REDUCE, "k", 9, 256, [out, x])
    s = x.reshape(9, 256).copy()
    for d in (128, 64, 32, 16, 8, 4, 2, 1):
        s[:, :d] += s[:, d : 2 * d]
    same(out, s[:, 0].copy())


def test_reduction_in_dynamic_shared_memory_behind_static() -> None:
    x = floats(64)
    out = np.zeros(1, f4)
    run(
        """extern "C" __global__ void k(float* o, const float* x) {
            extern __shared__ float s[];
            __shared__ int order[64];
            int t = threadIdx.x;
            order[t] = 63 - t;
            s[t] = x[t];
            __syncthreads();
            if (t == 0) { float v = 0; for (int i = 0; i < 64; ++i) v += s[order[i]]; *o = v; }
        }""",
        "k", 1, 64, [out, x], shared=256,
    )  # fmt: skip
    want = f4(0)
    for v in x[::-1]:
        want = want + v
    same(out, np.array([want], f4))


def test_warp_shuffle_reduction() -> None:
    x = floats(128)
    out = np.zeros(4, f4)
    run(
        """extern "C" __global__ void k(float* o, const float* x) {
            float v = x[threadIdx.x];
            for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(~0u, v, d);
            if (threadIdx.x % 32 == 0) o[threadIdx.x / 32] = v;
        }""",
        "k", 1, 128, [out, x],
    )  # fmt: skip
    s = x.reshape(4, 32).copy()
    for d in (16, 8, 4, 2, 1):
        s[:, :d] += s[:, d : 2 * d]
    same(out, s[:, 0].copy())


def test_every_shuffle_mode_with_widths() -> None:
    out = np.zeros((6, 32), i4)
    run(
        """extern "C" __global__ void k(int* o) {
            int t = threadIdx.x, v = t * t;
            o[t] = __shfl_sync(~0u, v, t ^ 5);
            o[32 + t] = __shfl_up_sync(~0u, v, 3, 8);
            o[64 + t] = __shfl_down_sync(~0u, v, 5, 16);
            o[96 + t] = __shfl_xor_sync(~0u, v, 9);
            o[128 + t] = __shfl_xor_sync(~0u, v, 3, 4);
            o[160 + t] = __shfl_sync(~0u, v, 6, 4);
        }""",
        "k", 1, 32, [out],
    )  # fmt: skip
    t = np.arange(32)
    source = [
        t ^ 5,
        np.where(t % 8 >= 3, t - 3, t),
        np.where(t % 16 + 5 < 16, t + 5, t),
        t ^ 9,
        t ^ 3,
        t // 4 * 4 + 2,
    ]
    same(out, np.array([s * s for s in source], i4))


def test_votes_matches_and_active_lanes() -> None:
    out = np.zeros((6, 32), u4)
    run(
        """extern "C" __global__ void k(unsigned* o) {
            unsigned t = threadIdx.x;
            o[t] = __ballot_sync(~0u, t % 3 == 0);
            o[32 + t] = __any_sync(~0u, t == 40) | __all_sync(~0u, t < 32) << 1;
            o[64 + t] = __match_any_sync(~0u, t % 5);
            int p; __match_all_sync(~0u, 7, &p); o[96 + t] = p;
            if (t & 1) o[128 + t] = __activemask(); else o[128 + t] = __ballot_sync(0x55555555u, t > 8);
            o[160 + t] = __reduce_add_sync(~0u, t) + __reduce_max_sync(~0u, t);
        }""",
        "k", 1, 32, [out],
    )  # fmt: skip
    t = np.arange(32)

    def bits(condition: Array) -> int:
        return int(sum(1 << int(k) for k in t[condition]))

    want = np.zeros((6, 32), u4)
    want[0] = bits(t % 3 == 0)
    want[1] = 2
    want[2] = [bits(t % 5 == k % 5) for k in t]
    want[3] = 1
    want[4] = np.where(t & 1, 0xAAAAAAAA, bits((t > 8) & (t % 2 == 0)))
    want[5] = t.sum() + 31
    same(out, want)


def test_inclusive_scan() -> None:
    x = rng(2).integers(0, 100, 512, dtype=i4)
    out = np.zeros_like(x)
    run(
        """extern "C" __global__ void k(int* o, const int* x) {
            __shared__ int s[2][512];
            int t = threadIdx.x, p = 0;
            s[0][t] = x[t];
            __syncthreads();
            for (int d = 1; d < 512; d *= 2, p ^= 1) {
                s[p ^ 1][t] = t >= d ? s[p][t] + s[p][t - d] : s[p][t];
                __syncthreads();
            }
            o[t] = s[p][t];
        }""",
        "k", 1, 512, [out, x],
    )  # fmt: skip
    same(out, np.cumsum(x, dtype=i4))


def test_histogram_with_shared_and_global_atomics() -> None:
    x = rng(3).integers(0, 256, 5000, dtype="u1")
    out = np.zeros(256, u4)
    run(
        """extern "C" __global__ void k(unsigned* o, const unsigned char* x, int n) {
            __shared__ unsigned h[256];
            for (int i = threadIdx.x; i < 256; i += blockDim.x) h[i] = 0;
            __syncthreads();
            for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
                atomicAdd(&h[x[i]], 1u);
            __syncthreads();
            for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&o[i], h[i]);
        }""",
        "k", 5, 96, [out, x, i4(5000)],
    )  # fmt: skip
    same(out, np.bincount(x, minlength=256).astype(u4))


def test_every_atomic_operation() -> None:
    ints = np.array([0, 100, -5, 0xFFFF, 0, 0xF0F0, 5, 3, 0, 0], i4)
    wide, real, single = np.array([1, 7], "u8"), np.zeros(1), np.zeros(1, f4)
    run(
        """extern "C" __global__ void k(int* a, unsigned long long* w, double* d, float* f) {
            int t = threadIdx.x;
            atomicAdd(a, t); atomicMin(a + 1, t - 3); atomicMax(a + 2, t);
            atomicAnd(a + 3, ~(1 << (t % 16))); atomicOr(a + 4, 1 << (t % 32));
            atomicXor(a + 5, t); atomicInc((unsigned*)a + 6, 10u); atomicDec((unsigned*)a + 7, 6u);
            atomicCAS(a + 8, t, t + 1); if (t == 63) atomicExch(a + 9, 77);
            atomicAdd(w, 1ull << 33); atomicMax(w + 1, (unsigned long long)t << 40);
            atomicAdd(d, 0.5); atomicAdd(f, 0.25f);
        }""",
        "k", 1, 64, [ints, wide, real, single],
    )  # fmt: skip
    inc, dec, xor = 5, 3, 0xF0F0
    for t in range(64):
        inc, dec, xor = 0 if inc >= 10 else inc + 1, 6 if dec in (0,) or dec > 6 else dec - 1, xor ^ t
    want = [2016, -3, 63, 0, -1, xor, inc, dec, 64, 77]
    same(ints, np.array(want, i4))
    same(wide, np.array([1 + 64 * 2**33, 63 << 40], "u8"))
    assert real[0] == 32 and single[0] == 16


def test_naive_and_tiled_matmul() -> None:
    source = """
    extern "C" __global__ void naive(float* c, const float* a, const float* b, int n) {
        int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;
        float s = 0;
        for (int k = 0; k < n; ++k) s = __fadd_rn(s, __fmul_rn(a[i * n + k], b[k * n + j]));
        c[i * n + j] = s;
    }
    extern "C" __global__ void tiled(float* c, const float* a, const float* b, int n) {
        __shared__ float p[16][16], q[16][17];
        int x = threadIdx.x, y = threadIdx.y, j = blockIdx.x * 16 + x, i = blockIdx.y * 16 + y;
        float s = 0;
        for (int t = 0; t < n; t += 16) {
            p[y][x] = a[i * n + t + x];
            q[y][x] = b[(t + y) * n + j];
            __syncthreads();
            for (int k = 0; k < 16; ++k) s = __fadd_rn(s, __fmul_rn(p[y][k], q[k][x]));
            __syncthreads();
        }
        c[i * n + j] = s;
    }"""
    n = 64
    a, b = floats(n * n).reshape(n, n), floats(n * n, 2).reshape(n, n)
    want = np.zeros((n, n), f4)
    for k in range(n):
        want += a[:, k : k + 1] * b[k]
    for name in ("naive", "tiled"):
        c = np.zeros((n, n), f4)
        run(source, name, (n // 16, n // 16), (16, 16), [c, a, b, i4(n)])
        same(c, want)


def test_transposition_through_a_padded_tile() -> None:
    x = floats(64 * 96).reshape(64, 96)
    out = np.zeros((96, 64), f4)
    run(
        """extern "C" __global__ void k(float* o, const float* x, int rows, int cols) {
            __shared__ float tile[32][33];
            int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
            for (int i = 0; i < 32; i += 8) tile[threadIdx.y + i][threadIdx.x] = x[(r + i) * cols + c];
            __syncthreads();
            c = blockIdx.y * 32 + threadIdx.x; r = blockIdx.x * 32 + threadIdx.y;
            for (int i = 0; i < 32; i += 8) o[(r + i) * rows + c] = tile[threadIdx.x][threadIdx.y + i];
        }""",
        "k", (3, 2), (32, 8), [out, x, i4(64), i4(96)],
    )  # fmt: skip
    same(out, np.ascontiguousarray(x.T))


def test_softmax_rows() -> None:
    x = floats(8 * 200).reshape(8, 200)
    out = np.zeros_like(x)
    run(
        """extern "C" __global__ void k(float* o, const float* x, int n) {
            __shared__ float s[8];
            const float* row = x + blockIdx.x * n;
            float m = -1e30f, sum = 0;
            for (int i = threadIdx.x; i < n; i += 64) m = fmaxf(m, row[i]);
            for (int d = 16; d; d >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
            if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = m;
            __syncthreads();
            m = fmaxf(s[0], s[1]);
            __syncthreads();
            for (int i = threadIdx.x; i < n; i += 64) sum += __expf(row[i] - m);
            for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
            if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = sum;
            __syncthreads();
            sum = s[0] + s[1];
            for (int i = threadIdx.x; i < n; i += 64)
                o[blockIdx.x * n + i] = __expf(row[i] - m) / sum;
        }""",
        "k", 8, 64, [out, x, i4(200)],
    )  # fmt: skip
    e = np.exp(x.astype(f8) - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, e / e.sum(1, keepdims=True), rtol=2e-5, atol=1e-12)


def test_layer_norm_with_rsqrt() -> None:
    x = floats(4 * 128).reshape(4, 128)
    out = np.zeros_like(x)
    run(
        """__device__ float total(float v, float* s) {
            for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
            __syncthreads();
            if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
            __syncthreads();
            return s[0] + s[1] + s[2] + s[3];
        }
        extern "C" __global__ void k(float* o, const float* x) {
            __shared__ float s[4];
            float v = x[blockIdx.x * 128 + threadIdx.x];
            float mean = total(v, s) / 128.f, d = v - mean;
            o[blockIdx.x * 128 + threadIdx.x] = d * rsqrtf(total(d * d, s) / 128.f + 1e-5f);
        }""",
        "k", 4, 128, [out, x],
    )  # fmt: skip
    y = x.astype(f8)
    want = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, want, rtol=3e-5, atol=1e-6)


def test_divergent_loops_with_break_and_continue() -> None:
    out = np.zeros(256, i4)
    elementwise(
        "f(i)", 256, out,
        prelude="""__device__ int f(int i) {
            int s = 0;
            for (int k = 0; k < 1000; ++k) {
                if ((k * i) % 7 == 3) continue;
                if (k > i % 37) break;
                for (int j = k; j < i % 11; ++j) { if (j * k == 12) break; s += j ^ k; }
                s += k;
            }
            return s;
        }""",
    )  # fmt: skip

    def f(i: int) -> int:
        s = 0
        for k in range(1000):
            if (k * i) % 7 == 3:
                continue
            if k > i % 37:
                break
            for j in range(k, i % 11):
                if j * k == 12:
                    break
                s += j ^ k
            s += k
        return s

    same(out, np.array([f(i) for i in range(256)], i4))


def test_collatz_lengths() -> None:
    out = np.zeros(500, i4)
    elementwise(
        "f(i + 1)", 500, out,
        prelude="""__device__ int f(unsigned n) {
            int c = 0;
            while (n != 1) { n = n % 2 ? 3 * n + 1 : n / 2; ++c; }
            return c;
        }""",
    )  # fmt: skip

    def f(n: int) -> int:
        count = 0
        while n != 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    same(out, np.array([f(i + 1) for i in range(500)], i4))


def test_early_return_before_a_barrier() -> None:
    out = np.zeros(128, i4)
    run(
        """extern "C" __global__ void k(int* o) {
            __shared__ int s[128];
            int t = threadIdx.x;
            if (t >= 100) { o[t] = -1; return; }
            s[t] = t;
            __syncthreads();
            o[t] = s[99 - t];
        }""",
        "k", 1, 128, [out],
    )  # fmt: skip
    same(out, np.concatenate([np.arange(99, -1, -1), np.full(28, -1)]).astype(i4))


def test_nested_device_functions_that_stay_calls() -> None:
    source = """
    __device__ __noinline__ int leaf(int x, int* acc) { *acc += x; return x * 3; }
    __device__ __noinline__ int middle(int x, int* acc) {
        if (x & 1) return leaf(x, acc) + leaf(x + 1, acc);
        return leaf(x / 2, acc);
    }
    extern "C" __global__ void k(int* o) {
        int acc = 0, t = threadIdx.x, r = middle(t, &acc);
        if (t > 10) r += middle(r, &acc);
        o[t] = r * 1000 + acc;
    }"""
    assert compile_cuda(source).count("call") >= 4
    out = np.zeros(64, i4)
    run(source, "k", 1, 64, [out])

    def expected(t: int) -> int:
        acc = 0

        def leaf(x: int) -> int:
            nonlocal acc
            acc += x
            return x * 3

        def middle(x: int) -> int:
            return leaf(x) + leaf(x + 1) if x & 1 else leaf(x // 2)

        r = middle(t)
        if t > 10:
            r += middle(r)
        return r * 1000 + acc

    same(out, np.array([expected(t) for t in range(64)], i4))


def test_structs_by_value_with_dynamic_indexing() -> None:
    layout = np.dtype([("a", "f4"), ("n", "i4", 5), ("d", "f8")])
    value = np.array((1.5, [1, 2, 3, 4, 5], 0.25), layout)
    out = np.zeros(10)
    run(
        """struct S { float a; int n[5]; double d; };
        __device__ __noinline__ double f(S s, int i) { s.n[0] += 10; return s.n[i % 5] * s.a + s.d; }
        extern "C" __global__ void k(S s, double* o) {
            int t = threadIdx.x;
            o[t] = f(s, t) + s.n[(t + 1) % 5];
        }""",
        "k", 1, 10, [value, out], options=NO_FMA,
    )  # fmt: skip
    n = [11, 2, 3, 4, 5]
    same(out, np.array([n[t % 5] * 1.5 + 0.25 + (t + 1) % 5 + 1 for t in range(10)]))


def test_local_arrays_and_pointers_to_them() -> None:
    out = np.zeros(64, i4)
    run(
        """__device__ __noinline__ void sort(int* v, int n) {
            for (int i = 1; i < n; ++i)
                for (int j = i; j > 0 && v[j - 1] > v[j]; --j) { int x = v[j]; v[j] = v[j - 1]; v[j - 1] = x; }
        }
        extern "C" __global__ void k(int* o) {
            int v[16], t = threadIdx.x;
            for (int i = 0; i < 16; ++i) v[i] = (i * 37 + t * 11) % 101;
            sort(v, 16);
            o[t] = v[t % 16] * 1000 + v[8];
        }""",
        "k", 1, 64, [out],
    )  # fmt: skip
    rows = [sorted((i * 37 + t * 11) % 101 for i in range(16)) for t in range(64)]
    same(out, np.array([r[t % 16] * 1000 + r[8] for t, r in enumerate(rows)], i4))


def test_switch_and_generic_pointers_to_three_spaces() -> None:
    out = np.zeros(48, i4)
    data = np.arange(16, dtype=i4) * 7
    run(
        """extern "C" __global__ void k(int* o, int* g) {
            __shared__ int s[16];
            int l[16], t = threadIdx.x;
            for (int i = 0; i < 16; ++i) l[i] = i * i;
            if (t < 16) s[t] = t + 100;
            __syncthreads();
            int* p;
            switch (t % 3) { case 0: p = g; break; case 1: p = s; break; default: p = l; }
            int v = p[t % 16];
            switch (t % 9) {
                case 0: v += 1; break; case 1: v *= 3; break; case 2: v ^= 5; break;
                case 3: v -= t; break; case 4: v <<= 2; break; case 5: v = -v; break;
                case 6: v /= 3; break; case 7: v |= 64; break;
            }
            o[t] = v;
        }""",
        "k", 1, 48, [out, data],
    )  # fmt: skip

    def f(t: int) -> int:
        v = (t % 16 * 7, t % 16 + 100, (t % 16) ** 2)[t % 3]
        return (v + 1, v * 3, v ^ 5, v - t, v << 2, -v, v // 3, v | 64, v)[t % 9]

    same(out, np.array([f(t) for t in range(48)], i4))


def test_constants_and_initialised_globals_with_addresses() -> None:
    kernel = Kernel(
        compile_cuda(
            """__constant__ float table[4] = {1.f, 2.f, 4.f, 8.f};
            __device__ int counter = 40;
            __device__ int* where = &counter + 0;
            __device__ double grid[2][2] = {{1, 2}, {3, 4}};
            extern "C" __global__ void k(float* o) {
                o[threadIdx.x] = table[threadIdx.x % 4] + (float)grid[1][threadIdx.x % 2];
                if (threadIdx.x == 0) *where += 2;
            }"""
        ),
        "k",
    )
    out = np.zeros(8, f4)
    kernel.run(1, 8, [out])
    kernel.run(1, 8, [out])
    same(out, np.array([4, 6, 7, 12] * 2, f4))
    assert kernel.variables["counter"].view(i4)[0] == 44


def test_printf_is_silent_and_returns_nothing_printed() -> None:
    out = np.full(4, 9, i4)
    run(
        """extern "C" __global__ void k(int* o) { o[threadIdx.x] = printf("%d %f\\n", 1, 2.0); }""",
        "k", 1, 4, [out],
    )  # fmt: skip
    same(out, np.zeros(4, i4))


def test_vector_loads_and_stores() -> None:
    x = floats(256)
    out = np.zeros_like(x)
    run(
        """extern "C" __global__ void k(float4* o, const float4* x) {
            float4 v = x[threadIdx.x]; o[threadIdx.x] = make_float4(v.w, v.z, v.y, v.x);
        }""",
        "k", 1, 64, [out, x],
    )  # fmt: skip
    same(out, x.reshape(-1, 4)[:, ::-1].reshape(-1).copy())


def test_three_dimensional_indices() -> None:
    out = np.zeros(2 * 3 * 2 * 4 * 3 * 2, i4)
    run(
        """extern "C" __global__ void k(int* o) {
            int b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
            int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
            o[b * blockDim.x * blockDim.y * blockDim.z + t] =
                threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z + 1000 * (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);
        }""",
        "k", (2, 3, 2), (4, 3, 2), [out],
    )  # fmt: skip
    b, t = np.divmod(np.arange(len(out)), 24)
    thread = t % 4 + 10 * (t // 4 % 3) + 100 * (t // 12)
    same(out, (thread + 1000 * (b % 2 + 10 * (b // 2 % 3) + 100 * (b // 6))).astype(i4))


def test_barrier_reductions_and_named_barriers() -> None:
    out = np.zeros((3, 96), i4)
    run(
        """extern "C" __global__ void k(int* o) {
            __shared__ int s[96];
            int t = threadIdx.x;
            o[t] = __syncthreads_count(t % 3 == 0);
            o[96 + t] = __syncthreads_and(t < 96) * 2 + __syncthreads_or(t == 95);
            s[t] = t;
            if (t < 64) { asm volatile("bar.sync 1, 64;"); o[192 + t] = s[63 - t]; }
            else { o[192 + t] = -1; }
        }""",
        "k", 1, 96, [out],
    )  # fmt: skip
    t = np.arange(96)
    same(out, np.array([np.full(96, 32), np.full(96, 3), np.where(t < 64, 63 - t, -1)], i4))


def test_producer_and_consumer_warps_with_arrive() -> None:
    out = np.zeros(32, i4)
    run(
        """extern "C" __global__ void k(int* o) {
            __shared__ int s[32];
            int t = threadIdx.x % 32;
            if (threadIdx.x < 32) { s[t] = t * 5; __threadfence_block(); asm volatile("bar.arrive 2, 64;"); }
            else { asm volatile("bar.sync 2, 64;"); o[t] = s[31 - t]; }
        }""",
        "k", 1, 64, [out],
    )  # fmt: skip
    same(out, (np.arange(31, -1, -1) * 5).astype(i4))


def test_a_lock_taken_by_the_lanes_of_one_warp_in_turn() -> None:
    state = np.zeros(2, i4)
    run(
        """extern "C" __global__ void k(int* s) {
            bool done = false;
            while (!done) {
                if (atomicCAS(s, 0, 1) == 0) {
                    ((volatile int*)s)[1] += 1;
                    __threadfence();
                    atomicExch(s, 0);
                    done = true;
                }
            }
        }""",
        "k", 3, 64, [state],
    )  # fmt: skip
    same(state, np.array([0, 192], i4))


def test_a_lock_whose_spinning_lanes_lie_below_the_critical_section() -> None:
    state = np.zeros(2, i4)
    run(
        """extern "C" __global__ void k(int* s) {
            while (atomicCAS(s, 0, 1) != 0) { }
            ((volatile int*)s)[1] += 1;
            __threadfence();
            atomicExch(s, 0);
        }""",
        "k", 1, 8, [state],
    )  # fmt: skip
    same(state, np.array([0, 8], i4))


def test_blocks_that_wait_for_later_blocks() -> None:
    state, out = np.zeros(1, i4), np.zeros(4, i4)
    run(
        """extern "C" __global__ void k(int* arrived, int* o) {
            if (threadIdx.x == 0) {
                atomicAdd(arrived, 1);
                while (*(volatile int*)arrived < gridDim.x) { }
                o[blockIdx.x] = blockIdx.x + 1;
            }
        }""",
        "k", 4, 32, [state, out],
    )  # fmt: skip
    same(out, np.arange(1, 5, dtype=i4))


def test_look_back_over_earlier_blocks() -> None:
    x = rng(4).integers(0, 50, 20 * 64, dtype=i4)
    out, flags = np.zeros_like(x), np.zeros(40, i4)
    run(
        """extern "C" __global__ void k(int* o, const int* x, volatile int* flags) {
            __shared__ int s[64], base;
            int t = threadIdx.x, b = blockIdx.x;
            s[t] = x[b * 64 + t];
            __syncthreads();
            if (t == 0) {
                for (int i = 1; i < 64; ++i) s[i] += s[i - 1];
                int before = 0;
                if (b > 0) { while (flags[b - 1] == 0) { } __threadfence(); before = flags[20 + b - 1]; }
                flags[20 + b] = before + s[63];
                __threadfence();
                flags[b] = 1;
                base = before;
            }
            __syncthreads();
            o[b * 64 + t] = base + s[t];
        }""",
        "k", 20, 64, [out, x, flags],
    )  # fmt: skip
    same(out, np.cumsum(x, dtype=i4))


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
            o[800 + t] = __fdiv_{mode}(a[t], b[t]); o[1200 + t] = __double2float_{mode}((double)a[t] / 3.0);
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


def test_double_shuffle_and_64_bit_atomics_in_shared_memory() -> None:
    out = np.zeros(33)
    run(
        """extern "C" __global__ void k(double* o) {
            __shared__ unsigned long long s;
            int t = threadIdx.x;
            if (t == 0) s = 0;
            __syncwarp();
            atomicAdd(&s, 1ull << t);
            __syncwarp();
            o[t] = __shfl_sync(~0u, t * 1.25, 31 - t);
            if (t == 0) o[32] = (double)s;
        }""",
        "k", 1, 32, [out],
    )  # fmt: skip
    same(out, np.concatenate([np.arange(31, -1, -1) * 1.25, [2.0**32 - 1]]))


def test_diverged_lanes_synchronise_their_warp_at_two_places() -> None:
    out = np.zeros(32, i4)
    run(
        """extern "C" __global__ void k(int* o) {
            __shared__ volatile int s[32];
            int t = threadIdx.x;
            if (t < 16) { s[t] = t; asm volatile("bar.warp.sync 0xffffffff;"); o[t] = s[t + 16]; }
            else { s[t] = t * 2; asm volatile("bar.warp.sync 0xffffffff;"); o[t] = s[t - 16]; }
        }""",
        "k", 1, 32, [out],
    )  # fmt: skip
    t = np.arange(16)
    same(out, np.concatenate([(t + 16) * 2, t]).astype(i4))


def test_clock_advances_and_nanosleep_returns() -> None:
    out = np.zeros(3, i8)
    run(
        """extern "C" __global__ void k(long long* o) {
            long long a = clock64(); __nanosleep(100); long long b = clock64();
            while (clock64() - b < 10000) { }
            o[0] = b - a; o[1] = clock64() - b;
        }""",
        "k", 1, 1, [out],
    )  # fmt: skip
    assert out[0] > 0 and out[1] >= 10000
