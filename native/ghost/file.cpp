#include "file.h"
#include "fault.h"

#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace fgg {
namespace {

using flowgpu::Fault;

constexpr flowgpu::WriteFaults kFaults = {Fault::at_ghost_full, Fault::at_ghost_error,
                                          Fault::at_ghost_short};

// Names a descriptor of a process instead of a file in a folder: nobody can have put a link there,
// and what it names is there already.
bool is_descriptor(const std::string& path) {
    unsigned pid = 0, fd = 0;
    int end = 0;
    return sscanf(path.c_str(), "/proc/%u/fd/%u%n", &pid, &fd, &end) == 2 && !path[end];
}

// Some file systems refuse O_DIRECT at open (EINVAL), others at the first call that does not suit
// them.
int open_file(const std::string& path, int flags, bool& direct) {
    flags |= O_CLOEXEC;
    flags = is_descriptor(path) ? flags & ~(O_CREAT | O_EXCL) : flags | O_NOFOLLOW;
    int fd = ::open(path.c_str(), flags | (direct ? O_DIRECT : 0), 0600);
    if (fd < 0 && direct && errno == EINVAL) {
        // The refused open may have created the file.
        direct = false;
        fd = ::open(path.c_str(), flags & ~O_EXCL, 0600);
    }
    return fd;
}

} // namespace

File File::create(const std::string& path, bool direct) {
    const int fd = open_file(path, O_RDWR | O_CREAT | O_EXCL, direct);
    if (fd < 0)
        throw file_failure("cannot create", path, errno);
    return File(fd, path, direct);
}

File File::open(const std::string& path, bool direct) {
    // A FIFO in the place of the file must not make the open wait.
    const int fd = open_file(path, O_RDONLY | O_NONBLOCK, direct);
    if (fd < 0)
        throw file_failure("cannot open", path, errno);
    return File(fd, path, direct);
}

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), direct_(other.direct_),
      mapping_(std::exchange(other.mapping_, nullptr)), mapped_(std::exchange(other.mapped_, 0)) {}

File::~File() {
    unmap();
    if (fd_ >= 0)
        ::close(fd_);
}

uint64_t File::size() const {
    struct stat status;
    if (fstat(fd_, &status))
        throw file_failure("cannot stat", path_, errno);
    if (!S_ISREG(status.st_mode))
        throw MoverFailure(FGG_IO, path_ + " is not a regular file");
    return static_cast<uint64_t>(status.st_size);
}

void File::resize(uint64_t bytes) {
    if (ftruncate(fd_, static_cast<off_t>(bytes)))
        throw file_failure("cannot set the size of", path_, errno);
}

bool File::reserve(uint64_t offset, uint64_t bytes) {
    if (const int error = flowgpu::write_error(kFaults))
        throw file_failure("cannot reserve space for", path_, error);
    if (fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0)
        return true;
    if (errno == EOPNOTSUPP || errno == ENOSYS)
        return false;
    throw file_failure("cannot reserve space for", path_, errno);
}

bool File::leave_direct(int error, bool& retried) {
    if (error != EINVAL || !direct_ || std::exchange(retried, true))
        return false;
    const int flags = fcntl(fd_, F_GETFL);
    return flags >= 0 && fcntl(fd_, F_SETFL, flags & ~O_DIRECT) == 0;
}

void File::write(const char* host, uint64_t bytes, uint64_t offset) {
    bool retried = false;
    while (bytes) {
        const ssize_t done =
            flowgpu::write_at(kFaults, fd_, host, bytes, static_cast<off_t>(offset));
        if (done < 0) {
            if (errno == EINTR || leave_direct(errno, retried))
                continue;
            throw file_failure("cannot write", path_, errno);
        }
        if (done == 0)
            throw file_failure("cannot write", path_, ENOSPC);
        host += done;
        bytes -= static_cast<uint64_t>(done);
        offset += static_cast<uint64_t>(done);
    }
}

void File::read(char* host, uint64_t bytes, uint64_t offset) {
    bool retried = false;
    uint64_t at = 0;
    while (at < bytes) {
        // O_DIRECT wants a whole last block asked for; the answer ends with the file.
        const uint64_t rest = bytes - at;
        const uint64_t ask = direct_ ? (rest + kAlignment - 1) / kAlignment * kAlignment : rest;
        const ssize_t done = flowgpu::read_at(Fault::at_ghost_read, fd_, host + at, ask,
                                              static_cast<off_t>(offset + at));
        if (done < 0) {
            if (errno == EINTR || leave_direct(errno, retried))
                continue;
            throw file_failure("cannot read", path_, errno);
        }
        if (done == 0)
            throw MoverFailure(FGG_SHORT, path_ + " ends at byte " + std::to_string(size()));
        at += static_cast<uint64_t>(done);
    }
}

void File::map(uint64_t bytes) {
    void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapping == MAP_FAILED)
        throw file_failure("cannot map", path_, errno);
    mapping_ = static_cast<char*>(mapping);
    mapped_ = bytes;
    // Huge pages where the tmpfs allows them (huge=advise); elsewhere refused, which is no matter.
    madvise(mapping_, bytes, MADV_HUGEPAGE);
}

void File::unmap() {
    if (mapping_)
        munmap(mapping_, mapped_);
    mapping_ = nullptr;
}

bool File::populate(uint64_t offset, uint64_t bytes) {
    if (const int error = flowgpu::write_error(kFaults))
        throw file_failure("cannot populate", path_, error);
    while (madvise(mapping_ + offset, bytes, MADV_POPULATE_WRITE)) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno == EINVAL) // Linux before 5.14
            return false;
        // EFAULT stands for the SIGBUS that a touch of the page would have been: no page to be had.
        throw file_failure("cannot populate", path_, errno == EFAULT ? ENOSPC : errno);
    }
    return true;
}

void File::leave(uint64_t offset, uint64_t bytes) {
    if (offset < mapped_)
        madvise(mapping_ + offset, std::min(bytes, mapped_ - offset), MADV_DONTNEED);
}

} // namespace fgg
