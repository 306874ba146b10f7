// Reads CRIU's image files (images/*.proto of CRIU 4.2), as far as a view of them needs (view.h).
#pragma once

#include "maps.h"

#include <string>
#include <utility>
#include <vector>

namespace pages {

struct Process {
    uint64_t pid = 0, parent = 0;
    std::vector<uint64_t> threads; // the first thread's number, too
};

struct Vma {
    uint64_t start = 0, end = 0, prot = 0, flags = 0, status = 0;
    size_t entry = 0; // the place in the file of the one that it is, or is a part of
};

struct Memory {
    uint64_t program = 0; // number of the executable file
    std::vector<Vma> vmas;
};

struct Thread {
    uint64_t stack = 0; // its stack pointer
    Range signal_stack{0, 0};
    std::vector<uint64_t> pointers; // to what the kernel or the C library has for it, or 0
};

struct PagemapEntry {
    uint64_t address = 0, count = 0, flags = 0, in_parent = 0;
};

struct Pagemap {
    uint64_t pages = 0; // the number in the name of its file of pages
    std::vector<PagemapEntry> entries;
};

// Each throws PagesFailure for a file that cannot be read or is not what it should be.
std::vector<Process> read_tree(const std::string& path);
Memory read_memory(const std::string& path);
Thread read_thread(const std::string& path);
Pagemap read_pagemap(const std::string& path);

// Writes file `target`, which is `source` with these mappings instead. Throws PagesFailure.
void write_memory(const std::string& source, const std::string& target,
                  const std::vector<Vma>& vmas);

} // namespace pages
