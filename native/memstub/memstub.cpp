#include "memstub.h"

#include <atomic>
#include <cerrno>
#include <new>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "live_set.h"

namespace flowgpu::memstub {

namespace {

// Descriptors that stay open for long are kept out of the range of select() and dup2().
constexpr int kHighDescriptor = 512;

struct Made {
    int fd = -1;
    void* memory = nullptr;
    alignas(LiveSet) unsigned char set[sizeof(LiveSet)] = {}; // in place: never destroyed
};

Made made;
pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;
// What was missed cannot be made up for: once the system refused a set, there is never one.
bool refused = false;
bool forks_watched = false;
std::atomic<LiveSet*> live{nullptr};
std::atomic<const uint32_t*> captures{nullptr};

// The child has the parent's mapping and descriptor, and none of its device memory.
void in_child() {
    pthread_mutex_init(&making, nullptr);
    live.store(nullptr);
    captures.store(nullptr);
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

LiveSet* make() {
    int fd = make_memfd();
    if (fd < 0)
        return nullptr;
    void* memory = mmap(nullptr, FLOWGPU_LIVE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    // Without the handler a child would write into its parent's set.
    if (memory == MAP_FAILED ||
        (!forks_watched && pthread_atfork(nullptr, nullptr, in_child) != 0)) {
        if (memory != MAP_FAILED)
            munmap(memory, FLOWGPU_LIVE_BYTES);
        close(fd);
        return nullptr;
    }
    forks_watched = true;
    made.fd = fd;
    made.memory = memory;
    return new (made.set) LiveSet(memory);
}

LiveSet* make_once() {
    int error = errno;
    pthread_mutex_lock(&making);
    LiveSet* set = live.load();
    if (!set && !refused) {
        set = make();
        refused = !set;
        live.store(set);
    }
    pthread_mutex_unlock(&making);
    errno = error;
    return set;
}

LiveSet* get() {
    LiveSet* set = live.load(std::memory_order_acquire);
    return __builtin_expect(set != nullptr, 1) ? set : make_once();
}

bool capturing() {
    const uint32_t* under_way = captures.load(std::memory_order_relaxed);
    return under_way && __atomic_load_n(under_way, __ATOMIC_RELAXED) != 0;
}

} // namespace

void allocated(const void* address, size_t bytes, unsigned device) {
    if (LiveSet* set = get())
        set->add(reinterpret_cast<uint64_t>(address), bytes, device, capturing());
}

void freed(const void* address) {
    if (LiveSet* set = get())
        set->remove(reinterpret_cast<uint64_t>(address));
}

} // namespace flowgpu::memstub

FGM_EXPORT int flowgpu_memstub_fd() {
    return flowgpu::memstub::get() ? flowgpu::memstub::made.fd : -1;
}

FGM_EXPORT void flowgpu_memstub_forget(uint64_t address, uint64_t bytes) {
    using namespace flowgpu::memstub;
    if (LiveSet* set = live.load(std::memory_order_acquire))
        set->forget(address, bytes);
}

FGM_EXPORT void flowgpu_memstub_captures(const uint32_t* under_way) {
    flowgpu::memstub::captures.store(under_way);
}
