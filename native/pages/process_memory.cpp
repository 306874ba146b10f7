#include "process_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace pages {
namespace {

// Bits of a word of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
constexpr uint64_t kIsPresent = 1ull << 63, kIsAlone = 1ull << 56, kFrame = (1ull << 55) - 1;

} // namespace

void ProcessMemory::close_files() {
    for (int* fd : {&pagemap_, &memory_}) {
        if (*fd >= 0)
            close(*fd);
        *fd = -1;
    }
}

bool ProcessMemory::open() {
    close_files();
    const std::string folder = "/proc/" + std::to_string(pid_) + "/";
    pagemap_ = ::open((folder + "pagemap").c_str(), O_RDONLY | O_CLOEXEC);
    memory_ = ::open((folder + "mem").c_str(), O_RDONLY | O_CLOEXEC);
    if (pagemap_ < 0 || memory_ < 0)
        return false;
    constexpr uint64_t kKinds =
        scan::kPresent | scan::kSwapped | scan::kWritten | scan::kTracked | scan::kSoftDirty;
    scan::Request nothing = {};
    nothing.size = sizeof nothing;
    for (const uint64_t wanted : {kKinds | scan::kGuard, kKinds}) {
        nothing.wanted = wanted;
        if (scan(nothing) == 0) {
            kinds_ = wanted;
            return true;
        }
    }
    return false;
}

void ProcessMemory::words(uint64_t address, uint64_t count, uint64_t* to) const {
    const ssize_t bytes =
        pread(pagemap_, to, count * sizeof *to, static_cast<off_t>(address / kPage * sizeof *to));
    const uint64_t known = bytes > 0 ? static_cast<uint64_t>(bytes) / sizeof *to : 0;
    std::fill(to + known, to + count, 0);
}

void ProcessMemory::frames(uint64_t address, uint64_t count, uint64_t* to) const {
    words(address, count, to);
    for (uint64_t n = 0; n < count; n++)
        to[n] = to[n] & kIsPresent ? to[n] & kFrame : 0;
}

// process_vm_readv(2) is the fastest, but gives a process a copy of its own of each page that it
// has in common with another (gup_must_unshare in the kernel). Its file `mem` does not.
template <class Take>
void ProcessMemory::each_part(uint64_t address, uint64_t count, Take take) const {
    constexpr uint64_t kPages = 512;
    uint64_t found[kPages];
    while (count) {
        const uint64_t part = std::min(count, kPages);
        words(address, part, found);
        const auto is_common = [&](uint64_t n) {
            return (found[n] & (kIsPresent | kIsAlone)) == kIsPresent;
        };
        for (uint64_t n = 0, end; n < part; n = end) {
            for (end = n + 1; end < part && is_common(end) == is_common(n);)
                end++;
            take(address + n * kPage, (end - n) * kPage, is_common(n));
        }
        address += part * kPage, count -= part;
    }
}

uint64_t ProcessMemory::read(uint64_t address, char* to, uint64_t bytes) const {
    uint64_t at = address;
    each_part(address, bytes / kPage, [&](uint64_t start, uint64_t size, bool common) {
        while (at >= start && at < start + size) {
            const uint64_t left = start + size - at;
            char* const place = to + (at - address);
            const iovec here = {place, left};
            const iovec there = {reinterpret_cast<void*>(at), left};
            ssize_t count = common ? 0 : process_vm_readv(pid_, &here, 1, &there, 1, 0);
            if (count <= 0) // the process itself may not read it, where it is not common
                count = pread(memory_, place, common ? left : kPage, static_cast<off_t>(at));
            if (count <= 0)
                return;
            at += static_cast<uint64_t>(count);
        }
    });
    return at - address;
}

void ProcessMemory::read(const std::vector<Entry>& entries, char* to) const {
    struct Part {
        uint64_t address, size;
        char* to;
    };
    std::vector<Part> alone, rest;
    std::vector<iovec> here, there;
    uint64_t bytes = 0;
    char* place = to;
    for (const Entry& entry : entries)
        each_part(entry.address, entry.count, [&](uint64_t start, uint64_t size, bool common) {
            (common ? rest : alone).push_back({start, size, place});
            if (!common) {
                here.push_back({place, size});
                there.push_back({reinterpret_cast<void*>(start), size});
                bytes += size;
            }
            place += size;
        });
    if (bytes && process_vm_readv(pid_, here.data(), here.size(), there.data(), there.size(), 0) !=
                     static_cast<ssize_t>(bytes))
        rest.insert(rest.end(), alone.begin(), alone.end());
    for (const Part& part : rest)
        if (read(part.address, part.to, part.size) != part.size)
            throw PagesFailure("process " + std::to_string(pid_) +
                               " has pages that cannot be read");
    put_kept(entries, to);
}

void ProcessMemory::keep(uint64_t address) {
    kept_.resize(kPage);
    kept_.resize(read(address, kept_.data(), kPage));
    kept_at_ = address;
}

void ProcessMemory::put_kept(const std::vector<Entry>& entries, char* to) const {
    for (const Entry& entry : entries) {
        if (kept_at_ >= entry.address && kept_at_ - entry.address < entry.count * kPage)
            std::copy(kept_.begin(), kept_.end(), to + (kept_at_ - entry.address));
        to += entry.count * kPage;
    }
}

size_t ProcessMemory::divide(const std::vector<uint64_t>& begins) {
    parts_.clear();
    if (!open())
        return 0;
    uint64_t start = scan::kLowest;
    for (const uint64_t begin : begins)
        if (begin > start && begin < scan::kHighest) {
            parts_.push_back({{start, begin}, {}});
            start = begin;
        }
    parts_.push_back({{start, scan::kHighest}, {}});
    return parts_.size();
}

void ProcessMemory::look(size_t part) {
    Part& one = parts_[part];
    each_region(one.range, 0, 0, [&](const scan::Region& region) { one.found.push_back(region); });
}

} // namespace pages
