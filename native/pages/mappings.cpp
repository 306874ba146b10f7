#include "mappings.h"

#include <sys/sysinfo.h>

#include <algorithm>

namespace pages {
namespace {

// criu/include/image.h
constexpr uint64_t kRegular = 1 << 0, kHeap = 1 << 5, kAnonPrivate = 1 << 9, kNoProtWrite = 1 << 29;
// MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE: not MAP_GROWSDOWN, MAP_HUGETLB, or what comes later.
constexpr uint64_t kNoReserve = 0x4000, kMapFlags = 0x2 | 0x20 | kNoReserve;

constexpr uint64_t kProtWrite = 2;

constexpr uint64_t kReserved = 1 << 20; // less is no reservation
constexpr size_t kMostMappings = 32000; // of a process: half of what the kernel allows
constexpr uint64_t kNear = 1 << 20;     // between pages, which is not worth a mapping

enum class How { kNot, kByPages, kByPlace };

How how(const Vma& vma, bool shares, uint64_t too_large) {
    const uint64_t size = vma.end - vma.start;
    if (vma.status != (kRegular | kAnonPrivate) || (vma.flags & ~kMapFlags) ||
        vma.end <= vma.start || (vma.start | vma.end) % kPage)
        return How::kNot;
    if (!vma.prot && shares) // what may be read often has pages that two processes share
        return size >= kReserved ? How::kByPages : How::kNot;
    if (size < too_large)
        return How::kNot;
    if (!(vma.prot & kProtWrite))
        return How::kByPages;
    if (vma.flags & kNoReserve) // is not counted, but CRIU counts its pages in 32 bits
        return shares ? How::kByPages : How::kNot;
    return How::kByPlace;
}

void add(std::vector<Vma>& parts, const Vma& whole, uint64_t start, uint64_t end, bool used) {
    if (start >= end)
        return;
    Vma part = whole;
    part.start = start, part.end = end;
    if (!used)
        part.status = kRegular | kNoProtWrite;
    parts.push_back(part);
}

void cut_by_pages(std::vector<Vma>& parts, const Vma& vma, const Pagemap& pagemap) {
    uint64_t unused = vma.start, used = vma.start; // up to which it is cut, and known to be used
    for (const PagemapEntry& entry : pagemap.entries) {
        const uint64_t start = std::max(entry.address, vma.start);
        const uint64_t end = std::min(entry.address + entry.count * kPage, vma.end);
        if (start >= end)
            continue;
        if (start - used >= kNear || used == vma.start) {
            add(parts, vma, unused, used, true);
            add(parts, vma, used, start, false);
            unused = start;
        }
        used = end;
    }
    add(parts, vma, unused, used, true);
    add(parts, vma, used, vma.end, false);
}

} // namespace

uint64_t too_large() {
    struct sysinfo info;
    if (sysinfo(&info) != 0)
        throw system_failure("sysinfo", errno);
    const uint64_t most = (info.totalram + info.totalswap) * info.mem_unit;
    uint64_t size = kPage;
    while (size <= most / 4)
        size *= 2;
    return size;
}

bool is_plain(const Vma& vma) {
    return (vma.status & ~kHeap) == (kRegular | kAnonPrivate) && !(vma.flags & ~kMapFlags) &&
           vma.end > vma.start;
}

bool cut_at(Memory& memory, const std::set<uint64_t>& places) {
    std::vector<Vma> parts;
    for (const Vma& vma : memory.vmas) {
        uint64_t start = vma.start;
        if (is_plain(vma))
            for (auto at = places.upper_bound(start); at != places.end() && *at < vma.end; at++) {
                add(parts, vma, start, *at, true);
                start = *at;
            }
        parts.push_back(vma);
        parts.back().start = start;
    }
    if (parts.size() == memory.vmas.size() || parts.size() > kMostMappings)
        return false;
    memory.vmas = std::move(parts);
    return true;
}

bool is_to_be_cut(const Memory& memory, bool shares, uint64_t too_large) {
    return std::any_of(memory.vmas.begin(), memory.vmas.end(),
                       [&](const Vma& vma) { return how(vma, shares, too_large) != How::kNot; });
}

void cut(Memory& memory, const Pagemap& pagemap, bool shares, uint64_t too_large) {
    std::vector<Vma> parts;
    for (const Vma& vma : memory.vmas) {
        switch (how(vma, shares, too_large)) {
        case How::kNot:
            parts.push_back(vma);
            break;
        case How::kByPages:
            cut_by_pages(parts, vma, pagemap);
            break;
        case How::kByPlace:
            for (uint64_t at = vma.start; at < vma.end;) {
                const uint64_t end = std::min(at / too_large * too_large + too_large, vma.end);
                add(parts, vma, at, end, true);
                at = end;
            }
            break;
        }
    }
    memory.vmas = std::move(parts);
}

} // namespace pages
