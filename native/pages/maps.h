// Which memory of a process reads as zeros where it has no page.
#pragma once

#include "failure.h"

#include <sys/types.h>

#include <vector>

namespace pages {

struct Range {
    uint64_t start, end;
};

// Private anonymous mappings of a process that CRIU holds, in order. None when the process with
// this number is not the one that is dumped (its number may be that of another pid namespace).
std::vector<Range> anonymous(pid_t pid);

} // namespace pages
