#include "fault.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flowgpu {

namespace {

const char* const kNames[] = {
#define FLOWGPU_FAULT_POINT(name, what) #name,
#include "flowgpu/fault.def"
#undef FLOWGPU_FAULT_POINT
};

// What a write of O_DIRECT takes a multiple of.
constexpr size_t kBlock = 4096;

const char* setting() {
    const char* chosen = getenv("FLOWGPU_FAULT");
    if (!chosen || *chosen != '@')
        return chosen;
    static char text[64];
    const int fd = open(chosen + 1, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return nullptr;
    const ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    text[size > 0 ? size : 0] = 0;
    return text;
}

} // namespace

bool fires(Fault point) {
    // Read once: the program may change its environment meanwhile.
    static const char* const chosen = setting();
    static std::atomic<unsigned long> passes; // of the one point that was chosen
    if (!chosen)
        return false;
    const char* name = kNames[static_cast<int>(point)];
    size_t length = strlen(name);
    if (strncmp(chosen, name, length) != 0 || (chosen[length] && chosen[length] != ':'))
        return false;
    unsigned long nth = chosen[length] ? strtoul(chosen + length + 1, nullptr, 10) : 1;
    return ++passes == nth || nth == 0;
}

bool fires_told(Fault point) {
    const bool found = fires(point);
    if (found)
        fprintf(stderr, "fault injected at %s\n", kNames[static_cast<int>(point)]);
    return found;
}

int write_error(const WriteFaults& faults) {
    if (fires_told(faults.full))
        return ENOSPC;
    return fires_told(faults.error) ? EIO : 0;
}

ssize_t write_at(const WriteFaults& faults, int fd, const void* data, size_t bytes, off_t offset) {
    if (const int error = write_error(faults)) {
        errno = error;
        return -1;
    }
    if (bytes > kBlock && fires_told(faults.part))
        bytes = (bytes + kBlock) / 2 / kBlock * kBlock;
    return pwrite(fd, data, bytes, offset);
}

ssize_t read_at(Fault error, int fd, void* data, size_t bytes, off_t offset) {
    if (fires_told(error)) {
        errno = EIO;
        return -1;
    }
    return pread(fd, data, bytes, offset);
}

} // namespace flowgpu
