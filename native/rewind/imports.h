// What the driver has asked of libc since remember(): threads, keys, handlers and address
// ranges.
// It asks through slots of its own that remember() points here, so that what a life of the driver
// leaves with libc can be taken back, or held back, when that life ends. Nothing is allocated.
#ifndef FLOWGPU_REWIND_IMPORTS_H
#define FLOWGPU_REWIND_IMPORTS_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <pthread.h>

#include "library.h"
#include "rewind.h"

namespace flowgpu::rewind {

// A thread that the driver has started.
struct DriverThread {
    static constexpr pid_t kFree = 0, kStarting = -1, kEnded = -2; // ended: not joined yet
    std::atomic<pid_t> tid{kFree};
    void* (*function)(void*) = nullptr;
    void* argument = nullptr;
    pthread_t handle = {};
    bool joinable = false;
    void* home[5] = {}; // for __builtin_longjmp: libc's side of the driver's function
};

constexpr size_t kMaxThreads = 1024;

namespace imports {

// Null, or what cannot be done.
const char* watch(Library& library, Passage passage);
// True if we know every thread, address range, closing of a descriptor or block of the driver: it
// imports the functions that we replace.
bool sees_threads();
bool sees_ranges();
bool sees_closes();
bool sees_blocks(); // of malloc

DriverThread* threads(); // kMaxThreads of them

// Address ranges that the driver has reserved, inaccessible, and its memory of the host, shared and
// anonymous, as long as it has them.
struct Reserved {
    uintptr_t start, end;
};
const Reserved* reserved(size_t* count);

// Before the driver's threads end: no value is destroyed by a driver that is about to be gone.
void delete_keys();
// After they have: frees the stacks of those that the driver would have joined.
void join_threads();
// The ranges that the system placed for the driver become ours until its next life asks for them,
// with what the caller keeps within them.
void hold_placements(const Range* keep, size_t count);
// See rewind.h.
bool see_devices(const char* visible);
void keep_environment();
bool make_way(const Range& kept, bool at_last);
bool is_placed(const Range& range);
// Handlers for exit and fork that the driver has registered do nothing from now on, until it
// registers them again; its ranges are forgotten.
void end_life();

} // namespace imports

} // namespace flowgpu::rewind

#endif
