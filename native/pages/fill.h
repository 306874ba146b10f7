// Writes the pages that a view left out into the restored, stopped processes.
#pragma once

#include "view.h"

namespace pages {

// Runs in one block of kBlock bytes of a process's memory, one read of its file apart.
struct Piece {
    const Fill* fill;
    std::vector<Run> runs;
};

// No two pieces in one huge page: both threads would clear one.
constexpr uint64_t kBlock = 2 << 20;

// The pieces refer to `fills`.
std::vector<Piece> cut(const std::vector<Fill>& fills);

// Writes all with so many threads. Throws Failure.
void fill(const std::vector<Piece>& pieces, unsigned threads);

} // namespace pages
