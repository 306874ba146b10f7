// The stub of this process: its live set, made at the first event, and what the hooks share.
//
// Rules: those of native/intercept/driver.h for code in someone else's process. In short: nothing
// happens before the first event, nothing is printed, errno and the program's results stay as they
// are, and a failure of ours makes memory active, never inactive.
#ifndef FLOWGPU_MEMSTUB_MEMSTUB_H
#define FLOWGPU_MEMSTUB_MEMSTUB_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "live_set.h"

#define FGM_EXPORT extern "C" __attribute__((visibility("default")))
#define FGM_TEXT_OF(symbol) #symbol
#define FGM_NAME_OF(symbol) FGM_TEXT_OF(symbol)

namespace flowgpu::memstub {

// c10::Device: trivially copyable, so it comes in a register.
struct Device {
    int8_t type;
    int8_t index;
};
using Report = void (*)(void*, int64_t, size_t, size_t, Device);

// The first call: looks for the definition that the program would use without us.
void first_report(void* address, int64_t bytes, size_t allocated, size_t reserved, Device device);

// What an event reads, in one line of the cache for the first three devices, and in two that are
// fetched together for eight (live_set.h says why).
struct alignas(128) Hot {
    std::atomic<const uint32_t*> captures{nullptr};
    std::atomic<Report> report{&first_report};
    LiveSet set;
};
extern Hot hot;

// Makes the set unless the system refuses it.
bool make_once();
inline bool ready() {
    return __builtin_expect(hot.set.is_open(), 1) || make_once();
}

// A framework's allocator has given out a block (bytes > 0), or is about to take one back (< 0). A
// block must be removed before the allocator can give its address out again.
inline void changed(const void* address, int64_t bytes, unsigned device) {
    if (!ready())
        return;
    const uint32_t* captures = hot.captures.load(std::memory_order_relaxed);
    bool capturing = captures && __atomic_load_n(captures, __ATOMIC_RELAXED) != 0;
    hot.set.change(reinterpret_cast<uint64_t>(address), bytes, device, capturing);
}
// The latter where the allocator does not tell the bytes.
inline void freed(const void* address) {
    if (ready())
        hot.set.remove(reinterpret_cast<uint64_t>(address));
}

// What dlsym is to give for a function of NCCL's that it has found in some library.
void* ours_instead(const char* name, void* found);

// The dlsym that comes behind ours.
using Dlsym = void* (*)(void*, const char*);
Dlsym next_dlsym();

// The definition of `symbol` that the program would use without us; null when there is none.
void* next_definition(const char* symbol, const void* ours);

} // namespace flowgpu::memstub

#endif
