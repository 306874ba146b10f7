// What libnccl.so.2 hands its kernel, and what both keep in device memory.
//
//   sender's GPU                                         receiver's GPU
//   +---------+  credit: chunks that were taken out      +------------------------------+
//   | Credit  | <--------------------------------------- | kernel of the receiver       |
//   +---------+                                          |                              |
//   kernel of the sender ---- chunk, then `tail` ------> | Fifo: header, 8 slots        |
//                                                        +------------------------------+
//
// Each rank owns the fifos that it receives from and the credits of those that it sends to. Its
// peers map them, so a kernel writes into the memory of others and spins on its own. A peer on
// another host maps nothing: both ends have a fifo and a credit of their own in host memory, and
// threads move the chunks between them (network.h).
#ifndef FLOWGPU_EMU_NCCL_WORK_H
#define FLOWGPU_EMU_NCCL_WORK_H

#define FN_RANKS 16
#define FN_SLOTS 8
#define FN_SLOT_BYTES 65536
#define FN_HEADER_BYTES 4096 // of a fifo: `tail`, and at FN_SIZES how many bytes each slot has
#define FN_SIZES 64
#define FN_FIFO_BYTES (FN_HEADER_BYTES + FN_SLOTS * FN_SLOT_BYTES)
#define FN_WORKS 96 // of a kernel, whose argument has at most 4096 bytes
#define FN_THREADS 64
#define FN_LARGE 16384 // elements of a collective that NCCL does in another way

namespace flowgpu::nccl {

using u32 = unsigned int;
using u64 = unsigned long long;

enum Route : u32 { kCollectives, kPairs, kRoutes };

// One direction between this rank and a peer.
struct Lane {
    u64 fifo;   // of the receiver
    u64 credit; // of the sender
    u64 step;   // chunks so far: kept here, because a graph's kernels go on from each other
};

struct Communicator {
    u32 rank, ranks, aborted, reserved;
    Lane send[kRoutes][FN_RANKS];
    Lane receive[kRoutes][FN_RANKS];
};

enum Kind : unsigned char {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kBroadcast,
    kAllGather,
    kAllToAll,
    kGather,
    kScatter,
    kSend,
    kReceive,
    kCopy, // what a rank sends to itself
};
// Numbers of ncclDataType_t and ncclRedOp_t.
enum Type : unsigned char { kI8, kU8, kI32, kU32, kI64, kU64, kF16, kF32, kF64, kBf16, kF8a, kF8b };
enum Reduction : unsigned char { kSum, kProduct, kMaximum, kMinimum, kAverage, kPreMultiplied };

struct Work {
    u64 send, receive;
    u64 count;  // elements: of a rank's part where the parts differ
    u64 scalar; // of kPreMultiplied: its bits, or where they are
    Kind kind;
    Type type;
    Reduction reduction;
    unsigned char scalar_is_on_device;
    int peer; // or the root
};

struct Arguments {
    u64 communicator;
    u32 works, reserved;
    Work work[FN_WORKS];
};
static_assert(sizeof(Arguments) <= 4096, "a kernel's argument");

} // namespace flowgpu::nccl

#endif
