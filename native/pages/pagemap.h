// CRIU's pagemap images (images/pagemap.proto): which pages of a process pages-N.img holds, in the
// order of the file.
#pragma once

#include "failure.h"

#include <algorithm>
#include <vector>

namespace pages {

enum PageFlag : uint32_t {
    kInParent = 1, // not in the file: its parent process has it at this address (inherited.h)
    kLazy = 2,
    kPresent = 4,
};

struct Entry {
    uint64_t address, count; // in pages
    uint32_t flags;
};

// Calls take(start, end) for the parts of [start, end) in none of `holes`, which are in order.
template <class Take>
void without(const std::vector<Entry>& holes, uint64_t start, uint64_t end, Take take) {
    auto hole =
        std::upper_bound(holes.begin(), holes.end(), start, [](uint64_t address, const Entry& one) {
            return address < one.address + one.count * kPage;
        });
    for (; start < end && hole != holes.end() && hole->address < end; hole++) {
        if (start < hole->address)
            take(start, hole->address);
        start = std::max(start, hole->address + hole->count * kPage);
    }
    if (start < end)
        take(start, end);
}

// Calls take(start, end) for the parts of [start, end) in `entries`, which are in order.
template <class Take>
void within(const std::vector<Entry>& entries, uint64_t start, uint64_t end, Take take) {
    uint64_t inside = start;
    without(entries, start, end, [&](uint64_t from, uint64_t to) {
        if (inside < from)
            take(inside, from);
        inside = to;
    });
    if (inside < end)
        take(inside, end);
}

// How many of `count` pages from `address` on `entries` have.
inline uint64_t pages_in(const std::vector<Entry>& entries, uint64_t address, uint64_t count) {
    uint64_t others = 0;
    without(entries, address, address + count * kPage,
            [&](uint64_t start, uint64_t end) { others += (end - start) / kPage; });
    return count - others;
}

// By their addresses.
inline void sort(std::vector<Entry>& entries) {
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.address < b.address; });
}

// Writes a new file. Throws PagesFailure.
void write_pagemap(const std::string& path, uint32_t pages_number,
                   const std::vector<Entry>& entries);

} // namespace pages
