// Descriptors of ours in someone else's process.
#ifndef FLOWGPU_COMMON_DESCRIPTOR_H
#define FLOWGPU_COMMON_DESCRIPTOR_H

#include <fcntl.h>
#include <unistd.h>

namespace flowgpu {

// Moves a descriptor that stays open for long out of the range that programs use with select() and
// dup2(), and whose lowest numbers they take to be free once they have closed them. Where there is
// no room above, it stays.
inline int move_high(int fd) {
    constexpr int kHighDescriptor = 512;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, kHighDescriptor);
    if (high < 0)
        return fd;
    close(fd);
    return high;
}

} // namespace flowgpu

#endif
