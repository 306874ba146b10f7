#include "inherited.h"

#include <set>

namespace pages {

std::vector<std::vector<Kin>> generations(const std::vector<pid_t>& pids) {
    std::map<pid_t, pid_t> parents;
    for (const pid_t pid : pids)
        parents[pid] = parent_of(pid);
    std::vector<std::vector<Kin>> found;
    std::set<pid_t> done{0};
    while (done.size() <= parents.size()) {
        std::vector<Kin> kin;
        for (const auto& [pid, parent] : parents)
            if (const pid_t known = parents.count(parent) ? parent : 0;
                !done.count(pid) && done.count(known))
                kin.push_back({pid, known});
        if (kin.empty())
            break;
        for (const Kin& one : kin)
            done.insert(one.pid);
        found.push_back(std::move(kin));
    }
    return found;
}

PagesFailure not_stored(const Kin& kin) {
    return PagesFailure("process " + std::to_string(kin.pid) + " has pages of process " +
                        std::to_string(kin.parent) + " that are not stored");
}

uint64_t common_pages(pid_t child, pid_t parent) {
    ProcessMemory own(child), others(parent);
    uint64_t pages = 0;
    if (own.open() && others.open())
        own.each_region(kAllMemory, 0, scan::kPresent, [&](const scan::Region& region) {
            each_common(own, &others, region.start, (region.end - region.start) / kPage,
                        [&](uint64_t, uint64_t count, bool common) { pages += common * count; });
        });
    return pages;
}

const std::vector<Entry>& Lists::add(const Kin& kin, const std::vector<Entry>& entries,
                                     const std::vector<Entry>& inherited,
                                     const std::vector<Range>& zeros) {
    std::vector<Entry>& list = entries_[kin.pid] = entries;
    if (!inherited.empty() && !entries_.count(kin.parent))
        throw PagesFailure("process " + std::to_string(kin.parent) + " has ended, and process " +
                           std::to_string(kin.pid) + " has pages of it");
    const std::vector<Entry>& others = entries_[kin.parent];
    for (const Entry& entry : inherited) {
        const uint64_t end = entry.address + entry.count * kPage;
        within(others, entry.address, end, [&](uint64_t from, uint64_t to) {
            list.push_back({from, (to - from) / kPage, kInParent});
            inherited_[kin.pid] += to - from;
        });
        without(others, entry.address, end, [&](uint64_t from, uint64_t to) {
            for (const Range& range : zeros)
                if (range.start <= from && from < range.end)
                    from = std::min(to, range.end);
            if (from < to)
                throw not_stored(kin);
        });
    }
    sort(list);
    return list;
}

} // namespace pages
