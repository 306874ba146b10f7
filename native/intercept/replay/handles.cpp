#include "handles.h"

#include <mutex>

#include <sys/mman.h>

namespace flowgpu::replay {

const char* const kind_names[kKinds] = {
    "context", "stream",     "event",           "module",     "library",
    "kernel",  "function",   "memory pool",     "CUDA array", "mipmapped array",
    "graph",   "graph node", "graph executable"};

namespace {

// An ended slot is used again only after so many others: a program that goes on with an ended
// handle should meet the driver's answer, not another object.
constexpr size_t kRest = 4096;

std::mutex mutex;
size_t fresh = 0;
Slot* first_ended = nullptr;
Slot* last_ended = nullptr;
size_t ended = 0;

// The queue of ended slots runs through them.
Slot* next_of(const Slot* slot) {
    return reinterpret_cast<Slot*>(slot->link & ~Slot::kEnded);
}

} // namespace

bool make_slots() {
    void* wanted = reinterpret_cast<void*>(kHandleBase);
    void* got = mmap(wanted, kHandleBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED)
        return false;
    if (got != wanted) { // a kernel without MAP_FIXED_NOREPLACE
        munmap(got, kHandleBytes);
        return false;
    }
    return true;
}

Slot* take_slot(void* driver, Object* object) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* slots = reinterpret_cast<Slot*>(kHandleBase);
    const bool full = fresh == kHandleBytes / sizeof(Slot);
    Slot* slot = nullptr;
    if (first_ended && (ended > kRest || full)) {
        slot = first_ended;
        first_ended = next_of(slot);
        if (!first_ended)
            last_ended = nullptr;
        ended--;
    } else if (!full) {
        slot = slots + fresh++;
    }
    if (slot) {
        slot->driver = driver;
        slot->link = reinterpret_cast<uintptr_t>(object);
    }
    return slot;
}

void free_slot(Slot* slot) {
    std::lock_guard<std::mutex> lock(mutex);
    slot->link = Slot::kEnded;
    if (last_ended)
        last_ended->link = reinterpret_cast<uintptr_t>(slot) | Slot::kEnded;
    else
        first_ended = slot;
    last_ended = slot;
    ended++;
}

} // namespace flowgpu::replay
