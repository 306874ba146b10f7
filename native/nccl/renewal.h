// Communicators are ended in a checkpoint and made anew later, with the same ranks, in the place of
// those that the program knows (flowgpu/nccl.h, coordinator/renewal.py). The steps are made by a
// thread of ours, on all ranks at once, while the program runs: who calls NCCL waits.
#ifndef FLOWGPU_NCCL_RENEWAL_H
#define FLOWGPU_NCCL_RENEWAL_H

#include <cstddef>

#include "calls.h"

namespace flowgpu::nccl {

struct UniqueId {
    char bytes[128];
};

// The handle is NCCL's own. False: NCCL does not know them yet.
bool ask_ranks(void* comm, int* ranks, int* rank);
// The GPU of a communicator that was made without a context: the thread's device, or one of a list.
void note_device(Communicator& place, void* comm);

// The environment has the one unique id that there is (NCCL_COMM_ID).
void ids_are_fixed();

// Around a call of NCCL that is no operation.
void begin_call();
void end_call();
// Communicators are held or ended.
bool is_held();

} // namespace flowgpu::nccl

#endif
