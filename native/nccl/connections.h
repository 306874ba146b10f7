// The connections of communicators that were made anew: those that they had before are made at
// once, in one order on all ranks. A call that connects waits for the other ranks, so two
// communicators which two ranks first used in opposite orders would wait for each other for ever.
#ifndef FLOWGPU_NCCL_CONNECTIONS_H
#define FLOWGPU_NCCL_CONNECTIONS_H

#include "calls.h"

namespace flowgpu::nccl {

// Each kind of operation that a communicator has done is done once more, with memory of our own.
// `sorted`: by communicator, the same on all ranks; those of one that are ranks of this process
// follow each other. Returns when all is done on the GPUs.
Result connect_all(Communicator* const* sorted, uint32_t count);

} // namespace flowgpu::nccl

#endif
