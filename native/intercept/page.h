// What every call of a driver function reads and writes besides its thread's own memory. A program
// leaves the caches and the TLB to none of ours between two calls, so that a call costs the pages
// it waits for: all of this lies together, and what is called most in the first page.
#ifndef FLOWGPU_INTERCEPT_PAGE_H
#define FLOWGPU_INTERCEPT_PAGE_H

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace flowgpu {

// In the order of tools/gen_intercept.py: those that are called most come first.
enum Symbol : unsigned {
#define FG_FORWARD(name, parameters, arguments) I_##name,
#define FG_GATE FG_FORWARD
#define FG_HANDLE FG_FORWARD
#define FG_REFUSE FG_FORWARD
#define FG_PLAIN(name, refuse) I_##name,
#include "generated/api.inc"
#include "generated/plain.inc"
#undef FG_FORWARD
#undef FG_GATE
#undef FG_HANDLE
#undef FG_REFUSE
#undef FG_PLAIN
    kSymbols
};

namespace replay {
class Aliases;
}

namespace gate {

// Two lines of the cache, which are fetched together: what lies beside a record may belong to
// another thread, and every call would pull the line from one core to the other.
constexpr size_t kApart = 128;
constexpr size_t kGranules = 128;
constexpr size_t kStored = 2;

// What the thread was given last of a context's storage by one key (replay/tables.cpp).
struct Stored {
    std::atomic<uint32_t> in{0}; // Page::contexts when it was known to be there
    std::atomic<uintptr_t> context{0}, key{0}, value{0};
};

struct alignas(kApart) ThreadRecord {
    // Not 0 while the thread is in the driver. More than 1 when the driver has called back into the
    // program (context-local destructors), which calls us. Written by its thread alone.
    std::atomic<uint32_t> inside{0};
    std::atomic<uint32_t> used{0};
    std::atomic<uint32_t> generation{0}; // of the driver that the thread's state is known to
    std::atomic<uint32_t> on_device{0};  // Page::contexts when its context was known to be there
    std::atomic<uint32_t> in_context{0}; // Page::contexts when `context` was known to be current
    std::atomic<const void*> context{nullptr}; // the program's handle
    std::atomic<uint64_t> thread{0};           // its thread pointer; only of a record in the page
    Stored stored[kStored];
    ThreadRecord* next = nullptr;
    std::atomic<uint64_t>* granules = nullptr; // kGranules of them: handlers_memory.cpp
};

} // namespace gate

constexpr unsigned kRecordBits = 4;

struct Function {
    void* next = nullptr;   // whom our wrapper calls: the driver, or for the replay engine a bridge
    void* driver = nullptr; // whom the bridge calls
};

struct alignas(4096) Page {
    // A thread's, where no other has it already, by a hash of its thread pointer, or one of three
    // beside that: found without the loader's words for thread-local variables, which lie in pages
    // of their own.
    gate::ThreadRecord records[1 << kRecordBits];
    std::atomic<uint32_t> gate{0};                        // its mode (gate.h); also the futex word
    std::atomic<uint32_t> generation{0};                  // counts the driver's rebuilds
    std::atomic<uint32_t> contexts{1};                    // changes when one may be another
    std::atomic<const replay::Aliases*> aliases{nullptr}; // replay/aliases.h
    std::atomic<uint64_t> primary{0};                     // replay/bridge.cpp: of the first device
    // Null until the driver is open. The trampolines use them by place.
    Function functions[kSymbols] = {};
};
extern "C" Page flowgpu_page;

} // namespace flowgpu

#endif
