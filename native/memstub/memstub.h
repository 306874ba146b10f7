// The stub of this process: its live set, made at the first event, and what the hooks share.
//
// Rules: those of native/intercept/driver.h for code in someone else's process. In short: nothing
// happens before the first event, nothing is printed, errno and the program's results stay as they
// are, and a failure of ours makes memory active, never inactive.
#ifndef FLOWGPU_MEMSTUB_MEMSTUB_H
#define FLOWGPU_MEMSTUB_MEMSTUB_H

#include <cstddef>
#include <cstdint>

#define FGM_EXPORT extern "C" __attribute__((visibility("default")))
#define FGM_TEXT_OF(symbol) #symbol
#define FGM_NAME_OF(symbol) FGM_TEXT_OF(symbol)

namespace flowgpu::memstub {

// A framework's allocator has given out a block, or is about to take one back. A block must be
// removed before the allocator can give its address out again.
void allocated(const void* address, size_t bytes, unsigned device);
void freed(const void* address);

// The definition of `symbol` that the program would use without us; null when there is none.
void* next_definition(const char* symbol, const void* ours);

} // namespace flowgpu::memstub

#endif
