// /proc/PID/smaps of a process that stands still, read by several threads.
//
// The kernel counts the pages of each mapping for it, which takes longer than most of what CRIU
// asks in a freeze. A file of /proc goes on at the mapping where its last read has ended. So while
// the process runs, a file for each part is read up to there; in the freeze each thread reads a
// part.
#pragma once

#include "maps.h"

#include <functional>
#include <string>

namespace pages {

class Smaps {
  public:
    explicit Smaps(pid_t pid) : pid_(pid) {}
    ~Smaps() { close_parts(); }
    Smaps(const Smaps&) = delete;
    Smaps& operator=(const Smaps&) = delete;

    // While the process runs: makes at most so many parts, which take about as long each. `pages`
    // gives how many there are in a range.
    void divide(unsigned parts, const std::function<uint64_t(const Range&)>& pages);
    size_t parts() const { return parts_.size(); }
    // The address space in about so many pieces with as many pages each, by their begin.
    std::vector<uint64_t> pieces(unsigned count) const;

    // The process stands still: first all parts begin, then all end. Any thread.
    void begin(size_t part);
    void end(size_t part);
    // After that. The parts are of use once.
    std::string text();

  private:
    struct Part {
        int fd;
        uint64_t first = UINT64_MAX; // where its first mapping is
        std::string text;
    };
    struct Mapping {
        Range range;
        uint64_t pages;
    };

    void close_parts();
    int open_smaps() const;

    pid_t pid_;
    std::vector<Part> parts_;
    std::vector<Mapping> mappings_;
};

} // namespace pages
