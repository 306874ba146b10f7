// What the driver has asked of libc since remember(): threads, keys and handlers here; address
// ranges (ranges.h), descriptors, blocks and variables in files of their own. It asks through slots
// of its own that remember() points here, so that what a life of the driver leaves with libc can be
// taken back, or held back, when that life ends. Nothing is allocated.
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
// True if we know every thread, address range, closing of a descriptor, variable or block of the
// driver: it imports the functions that we replace.
bool sees_threads();
bool sees_ranges();
bool sees_closes();
bool sees_variables();
bool sees_blocks();

DriverThread* threads(); // kMaxThreads of them

// Before the driver's threads end: no value is destroyed by a driver that is about to be gone.
void delete_keys();
// After they have: frees the stacks of those that the driver would have joined.
void join_threads();
// Handlers for exit and fork that the driver has registered do nothing from now on, until it
// registers them again; its ranges are forgotten.
void end_life();

} // namespace imports

} // namespace flowgpu::rewind

#endif
