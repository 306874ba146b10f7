// The kernel of libnccl.so.2: one block does all works of a group on one communicator. Collectives
// come first, one after another; then sends and receives, each as far as its peer lets it.
//
// A thread that waits spins on device memory, and nobody but the peer's kernel ends that. Results
// are the same to the bit on all ranks: parts are reduced in the order of the ranks.
#include "work.h"

using namespace flowgpu::nccl;
typedef unsigned char u8;
typedef unsigned short u16;

namespace {

__device__ u64 load(u64 address) {
    return *reinterpret_cast<volatile u64*>(address);
}
__device__ void store(u64 address, u64 value) {
    *reinterpret_cast<volatile u64*>(address) = value;
}
__device__ void nap() {
    asm volatile("nanosleep.u32 20000;");
}
__device__ bool aborted(const Communicator* c) {
    return *reinterpret_cast<const volatile u32*>(&c->aborted) != 0;
}

__device__ u32 bytes_of(Type type) {
    switch (type) {
    case kI64:
    case kU64:
    case kF64:
        return 8;
    case kI32:
    case kU32:
    case kF32:
        return 4;
    case kF16:
    case kBf16:
        return 2;
    default:
        return 1;
    }
}

__device__ void copy(u64 to, u64 from, u64 bytes) {
    u64 done = 0;
    if (((to | from) & 7) == 0) {
        for (u64 i = threadIdx.x; i < bytes / 8; i += FN_THREADS)
            store(to + 8 * i, load(from + 8 * i));
        done = bytes / 8 * 8;
    }
    for (u64 i = done + threadIdx.x; i < bytes; i += FN_THREADS)
        *reinterpret_cast<volatile u8*>(to + i) = *reinterpret_cast<volatile u8*>(from + i);
}

// Room for one more chunk, and a chunk that has come. The first thread looks, all know.
__device__ bool room(const Lane& lane) {
    return lane.step - load(lane.credit) < FN_SLOTS;
}
__device__ bool come(const Lane& lane) {
    return load(lane.fifo) > lane.step;
}
__device__ u64 slot(const Lane& lane) {
    return lane.fifo + FN_HEADER_BYTES + lane.step % FN_SLOTS * FN_SLOT_BYTES;
}

// All threads have done their part with the chunk before the first one tells the peer.
__device__ void tell(Lane& lane, u64 word) {
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        lane.step++;
        store(word, lane.step);
        __threadfence_system();
    }
    __syncthreads();
}

__device__ void filled(Lane& lane, u64 bytes) {
    if (threadIdx.x == 0)
        store(lane.fifo + FN_SIZES + 8 * (lane.step % FN_SLOTS), bytes);
    tell(lane, lane.fifo);
}

template <bool (*ready)(const Lane&)> __device__ bool await(Communicator* c, const Lane& lane) {
    __shared__ int stopped;
    if (threadIdx.x == 0) {
        stopped = 0;
        while (!ready(lane) && !stopped) {
            if (aborted(c))
                stopped = 1;
            else
                nap();
        }
        __threadfence_system();
    }
    __syncthreads();
    const bool go_on = !stopped;
    __syncthreads();
    return go_on;
}

__device__ bool put(Communicator* c, Lane& lane, u64 from, u64 bytes) {
    if (!await<room>(c, lane))
        return false;
    copy(slot(lane), from, bytes);
    filled(lane, bytes);
    return true;
}

