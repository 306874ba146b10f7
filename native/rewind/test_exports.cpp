// C interface for the tests: libflowgpu_rewind_test.so, loaded with ctypes.
#include "rewind.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT bool rewind_remember(const void* symbol, char* detail, size_t bytes) {
    return flowgpu::rewind::remember(symbol, {[] { return 0u; }, [](uint32_t) {}}, detail, bytes);
}

EXPORT bool rewind_strip(const flowgpu::rewind::Range* keep, size_t count, char* detail,
                         size_t bytes, bool* lost) {
    return flowgpu::rewind::strip(keep, count, detail, bytes, lost);
}
