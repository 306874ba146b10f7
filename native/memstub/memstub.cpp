#include "memstub.h"

#include <cerrno>
#include <new>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "descriptor.h"

namespace flowgpu::memstub {

Page page;

namespace {

struct Made {
    int fd = -1;
    void* memory = nullptr;
};

Made made;
pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
// What was missed cannot be made up for: once the system refused a set, there is never one.
bool refused = false;
bool forks_watched = false;

// Maps the memfd's first pages, or with -1 zeros, where `page` is.
bool map_page(int fd) {
    int kind = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    return mmap(&page, sizeof page, PROT_READ | PROT_WRITE, MAP_FIXED | kind, fd, 0) != MAP_FAILED;
}

// The child has the parent's mapping and descriptor, and none of its device memory.
void in_child() {
    pthread_mutex_init(&making, nullptr);
    if (!made.memory)
        return;
    map_page(-1);
    munmap(made.memory, FLOWGPU_LIVE_BYTES);
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
    return move_high(fd);
}

bool make() {
    // Without the handler a child would write into its parent's set.
    if (!forks_watched && pthread_atfork(nullptr, nullptr, in_child) != 0)
        return false;
    forks_watched = true;
    int fd = make_memfd();
    if (fd < 0)
        return false;
    void* memory = mmap(nullptr, FLOWGPU_LIVE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory != MAP_FAILED) {
        // Whole before it can be seen.
        auto* first = new (memory) LiveSet(page.set);
        first->open(memory);
        if (map_page(fd)) {
            made = {fd, memory};
            return true;
        }
        munmap(memory, FLOWGPU_LIVE_BYTES);
    }
    close(fd);
    return false;
}

} // namespace

bool make_once() {
    int error = errno;
    pthread_mutex_lock(&making);
    if (!page.set.is_open() && !refused)
        refused = !make();
    pthread_mutex_unlock(&making);
    errno = error;
    return page.set.is_open();
}

} // namespace flowgpu::memstub

FGM_EXPORT int flowgpu_memstub_fd() {
    return flowgpu::memstub::ready() ? flowgpu::memstub::made.fd : -1;
}

FGM_EXPORT void flowgpu_memstub_forget(uint64_t address, uint64_t bytes) {
    using namespace flowgpu::memstub;
    if (page.set.is_open())
        page.set.forget(address, bytes);
}

FGM_EXPORT void flowgpu_memstub_captures(const uint32_t* under_way) {
    using namespace flowgpu::memstub;
    // Not while the page is copied. The last call of several at once reads the last number.
    pthread_mutex_lock(&making);
    page.set.set_capturing(__atomic_load_n(under_way, __ATOMIC_SEQ_CST) != 0);
    pthread_mutex_unlock(&making);
}
