"""Parts of programs: sorting, a stencil, an optimiser, random numbers, embeddings, a recurrence."""

from __future__ import annotations

import numpy as np

from tests.emu.kernel_lib import (
    NO_FMA,
    Arguments,
    Generator,
    Out,
    f4,
    f8,
    from_bf16,
    i4,
    kernel,
    rows,
    to_bf16,
    u4,
)


@kernel(
    """extern "C" __global__ void k(float* key, int* value) {
        __shared__ float s[512];
        __shared__ int v[512];
        int t = threadIdx.x, b = blockIdx.x * 512;
        s[t] = key[b + t]; s[t + 256] = key[b + t + 256]; v[t] = t; v[t + 256] = t + 256;
        for (int size = 2; size <= 512; size *= 2)
            for (int d = size / 2; d > 0; d /= 2) {
                __syncthreads();
                int i = 2 * t - (t & (d - 1)), j = i + d;
                bool up = (i & size) == 0;
                if ((s[i] > s[j] || (s[i] == s[j] && v[i] > v[j])) == up) {
                    float f = s[i]; s[i] = s[j]; s[j] = f;
                    int w = v[i]; v[i] = v[j]; v[j] = w;
                }
            }
        __syncthreads();
        key[b + t] = s[t]; key[b + t + 256] = s[t + 256];
        value[b + t] = v[t]; value[b + t + 256] = v[t + 256];
    }""",
    2,
    256,
)
def bitonic_sort(rng: Generator) -> Arguments:
    x = rng.integers(-100, 100, (2, 512)).astype(f4)
    x[0, :2] = [np.inf, -np.inf]
    order = np.argsort(x, axis=1, kind="stable")
    return [Out(np.take_along_axis(x, order, 1), start=x), Out(order.astype(i4))]


@kernel(
    """extern "C" __global__ void k(float* o, const float* x, int w, int h) {
        __shared__ float s[10][34];
        int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 8 + threadIdx.y;
        auto get = [&](int y, int x_) {
            return y < 0 || y >= h || x_ < 0 || x_ >= w ? 0.f : x[y * w + x_]; };
        int t = threadIdx.y * 32 + threadIdx.x;
        for (int i = t; i < 340; i += 256)
            s[i / 34][i % 34] = get(blockIdx.y * 8 + i / 34 - 1, blockIdx.x * 32 + i % 34 - 1);
        __syncthreads();
        int y = threadIdx.y + 1, q = threadIdx.x + 1;
        if (c < w && r < h)
            o[r * w + c] = 0.5f * s[y][q] + 0.125f * ((s[y - 1][q] + s[y + 1][q])
                                                     + (s[y][q - 1] + s[y][q + 1]));
    }""",
    (2, 5),
    (32, 8),
    options=NO_FMA,
)
def stencil_with_halo(rng: Generator) -> Arguments:
    x = rows(rng, 37, 50)
    p = np.pad(x, 1)
    around = (p[:-2, 1:-1] + p[2:, 1:-1]) + (p[1:-1, :-2] + p[1:-1, 2:])
    return [Out(f4(0.5) * x + f4(0.125) * around), x, i4(50), i4(37)]


@kernel(
    """extern "C" __global__ void k(float* w, float* m, float* v, const float* g, float rate,
                                    float b1, float b2, float epsilon, int step, int n) {
        int i = blockIdx.x * 128 + threadIdx.x;
        if (i >= n) return;
        m[i] = b1 * m[i] + (1 - b1) * g[i];
        v[i] = b2 * v[i] + (1 - b2) * g[i] * g[i];
        float a = m[i] / (1 - powf(b1, step)), c = v[i] / (1 - powf(b2, step));
        w[i] -= rate * a / (sqrtf(c) + epsilon);
    }""",
    4,
    128,
)
def adam_step(rng: Generator) -> Arguments:
    w, m, g = rows(rng, 500), rows(rng, 500), rows(rng, 500)
    v = np.abs(rows(rng, 500))
    b1, b2, rate, epsilon = (f8(f4(x)) for x in (0.9, 0.999, 0.01, 1e-8))
    m2, v2 = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g.astype(f8) ** 2
    move = rate * (m2 / (1 - b1**7)) / (np.sqrt(v2 / (1 - b2**7)) + epsilon)
    size = np.abs(w) + np.abs(move) * 2**14  # 1 - b2**7 cancels seven bits, and once more for b2
    return [
        Out(w - move, "f4", ulps=4, scale=size, start=w),
        Out(m2, "f4", ulps=4, scale=np.abs(m) + np.abs(g), start=m),
        Out(v2, "f4", ulps=4, scale=np.abs(v) + g.astype(f8) ** 2, start=v),
        g, f4(rate), f4(b1), f4(b2), f4(epsilon), i4(7), i4(500),
    ]  # fmt: skip


