// Faults on purpose, for tests: FLOWGPU_FAULT=name:nth makes the nth pass of a point of fault.def
// fail.
#ifndef FLOWGPU_COMMON_FAULT_H
#define FLOWGPU_COMMON_FAULT_H

#include <sys/types.h>

namespace flowgpu {

enum class Fault {
#define FLOWGPU_FAULT_POINT(name, what) at_##name,
#include "flowgpu/fault.def"
#undef FLOWGPU_FAULT_POINT
};

// Counts a pass of `point`; true if this is the one that is to fail.
bool fires(Fault point);

// The rest is for our own processes: what fires is told on standard error.
bool fires_told(Fault point);

// What may go wrong with the files that a process writes.
struct WriteFaults {
    Fault full;  // no space is left
    Fault error; // an I/O error
    Fault part;  // fewer bytes are written than were asked for
};

// The errno that this pass is to fail with, or 0.
int write_error(const WriteFaults& faults);

// pwrite(2) and pread(2), with these faults.
ssize_t write_at(const WriteFaults& faults, int fd, const void* data, size_t bytes, off_t offset);
ssize_t read_at(Fault error, int fd, void* data, size_t bytes, off_t offset);

} // namespace flowgpu

#endif
