#include "pinned.h"

#include <algorithm>
#include <atomic>

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "driver.h"
#include "proc.h"
#include "task.h"

namespace flowgpu::pinned {

namespace {

constexpr uintptr_t kPage = 4096;
constexpr int kOurs = MAP_PRIVATE | MAP_ANONYMOUS;

// What was noted since `begin_to_keep`, in the order of the calls. Memory is never freed here.
constexpr size_t kMostKept = 1024;
Range kept[kMostKept];
std::atomic<size_t> kept_count{0}; // may count further than there is room
std::atomic<bool> keeping{false};

constexpr Kinds kPinned = only(MemoryKind::pinned);

void* at(uintptr_t address) {
    return reinterpret_cast<void*>(address);
}

bool is_readable(uintptr_t address) {
    char byte;
    const iovec here = {&byte, 1}, there = {at(address), 1};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == 1;
}

bool can_tell() {
    const char byte = 0;
    return is_readable(reinterpret_cast<uintptr_t>(&byte)); // seccomp may forbid it
}

// A page of ours begins with this mark, by which we know it again.
const void** mark_in(uintptr_t page) {
    return static_cast<const void**>(at(page));
}

// Where the file of a mapping that can be read ends.
uintptr_t end_of_file(uintptr_t start, uintptr_t end) {
    if (!can_tell() || is_readable(end - kPage))
        return end;
    while (start < end) { // the pages before `start` are the file's, those from `end` on are not
        const uintptr_t middle = start + (end - start) / 2 / kPage * kPage;
        if (is_readable(middle))
            start = middle + kPage;
        else
            end = middle;
    }
    return end;
}

int protection_of(const char* mode) {
    return (mode[0] == 'r' ? PROT_READ : 0) | (mode[1] == 'w' ? PROT_WRITE : 0) |
           (mode[2] == 'x' ? PROT_EXEC : 0);
}

} // namespace

std::vector<Range> merged(std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& one, const Range& other) { return one.start < other.start; });
    std::vector<Range> result;
    for (const Range& range : ranges)
        if (result.empty() || range.start > result.back().end) {
            result.push_back(range);
        } else {
            result.back().end = std::max(result.back().end, range.end);
            result.back().read_only = result.back().read_only && range.read_only;
        }
    return result;
}

