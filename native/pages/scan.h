// PAGEMAP_SCAN of /proc/PID/pagemap (Linux 6.7, linux/fs.h), for headers that are older.
#pragma once

#include <cstdint>

#include <linux/ioctl.h>

namespace pages::scan {

struct Region {
    uint64_t start, end, categories;
};

struct Request {
    uint64_t size, flags, start, end;
    uint64_t walk_end; // where the kernel says that it has stopped
    uint64_t regions, most_regions, most_pages;
    uint64_t inverted, all_of, any_of, wanted; // bits of kinds of pages
};

constexpr unsigned long kScan = _IOWR('f', 16, Request);
constexpr uint64_t kProtect = 1 << 0; // of Request::flags: what is found is protected

// What is scanned of a process's memory: what lies elsewhere is asked of the kernel.
constexpr uint64_t kLowest = 1 << 16, kHighest = (1ull << 47) - 4096;

enum Kind : uint64_t {
    kTracked = 1 << 0, // under asynchronous write protection
    kWritten = 1 << 1, // not protected, or written since
    kOfFile = 1 << 2,
    kPresent = 1 << 3,
    kSwapped = 1 << 4,
    kZeros = 1 << 5, // the kernel's page of zeros
    kSoftDirty = 1 << 7,
    kGuard = 1 << 8, // no page, and none may be made there (Linux 6.15)
};

// What a page is that is not the process's own: CRIU stores all others.
constexpr uint64_t kNotOwn = kOfFile | kZeros;

} // namespace pages::scan
