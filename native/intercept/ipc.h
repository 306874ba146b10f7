// Memory that several processes have. Whoever is to get a block is given a *ticket*: as a
// descriptor (cuMemExportToShareableHandle), or in the bytes of a legacy handle
// (cuIpcGetMemHandle). It names its owner's token and a block, and no memory, so that it stays true
// over a checkpoint and CRIU can dump it. Who imports it asks the owner for the block's descriptor.
#ifndef FLOWGPU_INTERCEPT_IPC_H
#define FLOWGPU_INTERCEPT_IPC_H

#include <cstdint>
#include <vector>

#include <cuda.h>

#include "flowgpu/wire.h"
#include "memory.h"

namespace flowgpu::ipc {

constexpr char kMemoryMagic[8] = {'F', 'l', 'o', 'w', 'G', 'P', 'U', '1'};
constexpr char kEventMagic[8] = {'F', 'l', 'o', 'w', 'G', 'P', 'U', 'e'};

// The bytes of a ticket, which are those of a legacy handle.
struct Ticket {
    char magic[sizeof kMemoryMagic];
    Token owner;
    uint64_t what; // the address of an allocation, a program handle, or an event's number
    uint8_t unused[32];
};
static_assert(sizeof(Ticket) == sizeof(CUipcMemHandle));
static_assert(sizeof(Ticket) == sizeof(CUipcEventHandle));

// The token of this process; zeros where the system gives no random bits.
Token token();
// Who lives and has asked for blocks of this process.
std::vector<flowgpu_asker> askers();

// A ticket for something of this process, which listens from now on.
CUresult make(const char* magic, uint64_t what, Ticket* ticket);
// Tells if an event of another process is done: the answer of its event_state(), or
// CUDA_ERROR_INVALID_HANDLE where it has ended. Not ready: perhaps not.
CUresult ask_event(const Ticket& ticket);
// Gives cuEventQuery's answer for an event of this process that others use, by its number.
CUresult event_state(uint64_t number);

// A descriptor, the caller's to close, of a ticket for the block that has a program handle.
CUresult make_ticket(CUmemGenericAllocationHandle handle, int* fd);
// False: `fd`, which stays the caller's, is no ticket.
bool import_ticket(int fd, CUmemGenericAllocationHandle* handle, CUresult* result);
// Tells if memory of a legacy handle is there, of which the program may not ask as of its mappings.
bool is_opened(CUdeviceptr address);

// Around a fork. In the child, what is the parent's business is forgotten.
void lock();
void unlock();
void forget_parents();
void lock_events();
void unlock_events();
void forget_parents_events();

} // namespace flowgpu::ipc

#endif