Range range_of(const void* address, size_t bytes, unsigned register_flags) {
    const auto start = reinterpret_cast<uintptr_t>(address);
    return {start & ~(kPage - 1), (start + bytes + kPage - 1) & ~(kPage - 1),
            (register_flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0};
}

Range all_memory() {
    return {0, UINTPTR_MAX & ~(kPage - 1), false};
}

void note(const void* address, size_t bytes, unsigned register_flags) {
    CUcontext context = nullptr;
    FG_REAL(cuCtxGetCurrent)(&context);
    Region region = {reinterpret_cast<uintptr_t>(address), bytes, MemoryKind::pinned, -1, context};
    region.flags = register_flags;
    address_map().put(region);
    if (!keeping)
        return;
    if (const size_t place = kept_count.fetch_add(1); place < kMostKept)
        kept[place] = range_of(address, bytes, register_flags);
}

void forget(const void* address) {
    address_map().remove(reinterpret_cast<uintptr_t>(address), kPinned);
}

void end_of(CUcontext context) {
    for (const Region& region : address_map().all(kPinned))
        if (region.context == context)
            address_map().remove(region.address, kPinned);
}

std::vector<Range> all() {
    std::vector<Range> ranges;
    for (const Region& region : address_map().all(kPinned))
        ranges.push_back(
            range_of(reinterpret_cast<const void*>(region.address), region.bytes, region.flags));
    return ranges;
}

void begin_to_keep() {
    kept_count = 0;
    keeping = true;
}

std::vector<Range> since_then() {
    std::vector<Range> ranges = all();
    const size_t count = kept_count;
    if (count > kMostKept)
        ranges.push_back(all_memory());
    ranges.insert(ranges.end(), kept, kept + std::min(count, kMostKept));
    return merged(std::move(ranges));
}

Gaps::Gaps(std::vector<Range> ranges) {
    if (ranges.empty())
        return;
    ranges = merged(std::move(ranges));
    auto range = ranges.begin();
    uintptr_t seen = range->start; // of the range, what lies before is looked at
    const auto hole_up_to = [&](uintptr_t end) {
        if (seen < end)
            gaps_.push_back({Kind::hole, seen, end, 0, 0, false, false, 0});
    };
    const auto next = [&] {
        hole_up_to(range->end);
        if (++range != ranges.end())
            seen = range->start;
    };
    proc::each_mapping([&](const proc::Mapping& mapping) {
        while (range != ranges.end() && range->start < mapping.end) {
            if (range->end > mapping.start) {
                Gap gap = {};
                gap.start = std::max(mapping.start, range->start);
                gap.end = std::min(mapping.end, range->end);
                gap.protection = protection_of(mapping.mode);
                gap.wanted = range->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
                gap.is_file = mapping.name[0] == '/';
                hole_up_to(gap.start);
                seen = gap.end;
                gap.kind = (gap.protection & gap.wanted) == gap.wanted ? Kind::cut : Kind::closed;
                if (gap.kind == Kind::cut)
                    gap.start = gap.is_file ? end_of_file(gap.start, gap.end) : gap.end;
                if (gap.start < gap.end)
                    gaps_.push_back(gap);
                if (range->end > mapping.end)
                    return;
            }
            next();
        }
    });
    while (range != ranges.end())
        next();
}

bool Gaps::in(const Range& range) const {
    return std::any_of(gaps_.begin(), gaps_.end(), [&](const Gap& gap) {
        return gap.start < range.end && range.start < gap.end;
    });
}

void Gaps::fill() {
    for (Gap& gap : gaps_) {
        if (gap.kind != Kind::hole)
            continue;
        gap.changed = mmap(at(gap.start), gap.end - gap.start, PROT_READ | PROT_WRITE,
                           kOurs | MAP_FIXED_NOREPLACE, -1, 0) == at(gap.start);
        if (gap.changed)
            *mark_in(gap.start) = &gaps_;
    }
}

void Gaps::open() {
    std::vector<Gap> ends; // of files, in memory that was closed
    for (Gap& gap : gaps_) {
        if (gap.kind == Kind::hole)
            continue;
        const size_t bytes = gap.end - gap.start;
        gap.changed = gap.kind == Kind::closed &&
                      mprotect(at(gap.start), bytes, gap.protection | gap.wanted) == 0;
        if (!gap.changed)
            gap.changed = move(gap);
        else if (gap.is_file)
            ends.push_back(
                {Kind::cut, end_of_file(gap.start, gap.end), gap.end, 0, 0, true, false, 0});
    }
    for (Gap& gap : ends) {
        gap.changed = gap.start < gap.end && move(gap);
        if (gap.changed)
            gaps_.push_back(gap);
    }
}

// Puts pages of ours in the place of what the program has there, which is never free meanwhile:
// another thread's mapping could be put there.
bool Gaps::move(Gap& gap) {
    constexpr int kMove = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    const size_t bytes = gap.end - gap.start;
    void* elsewhere = mmap(nullptr, bytes, PROT_NONE, kOurs | MAP_NORESERVE, -1, 0);
    if (elsewhere == MAP_FAILED)
        return false;
    if (mremap(at(gap.start), bytes, bytes, kMove, elsewhere) == MAP_FAILED) {
        munmap(elsewhere, bytes);
        return false;
    }
    gap.elsewhere = reinterpret_cast<uintptr_t>(elsewhere);
    mmap(at(gap.start), bytes, PROT_READ | PROT_WRITE, kOurs | MAP_FIXED, -1, 0);
    return true;
}

void Gaps::close() {
    for (; !gaps_.empty(); gaps_.pop_back()) {
        const Gap& gap = gaps_.back();
        const size_t bytes = gap.end - gap.start;
        if (!gap.changed)
            continue;
        if (gap.elsewhere)
            mremap(at(gap.elsewhere), bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, at(gap.start));
        else if (gap.kind == Kind::closed)
            mprotect(at(gap.start), bytes, gap.protection);
        else if (!can_tell() || (is_readable(gap.start) && *mark_in(gap.start) == &gaps_))
            munmap(at(gap.start), bytes); // else the program has mapped something there
    }
}

} // namespace flowgpu::pinned
