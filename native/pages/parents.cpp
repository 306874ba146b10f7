#include "parents.h"

#include "pagemap.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <set>

namespace pages {
namespace {

std::string list_name(uint64_t pid) {
    return "/pagemap-" + std::to_string(pid) + ".img";
}

std::string file_name(const Pagemap& pagemap) {
    return "/pages-" + std::to_string(pagemap.pages) + ".img";
}

void link_to(const std::string& source, const std::string& target) {
    if (symlink(source.c_str(), target.c_str()) != 0 && errno != EEXIST) // another process's too
        throw system_failure(target, errno);
}

} // namespace

Parents::Parents(const std::string& images, const std::vector<Process>& tree,
                 const std::map<uint64_t, Memory>& memory)
    : images_(images) {
    std::set<uint64_t> files;
    for (const Process& process : tree) {
        if (!memory.count(process.pid))
            continue;
        List& list = lists_[process.pid];
        list.parent = process.parent;
        list.pagemap = read_pagemap(images + list_name(process.pid));
        if (!files.insert(list.pagemap.pages).second)
            throw PagesFailure("two processes with one file of pages");
        uint64_t offset = 0, least = 0;
        for (const PagemapEntry& entry : list.pagemap.entries) {
            const bool is_known =
                (entry.flags & ~uint64_t{kLazy}) == kPresent || entry.flags == kInParent;
            if (!is_known || entry.in_parent || entry.address < least || entry.address % kPage ||
                entry.address > kMostAddress || !entry.count ||
                entry.count > (kMostAddress - entry.address) / kPage)
                throw PagesFailure(list_name(process.pid).substr(1) + " has an entry at " +
                                   hex(entry.address) + " with flags " +
                                   std::to_string(entry.flags));
            least = entry.address + entry.count * kPage;
            list.offsets.push_back(offset);
            if (entry.flags == kInParent)
                list.inherited.push_back({entry.address, entry.address + entry.count * kPage});
            else
                offset += entry.count * kPage;
        }
    }
}

bool Parents::any() const {
    return std::any_of(lists_.begin(), lists_.end(),
                       [](const auto& one) { return !one.second.inherited.empty(); });
}

bool Parents::inherits(uint64_t pid, const Range& range) const {
    const std::vector<Range>& all = lists_.at(pid).inherited;
    const auto found = std::upper_bound(all.begin(), all.end(), range.start,
                                        [](uint64_t at, const Range& one) { return at < one.end; });
    return found != all.end() && found->start < range.end;
}

void Parents::add_inherited(uint64_t pid, const Range& range, std::vector<Range>& found) const {
    const std::vector<Range>& all = lists_.at(pid).inherited;
    auto one = std::upper_bound(all.begin(), all.end(), range.start,
                                [](uint64_t at, const Range& other) { return at < other.end; });
    for (; one != all.end() && one->start < range.end; one++)
        found.push_back({std::max(one->start, range.start), std::min(one->end, range.end)});
}

const Parents::List& Parents::parent_of(uint64_t pid) const {
    const auto found = lists_.find(lists_.at(pid).parent);
    if (found == lists_.end())
        throw PagesFailure("process " + std::to_string(pid) + " has pages of a parent without any");
    return found->second;
}

void Parents::link(const std::string& folder) const {
    for (const auto& [pid, own] : lists_) {
        std::string level = folder;
        size_t depth = 0;
        for (uint64_t one = pid; inherits(one); one = lists_.at(one).parent) {
            const List& parent = parent_of(one);
            if (++depth > lists_.size())
                throw PagesFailure("process " + std::to_string(pid) + " is its own parent");
            level += "/parent";
            if (mkdir(level.c_str(), 0700) != 0 && errno != EEXIST)
                throw system_failure(level, errno);
            link_to(images_ + list_name(lists_.at(one).parent), level + list_name(pid));
            link_to(images_ + file_name(parent.pagemap), level + file_name(parent.pagemap));
        }
    }
}

void Parents::find(uint64_t pid, const Range& range,
                   std::map<std::string, std::vector<Run>>& runs) const {
    const List& parent = parent_of(pid);
    const std::vector<PagemapEntry>& entries = parent.pagemap.entries;
    auto entry = std::upper_bound(
        entries.begin(), entries.end(), range.start,
        [](uint64_t at, const PagemapEntry& one) { return at < one.address + one.count * kPage; });
    uint64_t at = range.start;
    for (; at < range.end && entry != entries.end() && entry->address <= at; entry++) {
        const uint64_t end = std::min(range.end, entry->address + entry->count * kPage);
        if (entry->flags == kInParent)
            find(lists_.at(pid).parent, {at, end}, runs);
        else
            runs[images_ + file_name(parent.pagemap)].push_back(
                {at, end - at,
                 parent.offsets[static_cast<size_t>(entry - entries.begin())] + at -
                     entry->address});
        at = end;
    }
    if (at < range.end)
        throw PagesFailure("process " + std::to_string(pid) +
                           " has pages of its parent that are not there");
}

} // namespace pages
