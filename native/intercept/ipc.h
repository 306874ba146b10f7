// Memory that several processes have. Whoever is to get a block is given a *ticket*: as a
// descriptor (cuMemExportToShareableHandle), or in the bytes of a legacy handle
// (cuIpcGetMemHandle). It names its owner's token and a block, and no memory, so that it stays true
// over a checkpoint and CRIU can dump it. Who imports it asks the owner for the block's descriptor.
#ifndef FLOWGPU_INTERCEPT_IPC_H
#define FLOWGPU_INTERCEPT_IPC_H

#include <vector>

#include <cuda.h>

#include "flowgpu/wire.h"
#include "memory.h"

namespace flowgpu::ipc {

// Of this process; zeros where the system gives no random bits.
Token token();
// Who lives and has asked for blocks of this process.
std::vector<flowgpu_asker> askers();

// A descriptor, the caller's to close, of a ticket for the block that has a program handle.
CUresult make_ticket(CUmemGenericAllocationHandle handle, int* fd);
// False: `fd`, which stays the caller's, is no ticket.
bool import_ticket(int fd, CUmemGenericAllocationHandle* handle, CUresult* result);
// Whether memory of a legacy handle is there, of which the program may not ask as of its mappings.
bool is_opened(CUdeviceptr address);

// Around a fork. In the child, what is the parent's business is forgotten.
void lock();
void unlock();
void forget_parents();

} // namespace flowgpu::ipc

#endif
