#include "view.h"

#include "mappings.h"
#include "pagemap.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <set>

namespace pages {
namespace {

constexpr uint64_t kWorth = 16 << 20; // a process with less is left to CRIU

// criu/include/image.h
constexpr uint64_t kRegular = 1 << 0, kHeap = 1 << 5, kFilePrivate = 1 << 6, kAnonPrivate = 1 << 9;
// MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE: not MAP_GROWSDOWN, MAP_HUGETLB, or what comes later.
constexpr uint64_t kMapFlags = 0x2 | 0x20 | 0x4000;
constexpr uint64_t kProtWrite = 2;

constexpr uint64_t kNear = 64 << 10;
// 64 signals may wait for a stopped thread, with 12 KiB of registers each.
constexpr uint64_t kSignalFrames = 1 << 20;

using Ranges = std::vector<Range>; // ascending and disjoint, but for holes
using Shared = std::set<std::pair<uint64_t, uint64_t>>;

uint64_t total(const Ranges& ranges) {
    uint64_t bytes = 0;
    for (const Range& range : ranges)
        bytes += range.end - range.start;
    return bytes;
}

using Memories = std::map<uint64_t, Memory>; // by process

// A process that runs the program of its parent, which has memory too.
bool is_forked(const Process& process, const Memories& memory) {
    const auto own = memory.find(process.pid), parent = memory.find(process.parent);
    return own != memory.end() && parent != memory.end() &&
           own->second.program == parent->second.program;
}

// Where in the memory of forked processes mappings of parent and child overlap in part, and pages
// there are inherited.
std::set<uint64_t> ends_of_common(const std::vector<Process>& tree, const Parents& parents,
                                  const Memories& memory) {
    std::set<uint64_t> found;
    for (const Process& process : tree) {
        if (!is_forked(process, memory) || !parents.inherits(process.pid))
            continue;
        const std::vector<Vma>& others = memory.at(process.parent).vmas;
        auto other = others.begin();
        for (const Vma& own : memory.at(process.pid).vmas) {
            while (other != others.end() && other->end <= own.start)
                other++;
            for (auto one = other; one != others.end() && one->start < own.end; one++) {
                const Range common = {std::max(own.start, one->start), std::min(own.end, one->end)};
                if (is_plain(own) && is_plain(*one) && parents.inherits(process.pid, common))
                    found.insert({common.start, common.end});
            }
        }
    }
    return found;
}

// Mappings whose pages CRIU compares and shares: equal ranges in two copies of a program. Where the
// image tells what is inherited, only those with such pages.
Shared may_share(const Process& process, const Parents& parents, const Memories& memory) {
    Shared of_parent, common;
    if (!is_forked(process, memory))
        return common;
    for (const Vma& vma : memory.at(process.parent).vmas)
        of_parent.insert({vma.start, vma.end});
    for (const Vma& vma : memory.at(process.pid).vmas)
        if (of_parent.count({vma.start, vma.end}) &&
            (!parents.inherits(process.pid) || parents.inherits(process.pid, {vma.start, vma.end})))
            common.insert({vma.start, vma.end});
    return common;
}

// Private, writable memory that is not locked, neighbours joined.
Ranges late_ranges(const Memory& memory, const Shared& shared) {
    Ranges found;
    for (const Vma& vma : memory.vmas) {
        const uint64_t status = vma.status & ~kHeap;
        const bool late =
            (status == (kRegular | kAnonPrivate) || status == (kRegular | kFilePrivate)) &&
            !(vma.flags & ~kMapFlags) && (vma.prot & kProtWrite) &&
            !shared.count({vma.start, vma.end});
        if (!late)
            continue;
        if (vma.end < vma.start || (vma.start | vma.end) % kPage ||
            (!found.empty() && vma.start < found.back().end))
            throw PagesFailure("an odd mapping, or one that overlaps another, at " +
                               hex(vma.start));
        if (!found.empty() && vma.start == found.back().end)
            found.back().end = vma.end;
        else
            found.push_back({vma.start, vma.end});
    }
    return found;
}

// Whole pages from `below` under to `above` over an address.
Range around(uint64_t address, uint64_t below, uint64_t above) {
    const uint64_t at = std::min(address, kMostAddress);
    return {(at - std::min(at, below)) / kPage * kPage, (at + above + kPage - 1) / kPage * kPage};
}

// Where something may read or write before the process is filled.
//
// CRIU registers restartable sequences and writes the pointer to the one that a thread is in, and
// the kernel writes processor numbers there. Signals that wait are delivered before the stop:
// frames on the thread's stack or its signal stack. The rest is small, and known to the kernel.
Ranges touched(const std::string& images, const Process& process) {
    Ranges found;
    for (uint64_t number : process.threads) {
        const Thread thread = read_thread(images + "/core-" + std::to_string(number) + ".img");
        found.push_back(around(thread.stack, kSignalFrames, kNear));
        const Range& own = thread.signal_stack;
        found.push_back(around(own.start, 0, std::min(own.end - own.start, kMostAddress)));
        for (uint64_t pointer : thread.pointers)
            if (pointer)
                found.push_back(around(pointer, kNear, kNear));
    }
    return found;
}

// What of `ranges` lies in no hole.
Ranges without(const Ranges& ranges, Ranges holes) {
    std::sort(holes.begin(), holes.end(),
              [](const Range& a, const Range& b) { return a.start < b.start; });
    Ranges found;
    auto first = holes.begin(); // no hole before it reaches into the ranges that are left
    for (auto [start, end] : ranges) {
        uint64_t reached = 0;
        for (auto hole = first; hole != holes.end() && hole->start < end; hole++) {
            reached = std::max(reached, hole->end);
            if (reached <= start) {
                first = hole + 1;
                continue;
            }
            if (start < hole->start)
                found.push_back({start, hole->start});
            start = std::min(std::max(start, hole->end), end);
        }
        if (start < end)
            found.push_back({start, end});
    }
    return found;
}

// Pages of a process as CRIU has them in its file, cut into what comes late and what does not.
struct Split {
    std::vector<Run> late, kept;
    std::vector<Entry> entries; // of what is kept
    Ranges inherited;           // comes late, and is not in the file
    uint64_t bytes = 0, late_bytes = 0;

