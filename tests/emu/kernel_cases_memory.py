"""Memory: asynchronous copies, vector accesses, address spaces, atomic operations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.emu.kernel_lib import (
    Arguments,
    Array,
    Near,
    Out,
    add,
    f2,
    f4,
    i4,
    i8,
    kernel,
    to_bf16,
    u1,
    u2,
    u4,
    u8,
)

Generator = np.random.Generator


def words(rng: Generator, *shape: int) -> Array:
    return rng.integers(0, 1 << 32, shape, dtype=u4)


# Asynchronous copies and mbarriers.
@kernel(
    """extern "C" __global__ void k(unsigned* o, const unsigned* x) {
        __shared__ __align__(16) unsigned s[4][256];
        int t = threadIdx.x;
        unsigned at[4];
        for (int r = 0; r < 4; ++r) at[r] = (unsigned)__cvta_generic_to_shared(&s[r][0]);
        for (int i = 0; i < 4; ++i)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                :: "r"(at[0] + (t + 64 * i) * 4), "l"(x + t + 64 * i));
        asm volatile("cp.async.commit_group;");
        for (int i = 0; i < 2; ++i)
            asm volatile("cp.async.ca.shared.global.L2::64B [%0], [%1], 8, %2;"
                :: "r"(at[1] + (t + 64 * i) * 8), "l"(x + 2 * (t + 64 * i)), "r"(t % 9));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
            :: "r"(at[2] + t * 16), "l"(x + 4 * t), "r"(t % 17));
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0;"
            "cp.async.cg.shared.global [%0], [%1], 16, p; }"
            :: "r"(at[3] + t * 16), "l"(x + 4 * t), "r"(t % 3));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        for (int i = t; i < 1024; i += 64) o[i] = s[i / 256][i % 256];
    }""",
    1,
    64,
)
def asynchronous_copies_of_every_size(rng: Generator) -> Arguments:
    x = words(rng, 256)

    def part(size: int, valid: Array) -> Array:  # the bytes behind the valid ones become zero
        rows = x.view(u1).reshape(-1, size)
        return np.where(np.arange(size) < valid[:, None], rows, u1(0)).view(u4).reshape(-1)

    t = np.arange(64)
    want = [x, part(8, np.minimum(np.tile(t % 9, 2), 8)), part(16, np.minimum(t % 17, 16)),
            part(16, np.where(t % 3 != 0, 0, 16))]  # fmt: skip
    return [Out(np.stack(want)), x]


@kernel(
    """#include <cuda_pipeline_primitives.h>
    extern "C" __global__ void k(float4* o, const float4* x, int tiles) {
        __shared__ float4 s[3][64];
        int t = threadIdx.x;
        for (int p = 0; p < 2; ++p) {
            __pipeline_memcpy_async(&s[p][t], x + p * 64 + t, 16);
            __pipeline_commit();
        }
        for (int i = 0; i < tiles; ++i) {
            int p = i + 2;
            if (p < tiles) __pipeline_memcpy_async(&s[p % 3][t], x + p * 64 + t, 16);
            __pipeline_commit();
            __pipeline_wait_prior(2);
            __syncthreads();
            float4 v = s[i % 3][63 - t];
            o[i * 64 + t] = make_float4(v.w, v.z, v.y, v.x);
            __syncthreads();
        }
    }""",
    1,
    64,
)
def pipeline_of_three_stages(rng: Generator) -> Arguments:
    x = words(rng, 7, 256)
    return [Out(x[:, ::-1].copy()), x.view(f4), i4(7)]


@kernel(
    """#include <cuda_awbarrier_primitives.h>
    #include <cuda_pipeline_primitives.h>
    extern "C" __global__ void k(int4* o, const int4* x) {
        __shared__ int4 s[128];
        __shared__ __mbarrier_t barrier;
        int t = threadIdx.x;
        if (t == 0) __mbarrier_init(&barrier, 128);
        __syncthreads();
        for (int round = 0; round < 3; ++round) {
            __pipeline_memcpy_async(s + t, x + round * 128 + t, 16);
            __pipeline_arrive_on(&barrier);
            __mbarrier_token_t token = __mbarrier_arrive(&barrier);
            while (!__mbarrier_test_wait(&barrier, token)) { }
            o[round * 128 + t] = s[127 - t];
            __syncthreads();
        }
        if (t == 0) __mbarrier_inval(&barrier);
    }""",
    2,
    128,
)
def copies_that_arrive_at_an_mbarrier(rng: Generator) -> Arguments:
    x = words(rng, 3, 128, 4)
    return [Out(x[:, ::-1].copy()), x]


@kernel(
    """extern "C" __global__ void k(int* o, const int* x, int rounds) {
        __shared__ __align__(8) unsigned long long full, empty;
        __shared__ int s[32];
        unsigned f = (unsigned)__cvta_generic_to_shared(&full);
        unsigned e = (unsigned)__cvta_generic_to_shared(&empty);
        int t = threadIdx.x % 32;
        if (threadIdx.x == 0) {
            asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(f));
            asm volatile("mbarrier.init.shared.b64 [%0], 33;" :: "r"(e));
        }
        __syncthreads();
        auto arrive = [](unsigned b) {
            unsigned long long state;
            asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
        };
        auto wait = [](unsigned b, unsigned parity) {
            unsigned done = 0;
            while (!done)
                asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2;"
                    "selp.b32 %0, 1, 0, p; }" : "=r"(done) : "r"(b), "r"(parity) : "memory");
        };
        if (threadIdx.x < 32) {  // a producer warp; its first lane arrives twice where it may empty
            for (int r = 0; r < rounds; ++r) {
                wait(e, (r & 1) ^ 1);
                s[t] = x[r * 32 + t] * 3;
                if (t == 0) arrive(e);
                arrive(f);
            }
        } else {
            for (int r = 0; r < rounds; ++r) {
                wait(f, r & 1);
                o[r * 32 + t] = s[31 - t];
                arrive(e);
            }
        }
    }""",
    1,
    64,
)
def producer_and_consumer_with_parities(rng: Generator) -> Arguments:
    x = rng.integers(-1000, 1000, (9, 32)).astype(i4)
    return [Out((x * 3)[:, ::-1].copy()), x, i4(9)]


@kernel(
    """extern "C" __global__ void k(unsigned* o) {
        __shared__ __align__(8) unsigned long long b;
        unsigned a = (unsigned)__cvta_generic_to_shared(&b), p, n = 0;
        unsigned long long s;
        asm volatile("mbarrier.init.shared.b64 [%0], 5;" :: "r"(a));
        asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 3;" : "=l"(s) : "r"(a));
        asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(o[n++]) : "l"(s));
        asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];" : "=l"(s) : "r"(a));
        asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(o[n++]) : "l"(s));
        asm volatile("{ .reg .pred q; mbarrier.test_wait.shared.b64 q, [%1], %2;"
            "selp.b32 %0, 1, 0, q; }" : "=r"(p) : "r"(a), "l"(s)); o[n++] = p;
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(a));
        asm volatile("cp.async.wait_all;" ::: "memory");
        do {
            asm volatile("{ .reg .pred q; mbarrier.test_wait.shared.b64 q, [%1], %2;"
                "selp.b32 %0, 1, 0, q; }" : "=r"(p) : "r"(a), "l"(s));
        } while (!p);
        o[n++] = p;
        asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(s) : "r"(a));
        asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(o[n++]) : "l"(s));
        asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(a));
    }""",
    1,
    1,
)
def counts_of_an_mbarrier(rng: Generator) -> Arguments:
    # Five are expected, then four, since one has dropped out.
    return [Out(np.array([5, 2, 0, 1, 4], u4))]


# Vector accesses, address spaces and hints.
@kernel(
    """extern "C" __global__ void k(unsigned char* o, const unsigned char* x) {
        int t = threadIdx.x;
        unsigned short a, b, c, d; unsigned e, f, g, h; unsigned long long p, q, policy;
        const unsigned char* s = x + 16 * t;
        asm volatile("ld.global.v4.u8 {%0,%1,%2,%3}, [%4];"
            : "=h"(a), "=h"(b), "=h"(c), "=h"(d) : "l"(s));
        asm volatile("st.global.v4.u8 [%0], {%1,%2,%3,%4};"
            :: "l"(o + 16 * t), "h"(d), "h"(c), "h"(b), "h"(a));
        asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u16 {%0,%1}, [%2+4];"
            : "=h"(a), "=h"(b) : "l"(s));
        asm volatile("st.global.cs.v2.u16 [%0+4], {%1,%2};" :: "l"(o + 16 * t), "h"(b), "h"(a));
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("ld.global.L1::evict_last.L2::cache_hint.b32 %0, [%1+8], %2;"
            : "=r"(e) : "l"(s), "l"(policy));
        asm volatile("ld.relaxed.gpu.global.s8 %0, [%1+12];" : "=r"(f) : "l"(s));
        asm volatile("ld.volatile.global.u16 %0, [%1+14];" : "=r"(g) : "l"(s));
        asm volatile("st.global.wt.v2.b32 [%0+8], {%1,%2};" :: "l"(o + 16 * t), "r"(e), "r"(f + g));
        o += 1024; s = x + 1024 + 32 * t;
        asm volatile("ld.global.v2.b64 {%0,%1}, [%2];" : "=l"(p), "=l"(q) : "l"(s));
        asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4+16];"
            : "=r"(e), "=r"(f), "=r"(g), "=r"(h) : "l"(s));
        asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};"
            :: "l"(o + 32 * t), "r"(h), "r"(g), "r"(f), "r"(e));
        asm volatile("st.release.gpu.global.b64 [%0+16], %1;" :: "l"(o + 32 * t), "l"(q));
        asm volatile("st.relaxed.sys.global.b64 [%0+24], %1;" :: "l"(o + 32 * t), "l"(p));
        asm volatile("prefetch.global.L2 [%0];" :: "l"(s));
        asm volatile("applypriority.global.L2::evict_normal [%0], 128;" :: "l"(x));
        asm volatile("fence.acq_rel.gpu; fence.sc.sys; membar.cta; pmevent 1;");
    }""",
    1,
    64,
)
def vector_accesses_with_hints(rng: Generator) -> Arguments:
    x = rng.integers(0, 256, 1024 + 2048).astype(u1)
    a, b = x[:1024].reshape(64, 16), x[1024:].reshape(64, 32)
    first = a.copy()
    first[:, :4] = a[:, 3::-1]
    first[:, 4:8] = a[:, [6, 7, 4, 5]]
    signed = a[:, 12].astype(np.int8).astype(i8) + a[:, 14:].copy().view(u2)[:, 0]
    first[:, 12:] = signed.astype(i4)[:, None].view(u1)
    second = np.concatenate([b[:, 16:].copy().view(u4)[:, ::-1].copy().view(u1), b[:, 8:16],
                             b[:, :8]], 1)  # fmt: skip
    return [Out(np.concatenate([first.reshape(-1), second.reshape(-1)])), x]


@kernel(
    """__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
    __device__ int counter = 100;
    struct Pair { short a; double b; };
    __device__ __noinline__ int sum(const int* p, int n) {
        int s = 0; for (int i = 0; i < n; ++i) s += p[i]; return s;
    }
    extern "C" __global__ void k(int* o, Pair pair, const int* x) {
        __shared__ int s[32];
        int l[8], t = threadIdx.x;
        for (int i = 0; i < 8; ++i) l[(i + t) % 8] = i * t;
        s[t] = x[t];
        __syncthreads();
        const int* p = t % 4 == 0 ? s : t % 4 == 1 ? l : t % 4 == 2 ? x : table;
        o[t] = sum(p, 8) * pair.a + (int)(pair.b * l[t % 8]);
        if (t == 7) o[32] = atomicAdd(&counter, 5);
    }""",
    1,
    32,
)
def pointers_into_four_spaces(rng: Generator) -> Arguments:
    x = rng.integers(-100, 100, 32).astype(i4)
    table = [3, 1, 4, 1, 5, 9, 2, 6]
    want = []
    for t in range(32):
        local = [0] * 8
        for i in range(8):
            local[(i + t) % 8] = i * t
        chosen = (x[:8].tolist(), local, x[:8].tolist(), table)[t % 4]
        want.append(sum(chosen) * -3 + int(2.5 * local[t % 8]))
    pair = np.array((-3, 2.5), np.dtype([("a", "i2"), ("b", "f8")], align=True))
    return [Out(np.array([*want, 100], i4)), pair, x]


# Atomic operations: the same on device memory and on shared memory. What the lanes find in the
# cell depends on their order, so the results of all are compared as a set.
def add_atomics(name: str, kind: str, c: str, letter: str, values: Array, start: int,
                operations: dict[str, Callable[[Array], int]]) -> None:  # fmt: skip
    """Each operation by 96 threads on a cell of its own, in both memories."""
    statements = ""
    for at, operation in enumerate(operations):
        suffix = operation if "." in operation else f"{operation}.{kind}"
        statements += f"""
            asm volatile("atom.global.{suffix} %0, [%1], %2;"
                : "={letter}"(r) : "l"(o + {2 * at}), "{letter}"(v) : "memory");
            asm volatile("red.shared.{suffix} [%0], %1;"
                :: "r"(a + {at * values.itemsize}), "{letter}"(v) : "memory");
            seen ^= r;"""
    n = len(operations)
    source = f"""extern "C" __global__ void k({c}* o, const {c}* x, {c} start) {{
        __shared__ {c} s[{n}];
        unsigned a = (unsigned)__cvta_generic_to_shared(s);
        if (threadIdx.x < {n}) s[threadIdx.x] = start;
        __syncthreads();
        {c} v = x[threadIdx.x], r, seen = 0;
        {statements}
        __syncthreads();
        if (threadIdx.x < {n}) o[2 * threadIdx.x + 1] = s[threadIdx.x];
        if (seen == 1 && r == 2) o[0] = 0;
    }}"""

    def arguments(rng: Generator) -> Arguments:
        begin = np.full((n, 2), start, values.dtype)
        results = [[reference(values)] * 2 for reference in operations.values()]
        mask = (1 << values.itemsize * 8) - 1
        unsigned = np.array([[v & mask for v in row] for row in results], f"u{values.itemsize}")
        return [Out(unsigned.view(values.dtype), start=begin), values, values.dtype.type(start)]

    add(name, source, 1, 96, arguments)


def reduced(operation: np.ufunc, start: int) -> Callable[[Array], int]:
    return lambda values: int(operation.reduce(np.append(values, values.dtype.type(start))))


def counted(wrap: int, step: int, start: int) -> Callable[[Array], int]:
    """inc and dec of the same limit by every lane."""

    def result(values: Array) -> int:
        at = start
        for _ in values:
            at = (
                (0 if at >= wrap else at + 1)
                if step > 0
                else wrap
                if at in (0, wrap + 1)
                else at - 1
            )
        return at

    return result


_random = np.random.default_rng(5)
_u4 = _random.integers(0, 1 << 32, 96, dtype=u4)
_i4, _u8 = _u4.view(i4), _random.integers(0, 1 << 64, 96, dtype=u8)
_total = {"add": lambda v: int(v.astype(object).sum()) + 77}
add_atomics("atomics_u32", "u32", "unsigned", "r", _u4, 77,
            {**_total, "min": reduced(np.minimum, 77), "max": reduced(np.maximum, 77),
             "and.b32": reduced(np.bitwise_and, 77), "or.b32": reduced(np.bitwise_or, 77),
             "xor.b32": reduced(np.bitwise_xor, 77)})  # fmt: skip
add_atomics("atomics_s32", "s32", "int", "r", _i4, 77,
            {**_total, "min": reduced(np.minimum, 77), "max": reduced(np.maximum, 77)})  # fmt: skip
add_atomics("atomics_u64", "u64", "unsigned long long", "l", _u8, 77,
            {**_total, "min": reduced(np.minimum, 77), "max": reduced(np.maximum, 77),
             "and.b64": reduced(np.bitwise_and, 77), "or.b64": reduced(np.bitwise_or, 77),
             "xor.b64": reduced(np.bitwise_xor, 77)})  # fmt: skip
add_atomics("atomics_s64", "s64", "long long", "l", _u8.view(i8), 77,
            {"min": reduced(np.minimum, 77), "max": reduced(np.maximum, 77)})  # fmt: skip
add_atomics("atomics_that_wrap", "u32", "unsigned", "r", np.full(96, 30, u4), 77,
            {"inc": counted(30, 1, 77), "dec": counted(30, -1, 31)})  # fmt: skip


@kernel(
    """#include <cuda_fp16.h>
    #include <cuda_bf16.h>
    extern "C" __global__ void k(float* f, double* d, __half* h, __half2* p, __nv_bfloat16* b,
                                 const float* x) {
        __shared__ float sf; __shared__ double sd; __shared__ __half sh;
        int t = threadIdx.x;
        if (t == 0) { sf = 0; sd = 0; sh = __float2half(0.f); }
        __syncthreads();
        float v = x[t];
        atomicAdd(f, v); atomicAdd(&sf, v); atomicAdd(d, (double)v); atomicAdd(&sd, (double)v);
        atomicAdd(h, __float2half(v)); atomicAdd(&sh, __float2half(v));
        atomicAdd(p, __floats2half2_rn(v, -v)); atomicAdd(b, __float2bfloat16(v));
        __syncthreads();
        if (t == 0) { f[1] = sf; d[1] = sd; h[1] = sh; }
    }""",
    1,
    64,
)
def atomic_sums_of_floats(rng: Generator) -> Arguments:
    x = rng.integers(-2, 3, 64).astype(f4)  # sums that every type holds exactly
    total = float(x.sum())
    return [
        Out(np.full(2, total, f4)), Out(np.full(2, total)), Out(np.full(2, total, f2)),
        Out(np.array([total, -total], f2)), Out(to_bf16(np.array([total, 0], f4))), x,
    ]  # fmt: skip


@kernel(
    """extern "C" __global__ void k(float* o, float* old, float v) {
        __shared__ float s;
        s = v;
        old[0] = atomicAdd(o, v); old[1] = atomicAdd(&s, v);
        o[1] = s;
    }""",
    1,
    1,
)
def atomic_sums_of_subnormal_numbers(rng: Generator) -> Arguments:
    # PTX ISA: flushed to zero in global memory, kept in shared memory.
    v = f4(3e-40)
    return [Out(np.array([0, v + v], f4), start=np.array([v, 0], f4)), Out(np.array([v, v], f4)), v]


@kernel(
    """extern "C" __global__ void k(unsigned* o, unsigned long long* w, unsigned short* h,
                                    float* f, const float* x) {
        int t = threadIdx.x;
        unsigned old = *o, seen;
        do { seen = old; old = atomicCAS(o, seen, seen * 3 + 1); } while (old != seen);
        unsigned long long a = *w, b;
        do { b = a; a = atomicCAS(w, b, b + (1ull << 33) + t); } while (a != b);
        unsigned short c = *h, d;
        do { d = c; c = atomicCAS(h, d, (unsigned short)(d + t)); } while (c != d);
        int m = __float_as_int(*f), n;  // the largest float by comparing and swapping
        do { n = m; m = atomicCAS((int*)f, n, __float_as_int(fmaxf(__int_as_float(n), x[t]))); }
        while (m != n);
        unsigned mine = atomicExch(o + 1, t + 1);
        atomicAdd(o + 2, mine);
    }""",
    1,
    128,
)
def loops_of_compare_and_swap(rng: Generator) -> Arguments:
    x = rng.standard_normal(128).astype(f4)
    value = 5
    for _ in range(128):
        value = value * 3 + 1 & 0xFFFFFFFF
    # Each exchange takes what another lane has left; the last one's value stays: not compared, but
    # with the sum of those taken it is the sum of all.
    source = np.array([5, 0, 0], u4)
    total = 128 * 129 // 2
    wide = np.array([128 * (1 << 33) + 127 * 64], u8)
    return [
        Exchanged(np.array([value, 0, total], u4), start=source),
        Out(wide),
        Out(np.array([127 * 64], u2)),
        Out(np.array([x.max()], f4), start=np.array([-np.inf], f4)),
        x,
    ]


class Exchanged(Out):
    """Elements 1 and 2 of the output have a known sum."""

    def check(self, got: Array) -> Near:
        folded = got.copy()
        folded[2] += folded[1]
        folded[1] = 0
        return super().check(folded)
