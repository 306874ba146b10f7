// What communicators have been used for. NCCL connects ranks when an operation first needs it, by
// the kind of the operation and its size, and that call waits for the other ranks. One that is made
// anew gets all its connections again at once (connections.cpp).
#ifndef FLOWGPU_NCCL_USES_H
#define FLOWGPU_NCCL_USES_H

#include <cstdint>

namespace flowgpu::nccl {

enum Kind : uint32_t {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kBroadcast,
    kAllGather,
    kAlltoAll,
    kGather,
    kScatter,
    kBcast = kBroadcast,
};

constexpr int kLastOperation = 4; // of NCCL's own reductions; others are the program's

// Collectives alike but for their sizes, which differ by less than a factor of two. All ranks of a
// communicator have the same ones behind a cut.
struct Use {
    Kind kind;
    int type;
    int with; // the reduction, where there is one; the root, where it decides who is connected
    uint64_t least, most; // elements
};

// One collective.
struct Collective {
    Kind kind;
    int type, with;
    uint64_t count;

    bool is_like(const Collective& other) const {
        return kind == other.kind && type == other.type && with == other.with;
    }
};

// It was issued on the communicator with this row.
void note(uint32_t row, const Collective& collective);
// Gives how many there are, the first `room` of them in an order that is the same on all ranks.
uint32_t uses_of(uint32_t row, Use* out, uint32_t room);
void forget_uses(uint32_t row);
// In the child of a fork.
void forget_all_uses();

} // namespace flowgpu::nccl

#endif
