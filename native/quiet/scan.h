// Which pages of a process hold nothing but zeros.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace quiet {

struct Range {
    uint64_t start, end;
};

struct Found {
    uint64_t scanned = 0, zero = 0; // bytes
    std::vector<Range> runs;        // zero pages, each run inside one mapping
};

// Mappings whose zero pages may be given back: private, anonymous, writable, and nothing that
// makes a missing page differ from a page of zeros or refuses (userfaultfd, mlock).
// Throws Skip for a process into whose memory the kernel may write by itself.
std::vector<Range> droppable(pid_t pid);

// Present pages of the mappings, read by `threads` threads. The process must stand still.
Found find_zeros(pid_t pid, const std::vector<Range>& mappings, uint64_t minimum, unsigned threads);

} // namespace quiet
