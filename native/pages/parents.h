// Where an image has the pages of its processes: in a process's own file, or in that of the process
// that it was forked from (inherited.h).
#pragma once

#include "images.h"

#include <map>
#include <string>
#include <vector>

namespace pages {

constexpr uint64_t kMostAddress = 1ull << 56;

// Bytes of a file of pages, and the address at which a process has them.
struct Run {
    uint64_t address, bytes, offset;
};

class Parents {
  public:
    // Reads the lists of pages of the processes that have memory, and checks them. Throws
    // PagesFailure.
    Parents(const std::string& images, const std::vector<Process>& tree,
            const std::map<uint64_t, Memory>& memory);

    const Pagemap& pagemap(uint64_t pid) const { return lists_.at(pid).pagemap; }
    // True where an image has pages of a process with its parent alone; some in a range.
    bool any() const;
    bool inherits(uint64_t pid) const { return !lists_.at(pid).inherited.empty(); }
    bool inherits(uint64_t pid, const Range& range) const;
    // Adds the ranges of such pages in a range.
    void add_inherited(uint64_t pid, const Range& range, std::vector<Range>& found) const;

    // CRIU looks for such pages in a folder `parent` beside the process's list, in a list of the
    // same name: makes these folders, of links to the parents' files. Throws PagesFailure.
    void link(const std::string& folder) const;

    // Adds the runs, by the path of their file, of pages that a process has of its parent. Throws
    // PagesFailure where one is missing.
    void find(uint64_t pid, const Range& range,
              std::map<std::string, std::vector<Run>>& runs) const;

  private:
    struct List {
        uint64_t parent = 0;
        Pagemap pagemap;
        std::vector<uint64_t> offsets; // of each entry, in the file of pages
        std::vector<Range> inherited;
    };

    const List& parent_of(uint64_t pid) const;

    std::string images_;
    std::map<uint64_t, List> lists_;
};

} // namespace pages
