"""Reductions, softmax, normalisations, scans, histograms and transpositions."""

from __future__ import annotations

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Generator,
    Out,
    f2,
    f4,
    f8,
    from_bf16,
    i4,
    i8,
    kernel,
    rows,
    to_bf16,
    u1,
    u2,
    u4,
)


# Reductions. Sums of f32 follow the order of the kernel, so that the bits are defined.
@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int n) {
        __shared__ float s[256];
        int t = threadIdx.x;
        float v = 0;
        for (int i = t; i < n; i += 256) v = __fadd_rn(v, x[blockIdx.x * n + i]);
        s[t] = v;
        __syncthreads();
        for (int d = 128; d > 0; d >>= 1) {
            if (t < d) s[t] += s[t + d];
            __syncthreads();
        }
        if (t == 0) o[blockIdx.x] = s[0];
    }""",
    5,
    256,
)
def sum_of_rows(rng: Generator) -> Arguments:
    x = rows(rng, 5, 1001)
    padded = np.zeros((5, 1024), f4)
    padded[:, :1001] = x
    s = np.zeros((5, 256), f4)
    for part in padded.reshape(5, 4, 256).swapaxes(0, 1):
        s += part
    for d in (128, 64, 32, 16, 8, 4, 2, 1):
        s[:, :d] += s[:, d : 2 * d]
    return [Out(s[:, 0].copy()), x, i4(1001)]


@kernel(
    """extern "C" __global__ void k(float* o, int* where, const float* x, int n) {
        float best = -INFINITY; int at = n;
        for (int i = threadIdx.x; i < n; i += 32) {
            float v = x[blockIdx.x * n + i];
            if (v > best) { best = v; at = i; }
        }
        for (int d = 16; d > 0; d >>= 1) {
            float v = __shfl_xor_sync(~0u, best, d); int w = __shfl_xor_sync(~0u, at, d);
            if (v > best || (v == best && w < at)) { best = v; at = w; }
        }
        if (threadIdx.x == 0) { o[blockIdx.x] = best; where[blockIdx.x] = at; }
    }""".replace("INFINITY", "__int_as_float(0x7f800000)"),
    7,
    32,
)
def maximum_and_its_index(rng: Generator) -> Arguments:
    x = rng.integers(-50, 50, (7, 203)).astype(f4)
    x[3] = -np.inf
    x[3, 77] = -1e38
    return [Out(x.max(1)), Out(x.argmax(1).astype(i4)), x, i4(203)]


@kernel(
    """extern "C" __global__ void k(int* o, const int* x) {
        int v = x[blockIdx.x * 96 + threadIdx.x];
        unsigned u = v;
        int w = threadIdx.x / 32, lane = threadIdx.x % 32;
        int r[8] = {__reduce_add_sync(~0u, v), __reduce_min_sync(~0u, v), __reduce_max_sync(~0u, v),
                    (int)__reduce_min_sync(~0u, u), (int)__reduce_max_sync(~0u, u),
                    (int)__reduce_and_sync(~0u, u), (int)__reduce_or_sync(~0u, u),
                    (int)__reduce_xor_sync(~0u, u)};
        int half = lane < 16 ? __reduce_add_sync(0xffffu, v) : __reduce_add_sync(0xffff0000u, v);
        if (lane < 8) o[(blockIdx.x * 3 + w) * 10 + lane] = r[lane];
        if (lane % 16 == 0) o[(blockIdx.x * 3 + w) * 10 + 8 + lane / 16] = half;
    }""",
    2,
    96,
)
def warp_reductions(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, (6, 32)).astype(i4)
    u = x.view(u4)
    with np.errstate(over="ignore"):
        want = [x.sum(1, dtype=i4), x.min(1), x.max(1), u.min(1).view(i4), u.max(1).view(i4),
                np.bitwise_and.reduce(x, 1), np.bitwise_or.reduce(x, 1),
                np.bitwise_xor.reduce(x, 1), x[:, :16].sum(1, dtype=i4),
                x[:, 16:].sum(1, dtype=i4)]  # fmt: skip
    return [Out(np.stack(want, 1)), x]


@kernel(
    """extern "C" __global__ void k(long long* o, unsigned* done, const int* x, int n) {
        __shared__ long long s[4];
        __shared__ bool last;
        long long v = 0;
        for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += gridDim.x * 128) v += x[i];
        for (int d = 16; d > 0; d >>= 1) v += __shfl_down_sync(~0u, v, d);
        if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
        __syncthreads();
        if (threadIdx.x == 0) {
            o[1 + blockIdx.x] = s[0] + s[1] + s[2] + s[3];
            __threadfence();
            last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
        }
        __syncthreads();
        if (last && threadIdx.x == 0) {
            long long sum = 0;
            for (int b = 0; b < gridDim.x; ++b) sum += ((volatile long long*)o)[1 + b];
            o[0] = sum;
        }
    }""",
    6,
    128,
)
def sum_by_the_last_block(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, 5003).astype(i4)
    padded = np.zeros(6 * 128 * 7, i8)
    padded[:5003] = x
    parts = padded.reshape(-1, 6, 128).sum((0, 2))
    return [Out(np.concatenate([[parts.sum()], parts])), Out(np.zeros(1, u4)), x, i4(5003)]


@kernel(
    """extern "C" __global__ void k(double* o, const double* x, int n) {
        __shared__ double s[64], q[64];
        int t = threadIdx.x;
        double mean = 0, m2 = 0; int count = 0;
        for (int i = t; i < n; i += 64) {
            double v = x[blockIdx.x * n + i], d = v - mean;
            mean += d / ++count; m2 += d * (v - mean);
        }
        s[t] = mean * count; q[t] = m2 + mean * mean * count;
        __syncthreads();
        for (int d = 32; d > 0; d >>= 1) {
            if (t < d) { s[t] += s[t + d]; q[t] += q[t + d]; }
            __syncthreads();
        }
        if (t == 0) { o[2 * blockIdx.x] = s[0] / n; o[2 * blockIdx.x + 1] = q[0] / n; }
    }""",
    3,
    64,
)
def mean_and_second_moment(rng: Generator) -> Arguments:
    x = rng.standard_normal((3, 700)) + 5
    want = np.stack([x.mean(1), (x * x).mean(1)], 1)
    return [Out(want, ulps=64), x, i4(700)]


# Softmax and normalisations.
@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int n) {
        int row = blockIdx.x * 4 + threadIdx.y, t = threadIdx.x;
        const float* p = x + row * n;
        float top = __int_as_float(0xff800000), sum = 0;
        for (int i = t; i < n; i += 32) top = fmaxf(top, p[i]);
        for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        for (int i = t; i < n; i += 32) sum += expf(p[i] - top);
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        for (int i = t; i < n; i += 32) o[row * n + i] = expf(p[i] - top) / sum;
    }""",
    3,
    (32, 4),
)
def softmax_of_rows_in_a_warp(rng: Generator) -> Arguments:
    x = rows(rng, 12, 111)
    x[1, 5:] = -np.inf
    x[2, 7] = 3e38
    with np.errstate(over="ignore"):
        e = np.exp(x.astype(f8) - x.max(1, keepdims=True))
    return [Out(e / e.sum(1, keepdims=True), "f4", ulps=16), x, i4(111)]


