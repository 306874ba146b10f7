"""Ordinary CUDA kernels through NVRTC and the PTX interpreter, bit for bit against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_cases import NO_FMA, Array, elementwise, f4, f8, floats, i4, rng, same, u4
from ptx_runner import Kernel, LaunchError, compile_cuda, run


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
            if (t & 1) o[128 + t] = __activemask();
            else o[128 + t] = __ballot_sync(0x55555555u, t > 8);
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
        inc, dec, xor = (
            0 if inc >= 10 else inc + 1,
            6 if dec == 0 or dec > 6 else dec - 1,
            xor ^ t,
        )
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
            for (int i = 0; i < 32; i += 8)
                tile[threadIdx.y + i][threadIdx.x] = x[(r + i) * cols + c];
            __syncthreads();
            c = blockIdx.y * 32 + threadIdx.x; r = blockIdx.x * 32 + threadIdx.y;
            for (int i = 0; i < 32; i += 8)
                o[(r + i) * rows + c] = tile[threadIdx.x][threadIdx.y + i];
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
        __device__ __noinline__ double f(S s, int i) {
            s.n[0] += 10;
            return s.n[i % 5] * s.a + s.d;
        }
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
                for (int j = i; j > 0 && v[j - 1] > v[j]; --j) {
                    int x = v[j];
                    v[j] = v[j - 1];
                    v[j - 1] = x;
                }
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


FUNCTIONS = """
extern "C" __device__ __noinline__ int f(int x) { return x * 3; }
extern "C" __device__ __noinline__ int g(int x) { return x + 7; }
extern "C" __global__ void child(int* o) { *o = 3; }
typedef int (*Function)(int);
struct Named { char name; Function function; };
__device__ Function table[2] = {f, g};
__device__ Named named = {'g', g};
__constant__ Function constants[2] = {g, f};
__device__ void (*kernel)(int*) = child;
"""


def test_a_function_has_one_address_in_variables_and_code() -> None:
    kernel = Kernel(
        compile_cuda(
            FUNCTIONS
            + """extern "C" __global__ void k(void** o) {
                o[0] = (void*)f, o[1] = (void*)g, o[2] = (void*)child;
                o[3] = (void*)table[0], o[4] = (void*)table[1], o[5] = (void*)named.function;
                o[6] = (void*)constants[0], o[7] = (void*)constants[1], o[8] = (void*)kernel;
            }"""
        ),
        "k",
    )
    out = np.zeros(9, np.uint64)
    kernel.run(1, 1, [out])
    f, g, child = (kernel.address(name) for name in ("f", "g", "child"))
    assert len({0, f, g, child}) == 4
    assert f % 8 == g % 8 == child % 8 == 0
    assert list(out) == [f, g, child, f, g, g, g, f, child]


def test_no_memory_is_at_the_address_of_a_function() -> None:
    source = 'extern "C" __global__ void k(int* o) { *o = *(int*)table[0]; }'
    with pytest.raises(LaunchError) as caught:
        run(FUNCTIONS + source, "k", 1, 1, [np.zeros(1, i4)])
    assert caught.value.outcome == "illegal_address"


def test_calls_through_a_table_of_functions() -> None:
    source = (
        FUNCTIONS
        + """extern "C" __global__ void k(int* o, const int* x) {
            int t = threadIdx.x, v = table[t % 2](x[t]);
            if (t % 3 == 0) v = constants[t / 3 % 2](v) + named.function(t);
            o[t] = v;
        }"""
    )
    assert compile_cuda(source).count(".callprototype") == 3
    x = np.arange(64, dtype=i4)
    out = np.zeros_like(x)
    run(source, "k", 1, 64, [out, x])

    def f(x: int) -> int:
        return x * 3

    def g(x: int) -> int:
        return x + 7

    def expected(t: int) -> int:
        v = (f, g)[t % 2](t)
        return (g, f)[t // 3 % 2](v) + g(t) if t % 3 == 0 else v

    same(out, np.array([expected(t) for t in range(64)], i4))


def test_functions_called_by_address_wait_call_and_take_structures() -> None:
    source = """struct S { int n[4]; double d; };
        typedef double (*Inner)(S, int);
        typedef void (*Outer)(int*, Inner);
        __device__ __noinline__ double at(S s, int i) { s.n[i & 3] += 1; return s.n[i & 3] + s.d; }
        __device__ __noinline__ double twice(S s, int i) { return 2 * at(s, i); }
        __device__ __noinline__ void shared(int* o, Inner inner) {
            __shared__ int all[64];
            int t = threadIdx.x;
            all[t] = (int)inner(S{{t, 2 * t, 3 * t, 4 * t}, 0.5}, t);
            __syncthreads();
            o[t] = all[63 - t];
        }
        __device__ __noinline__ void alone(int* o, Inner inner) {
            o[threadIdx.x] = (int)inner(S{}, 1);
        }
        __device__ Inner inner[2] = {at, twice};
        __device__ Outer outer[2] = {shared, alone};
        extern "C" __global__ void k(int* o, int which) {
            outer[which](o, inner[threadIdx.x % 2]);
        }"""
    assert compile_cuda(source).count(".callprototype") == 3
    out = np.zeros(64, i4)
    run(source, "k", 1, 64, [out, i4(0)])
    values = [int((t * (t % 4 + 1) + 1.5) * (1 + t % 2)) for t in range(64)]
    same(out, np.array(values[::-1], i4))


TARGETS = """.version 9.0
.target sm_80
.address_size 64
.func (.param .b32 r) one() { st.param.b32 [r], 1; ret; }
.func (.param .b32 r) two() { st.param.b32 [r], 2; ret; }
.func (.param .b32 r) three() { st.param.b32 [r], 3; ret; }
.visible .entry k(.param .u64 out) {
    .reg .b64 %d<3>; .reg .b32 %r<2>; .reg .pred %p<3>; .param .b32 r;
    ld.param.u64 %d1, [out];
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 1; setp.lt.u32 %p2, %r0, 3;
    mov.u64 %d0, three;
    @%p0 mov.u64 %d0, one;
    @%p1 mov.u64 %d0, two;
    st.param.b32 [r], 9;
targets: .calltargets one, two;
    @%p2 call.uni (r), %d0, targets;
    ld.param.b32 %r1, [r];
    mad.wide.u32 %d2, %r0, 4, %d1; st.global.u32 [%d2], %r1; ret;
}"""


def test_a_call_with_a_list_of_targets_under_a_guard() -> None:
    out = np.zeros(4, i4)
    kernel = Kernel(TARGETS.replace("setp.lt.u32 %p2, %r0, 3", "setp.lt.u32 %p2, %r0, 2"), "k")
    kernel.run(1, 4, [out])
    assert list(out) == [1, 2, 9, 9]
    with pytest.raises(LaunchError) as caught:
        Kernel(TARGETS, "k").run(1, 4, [out])
    assert caught.value.outcome == "illegal_instruction"
    assert "thread (2,0,0)" in caught.value.detail
