#include "memstub.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "flowgpu/live.h"

namespace flowgpu::memstub {

namespace {

decltype(&flowgpu_memstub_fd) stub_fd;
decltype(&flowgpu_memstub_forget) stub_forget;
decltype(&flowgpu_memstub_captures) stub_captures;
decltype(&flowgpu_memstub_is_profiled) stub_is_profiled;
pthread_once_t found = PTHREAD_ONCE_INIT;

template <typename Function> void find(Function& slot, const char* name) {
    slot = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

void find_all() {
    find(stub_fd, "flowgpu_memstub_fd");
    find(stub_forget, "flowgpu_memstub_forget");
    find(stub_captures, "flowgpu_memstub_captures");
    find(stub_is_profiled, "flowgpu_memstub_is_profiled");
}

} // namespace

int live_fd() {
    pthread_once(&found, find_all);
    return stub_fd ? stub_fd() : -1;
}

LiveSum::LiveSum() : mapped_(MAP_FAILED) {
    // The stub may be of another version, and its set shorter.
    struct stat status;
    int fd = live_fd();
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_size != FLOWGPU_LIVE_BYTES)
        return;
    mapped_ = mmap(nullptr, FLOWGPU_LIVE_LOG_AT, PROT_READ, MAP_SHARED, fd, 0);
}

LiveSum::~LiveSum() {
    if (mapped_ != MAP_FAILED)
        munmap(mapped_, FLOWGPU_LIVE_LOG_AT);
}

uint64_t LiveSum::bytes() const {
    constexpr uint64_t kUnknown = ~0ull;
    if (mapped_ == MAP_FAILED)
        return kUnknown;
    const volatile auto* header = static_cast<flowgpu_live_header*>(mapped_);
    int64_t sum = 0;
    for (unsigned i = 0; i < FLOWGPU_LIVE_DEVICES; i++)
        sum += header->device_bytes[i];
    bool ours = header->magic == FLOWGPU_LIVE_MAGIC && header->version == FLOWGPU_LIVE_VERSION;
    return !ours || header->overflow || !header->logged || sum < 0 ? kUnknown
                                                                   : static_cast<uint64_t>(sum);
}

void forget(uint64_t address, uint64_t bytes) {
    pthread_once(&found, find_all);
    if (stub_forget)
        stub_forget(address, bytes);
}

bool is_profiled() {
    pthread_once(&found, find_all);
    return stub_is_profiled && stub_is_profiled();
}

void captures_changed(const std::atomic<uint32_t>& under_way) {
    pthread_once(&found, find_all);
    static_assert(sizeof under_way == sizeof(uint32_t), "read as a plain word");
    if (stub_captures)
        stub_captures(reinterpret_cast<const uint32_t*>(&under_way));
}

} // namespace flowgpu::memstub
