#include "memstub.h"

#include <cerrno>
#include <new>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace flowgpu::memstub {

Hot hot;

namespace {

// Descriptors that stay open for long are kept out of the range of select() and dup2().
constexpr int kHighDescriptor = 512;

struct Made {
    int fd = -1;
    void* memory = nullptr;
};

Made made;
pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
// What was missed cannot be made up for: once the system refused a set, there is never one.
bool refused = false;
bool forks_watched = false;

// The child has the parent's mapping and descriptor, and none of its device memory.
void in_child() {
    pthread_mutex_init(&making, nullptr);
    new (&hot.set) LiveSet;
    hot.captures.store(nullptr);
    if (made.memory)
        munmap(made.memory, FLOWGPU_LIVE_BYTES);
    if (made.fd >= 0)
        close(made.fd);
    made.memory = nullptr;
    made.fd = -1;
}

int make_memfd() {
    int fd = memfd_create("flowgpu-live", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, FLOWGPU_LIVE_BYTES) != 0) {
        if (fd >= 0)
            close(fd);
        return -1;
    }
    int high = fcntl(fd, F_DUPFD_CLOEXEC, kHighDescriptor);
    if (high < 0)
        return fd;
    close(fd);
    return high;
}

bool make() {
    int fd = make_memfd();
    if (fd < 0)
        return false;
    void* memory = mmap(nullptr, FLOWGPU_LIVE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    // Without the handler a child would write into its parent's set.
    if (memory == MAP_FAILED ||
        (!forks_watched && pthread_atfork(nullptr, nullptr, in_child) != 0)) {
        if (memory != MAP_FAILED)
            munmap(memory, FLOWGPU_LIVE_BYTES);
        close(fd);
        return false;
    }
    forks_watched = true;
    made.fd = fd;
    made.memory = memory;
    hot.set.open(memory);
    return true;
}

} // namespace

bool make_once() {
    int error = errno;
    pthread_mutex_lock(&making);
    if (!hot.set.is_open() && !refused)
        refused = !make();
    pthread_mutex_unlock(&making);
    errno = error;
    return hot.set.is_open();
}

} // namespace flowgpu::memstub

FGM_EXPORT int flowgpu_memstub_fd() {
    return flowgpu::memstub::ready() ? flowgpu::memstub::made.fd : -1;
}

FGM_EXPORT void flowgpu_memstub_forget(uint64_t address, uint64_t bytes) {
    using namespace flowgpu::memstub;
    if (hot.set.is_open())
        hot.set.forget(address, bytes);
}

FGM_EXPORT void flowgpu_memstub_captures(const uint32_t* under_way) {
    flowgpu::memstub::hot.captures.store(under_way);
}
