// Pages that a process has in common with the one that it was forked from: the same frames of
// memory, so the same bytes. An image has them once, with the parent.
//
// The kernel tells frames (Documentation/admin-guide/mm/pagemap.rst) to who may administer the
// system. To others nothing is common. A frame that several processes have is not written: who
// writes gets a frame of its own. So two processes that stand still have the same bytes where they
// have the same frame. Processes that run do until one writes, which its protection tells
// (tracked.h).
#pragma once

#include "parallel.h"
#include "process_memory.h"

#include <map>

namespace pages {

struct Kin {
    pid_t pid, parent; // 0: the parent is none of them
};

template <class Value> std::vector<pid_t> pids_of(const std::map<pid_t, Value>& all) {
    std::vector<pid_t> pids;
    for (const auto& [pid, value] : all)
        pids.push_back(pid);
    return pids;
}

// Processes, parents before their children; who is in one generation is nobody's parent there.
std::vector<std::vector<Kin>> generations(const std::vector<pid_t>& pids);

// Calls action(kin, threads) for processes, one generation after another, with so many threads in
// all.
template <class Action>
void by_generation(unsigned threads, const std::vector<std::vector<Kin>>& all, Action action) {
    for (const std::vector<Kin>& kin : all)
        in_parallel(threads, kin.size(), [&](size_t n) {
            action(kin[n], std::max(1u, threads / static_cast<unsigned>(kin.size())));
        });
}

// Calls take(address, count, is_common) for the parts of a range, in order. `parent` may be null.
template <class Take>
void each_common(const ProcessMemory& child, const ProcessMemory* parent, uint64_t address,
                 uint64_t count, Take take) {
    constexpr uint64_t kPages = 512;
    uint64_t own[kPages], others[kPages];
    while (count) {
        const uint64_t part = parent ? std::min(count, kPages) : count;
        if (parent) {
            child.frames(address, part, own);
            parent->frames(address, part, others);
        }
        for (uint64_t n = 0, end; n < part; n = end) {
            const auto is_common = [&](uint64_t i) { return own[i] && own[i] == others[i]; };
            const bool common = parent && is_common(n);
            for (end = parent ? n + 1 : part; end < part && is_common(end) == common;)
                end++;
            take(address + n * kPage, end - n, common);
        }
        address += part * kPage, count -= part;
    }
}

// Why a process cannot have pages of its parent.
PagesFailure not_stored(const Kin& kin);

// Pages of its own that a process which may run has in common with another one now.
uint64_t common_pages(pid_t child, pid_t parent);

// Lists of pages by process, as their images have them. A page that is not there with the parent
// holds zeros.
class Lists {
  public:
    // Adds to `entries`, the pages in a process's own file, those that it has in common with its
    // parent, whose list is known. `zeros`: where it may lack pages. Throws PagesFailure.
    const std::vector<Entry>& add(const Kin& kin, const std::vector<Entry>& entries,
                                  const std::vector<Entry>& inherited,
                                  const std::vector<Range>& zeros);
    // Bytes in the lists that are with parents, by process.
    const std::map<pid_t, uint64_t>& inherited() const { return inherited_; }

  private:
    std::map<pid_t, std::vector<Entry>> entries_;
    std::map<pid_t, uint64_t> inherited_;
};

} // namespace pages
