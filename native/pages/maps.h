// What /proc/PID/maps says of a process's memory.
#pragma once

#include "failure.h"

#include <sys/types.h>

#include <vector>

namespace pages {

struct Range {
    uint64_t start, end;
};

// A file of /proc, or nothing where it cannot be read.
std::string read_file(const std::string& path);

// Private anonymous mappings of a process that CRIU holds, in order. None when the process with
// this number is not the one that is dumped (its number may be that of another pid namespace).
std::vector<Range> anonymous(pid_t pid);

// Where CRIU finds pages of a process's own, and reads them with the process's memory as it is.
struct Own {
    Range range;
    bool anonymous; // memory without a page reads as zeros
};

// Private mappings, but for those of devices and of the kernel's code, in order.
std::vector<Own> own(pid_t pid);

// Where the first mapping begins that may be executed; 0: there is none.
uint64_t first_code(pid_t pid);

// The process that it is a child of; 0: none, or it has ended.
pid_t parent_of(pid_t pid);

// Says whether a process has another number in a pid namespace of its own.
bool has_other_number(pid_t pid);

// All mappings of a process, in order.
std::vector<Range> mappings(pid_t pid);

// Private mappings that a process may write to, but for those of devices.
std::vector<Range> writable(pid_t pid);

} // namespace pages
