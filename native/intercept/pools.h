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
// What the program has of a pool in memory that is ours, or what is reserved for that.
uint64_t bytes_of(CUmemoryPool pool, bool reserved);

// Managed pools. The driver's reserve 205 GiB of addresses, and give some that cannot be had again.
// So a pool of the driver's that stays empty stands for each, and what the program is given from it
// is memory of managed.h.
// True if FlowGPU can serve such a pool; `stand_in`: what stands for it.
bool may_serve(const CUmemPoolProps& props, CUmemPoolProps* stand_in);
void serve(CUmemoryPool pool, const CUmemLocation& preferred);
// `preferred`: where its memory is to be, in the driver's words of a pool.
bool serves(CUmemoryPool pool, CUmemLocation* preferred = nullptr);
void end_serving(CUmemoryPool pool);
// A location's own pool, which the program cannot end. Null: there is none yet.
CUmemoryPool default_managed(const CUmemLocation& location);
// The one that the program has set in its place, or null. False: the pool is for another location.
CUmemoryPool set_managed(const CUmemLocation& location);
bool set_managed(const CUmemLocation& location, CUmemoryPool pool);
// Gives the one that is: another thread may have made it meanwhile.
CUmemoryPool make_default_managed(const CUmemLocation& location, CUmemoryPool pool);
bool is_default_managed(CUmemoryPool pool);

// For a fork, before all other locks of this library's.
void lock();
void unlock();

} // namespace flowgpu::pools

#endif