    void add(uint64_t start, uint64_t end, uint64_t flags, bool is_late) {
        if (start >= end)
            return;
        if (flags == kInParent) {
            if (is_late)
                inherited.push_back({start, end});
            else
                entries.push_back({start, (end - start) / kPage, kInParent});
            return;
        }
        // CRIU finds a run's bytes by adding up the runs before it.
        const Run run{start, end - start, bytes};
        bytes += run.bytes;
        std::vector<Run>& runs = is_late ? late : kept;
        const bool joins = !runs.empty() && runs.back().address + runs.back().bytes == start &&
                           runs.back().offset + runs.back().bytes == run.offset;
        if (is_late) {
            late_bytes += run.bytes;
        } else if (joins && entries.back().flags == flags) {
            entries.back().count += run.bytes / kPage;
        } else {
            entries.push_back({start, run.bytes / kPage, static_cast<uint32_t>(flags)});
        }
        if (joins)
            runs.back().bytes += run.bytes;
        else
            runs.push_back(run);
    }
};

Split split(const Pagemap& pagemap, const Ranges& late) {
    Split out;
    for (const PagemapEntry& entry : pagemap.entries) {
        uint64_t start = entry.address;
        const uint64_t end = start + entry.count * kPage;
        auto range = std::lower_bound(late.begin(), late.end(), start,
                                      [](const Range& r, uint64_t at) { return r.end <= at; });
        for (; range != late.end() && range->start < end; range++) {
            const uint64_t from = std::max(start, range->start);
            const uint64_t to = std::min(end, range->end);
            out.add(start, from, entry.flags, false);
            out.add(from, to, entry.flags, true);
            start = to;
        }
        out.add(start, end, entry.flags, false);
    }
    return out;
}

// Writes a new file of runs of another one.
void copy_runs(const std::string& source, const std::string& target, const std::vector<Run>& runs) {
    const int from = open(source.c_str(), O_RDONLY | O_CLOEXEC);
    const int to =
        from < 0 ? -1 : open(target.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    std::string failure = to < 0 ? source + " and " + target + ": " + std::strerror(errno) : "";
    for (size_t i = 0; failure.empty() && i < runs.size(); i++) {
        off_t offset = static_cast<off_t>(runs[i].offset);
        for (uint64_t left = runs[i].bytes; failure.empty() && left;) {
            const ssize_t count = sendfile(to, from, &offset, left);
            if (count > 0)
                left -= static_cast<uint64_t>(count);
            else if (count == 0)
                failure = short_file(source, from).what();
            else if (errno != EINTR)
                failure = "cannot write " + target + ": " + std::strerror(errno);
        }
    }
    for (int fd : {from, to})
        if (fd >= 0)
            close(fd);
    if (!failure.empty())
        throw PagesFailure(failure);
}

// Writes the two files of a process, unless it has too little that may come late.
void make_files(const std::string& images, const std::string& folder, const Process& process,
                const Ranges& late, const Parents& parents, std::vector<Fill>& fills) {
    const std::string name = "/pagemap-" + std::to_string(process.pid) + ".img";
    const Pagemap& pagemap = parents.pagemap(process.pid);
    const std::string pages = "/pages-" + std::to_string(pagemap.pages) + ".img";
    Split parts = split(pagemap, late);
    struct stat file;
    if (stat((images + pages).c_str(), &file) != 0)
        throw system_failure(images + pages, errno);
    if (parts.bytes > static_cast<uint64_t>(file.st_size))
        throw PagesFailure(pages.substr(1) + " has fewer bytes than the " +
                           std::to_string(parts.bytes) + " of " + name.substr(1));
    // The kept pages are written a second time, to the view, which costs memory for a while.
    const uint64_t kept = parts.bytes - parts.late_bytes;
    if (parts.late_bytes < std::max(kWorth, kept / 2) || !kept)
        return;
    copy_runs(images + pages, folder + pages, parts.kept);
    write_pagemap(folder + name, static_cast<uint32_t>(pagemap.pages), parts.entries);
    std::map<std::string, std::vector<Run>> runs;
    runs[images + pages] = std::move(parts.late);
    for (const Range& range : parts.inherited)
        parents.find(process.pid, range, runs);
    for (auto& [path, all] : runs)
        fills.push_back({static_cast<pid_t>(process.pid), path, std::move(all)});
}

// Cuts mappings of processes, for which it writes new files; gives the processes.
std::vector<pid_t> cut_mappings(const std::string& images, const std::string& folder,
                                const std::vector<Process>& tree, const Parents& parents,
                                Memories& memory) {
    std::set<uint64_t> sharing;
    for (const Process& process : tree)
        if (is_forked(process, memory))
            sharing.insert({process.pid, process.parent});
    const std::set<uint64_t> ends = ends_of_common(tree, parents, memory);
    std::vector<pid_t> cut;
    const uint64_t most = too_large();
    for (auto& [pid, own] : memory) {
        const bool shares = sharing.count(pid);
        const bool is_cut = shares && cut_at(own, ends), is_large = is_to_be_cut(own, shares, most);
        if (!is_cut && !is_large)
            continue;
        const std::string name = "-" + std::to_string(pid) + ".img";
        if (is_large)
            pages::cut(own, parents.pagemap(pid), shares, most);
        write_memory(images + "/mm" + name, folder + "/mm" + name, own.vmas);
        cut.push_back(static_cast<pid_t>(pid));
    }
    return cut;
}

void link_others(const std::string& images, const std::string& folder) {
    DIR* listing = opendir(images.c_str());
    if (!listing)
        throw system_failure(images, errno);
    std::string failure;
    while (const dirent* entry = readdir(listing)) {
        const std::string name = entry->d_name;
        if (name == "." || name == "..")
            continue;
        if (name == "parent")
            failure = "an incremental dump";
        else if (symlink((images + "/" + name).c_str(), (folder + "/" + name).c_str()) != 0 &&
                 errno != EEXIST) // it is one of ours
            failure = folder + "/" + name + ": " + std::strerror(errno);
    }
    closedir(listing);
    if (!failure.empty())
        throw PagesFailure(failure);
}

} // namespace

View make_view(const std::string& images, const std::string& folder) {
    const std::vector<Process> tree = read_tree(images + "/pstree.img");
    Memories memory;
    std::map<uint64_t, Shared> shared; // where nothing tells which pages are common
    std::map<uint64_t, Ranges> common;
    for (const Process& process : tree) {
        const std::string path = images + "/mm-" + std::to_string(process.pid) + ".img";
        if (access(path.c_str(), F_OK) == 0) // a zombie has none
            memory[process.pid] = read_memory(path);
    }
    const Parents parents(images, tree, memory);
    View view;
    view.inherits = parents.any();
    parents.link(folder);
    view.cut = cut_mappings(images, folder, tree, parents, memory);
    for (const Process& process : tree)
        for (const auto& range : may_share(process, parents, memory))
            for (const uint64_t pid : {process.pid, process.parent}) {
                if (parents.inherits(process.pid))
                    parents.add_inherited(process.pid, {range.first, range.second}, common[pid]);
                else
                    shared[pid].insert(range);
            }
    std::vector<Fill>& fills = view.fills;
    for (const Process& process : tree) {
        if (!memory.count(process.pid))
            continue;
        const Ranges late = without(late_ranges(memory[process.pid], shared[process.pid]),
                                    std::move(common[process.pid]));
        if (total(late) >= kWorth)
            make_files(images, folder, process, without(late, touched(images, process)), parents,
                       fills);
    }
    if (!fills.empty() || !view.cut.empty() || view.inherits)
        link_others(images, folder);
    return view;
}

} // namespace pages
