// Which communicator a handle of NCCL's is, and which rows of the page it has.
#ifndef FLOWGPU_NCCL_COMMUNICATORS_H
#define FLOWGPU_NCCL_COMMUNICATORS_H

#include <cstddef>
#include <cstdint>

#include "page.h"

namespace flowgpu::nccl {

uint64_t mix(uint64_t seed, const void* data, size_t bytes);

// One that is being made: its row, and where NCCL puts the handle.
struct Coming {
    uint32_t row = kNoRow;
    void** handle = nullptr;
};

// Notes a handle with the row of its collectives. Without room for it nothing of it is counted, and
// the page says so.
void bind(void* handle, uint32_t row);
// The row of a communicator's collectives; kNoRow for one that is not known.
uint32_t collectives_of(void* handle);
// That of messages between the rank of `collectives` and a peer, made where there is none.
uint32_t messages_of(uint32_t collectives, bool sends, int peer);
// Frees all its rows.
void forget(void* handle);
// What went on in the background has ended.
void settle(void* handle, bool well);

} // namespace flowgpu::nccl

#endif
