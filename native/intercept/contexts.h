// Questions to all contexts of the program. They leave the calling thread without a current one.
#ifndef FLOWGPU_INTERCEPT_CONTEXTS_H
#define FLOWGPU_INTERCEPT_CONTEXTS_H

#include <cstdint>

#include <cuda.h>

namespace flowgpu::contexts {

// Waits until nothing the program submitted is in flight. Behind a closed gate.
CUresult drain();

// The least that any device has free, with the room that the task keeps there; all ones without a
// context. Only the devices of contexts with memory in the window are asked.
uint64_t least_free();
// The same for the devices of all contexts, behind a closed gate.
uint64_t least_free_of_all();

// A device is one that processes have contexts on together, or only a part of a GPU.
bool on_shared_gpu();
bool on_part_of_gpu();

} // namespace flowgpu::contexts

#endif
