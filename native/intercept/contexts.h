// Questions to all contexts of the program. They leave the calling thread without a current one.
#ifndef FLOWGPU_INTERCEPT_CONTEXTS_H
#define FLOWGPU_INTERCEPT_CONTEXTS_H

#include <cstdint>

#include <cuda.h>

namespace flowgpu::contexts {

// Waits until nothing the program submitted is in flight. Behind a closed gate.
CUresult drain();

// The least that a device has free, the room that the task keeps there included; all ones without a
// context. Of the contexts with memory in the window, or of all behind a closed gate.
uint64_t least_free();
uint64_t least_free_of_all();

// What a device is instead of a whole GPU that each process has contexts of its own on. Null: none
// is anything else.
const char* not_a_whole_gpu();

} // namespace flowgpu::contexts

#endif