# The form of a compiled Triton kernel: predicated loads of 128 bits whose registers hold the other
# value, reductions by shuffles and through shared memory, ex2.approx and div.full.
@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int n) {
        extern __shared__ __align__(16) char memory[];
        unsigned base = (unsigned)__cvta_generic_to_shared(memory);
        int t = threadIdx.x, at = t * 4;
        const float* p = x + blockIdx.x * n + at;
        float v[4];
        asm volatile("{ .reg .pred q; setp.ne.s32 q, %5, 0;"
            "mov.b32 %0, 0xff800000; mov.b32 %1, 0xff800000; mov.b32 %2, 0xff800000;"
            "mov.b32 %3, 0xff800000; @q ld.global.v4.b32 { %0, %1, %2, %3 }, [ %4 + 0 ]; }"
            : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p), "r"((int)(at < n)));
        float top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
        for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        asm volatile("{ .reg .pred q; setp.eq.s32 q, %2, 0; @q st.shared.b32 [ %0 + 0 ], { %1 }; }"
            :: "r"(base + t / 32 * 4), "f"(top), "r"(t & 31) : "memory");
        asm volatile("bar.sync 0;" ::: "memory");
        asm volatile("ld.shared.b32 %0, [ %1 + 0 ];"
            : "=f"(top) : "r"(base + (t & 3) * 4) : "memory");
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        asm volatile("bar.sync 0;" ::: "memory");
        float sum = 0;
        for (int i = 0; i < 4; ++i) {
            float e;
            asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"((v[i] - top) * 1.44269504f));
            v[i] = e; sum += e;
        }
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        asm volatile("{ .reg .pred q; setp.eq.s32 q, %2, 0; @q st.shared.b32 [ %0 + 0 ], { %1 }; }"
            :: "r"(base + t / 32 * 4), "f"(sum), "r"(t & 31) : "memory");
        asm volatile("bar.sync 0;" ::: "memory");
        asm volatile("ld.shared.b32 %0, [ %1 + 0 ];"
            : "=f"(sum) : "r"(base + (t & 3) * 4) : "memory");
        sum += __shfl_xor_sync(~0u, sum, 2);
        sum += __shfl_xor_sync(~0u, sum, 1);
        for (int i = 0; i < 4; ++i)
            asm("div.full.f32 %0, %1, %2;" : "=f"(v[i]) : "f"(v[i]), "f"(sum));
        asm volatile("{ .reg .pred q; setp.ne.s32 q, %5, 0;"
            "@q st.global.v4.b32 [ %4 + 0 ], { %0, %1, %2, %3 }; }"
            :: "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "l"(o + blockIdx.x * n + at),
               "r"((int)(at < n)) : "memory");
    }""",
    6,
    128,
    shared=16,
)
def softmax_as_triton_compiles_it(rng: Generator) -> Arguments:
    x = rows(rng, 6, 388)
    e = np.exp(x.astype(f8) - x.max(1, keepdims=True))
    return [Out(e / e.sum(1, keepdims=True), "f4", relative=2**-17), x, i4(388)]


@kernel(
    """#include <cuda_fp16.h>
    extern "C" __global__ void k(__half* o, const __half* x, int n) {
        __shared__ float s[8];
        int t = threadIdx.x;
        const __half* p = x + blockIdx.x * n;
        float top = -65504.f, sum = 0;
        for (int i = t; i < n; i += 256) {  // one pass: the sum is scaled when the maximum grows
            float v = __half2float(p[i]), m = fmaxf(top, v);
            sum = sum * __expf(top - m) + __expf(v - m); top = m;
        }
        for (int d = 16; d > 0; d >>= 1) {
            float m = __shfl_xor_sync(~0u, top, d), q = __shfl_xor_sync(~0u, sum, d);
            float a = fmaxf(top, m);
            sum = sum * __expf(top - a) + q * __expf(m - a); top = a;
        }
        __shared__ float tops[8];
        if (t % 32 == 0) { s[t / 32] = sum; tops[t / 32] = top; }
        __syncthreads();
        float all = 0, most = tops[0];
        for (int w = 1; w < 8; ++w) most = fmaxf(most, tops[w]);
        for (int w = 0; w < 8; ++w) all += s[w] * __expf(tops[w] - most);
        for (int i = t; i < n; i += 256)
            o[blockIdx.x * n + i] = __float2half(__half2float(p[i]) - most - __logf(all));
    }""",
    4,
    256,
)
def logarithmic_softmax_of_f16(rng: Generator) -> Arguments:
    x = (rng.standard_normal((4, 777)) * 4).astype(f2)
    y = x.astype(f8)
    top = y.max(1, keepdims=True)
    want = y - top - np.log(np.exp(y - top).sum(1, keepdims=True))
    return [Out(want, "f2", ulps=1), x, i4(777)]


@kernel(
    """__device__ float total(float v, float* s) {
        for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
        __syncthreads();
        if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
        __syncthreads();
        return s[0] + s[1] + s[2] + s[3];
    }
    extern "C" __global__ void k(float4* o, const float4* x, const float4* gain, const float4* bias,
                                 float epsilon) {
        __shared__ float s[4];
        int t = threadIdx.x, i = blockIdx.x * 128 + t;
        float4 v = x[i], g = gain[t], b = bias[t];
        float mean = total(v.x + v.y + v.z + v.w, s) / 512.f;
        v.x -= mean; v.y -= mean; v.z -= mean; v.w -= mean;
        float r = rsqrtf(total(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w, s) / 512.f + epsilon);
        o[i] = make_float4(v.x * r * g.x + b.x, v.y * r * g.y + b.y,
                           v.z * r * g.z + b.z, v.w * r * g.w + b.w);
    }""",
    5,
    128,
)
def layer_norm(rng: Generator) -> Arguments:
    x, gain, bias = rows(rng, 5, 512), rows(rng, 512), rows(rng, 512)
    y = x.astype(f8)
    centred = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + f8(f4(1e-5)))
    scale = np.abs(centred * gain) + np.abs(bias) + np.abs(gain)
    return [Out(centred * gain + bias, "f4", ulps=16, scale=scale), x, gain, bias, f4(1e-5)]


@kernel(
    """#include <cuda_bf16.h>
    extern "C" __global__ void k(__nv_bfloat162* o, const __nv_bfloat162* x,
                                 const __nv_bfloat162* gain, float epsilon) {
        int t = threadIdx.x, i = blockIdx.x * 32 + t;
        float sum = 0;
        float2 v[4];
        for (int j = 0; j < 4; ++j) {
            v[j] = __bfloat1622float2(x[blockIdx.x * 128 + j * 32 + t]);
            sum += v[j].x * v[j].x + v[j].y * v[j].y;
        }
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        float r = rsqrtf(sum / 256.f + epsilon);
        for (int j = 0; j < 4; ++j) {
            float2 g = __bfloat1622float2(gain[j * 32 + t]);
            o[blockIdx.x * 128 + j * 32 + t] =
                __float22bfloat162_rn(make_float2(v[j].x * r * g.x, v[j].y * r * g.y));
        }
    }""",
    6,
    32,
)
def root_mean_square_norm_of_bf16(rng: Generator) -> Arguments:
    x, gain = to_bf16(rows(rng, 6, 256)), to_bf16(rows(rng, 256))
    y = from_bf16(x).astype(f8)
    want = y / np.sqrt((y * y).mean(1, keepdims=True) + 1e-6) * from_bf16(gain)
    return [Out(want, "bf16", ulps=0.51), x, gain, f4(1e-6)]


@kernel(
    """extern "C" __global__ void k(float* loss, float* gradient, const float* x, const int* label,
                                    int n) {
        int t = threadIdx.x, row = blockIdx.x;
        float top = -3e38f, sum = 0;
        for (int i = t; i < n; i += 32) top = fmaxf(top, x[row * n + i]);
        for (int d = 16; d > 0; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        for (int i = t; i < n; i += 32) sum += __expf(x[row * n + i] - top);
        for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        for (int i = t; i < n; i += 32)
            gradient[row * n + i] = __fdividef(__expf(x[row * n + i] - top), sum)
                                    - (i == label[row] ? 1.f : 0.f);
        if (t == 0) loss[row] = top + logf(sum) - x[row * n + label[row]];
    }""",
    9,
    32,
)
def cross_entropy_and_its_gradient(rng: Generator) -> Arguments:
    x, label = rows(rng, 9, 50), rng.integers(0, 50, 9).astype(i4)
    y = x.astype(f8)
    e = np.exp(y - y.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    hot = np.eye(50)[label]
    loss = -np.log(p[np.arange(9), label])
    return [
        Out(loss, "f4", absolute=2**-17),
        Out(p - hot, "f4", absolute=2**-19),
        x, label, i4(50),
    ]  # fmt: skip


# Scans.
@kernel(
    """extern "C" __global__ void k(int* o, const int* x, int n) {
        __shared__ int sums[8];
        int t = threadIdx.x, lane = t % 32, base = 0;
        for (int i = t; i < (n + 255) / 256 * 256; i += 256) {
            int v = i < n ? x[i] : 0;
            for (int d = 1; d < 32; d <<= 1) {
                int u = __shfl_up_sync(~0u, v, d);
                if (lane >= d) v += u;
            }
            if (lane == 31) sums[t / 32] = v;
            __syncthreads();
            int before = 0, all = 0;
            for (int w = 0; w < 8; ++w) { before += w < t / 32 ? sums[w] : 0; all += sums[w]; }
            if (i < n) o[i] = base + before + v;
            base += all;
            __syncthreads();
        }
    }""",
    1,
    256,
)
def inclusive_scan(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, 1000).astype(i4)
    with np.errstate(over="ignore"):
        return [Out(np.cumsum(x, dtype=i4)), x, i4(1000)]


@kernel(
    """extern "C" __global__ void k(float* o, const float* x) {
        __shared__ float s[512 + 16];
        int t = threadIdx.x;
        auto at = [](int i) { return i + i / 32; };  // keeps the banks apart
        s[at(2 * t)] = x[2 * t]; s[at(2 * t + 1)] = x[2 * t + 1];
        int step = 1;
        for (int d = 256; d > 0; d >>= 1, step *= 2) {
            __syncthreads();
            if (t < d) s[at(step * (2 * t + 2) - 1)] += s[at(step * (2 * t + 1) - 1)];
        }
        if (t == 0) s[at(511)] = 0;
        for (int d = 1; d < 512; d *= 2) {
            step >>= 1;
            __syncthreads();
            if (t < d) {
                int a = at(step * (2 * t + 1) - 1), b = at(step * (2 * t + 2) - 1);
                float v = s[a]; s[a] = s[b]; s[b] += v;
            }
        }
        __syncthreads();
        o[2 * t] = s[at(2 * t)]; o[2 * t + 1] = s[at(2 * t + 1)];
    }""",
    1,
    256,
)
def exclusive_scan_up_and_down_a_tree(rng: Generator) -> Arguments:
    x = rng.integers(-1000, 1000, 512).astype(f4)  # sums of integers are exact
    return [Out(np.concatenate([[0], np.cumsum(x)[:-1]]).astype(f4)), x]


@kernel(
    """extern "C" __global__ void k(int* o, volatile unsigned long long* state, const int* x) {
        __shared__ int sums[4], base;
        int t = threadIdx.x, b = blockIdx.x, v = x[b * 128 + t];
        for (int d = 1; d < 32; d <<= 1) {
            int u = __shfl_up_sync(~0u, v, d);
            if (t % 32 >= d) v += u;
        }
        if (t % 32 == 31) sums[t / 32] = v;
        __syncthreads();
        if (t == 0) {
            unsigned all = sums[0] + sums[1] + sums[2] + sums[3], before = 0;
            state[b] = 1ull << 32 | all;  // the sum of this block alone
            for (int p = b - 1; p >= 0; --p) {
                unsigned long long s;
                while ((s = state[p]) >> 32 == 0) { }
                before += (unsigned)s;
                if (s >> 32 == 2) break;  // the sum of all up to that block
            }
            state[b] = 2ull << 32 | (before + all);
            base = before;
        }
        __syncthreads();
        int before = base;
        for (int w = 0; w < t / 32; ++w) before += sums[w];
        o[b * 128 + t] = before + v;
    }""",
    16,
    128,
)
def scan_with_decoupled_look_back(rng: Generator) -> Arguments:
    x = rng.integers(-(1 << 31), 1 << 31, 2048).astype(i4)
    with np.errstate(over="ignore"):
        sums = np.cumsum(x, dtype=i4)
    state = np.uint64(2 << 32) | sums[127::128].view(u4).astype(np.uint64)
    return [Out(sums), Out(state), x]


@kernel(
    """extern "C" __global__ void k(int* o, int* count, const int* x, int n) {
        int i = blockIdx.x * 64 + threadIdx.x;
        bool keep = i < n && x[i] % 3 == 0;
        unsigned votes = __ballot_sync(~0u, keep);
        int lane = threadIdx.x % 32, leader = __ffs(votes) - 1, base = 0;
        if (lane == leader) base = atomicAdd(count, __popc(votes));
        base = __shfl_sync(~0u, base, leader & 31);
        if (keep) o[base + __popc(votes & ((1u << lane) - 1))] = x[i];
        unsigned below;
        asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
        if (below != (1u << lane) - 1) o[0] = -1;
    }""",
    1,
    64,
)
def compaction_by_votes(rng: Generator) -> Arguments:
    x = rng.integers(0, 1000, 61).astype(i4)
    kept = [x[:32][x[:32] % 3 == 0], x[32:][x[32:] % 3 == 0]]
    # Either warp may come first on a real GPU: let only the first have any.
    x[32:] = x[32:] // 3 * 3 + 1
    want = np.zeros(64, i4)
    want[: len(kept[0])] = kept[0]
    return [Out(want), Out(np.array([len(kept[0])], i4)), x, i4(61)]


# Histograms.
@kernel(
    """extern "C" __global__ void k(unsigned* o, const uchar4* x, int n) {
        __shared__ unsigned s[256];
        s[threadIdx.x] = 0;
        __syncthreads();
        for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
            uchar4 v = x[i];
            atomicAdd(s + v.x, 1u); atomicAdd(s + v.y, 1u);
            atomicAdd(s + v.z, 1u); atomicAdd(s + v.w, 1u);
        }
        __syncthreads();
        if (s[threadIdx.x]) atomicAdd(o + threadIdx.x, s[threadIdx.x]);
    }""",
    3,
    256,
)
def histogram_of_bytes(rng: Generator) -> Arguments:
    x = np.minimum(rng.exponential(40, 8004), 255).astype(u1)
    return [Out(np.bincount(x, minlength=256).astype(u4)), x, i4(2001)]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const float* x, float low, float width, int n) {
        int i = blockIdx.x * 128 + threadIdx.x;
        int bin = i < n ? (int)floorf((x[i] - low) / width) : -1;
        bin = bin < 0 || bin >= 20 ? -1 : bin;
        unsigned same = __match_any_sync(~0u, bin);  // one atomic operation for equal bins
        if (bin >= 0 && (threadIdx.x & 31) == __ffs(same) - 1) atomicAdd(o + bin, __popc(same));
    }""",
    9,
    128,
)
def histogram_with_equal_bins_joined(rng: Generator) -> Arguments:
    x = rng.standard_normal(1100).astype(f4)
    bins = np.floor((x - f4(-2.5)) / f4(0.25)).astype(int)
    counts = np.bincount(bins[(bins >= 0) & (bins < 20)], minlength=20)
    return [Out(counts.astype(u4)), x, f4(-2.5), f4(0.25), i4(1100)]


