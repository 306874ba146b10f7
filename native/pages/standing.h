// What CRIU is told of processes that stand still: the list of their mappings, and which pages it
// has to send. Their bytes are one file, which CRIU's library reads (criu_memory.cpp): a Head, a
// Process for each, then what these point to.
#pragma once

#include <cstdint>

namespace pages::standing {

constexpr char kVariable[] = "FLOWGPU_STANDING"; // descriptors: the file, and who says it is there
constexpr char kIsThere = 1;

struct Head {
    uint64_t processes;
};

struct Process {
    uint64_t pid;
    uint64_t smaps, smaps_bytes;    // where in the file
    uint64_t regions, region_count; // scan::Region
    uint64_t kinds;                 // of pages that the regions tell apart; 0: there are none
};

} // namespace pages::standing
