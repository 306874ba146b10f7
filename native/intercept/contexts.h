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

// What a device is instead of a whole GPU that each process has contexts of its own on. Null: none
// is anything else.
const char* not_a_whole_gpu();

} // namespace flowgpu::contexts

#endif
