// What the driver's constructors have left with libc and on the heap before its calls could be
// seen: keys of thread-specific data, and the loading thread's values.
#ifndef FLOWGPU_REWIND_KEYS_H
#define FLOWGPU_REWIND_KEYS_H

#include <cstdint>

namespace flowgpu::rewind::keys {

// Finds the keys whose destructor lies from `start` to `end`, and copies what they mean to the
// calling thread, which has loaded the driver. Nothing is found where libc is not glibc.
void remember(uintptr_t start, uintptr_t end);

// No thread has a value any more, so a thread's end destroys none; the keys stay.
void forget_values();

// What the loading thread had is as it was: the driver's data points to it.
void put_back();

} // namespace flowgpu::rewind::keys

#endif
