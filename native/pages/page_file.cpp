#include "page_file.h"

#include "fault.h"

#include <algorithm>
#include <cstdlib>
#include <fcntl.h>

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

namespace pages {
namespace {

using flowgpu::Fault;

constexpr uint64_t kMoved = 1 << 20;
constexpr flowgpu::WriteFaults kFaults = {Fault::at_pages_full, Fault::at_pages_error,
                                          Fault::at_pages_short};

} // namespace

PageFile::PageFile(const std::string& folder, uint32_t number)
    : number_(number), path_(folder + "/pages-" + std::to_string(number) + ".img"),
      fd_(open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600)) {
    if (fd_ < 0)
        throw failure("cannot create ", errno);
}

PageFile::PageFile(const std::string& folder)
    : number_(0), path_(folder + "/pages-early-XXXXXX"), fd_(mkostemp(path_.data(), O_CLOEXEC)),
      finished_(true) {
    if (fd_ < 0 || unlink(path_.c_str()) != 0)
        throw failure("cannot create ", errno);
}

PageFile::~PageFile() {
    if (cutting_.joinable())
        cutting_.join();
    if (!finished_)
        unlink(path_.c_str());
    close(fd_); // the mapping goes with the process, outside the time that anyone waits for
}

PagesFailure PageFile::failure(const char* what, int error) const {
    return system_failure(what + path_, error);
}

bool PageFile::reserve(uint64_t bytes) {
    if (fallocate(fd_, 0, 0, static_cast<off_t>(bytes)) != 0)
        return false;
    reserved_ = bytes;
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED)
        return false;
    mapping_ = static_cast<char*>(at);
    // Huge pages where the file system has them; a refusal is no matter.
    madvise(mapping_, bytes, MADV_HUGEPAGE);
    return true;
}

bool PageFile::populate(uint64_t offset, uint64_t bytes) {
    while (madvise(mapping_ + offset, bytes, MADV_POPULATE_WRITE) != 0)
        if (errno != EINTR && errno != EAGAIN)
            return false;
    return true;
}

uint64_t PageFile::take(uint64_t bytes) {
    const uint64_t offset = size_;
    size_ += bytes;
    return offset;
}

void PageFile::write(uint64_t offset, const char* data, uint64_t bytes) {
    if (offset + bytes <= populated_) {
        if (const int error = flowgpu::write_error(kFaults))
            throw failure("cannot write ", error);
        memcpy(mapping_ + offset, data, bytes);
        return;
    }
    while (bytes) {
        const ssize_t count =
            flowgpu::write_at(kFaults, fd_, data, bytes, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            throw failure("cannot write ", count < 0 ? errno : ENOSPC);
        data += count;
        offset += static_cast<uint64_t>(count);
        bytes -= static_cast<uint64_t>(count);
    }
}

void PageFile::read(uint64_t offset, char* to, uint64_t bytes) const {
    while (bytes) {
        const ssize_t count = pread(fd_, to, bytes, static_cast<off_t>(offset));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            throw failure("cannot read ", count < 0 ? errno : EIO);
        to += count;
        offset += static_cast<uint64_t>(count);
        bytes -= static_cast<uint64_t>(count);
    }
}

// From the end on, since both places may overlap.
void PageFile::move(uint64_t from, uint64_t to, uint64_t bytes) {
    std::vector<char> buffer(std::min(bytes, kMoved));
    while (bytes && from != to) {
        const uint64_t part = std::min(bytes, kMoved);
        bytes -= part;
        read(from + bytes, buffer.data(), part);
        write(to + bytes, buffer.data(), part);
    }
}

void PageFile::finish() {
    // Giving pages back takes as long as copying as many; the file has its new size before that.
    if (size_ < reserved_)
        cutting_ = std::thread(
            [this] { cut_ = ftruncate(fd_, static_cast<off_t>(size_)) == 0 ? 0 : errno; });
    while (cutting_.joinable() && cut_ < 0) {
        struct stat status;
        if (fstat(fd_, &status) != 0)
            throw failure("cannot set the size of ", errno);
        if (status.st_size == static_cast<off_t>(size_))
            break;
        sched_yield();
    }
    if (cut_ > 0)
        throw failure("cannot set the size of ", cut_);
    finished_ = true;
}

} // namespace pages
