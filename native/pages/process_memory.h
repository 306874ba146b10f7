// The memory of another process: which pages are its own, and what they hold.
#pragma once

#include "maps.h"
#include "pagemap.h"
#include "scan.h"

#include <cerrno>
#include <sys/ioctl.h>

namespace pages {

constexpr Range kAllMemory = {scan::kLowest, scan::kHighest};

class ProcessMemory {
  public:
    explicit ProcessMemory(pid_t pid) : pid_(pid) {}
    ~ProcessMemory() { close_files(); }
    ProcessMemory(const ProcessMemory&) = delete;
    ProcessMemory& operator=(const ProcessMemory&) = delete;

    // Anew: a process that runs another program has other memory. False where there is none to look
    // at, or the kernel tells no kinds of pages (Linux 6.7).
    bool open();
    // That the kernel tells apart; after `open`.
    uint64_t kinds() const { return kinds_; }

    // Calls found(region) for the pages of its own that have the kinds `all_of`.
    template <class Found>
    void each_region(const Range& part, uint64_t flags, uint64_t all_of, Found found) const;
    int scan(scan::Request& request) const { return ioctl(pagemap_, scan::kScan, &request); }

    // Any thread. The bytes from `address` on that could be read.
    uint64_t read(uint64_t address, char* to, uint64_t bytes) const;
    // Any thread, after `open`. The frames of so many pages; 0: there is none, or it is not told.
    void frames(uint64_t address, uint64_t count, uint64_t* to) const;
    // Reads a page now, so that who reads pages later finds there what it has now.
    void keep(uint64_t address);
    // Any thread. Pages that may lie apart. Throws PagesFailure.
    void read(const std::vector<Entry>& entries, char* to) const;

    // The process stands still: what its pages are is looked up in parts, which begin at these
    // places. Gives how many parts there are; 0: there is none to look at.
    size_t divide(const std::vector<uint64_t>& begins);
    // Any thread. Throws PagesFailure.
    void look(size_t part);
    bool is_divided() const { return !parts_.empty(); }
    // After all parts: calls found(region) in order of the addresses.
    template <class Found> void each_found(Found found) const {
        for (const Part& part : parts_)
            for (const scan::Region& region : part.found)
                found(region);
    }

  private:
    struct Part {
        Range range;
        std::vector<scan::Region> found;
    };

    void close_files();
    // Words of /proc/PID/pagemap; 0 where it has none.
    void words(uint64_t address, uint64_t count, uint64_t* to) const;
    // Calls take(address, bytes, is_common) for the parts of a range, in order.
    template <class Take> void each_part(uint64_t address, uint64_t count, Take take) const;
    void put_kept(const std::vector<Entry>& entries, char* to) const;

    pid_t pid_;
    int pagemap_ = -1, memory_ = -1;
    uint64_t kinds_ = 0;
    std::vector<Part> parts_;
    uint64_t kept_at_ = 0;
    std::vector<char> kept_;
};

template <class Found>
void ProcessMemory::each_region(const Range& part, uint64_t flags, uint64_t all_of,
                                Found found) const {
    constexpr size_t kRegions = 1 << 15;
    static thread_local std::vector<scan::Region> regions(kRegions);
    scan::Request request = {};
    request.size = sizeof request;
    request.flags = flags;
    request.end = part.end;
    request.regions = reinterpret_cast<uint64_t>(regions.data());
    request.most_regions = kRegions;
    request.inverted = scan::kNotOwn;
    request.all_of = scan::kNotOwn | all_of;
    request.any_of = scan::kPresent | scan::kSwapped;
    request.wanted = kinds_;
    size_t count = kRegions;
    // Where there was room for more, that was all. The kernel's own word (walk_end) is of an
    // earlier part, where the last one ended without a full buffer.
    for (request.start = part.start; count == kRegions; request.start = regions.back().end) {
        const int result = scan(request);
        if (result < 0 && errno == ESRCH)
            return; // it has ended
        if (result < 0)
            throw system_failure("cannot scan process " + std::to_string(pid_), errno);
        count = static_cast<size_t>(result);
        for (size_t i = 0; i < count; i++)
            found(regions[i]);
    }
}

} // namespace pages
