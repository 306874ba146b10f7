// Kernels on 32 KiB chunks; chunks.h says how they are launched.
//
// XXH3-128 (xxHash's specification, "XXH3 algorithm", inputs of 241 bytes and more) of a chunk: 32
// blocks of 16 stripes of 64 bytes; eight accumulators of 64 bits, scrambled between blocks. What a
// stripe adds does not depend on the accumulators, so several stripes of a block are digested at
// the same time by groups of four threads, two accumulators a thread, and summed once a block.
#include "chunks.h"

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace {

constexpr u32 all_lanes = 0xffffffff;
constexpr u32 warp_threads = 32;
constexpr u32 vector_bytes = 16;
constexpr u32 stripe_bytes = 64;
constexpr u32 stripes_per_block = 16;
constexpr u32 block_bytes = stripe_bytes * stripes_per_block;
constexpr u32 blocks = FGK_CHUNK_BYTES / block_bytes;
constexpr u32 lanes = FGK_DIGEST_LANES;
constexpr u32 groups = lanes / 4;                  // stripes digested at the same time
constexpr u32 rounds = stripes_per_block / groups; // one after another
constexpr u32 warp_vectors = FGK_CHUNK_BYTES / (warp_threads * vector_bytes);
static_assert(lanes == 4 || lanes == 8 || lanes == 16 || lanes == 32, "a chunk's threads");

constexpr u64 prime32_1 = 0x9e3779b1, prime32_2 = 0x85ebca77, prime32_3 = 0xc2b2ae3d;
constexpr u64 prime64_1 = 0x9e3779b185ebca87, prime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr u64 prime64_3 = 0x165667b19e3779f9, prime64_4 = 0x85ebca77c2b2ae63;
constexpr u64 prime64_5 = 0x27d4eb2f165667c5, prime_avalanche = 0x165667919e3779f9;

// Where the secret is read, in bytes.
constexpr u32 scramble_secret = 128, last_stripe_secret = 121;
constexpr u32 low_secret = 11, high_secret = 117;

__constant__ u64 secret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
__constant__ u64 initial[8] = {prime32_3, prime64_1, prime64_2, prime64_3,
                               prime64_4, prime32_2, prime64_5, prime32_1};

struct Pair {
    u64 a, b;
};

__device__ __forceinline__ u64 secret_at(u32 byte) {
    u32 word = byte / 8, shift = byte % 8 * 8;
    return shift == 0 ? secret[word] : secret[word] >> shift | secret[word + 1] << (64 - shift);
}

__device__ __forceinline__ Pair secret_pair(u32 byte) {
    return {secret_at(byte), secret_at(byte + 8)};
}

__device__ __forceinline__ u64 product_of_halves(u64 key) {
    return static_cast<u64>(static_cast<u32>(key)) * static_cast<u32>(key >> 32);
}

__device__ __forceinline__ void accumulate(Pair& sum, const ulonglong2& data, const Pair& key) {
    sum.a += data.y + product_of_halves(data.x ^ key.a);
    sum.b += data.x + product_of_halves(data.y ^ key.b);
}

// Sum over the groups of a chunk: over the threads that hold the same two accumulators.
__device__ __forceinline__ u64 sum_of_groups(u64 value) {
#pragma unroll
    for (u32 step = 4; step < lanes; step *= 2) {
        value += __shfl_xor_sync(all_lanes, value, step);
    }
    return value;
}

__device__ __forceinline__ u64 scramble(u64 value, u64 key) {
    return (value ^ value >> 47 ^ key) * prime32_1;
}

// Half of the digest, from the accumulators of the four threads of a group.
__device__ __forceinline__ u64 merge(const Pair& sum, const Pair& key, u64 start) {
    u64 left = sum.a ^ key.a, right = sum.b ^ key.b;
    u64 value = left * right ^ __umul64hi(left, right);
    value += __shfl_xor_sync(all_lanes, value, 1);
    value += __shfl_xor_sync(all_lanes, value, 2);
    value += start;
    value = (value ^ value >> 37) * prime_avalanche;
    return value ^ value >> 32;
}

__device__ __forceinline__ u64 big_endian(u64 value) {
    u32 low = static_cast<u32>(value), high = static_cast<u32>(value >> 32);
    return static_cast<u64>(__byte_perm(low, 0, 0x0123)) << 32 | __byte_perm(high, 0, 0x0123);
}

struct Digest {
    const ulonglong2* next; // this thread's part of the first group's stripe of the next block
    Pair sum;
    Pair key[rounds];
    u64 bits = 0; // or of all data

    __device__ __forceinline__ void load(ulonglong2 (&data)[rounds]) {
#pragma unroll
        for (u32 r = 0; r < rounds; ++r) {
            data[r] = __ldcs(next + r * lanes);
        }
        next += block_bytes / vector_bytes;
    }

    __device__ __forceinline__ void block(const ulonglong2 (&data)[rounds]) {
        Pair part = {0, 0};
#pragma unroll
        for (u32 r = 0; r < rounds; ++r) {
            accumulate(part, data[r], key[r]);
            bits |= data[r].x | data[r].y;
        }
        sum.a += sum_of_groups(part.a);
        sum.b += sum_of_groups(part.b);
    }
};

// One warp a chunk: the chunk's number, or count for a warp without one.
__device__ __forceinline__ u32 chunk_of_warp(u32 count) {
    u32 chunk = blockIdx.x * (FGK_THREADS / warp_threads) + threadIdx.x / warp_threads;
    return chunk < count ? chunk : count;
}

__device__ __forceinline__ u32 lane() {
    return threadIdx.x % warp_threads;
}

} // namespace

