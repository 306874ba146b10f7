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
#include "next_definition.h"

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

// The definition that the program would use without us, which is found once.
__attribute__((cold)) Report next_report();

// In pages of its own, onto which the memfd's first ones are mapped when the set is made: so an
// event needs no pointer to them.
struct alignas(4096) Page {
    LiveSet set;
};
extern Page page;

// Makes the set unless the system refuses it.
bool make_once();
inline bool ready() {
    return __builtin_expect(page.set.is_open(), 1) || make_once();
}

// A framework's allocator has given out a block (bytes > 0), or is about to take one back (< 0). A
// block must be removed before the allocator can give its address out again.
inline void changed(const void* address, int64_t bytes, unsigned device) {
    if (ready())
        page.set.change(reinterpret_cast<uint64_t>(address), bytes, device);
}
// The latter where the allocator does not tell the bytes.
inline void freed(const void* address) {
    if (ready())
        page.set.remove(reinterpret_cast<uint64_t>(address));
}

// What dlsym is to give for a function of CUPTI's that it has found in some library.
void* ours_of_cupti(const char* name, void* found);

} // namespace flowgpu::memstub

#endif
