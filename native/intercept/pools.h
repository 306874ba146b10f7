// Memory from the driver's stream-ordered pools (cuMemAllocAsync), in jobs prepared for the replay
// engine.
//
// While the program runs it is the driver's alone: nobody can tell it at which address it has to
// give memory. At a checkpoint its bytes are copied to blocks of ours, one for each run of 2 MiB
// with such memory, which leave the task as all blocks do. Once CUDA has been made anew they are
// mapped where the memory was, and are the program's from then on, until it frees them. Where
// CUDA stays as it is, the copies are dropped.
//
// Driver 580 has its pools, and what programs reserve there, in pieces of 32 MiB: addresses are had
// again by such pieces (docs/design/hardware-notes.md).
#ifndef FLOWGPU_INTERCEPT_POOLS_H
#define FLOWGPU_INTERCEPT_POOLS_H

#include <cstddef>
#include <cstdint>

#include <cuda.h>

#include "memory.h"

namespace flowgpu::pools {

// Notes memory that the driver has placed in a pool (null: the one that its device has now), in the
// order of `stream`.
void note(CUdeviceptr address, size_t bytes, CUmemoryPool pool, CUstream stream);

// Behind a closed gate, with all work done: copies all of it. False: `detail` says why, and nothing
// was kept.
bool copy_out(char* detail, size_t bytes);
// CUDA stays as it is: drops the copies.
void stay();
// CUDA was made anew: the copies are the memory, as soon as they are mapped again.
void driver_is_new();

// Frees memory that is ours by now (MemoryKind::adopted). The caller has waited for the end of all
// work that uses it.
CUresult release(CUdeviceptr address);
// A context has ended, and memory that was given in it.
void end_of(CUcontext context);
uint64_t bytes_of(CUmemoryPool pool);

// For a fork, before all other locks of this library's.
void lock();
void unlock();

} // namespace flowgpu::pools

#endif
