// The real driver: one slot a symbol, filled when the first call comes.
//
// Rules for all code in this library, which lives in someone else's process:
//  - never exit, abort, print, or change errno, signal masks, limits or the current context of a
//  program's thread;
//  - do nothing in constructors: preloaded tools, shells and CRIU never load the driver because of
//  us;
//  - no allocation while a lock of ours is held on a path that the program's allocator could enter;
//  - no call into our own exports: the driver is called through FG_REAL only;
//  - a failure of ours is an error code of the call that met it, or a refusal at the next
//  checkpoint.
#ifndef FLOWGPU_INTERCEPT_DRIVER_H
#define FLOWGPU_INTERCEPT_DRIVER_H

#include <atomic>
#include <cstdint>

#pragma GCC visibility push(default)
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#pragma GCC visibility pop

#include "page.h"
#include "quiet.h"

namespace flowgpu {

extern const char* const symbol_names[kSymbols];
extern const bool refuses[kSymbols];

extern "C" {
// Successful calls of functions with treatment REFUSE since the program started (of plain
// functions: all calls). The trampolines use it by name.
extern std::atomic<uint64_t> flowgpu_refused_calls[kSymbols];
// Opens the driver named by FLOWGPU_REAL_LIBCUDA (once) and returns the slot's function, never
// null: a driver that cannot be opened answers CUDA_ERROR_NO_DEVICE, a symbol it lacks
// CUDA_ERROR_NOT_FOUND.
void* flowgpu_resolve(unsigned symbol);
}

inline void* real_function(unsigned symbol) {
    void* function = __atomic_load_n(&flowgpu_page.functions[symbol].next, __ATOMIC_RELAXED);
    if (__builtin_expect(function != nullptr, 1))
        return function;
    uint64_t word = symbol;
    FG_QUIETLY(flowgpu_resolve_quietly, word);
    return reinterpret_cast<void*>(word);
}

#define FG_REAL(name)                                                                              \
    (reinterpret_cast<decltype(&::name)>(::flowgpu::real_function(::flowgpu::I_##name)))

// What the program is to have for a function that the real resolver returned: ours, or the same
// where ours would only pass the call on; null for a function without a row.
void* wrapper_for(void* real);

} // namespace flowgpu

#endif