@kernel(
    """extern "C" __global__ void k(unsigned* o, uint2 key) {
        unsigned i = blockIdx.x * 64 + threadIdx.x;
        uint4 c = make_uint4(i, 0, 7, 0);
        for (int r = 0; r < 10; ++r) {
            unsigned h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
            unsigned h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
            c = make_uint4(h1 ^ c.y ^ key.x, l1, h0 ^ c.w ^ key.y, l0);
            key.x += 0x9E3779B9u; key.y += 0xBB67AE85u;
        }
        ((uint4*)o)[i] = c;
    }""",
    2,
    64,
)
def counter_based_random_numbers(rng: Generator) -> Arguments:
    key = rng.integers(0, 1 << 32, 2, dtype=u4)

    def one(i: int) -> list[int]:
        c, k0, k1 = [i, 0, 7, 0], int(key[0]), int(key[1])
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [q >> 32 ^ c[1] ^ k0, q & 0xFFFFFFFF, p >> 32 ^ c[3] ^ k1, p & 0xFFFFFFFF]
            k0, k1 = k0 + 0x9E3779B9 & 0xFFFFFFFF, k1 + 0xBB67AE85 & 0xFFFFFFFF
        return c

    want = np.array([one(i) for i in range(128)], u4)
    return [Out(want), np.array((key[0], key[1]), np.dtype([("x", u4), ("y", u4)]))]


@kernel(
    """extern "C" __global__ void k(float2* q, const float* angle, const int* position, int heads) {
        int i = blockIdx.x * blockDim.x + threadIdx.x, pair = threadIdx.x, row = blockIdx.x / heads;
        float s, c;
        sincosf(position[row] * angle[pair], &s, &c);
        float2 v = q[i];
        q[i] = make_float2(v.x * c - v.y * s, v.x * s + v.y * c);
    }""",
    12,
    32,
)
def rotary_embedding(rng: Generator) -> Arguments:
    q, angle = rows(rng, 12, 32, 2), (10000.0 ** (-np.arange(32) / 32)).astype(f4)
    position = np.array([0, 5, 1000], i4)
    a = (position[:, None] * angle).astype(f4).astype(f8).repeat(4, 0)
    x, y = q[..., 0].astype(f8), q[..., 1].astype(f8)
    want = np.stack([x * np.cos(a) - y * np.sin(a), x * np.sin(a) + y * np.cos(a)], -1)
    return [Out(want, "f4", ulps=6, scale=np.abs(q).sum(-1, keepdims=True), start=q), angle,
            position, i4(4)]  # fmt: skip


@kernel(
    """extern "C" __global__ void k(float4* o, const float4* table, const int* index, int width,
                                    int rows) {
        int row = index[blockIdx.x];
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            o[blockIdx.x * width + i] = row >= 0 && row < rows ? __ldg(table + row * width + i)
                                                               : make_float4(0, 0, 0, 0);
    }""",
    40,
    64,
)
def embedding_lookup(rng: Generator) -> Arguments:
    table, index = rows(rng, 30, 100), rng.integers(-2, 33, 40).astype(i4)
    valid = (index >= 0) & (index < 30)
    want = np.where(valid[:, None], table[np.clip(index, 0, 29)], f4(0))
    return [Out(want), table, index, i4(25), i4(30)]


@kernel(
    """extern "C" __global__ void k(unsigned short* o, const unsigned short* x, float decay) {
        // State of bf16 in memory, f32 in registers, as recurrent layers keep it.
        int t = blockIdx.x * 32 + threadIdx.x;
        float state = 0;
        for (int i = 0; i < 20; ++i) {
            float v = __int_as_float((int)x[i * 64 + t] << 16);
            state = __fmaf_rn(state, decay, v);
            unsigned short h;
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(state));
            o[i * 64 + t] = h;
        }
    }""",
    2,
    32,
)
def recurrence_with_bf16_outputs(rng: Generator) -> Arguments:
    x = to_bf16(rng.standard_normal((20, 64)).astype(f4))
    state, rows = np.zeros(64, f8), []
    for row in from_bf16(x):
        # The product of two f32 is exact in f64, and so, nearly always, is the sum's rounding.
        state = (state * f8(f4(0.75)) + row).astype(f4).astype(f8)
        rows.append(to_bf16(state.astype(f4)))
    return [Out(np.stack(rows)), x, f4(0.75)]