# Transpositions.
@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int rows, int columns) {
        __shared__ float s[32][33];
        int u = threadIdx.x, v = threadIdx.y, c = blockIdx.x * 32 + u, r = blockIdx.y * 32 + v;
        for (int j = 0; j < 32; j += 8)
            if (c < columns && r + j < rows) s[v + j][u] = x[(r + j) * columns + c];
        __syncthreads();
        c = blockIdx.y * 32 + u; r = blockIdx.x * 32 + v;
        for (int j = 0; j < 32; j += 8)
            if (c < rows && r + j < columns) o[(r + j) * rows + c] = s[u][v + j];
    }""",
    (3, 2),
    (32, 8),
)
def transposition_in_tiles(rng: Generator) -> Arguments:
    x = rng.integers(0, 1 << 32, (45, 77), dtype=u4).view(f4)
    return [Out(x.T.copy().view(u4)), x, i4(45), i4(77)]


@kernel(
    """extern "C" __global__ void k(uint4* o, const uint4* x) {
        __shared__ __align__(16) unsigned short s[64][72];
        int t = threadIdx.x;
        for (int i = t; i < 512; i += 128) *(uint4*)&s[i / 8][i % 8 * 8] = x[i];
        __syncthreads();
        int warp = t / 32, lane = t % 32;
        for (int tile = warp; tile < 16; tile += 4) {  // 16 by 16 elements each
            int r = tile / 4 * 16, c = tile % 4 * 16;
            unsigned a = (unsigned)__cvta_generic_to_shared(&s[r + lane % 16][c + lane / 16 * 8]);
            unsigned v[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(a));
            unsigned* d = (unsigned*)o;
            for (int j = 0; j < 4; ++j) {
                int row = c + j / 2 * 8 + lane / 4, column = r + j % 2 * 8 + lane % 4 * 2;
                d[(row * 64 + column) / 2] = v[j];
            }
        }
    }""",
    1,
    128,
)
def transposition_by_ldmatrix(rng: Generator) -> Arguments:
    x = rng.integers(0, 1 << 16, (64, 64), dtype=u2)
    return [Out(x.T.copy()), x]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const unsigned* x) {
        unsigned v = x[blockIdx.x * 32 + threadIdx.x], r;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
        o[blockIdx.x * 32 + threadIdx.x] = r;
    }""",
    3,
    32,
)
def transposition_by_movmatrix(rng: Generator) -> Arguments:
    x = rng.integers(0, 1 << 16, (3, 8, 8), dtype=u2)
    return [Out(x.swapaxes(1, 2).copy()), x]
