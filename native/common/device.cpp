#include "device.h"

#include <cstddef>
#include <cstring>

#include <sys/socket.h>
#include <sys/un.h>

#include "proc.h"

namespace flowgpu::device {

bool is_descriptor(int fd, const char* target) {
    if (strncmp(target, "/dev/nvidia", 11) == 0)
        return true;
    if (strncmp(target, "socket:", 7) != 0)
        return strstr(target, "flowgpu-emu-device") != nullptr;
    sockaddr_un name = {};
    auto* generic = reinterpret_cast<sockaddr*>(&name);
    socklen_t length = sizeof name;
    if (getpeername(fd, generic, &length) != 0) {
        length = sizeof name;
        if (getsockname(fd, generic, &length) != 0)
            return false;
    }
    constexpr size_t path = offsetof(sockaddr_un, sun_path);
    if (name.sun_family != AF_UNIX || length <= path)
        return false;
    size_t bytes = length - path;
    constexpr char uvm[] = "\0cuda-uvmfd-";
    return memmem(name.sun_path, bytes, "flowgpu-emu", 11) != nullptr ||
           (bytes >= sizeof uvm - 1 && memcmp(name.sun_path, uvm, sizeof uvm - 1) == 0);
}

bool is_mapping(const char* name) {
    return strncmp(name, "/dev/nvidia", 11) == 0 || strstr(name, "flowgpu-emu-device") != nullptr;
}

void close_descriptors() {
    proc::each_number("/proc/self/fd", [](const char* name, int folder) {
        char target[128] = {};
        int fd = atoi(name);
        if (fd != folder && readlinkat(folder, name, target, sizeof target - 1) > 0 &&
            is_descriptor(fd, target))
            close(fd);
    });
}

} // namespace flowgpu::device