extern "C" __global__ void __launch_bounds__(FGK_THREADS)
    fgk_digest(const u64* __restrict__ address, u32 count, u8* __restrict__ digests,
               u8* __restrict__ zero) {
    u32 chunk = blockIdx.x * FGK_DIGEST_CHUNKS + threadIdx.x / lanes;
    if (chunk - lane() / lanes >= count) {
        return; // the whole warp
    }
    // A shuffle needs the warp's other threads, so those past the end do the last chunk again.
    const u32 part = threadIdx.x % lanes, group = part / 4, pair = part % 4 * 16;
    Digest d;
    d.next = reinterpret_cast<const ulonglong2*>(address[chunk < count ? chunk : count - 1]) + part;
    d.sum = {initial[pair / 8], initial[pair / 8 + 1]};
#pragma unroll
    for (u32 r = 0; r < rounds; ++r) {
        d.key[r] = secret_pair((r * groups + group) * 8 + pair);
    }
    const Pair between = secret_pair(scramble_secret + pair);

    ulonglong2 data[rounds];
    d.load(data);
    for (u32 block = 0; block < blocks - 1; ++block) {
        ulonglong2 ahead[rounds];
        d.load(ahead);
        d.block(data);
        d.sum = {scramble(d.sum.a, between.a), scramble(d.sum.b, between.b)};
#pragma unroll
        for (u32 r = 0; r < rounds; ++r) {
            data[r] = ahead[r];
        }
    }
    if (group == groups - 1) {
        d.key[rounds - 1] = secret_pair(last_stripe_secret + pair);
    }
    d.block(data);

    constexpr u64 bytes = FGK_CHUNK_BYTES;
    u64 low = merge(d.sum, secret_pair(low_secret + pair), bytes * prime64_1);
    u64 high = merge(d.sum, secret_pair(high_secret + pair), ~(bytes * prime64_2));
    u32 nonzero = __ballot_sync(all_lanes, d.bits != 0) >> (lane() / lanes * lanes);
    if (part == 0 && chunk < count) {
        reinterpret_cast<ulonglong2*>(digests)[chunk] = {big_endian(high), big_endian(low)};
        zero[chunk] = (nonzero & (all_lanes >> (warp_threads - lanes))) == 0;
    }
}

extern "C" __global__ void __launch_bounds__(FGK_THREADS)
    fgk_compare(const u64* __restrict__ left, const u64* __restrict__ right, u32 count,
                u8* __restrict__ differ) {
    u32 chunk = chunk_of_warp(count);
    if (chunk == count) {
        return;
    }
    const ulonglong2* a = reinterpret_cast<const ulonglong2*>(left[chunk]) + lane();
    const ulonglong2* b = reinterpret_cast<const ulonglong2*>(right[chunk]) + lane();
    u64 bits = 0;
#pragma unroll 4
    for (u32 v = 0; v < warp_vectors; ++v) {
        ulonglong2 x = __ldcs(a + v * warp_threads), y = __ldcs(b + v * warp_threads);
        bits |= (x.x ^ y.x) | (x.y ^ y.y);
    }
    bool differs = __any_sync(all_lanes, bits != 0);
    if (lane() == 0) {
        differ[chunk] = differs;
    }
}

extern "C" __global__ void __launch_bounds__(FGK_THREADS)
    fgk_copy(const u64* __restrict__ source, const u64* __restrict__ destination, u32 count) {
    u32 chunk = chunk_of_warp(count);
    if (chunk == count) {
        return;
    }
    constexpr u32 in_flight = 8;
    const ulonglong2* from = reinterpret_cast<const ulonglong2*>(source[chunk]) + lane();
    ulonglong2* to = reinterpret_cast<ulonglong2*>(destination[chunk]) + lane();
#pragma unroll 1
    for (u32 v = 0; v < warp_vectors; v += in_flight) {
        ulonglong2 data[in_flight];
#pragma unroll
        for (u32 k = 0; k < in_flight; ++k) {
            data[k] = __ldcs(from + (v + k) * warp_threads);
        }
#pragma unroll
        for (u32 k = 0; k < in_flight; ++k) {
            __stcs(to + (v + k) * warp_threads, data[k]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(FGK_THREADS)
    fgk_fill(const u64* __restrict__ destination, u32 count, u64 pattern) {
    u32 chunk = chunk_of_warp(count);
    if (chunk == count) {
        return;
    }
    ulonglong2* to = reinterpret_cast<ulonglong2*>(destination[chunk]) + lane();
#pragma unroll 8
    for (u32 v = 0; v < warp_vectors; ++v) {
        __stcs(to + v * warp_threads, ulonglong2{pattern, pattern});
    }
}
