"""Threads of a block and of a warp: barriers, votes, matches, shuffles, locks."""

from __future__ import annotations

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Out,
    i4,
    kernel,
    u4,
)

Generator = np.random.Generator


@kernel(
    """extern "C" __global__ void k(int* o, const int* x) {
        __shared__ int s[2][64];
        int t = threadIdx.x, v = x[t];
        int r = __syncthreads_count(v % 3 == 0) + 1000 * __syncthreads_and(v < 90)
              + 2000 * __syncthreads_or(v == 17);
        int group = t / 64, u = t % 64;
        s[group][u] = v;
        if (group == 0) asm volatile("bar.sync 1, 64;" ::: "memory");
        else asm volatile("barrier.sync 2, 64;" ::: "memory");
        r += 10000 * s[group][63 - u];
        o[t] = r;
    }""",
    1,
    128,
)
def barriers_that_count(rng: Generator) -> Arguments:
    x = rng.integers(0, 91, 128).astype(i4)
    base = (x % 3 == 0).sum() + 1000 * (x < 90).all() + 2000 * (x == 17).any()
    return [Out((base + 10000 * x.reshape(2, 64)[:, ::-1].reshape(-1)).astype(i4)), x]


@kernel(
    """extern "C" __global__ void k(unsigned* o, const int* x) {
        int t = threadIdx.x, v = x[t], p;
        unsigned* r = o + t * 8;
        r[0] = __ballot_sync(~0u, v & 1);
        r[1] = __any_sync(~0u, v == 3) + 2 * __all_sync(~0u, v >= 0)
             + 4 * __all_sync(~0u, v == __shfl_sync(~0u, v, 0));
        r[2] = __match_any_sync(~0u, v % 4);
        r[3] = __match_all_sync(~0u, v / 100, &p) + p;
        r[4] = __match_any_sync(~0u, (long long)(v % 3) << 40);
        unsigned odd = r[0];
        if (v & 1) { r[5] = __ballot_sync(odd, v % 3 == 0); r[6] = 1; }
        else { __syncwarp(~odd); r[5] = 0; r[6] = __activemask() >> t & 1; }
        unsigned lanes;
        asm("mov.u32 %0, %%lanemask_ge;" : "=r"(lanes));
        r[7] = lanes;
    }""",
    1,
    32,
)
def votes_and_matches(rng: Generator) -> Arguments:
    x = rng.integers(0, 90, 32).astype(i4)

    def bits(mask: Array) -> int:
        return int((mask.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum())

    odd = x & 1 == 1
    want = []
    for t in range(32):
        flags = int((x == 3).any()) + 2 + 4 * int((x == x[0]).all())
        active = bits(odd & (x % 3 == 0)) if odd[t] else 0
        want.append([bits(odd), flags, bits(x % 4 == x[t] % 4), 0, bits(x % 3 == x[t] % 3), active,
                     1, 0xFFFFFFFF << t & 0xFFFFFFFF])  # fmt: skip
    # match.all of equal values: every lane, plus the predicate.
    table = np.array(want, u4)
    table[:, 3] = 0
    return [Out(table), x]


@kernel(
    """extern "C" __global__ void k(int* o, const int* x, const double* y, double* p) {
        int t = threadIdx.x, v = x[t], lane = t % 32;
        int* r = o + t * 7;
        r[0] = __shfl_sync(~0u, v, lane * 7 + 3);
        r[1] = __shfl_up_sync(~0u, v, 5, 16);
        r[2] = __shfl_down_sync(~0u, v, lane % 3, 8);
        r[3] = __shfl_xor_sync(~0u, v, 21);
        r[4] = __shfl_xor_sync(~0u, v, 6, 4);
        int d, ok;
        asm volatile("{ .reg .pred q; shfl.sync.down.b32 %0|q, %2, 9, 0x1f, -1;"
            "selp.b32 %1, 1, 0, q; }" : "=r"(d), "=r"(ok) : "r"(v));
        r[5] = ok; r[6] = d;
        p[t] = __shfl_xor_sync(~0u, y[t], 1);
    }""",
    1,
    64,
)
def shuffles_of_every_kind(rng: Generator) -> Arguments:
    x, y = rng.integers(-1000, 1000, 64).astype(i4), rng.standard_normal(64)
    lane = np.arange(32)

    def take(index: Array) -> Array:
        return x.reshape(2, 32)[:, index].reshape(-1)

    down = lane % 3
    # Within four lanes, lane ^ 6 lies outside unless it is below: then it is read.
    cross = lane ^ 6
    cross = np.where(cross <= (lane | 3), cross, lane)
    want = [
        take((lane * 7 + 3) % 32), take(np.where(lane % 16 >= 5, lane - 5, lane)),
        take(np.where(lane % 8 + down < 8, lane + down, lane)), take(lane ^ 21), take(cross),
        np.tile(lane + 9 < 32, 2), take(np.where(lane + 9 < 32, lane + 9, lane)),
    ]  # fmt: skip
    return [
        Out(np.stack(want, 1).astype(i4)),
        x,
        y,
        Out(y.reshape(-1, 2)[:, ::-1].reshape(-1).copy()),
    ]


@kernel(
    """extern "C" __global__ void k(unsigned* o, int rounds) {
        // Lanes of one warp take a lock in turn, while other blocks do the same.
        for (int r = 0; r < rounds; ++r) {
            bool done = false;
            while (!done) {
                if (atomicCAS(o, 0u, 1u) == 0) {
                    __threadfence();
                    ((volatile unsigned*)o)[1] += 1;
                    __threadfence();
                    atomicExch(o, 0u);
                    done = true;
                }
            }
        }
    }""",
    3,
    48,
)
def lock_among_lanes_and_blocks(rng: Generator) -> Arguments:
    return [Out(np.array([0, 3 * 48 * 2], u4)), i4(2)]
