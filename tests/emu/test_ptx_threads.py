"""Threads that wait for each other: barriers, warps, locks, blocks that spin."""

from __future__ import annotations

import numpy as np
from ptx_cases import floats, i4, i8, rng, same
from ptx_runner import run


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
                threadIdx.x + 10 * threadIdx.y + 100 * threadIdx.z
                + 1000 * (blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);
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
            if (threadIdx.x < 32) {
                s[t] = t * 5;
                __threadfence_block();
                asm volatile("bar.arrive 2, 64;");
            } else { asm volatile("bar.sync 2, 64;"); o[t] = s[31 - t]; }
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
                if (b > 0) {
                    while (flags[b - 1] == 0) { }
                    __threadfence();
                    before = flags[20 + b - 1];
                }
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
