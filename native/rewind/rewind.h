// Rewinding the driver library inside a living process: the driver's threads, descriptors and
// mappings go, its writable memory becomes what it was before cuInit, and cuInit starts afresh.
// What that rests on, and what it leaves behind: docs/design/rewind.md.
//
// No exit or abort, nothing printed, errno kept; strip() neither allocates nor uses stdio.
#ifndef FLOWGPU_REWIND_REWIND_H
#define FLOWGPU_REWIND_REWIND_H

#include <cstddef>
#include <cstdint>

#include "laps.h"

namespace flowgpu::rewind {

// Around what libc calls in the driver: its handlers of exit(), fork() and the end of a thread of
// the program's. While strip() runs, `enter` does not return; `leave` gets what it has returned.
// They may be nested.
struct Passage {
    uint32_t (*enter)();
    void (*leave)(uint32_t);
};

// Once, when the driver library has been opened and before its first cuInit: keeps a copy of the
// driver's writable segments and notes what the process has. `symbol`: any function of the driver.
// False: this library cannot be rewound; `detail` says why.
bool remember(const void* symbol, Passage passage, char* detail, size_t bytes);

struct Range {
    uintptr_t start;
    size_t bytes;
};

// Ends the driver in this process. The caller is no thread of the driver's and guarantees that none
// but the driver's own is inside it, or in the passage. The ranges of `keep`, whole pages, become
// inaccessible anonymous mappings without ever being free. Can be called again after the next
// cuInit. False: `detail` says why, and the driver is as it was, unless *lost: then it has ended
// but is not all gone, and the process cannot go on with CUDA.
// `at_end` is called once nothing can fail any more, while the driver's descriptors are still open:
// the caller closes those that are its own, as their numbers may soon be somebody else's. It
// allocates nothing.
// `laps` is told of its steps.
bool strip(const Range* keep, size_t count, char* detail, size_t bytes, bool* lost = nullptr,
           void (*at_end)() = nullptr, Laps* laps = nullptr);

// In a child of fork(), before anything else here.
void leave_parents();

// The process is about to be copied as it is, without what ties it to a device
// (native/criu_plugin).
void before_copy();
// True if this process is such a copy. A copy calls this before anything else here, and has to be
// stripped before it uses the driver.
bool is_copy();

// cuInit has succeeded: what it has found in the environment is what its next lives find.
void keep_environment();

// From its next life on the driver finds this as CUDA_VISIBLE_DEVICES, whatever the environment
// has. False: it is too long, or the driver does not ask for the environment by a slot of its own.
bool see_devices(const char* visible);

// Where the driver is to put the range that a thread has it map next (managed memory): it reserves
// addresses for that, which the wish decides, and maps its memory there.
struct Wish {
    Range range;
    // What has the program's data in the range (hold_data), so that the driver's mapping takes
    // their place: it is called in that of mmap. Null: there are none.
    void* (*take_place)(void* at, size_t bytes, int protection, int flags, int fd, long offset);
    bool reserved = false; // the driver has asked for addresses, and was given these
    bool mapped = false;   // and has mapped exactly the range
    int fd = -1;           // the driver's, that it has mapped
};
// The calling thread has this wish until it is given another; null: it has none.
void wish(Wish* wish);

// While data of the program lie where the driver had memory: no life of the driver's sees that the
// range is taken, and what it unmaps or reserves there is left as it is. False: there are too many.
bool hold_data(const Range& range);
void forget_data(const Range& range);

// In the next life: just before the driver is to reserve a range of `keep` again. False: the range
// lay in a larger one of the driver's, which it has not asked for again, and has to wait for that;
// `at_last` it is free all the same, and the driver gets the larger one elsewhere.
bool make_way(const Range& kept, bool at_last);
// Tells if it lies in a range for which the driver has chosen the address, and gets it again.
bool is_placed(const Range& range);

} // namespace flowgpu::rewind

#endif
