// CRIU's pagemap images (images/pagemap.proto): which pages of a process pages-N.img holds, in the
// order of the file.
#pragma once

#include "failure.h"

#include <vector>

namespace pages {

enum PageFlag : uint32_t { kLazy = 2, kPresent = 4 };

struct Entry {
    uint64_t address, count; // in pages
    uint32_t flags;
};

// Writes a new file. Throws PagesFailure.
void write_pagemap(const std::string& path, uint32_t pages_number,
                   const std::vector<Entry>& entries);

} // namespace pages