__device__ float widen(u16 bits, Type type) {
    float value;
    if (type == kBf16)
        return __uint_as_float(static_cast<u32>(bits) << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ u16 narrow(float value, Type type) {
    u16 bits;
    if (type == kBf16) {
        const u32 word = __float_as_uint(value);
        if (value != value)
            return static_cast<u16>(word >> 16 | 0x40);
        return static_cast<u16>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

template <class T> __device__ T joined(T a, T b, Reduction reduction) {
    switch (reduction) {
    case kProduct:
        return a * b;
    case kMaximum:
        return a < b || a != a ? b : a;
    case kMinimum:
        return b < a || a != a ? b : a;
    default:
        return a + b;
    }
}

template <class T> struct Plain {
    using Stored = T;
    static __device__ T in(T stored, Type) { return stored; }
    static __device__ T out(T value, Type) { return value; }
};
struct Half {
    using Stored = u16;
    static __device__ float in(u16 stored, Type type) { return widen(stored, type); }
    static __device__ u16 out(float value, Type type) { return narrow(value, type); }
};

// `parts`: a chunk of each rank, null for the one in `own`.
template <class F>
__device__ void reduce(Communicator* c, const Work& w, u64 own, u64 to, u64 count) {
    using Stored = typename F::Stored;
    Stored scalar = Stored();
    if (w.reduction == kPreMultiplied)
        scalar = w.scalar_is_on_device ? *reinterpret_cast<volatile Stored*>(w.scalar)
                                       : *reinterpret_cast<const Stored*>(&w.scalar);
    for (u64 i = threadIdx.x; i < count; i += FN_THREADS) {
        auto value = F::in(Stored(), w.type);
        for (u32 rank = 0; rank < c->ranks; rank++) {
            const u64 from = rank == c->rank ? own : slot(c->receive[kCollectives][rank]);
            auto one = F::in(reinterpret_cast<volatile Stored*>(from)[i], w.type);
            if (w.reduction == kPreMultiplied)
                one = one * F::in(scalar, w.type);
            value = rank == 0 ? one : joined(value, one, w.reduction);
        }
        if (w.reduction == kAverage)
            value = value / static_cast<decltype(value)>(c->ranks);
        reinterpret_cast<volatile Stored*>(to)[i] = F::out(value, w.type);
    }
}

__device__ void reduce_any(Communicator* c, const Work& w, u64 own, u64 to, u64 count) {
    switch (w.type) {
    case kI8:
        return reduce<Plain<signed char>>(c, w, own, to, count);
    case kU8:
        return reduce<Plain<u8>>(c, w, own, to, count);
    case kI32:
        return reduce<Plain<int>>(c, w, own, to, count);
    case kU32:
        return reduce<Plain<u32>>(c, w, own, to, count);
    case kI64:
        return reduce<Plain<long long>>(c, w, own, to, count);
    case kU64:
        return reduce<Plain<u64>>(c, w, own, to, count);
    case kF32:
        return reduce<Plain<float>>(c, w, own, to, count);
    case kF64:
        return reduce<Plain<double>>(c, w, own, to, count);
    default:
        return reduce<Half>(c, w, own, to, count);
    }
}

__device__ bool reduces(Kind kind) {
    return kind == kAllReduce || kind == kReduce || kind == kReduceScatter;
}
__device__ bool sends_to(const Work& w, u32 rank, u32 peer) {
    switch (w.kind) {
    case kReduce:
    case kGather:
        return static_cast<u32>(w.peer) == peer;
    case kBroadcast:
    case kScatter:
        return static_cast<u32>(w.peer) == rank;
    default:
        return true;
    }
}
// Where the part for a peer, or of a peer, begins.
__device__ u64 part_to(const Work& w, u32 peer, u64 bytes) {
    const bool parted = w.kind == kReduceScatter || w.kind == kAllToAll || w.kind == kScatter;
    return w.send + (parted ? peer * bytes : 0);
}
__device__ u64 part_from(const Work& w, u32 peer, u64 bytes) {
    const bool parted = w.kind == kAllGather || w.kind == kAllToAll || w.kind == kGather;
    return w.receive + (parted ? peer * bytes : 0);
}

__device__ void collective(Communicator* c, const Work& w) {
    const u32 rank = c->rank, size = bytes_of(w.type);
    const u64 bytes = w.count * size;
    const bool has_own = sends_to(w, rank, rank);
    if (has_own && !reduces(w.kind) && part_from(w, rank, bytes) != part_to(w, rank, bytes))
        copy(part_from(w, rank, bytes), part_to(w, rank, bytes), bytes);
    for (u64 at = 0; at < bytes; at += FN_SLOT_BYTES) {
        const u64 here = bytes - at < FN_SLOT_BYTES ? bytes - at : FN_SLOT_BYTES;
        for (u32 peer = 0; peer < c->ranks; peer++)
            if (peer != rank && sends_to(w, rank, peer) &&
                !put(c, c->send[kCollectives][peer], part_to(w, peer, bytes) + at, here))
                return;
        u32 senders = 0;
        for (u32 peer = 0; peer < c->ranks; peer++) {
            Lane& lane = c->receive[kCollectives][peer];
            if (peer == rank || !sends_to(w, peer, rank))
                continue;
            senders++;
            if (!await<come>(c, lane))
                return;
            if (reduces(w.kind))
                continue;
            copy(part_from(w, peer, bytes) + at, slot(lane), here);
            tell(lane, lane.credit);
        }
        if (!reduces(w.kind) || !has_own)
            continue;
        reduce_any(c, w, part_to(w, rank, bytes) + at, w.receive + at, here / size);
        for (u32 peer = 0; senders && peer < c->ranks; peer++)
            if (peer != rank)
                tell(c->receive[kCollectives][peer], c->receive[kCollectives][peer].credit);
    }
}

__device__ u64 chunks_of(const Work& w) {
    const u64 bytes = w.count * bytes_of(w.type);
    return bytes == 0 ? 1 : (bytes + FN_SLOT_BYTES - 1) / FN_SLOT_BYTES;
}

// The pairs' works, of which each one that is first at its lane goes on by a chunk at a time.
__device__ void pairs(Communicator* c, const Arguments& a, u32 first) {
    __shared__ u64 done[FN_WORKS];
    __shared__ int ready, left, moved;
    for (u32 i = threadIdx.x; i < FN_WORKS; i += FN_THREADS)
        done[i] = 0;
    __syncthreads();
    do {
        if (threadIdx.x == 0)
            left = moved = 0;
        __syncthreads();
        for (u32 i = first; i < a.works; i++) {
            const Work& w = a.work[i];
            const bool sending = w.kind == kSend;
            Lane& lane = (sending ? c->send : c->receive)[kPairs][w.peer];
            if (threadIdx.x == 0) {
                bool turn = done[i] < chunks_of(w);
                left |= turn;
                for (u32 j = first; j < i && turn; j++)
                    turn = a.work[j].kind != w.kind || a.work[j].peer != w.peer ||
                           done[j] == chunks_of(a.work[j]);
                ready = turn && (w.kind == kCopy || (sending ? room(lane) : come(lane)));
                __threadfence_system();
            }
            __syncthreads();
            if (ready) {
                const u64 at = done[i] * FN_SLOT_BYTES, bytes = w.count * bytes_of(w.type);
                const u64 here = bytes - at < FN_SLOT_BYTES ? bytes - at : FN_SLOT_BYTES;
                if (w.kind == kCopy) {
                    copy(w.receive + at, w.send + at, here);
                } else if (sending) {
                    copy(slot(lane), w.send + at, here);
                    filled(lane, here);
                } else {
                    copy(w.receive + at, slot(lane), here);
                    tell(lane, lane.credit);
                }
                if (threadIdx.x == 0) {
                    done[i]++;
                    moved = 1;
                }
            }
            __syncthreads();
        }
        if (threadIdx.x == 0 && left && !moved) {
            if (aborted(c))
                left = 0;
            else
                nap();
        }
        __syncthreads();
    } while (left);
}

} // namespace

extern "C" __global__ void __launch_bounds__(FN_THREADS)
    ncclDevKernel_Generic(const __grid_constant__ Arguments a) {
    auto* c = reinterpret_cast<Communicator*>(a.communicator);
    u32 at = 0;
    for (; at < a.works && a.work[at].kind < kSend; at++)
        collective(c, a.work[at]);
    if (at < a.works)
        pairs(c, a, at);
}
