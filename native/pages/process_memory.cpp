#include "process_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

namespace pages {

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

uint64_t ProcessMemory::read(uint64_t address, char* to, uint64_t bytes) const {
    uint64_t done = 0;
    while (done < bytes) {
        const iovec here = {to + done, bytes - done};
        const iovec there = {reinterpret_cast<void*>(address + done), bytes - done};
        ssize_t count = process_vm_readv(pid_, &here, 1, &there, 1, 0);
        if (count <= 0) // what the process itself may not read
            count = pread(memory_, to + done, kPage - (address + done) % kPage,
                          static_cast<off_t>(address + done));
        if (count <= 0)
            break;
        done += static_cast<uint64_t>(count);
    }
    return done;
}

void ProcessMemory::read(const std::vector<Entry>& entries, char* to) const {
    std::vector<iovec> there;
    uint64_t bytes = 0;
    for (const Entry& entry : entries) {
        there.push_back({reinterpret_cast<void*>(entry.address), entry.count * kPage});
        bytes += entry.count * kPage;
    }
    const iovec here = {to, bytes};
    if (process_vm_readv(pid_, &here, 1, there.data(), there.size(), 0) !=
        static_cast<ssize_t>(bytes)) {
        char* part = to;
        for (const Entry& entry : entries) {
            if (read(entry.address, part, entry.count * kPage) != entry.count * kPage)
                throw PagesFailure("process " + std::to_string(pid_) +
                                   " has pages that cannot be read");
            part += entry.count * kPage;
        }
    }
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
