// The bytes of arrays and mipmapped arrays, which have no address.
//
// Behind the closed gate of a checkpoint they are copied to memory of ours, which leaves the task
// and comes back as the program's does. Once CUDA has been made anew they are copied into the new
// arrays; where it stays as it is, the copies are dropped.
#ifndef FLOWGPU_INTERCEPT_REPLAY_ARRAYS_H
#define FLOWGPU_INTERCEPT_REPLAY_ARRAYS_H

#include <cstddef>

#include <cuda.h>

namespace flowgpu::replay::arrays {

// Why the bytes of an array like this cannot be copied; null: they can.
const char* why_not(const CUDA_ARRAY3D_DESCRIPTOR& array);

// Behind a closed gate, with all work done: copies all of them. False: `detail` says why, and
// nothing was kept.
bool copy_out(char* detail, size_t bytes);
// Drops the copies that there are; all memory is mapped.
void stay();
// CUDA was made anew, so the arrays are empty.
void driver_is_new();
// Fills them, if they are empty; all memory is mapped again. False: `detail` says why; it may be
// tried again.
bool copy_back(char* detail, size_t bytes);

} // namespace flowgpu::replay::arrays

#endif
