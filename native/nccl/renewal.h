// Communicators are ended in a checkpoint and made anew later, with the same ranks, in the place of
// those that the program knows (flowgpu/nccl.h, coordinator/renewal.py). The steps are made by a
// thread of ours, on all ranks at once, while the program runs: who calls NCCL waits.
#ifndef FLOWGPU_NCCL_RENEWAL_H
#define FLOWGPU_NCCL_RENEWAL_H

#include <cstddef>

#include "communicators.h"

namespace flowgpu::nccl {

enum Result : int { kSuccess = 0, kSystemError = 2, kRemoteError = 6, kInProgress = 7 };
struct UniqueId {
    char bytes[128];
};

inline bool good(Result result) {
    return result == kSuccess || result == kInProgress;
}

// A function of the NCCL that the program uses.
void seen(const void* function);
// Lies in that library.
bool is_of_nccl(const void* address);
// The calling thread's context, as the driver has it.
void* current_context();
// The handle is NCCL's own. False: NCCL does not know them yet.
bool ask_ranks(void* comm, int* ranks, int* rank);
// The GPU of a communicator that was made without a context: the thread's device, or one of a list.
void note_device(Communicator& place, void* comm);

// While it lives, what the thread calls is called as NCCL's own code would.
struct AsNccl {
    AsNccl();
    ~AsNccl();
    AsNccl(const AsNccl&) = delete;
    AsNccl& operator=(const AsNccl&) = delete;
};

// The environment has the one unique id that there is (NCCL_COMM_ID).
void ids_are_fixed();

// Around a call of NCCL that is no operation.
void begin_call();
void end_call();
// Communicators are held or ended.
bool is_held();

} // namespace flowgpu::nccl

#endif
