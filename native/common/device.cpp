#include "device.h"

#include <cstddef>
#include <cstring>

#include <sys/socket.h>
#include <sys/un.h>

#include "proc.h"

namespace flowgpu::device {

namespace {

constexpr char kLeftOutFile[] = "/memfd:flowgpu-left-out"; // kLeftOutMapping

bool begins(const char* text, size_t bytes, const char* with, size_t size) {
    return bytes >= size && memcmp(text, with, size) == 0;
}

// The name of the Unix socket that a socket is connected to, else its own. 0: it has none.
size_t socket_name(int fd, sockaddr_un* name) {
    auto* generic = reinterpret_cast<sockaddr*>(name);
    socklen_t length = sizeof *name;
    if (getpeername(fd, generic, &length) != 0) {
        length = sizeof *name;
        if (getsockname(fd, generic, &length) != 0)
            return 0;
    }
    constexpr size_t path = offsetof(sockaddr_un, sun_path);
    return name->sun_family != AF_UNIX || length <= path ? 0 : length - path;
}

bool is_left_out(int fd, const char* target) {
    if (strncmp(target, "socket:", 7) != 0)
        return strncmp(target, kLeftOutFile, sizeof kLeftOutFile - 1) == 0;
    sockaddr_un name = {};
    const size_t bytes = socket_name(fd, &name);
    return begins(name.sun_path, bytes, kLeftOutSocket, sizeof kLeftOutSocket - 1);
}

// Calls visit(descriptor, what it links to) for those of this process.
template <class Visit> void each_descriptor(Visit visit) {
    proc::each_number("/proc/self/fd", [&](const char* name, int folder) {
        char target[128] = {};
        int fd = atoi(name);
        if (fd != folder && readlinkat(folder, name, target, sizeof target - 1) > 0)
            visit(fd, static_cast<const char*>(target));
    });
}

} // namespace

bool is_descriptor(int fd, const char* target) {
    if (strncmp(target, "/dev/nvidia", 11) == 0 || is_left_out(fd, target))
        return true;
    if (strncmp(target, "socket:", 7) != 0)
        return strstr(target, "flowgpu-emu-device") != nullptr;
    sockaddr_un name = {};
    const size_t bytes = socket_name(fd, &name);
    constexpr char uvm[] = "\0cuda-uvmfd-";
    return memmem(name.sun_path, bytes, "flowgpu-emu", 11) != nullptr ||
           begins(name.sun_path, bytes, uvm, sizeof uvm - 1);
}

bool is_mapping(const char* name) {
    return strncmp(name, "/dev/nvidia", 11) == 0 ||
           strncmp(name, kLeftOutFile, sizeof kLeftOutFile - 1) == 0 ||
           strstr(name, "flowgpu-emu-device") != nullptr;
}

bool left_out() {
    bool found = false;
    each_descriptor([&](int fd, const char* target) { found = found || is_left_out(fd, target); });
    return found;
}

void close_descriptors() {
    each_descriptor([](int fd, const char* target) {
        if (is_descriptor(fd, target))
            close(fd);
    });
}

} // namespace flowgpu::device
